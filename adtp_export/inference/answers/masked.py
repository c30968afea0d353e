"""What stands in the place of a masked token: probabilities over the vocabulary, as transformers' pipeline "fill-mask" gives them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer

from ...data.truncate import check_unicode
from ...errors import InputError, quoted


@dataclass(frozen=True, kw_only=True)
class Filling:
    """A token in place of a masked one. score: its probability. token: its id. token_str: it as text. sequence: the text with it."""

    score: float
    token: int
    token_str: str
    sequence: str


class Best(NamedTuple):
    """The best tokens of each masked one, ``(masks, k)`` both: ids, and probabilities that fall."""

    tokens: np.ndarray
    scores: np.ndarray


def best(logits: np.ndarray, top_k: int, targets: np.ndarray | None) -> Best:
    """Return the `top_k` best tokens of ``logits (masks, V)``; ties go to the lower id.

    Args:
        targets: ``(n,) int64``, ids of the only tokens to choose from. Probabilities are those among all tokens.
    """
    shifted = np.exp(logits - logits.max(1, keepdims=True), dtype=np.float32)
    shares = shifted / shifted.sum(1, keepdims=True)
    if targets is not None:
        shares = shares[:, targets]
    order = np.stack([_largest(row, min(top_k, len(row))) for row in shares])
    return Best(order if targets is None else targets[order], np.take_along_axis(shares, order, 1))


def _largest(row: np.ndarray, k: int) -> np.ndarray:
    """Return the places of the `k` largest numbers of ``(n,)``, falling. Only these are sorted: a vocabulary may have 250,000 tokens."""
    least = np.partition(row, len(row) - k)[len(row) - k]
    (candidates,) = np.nonzero(~(row < least))  # all of them, where they are NaN
    order: np.ndarray = candidates[np.argsort(-row[candidates], kind="stable")[:k]]
    return order


def fillings(ids: Sequence[int], mask_id: int, found: Best, tokenizer: Tokenizer, pad_id: int) -> list[list[Filling]]:
    """Fill the masked tokens of a text, each for itself.

    Args:
        ids: of the text's tokens. found: for its masked tokens, in order, at least.

    Returns:
        For each masked token its tokens, best first. Special tokens are left out of `sequence` where one token alone is masked; else the
        other masks are shown, and so are all special tokens.

    Source: `FillMaskPipeline` of transformers.
    """
    places = [i for i, number in enumerate(ids) if number == mask_id]
    rows = []
    for place, tokens, scores in zip(places, found.tokens.tolist(), found.scores.tolist()):
        row = []
        for token, score in zip(tokens, scores):
            filled = [number for number in (*ids[:place], token, *ids[place + 1 :]) if number != pad_id]
            text = tokenizer.decode(filled, skip_special_tokens=len(places) == 1)
            own = tokenizer.decode([token], skip_special_tokens=False)
            row.append(Filling(score=score, token=token, token_str=own, sequence=text))
        rows.append(row)
    return rows


def target_ids(targets: Sequence[str], tokenizer: Tokenizer, unknown: int | None) -> np.ndarray:
    """Return the ids of words, ``(n,) int64``, rising, each once: of tokens that are written so, or that a word becomes.

    Args:
        unknown: the id of the token for all other words (`data.tokenize.unknown_id`).

    Raises:
        InputError: none at all, or a word that is no single token, or one that the tokenizer does not know.
    """
    if not targets:
        raise InputError("targets: got none; accepted is at least one word, or None for all of the vocabulary")
    found = set()
    for target in targets:
        check_unicode(target, "targets")
        number = tokenizer.token_to_id(target)
        ids = [number] if number is not None else tokenizer.encode(target, add_special_tokens=False).ids
        parts = [tokenizer.id_to_token(i) for i in ids]
        if len(ids) != 1 or (number is None and ids == [unknown]):
            counted = f"{len(ids)} tokens" if len(ids) > 1 else "the unknown token"
            became = f"{counted} ({' '.join(map(str, parts))})" if ids else "no token"
            raise InputError(
                f"targets: got {quoted(target)}, which becomes {became}; accepted are words that are one token"
            )
        found.add(ids[0])
    return np.array(sorted(found), np.int64)


def filled_rows(logits: np.ndarray) -> np.ndarray:
    """Return the rows of ``(masks, V)`` that belong to a token; those behind the last one are 0."""
    return logits[logits.any(1)]


def agreement(logits: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Say of each token that has logits ``(masks, V)`` whether its best token is the same, ``(n,) bool``."""
    some = expected.any(1)
    return np.equal(logits[some].argmax(1), expected[some].argmax(1))
