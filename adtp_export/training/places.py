"""Tokens and the characters they stand for: words are aligned with their first pieces, long contexts become windows."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from tokenizers import Encoding, Tokenizer

from ..errors import InputError
from ..text import Encoded, reading_texts

LONGEST_QUESTION = 0.5
"""Share of a window that a question may take; the rest of a longer one is cut off."""


class Placed(NamedTuple):
    """A tokenized row. offsets: of each token, first character and the one behind the last, in the text, or in the context of a
    question; None for special tokens, and for those of the question.
    """

    encoded: Encoded
    offsets: list[tuple[int, int] | None]


def place_texts(tokenizer: Tokenizer, texts: Sequence[str], max_tokens: int) -> list[Placed]:
    """Tokenize single texts, each cut at `max_tokens`; raises InputError for one that the tokenizer cannot read."""
    tokenizer.no_padding()
    tokenizer.enable_truncation(max_tokens)
    try:
        with reading_texts():
            return [_placed(e, 0, bool(e.overflowing)) for e in tokenizer.encode_batch(list(texts))]
    finally:
        tokenizer.no_truncation()


def place_windows(
    tokenizer: Tokenizer, pairs: Sequence[tuple[str, str]], max_tokens: int, stride: int
) -> list[list[Placed]]:
    """Tokenize questions with their contexts; a context that is too long becomes windows that share `stride` tokens.

    Returns:
        The windows of each pair, in order. Each has the question, of which half a window is left at most.

    Raises:
        InputError: `stride` leaves no room to go on, or the tokenizer cannot read a text.
    """
    most = int(max_tokens * LONGEST_QUESTION)
    room = max_tokens - most - tokenizer.num_special_tokens_to_add(True)
    if stride >= room:
        raise InputError(
            f"--stride: got {stride} with --max-tokens {max_tokens}; accepted is below {max(room, 0)}, for a question may take half "
            "of a window"
        )
    tokenizer.no_padding()
    tokenizer.no_truncation()
    with reading_texts():
        asked = tokenizer.encode_batch([question for question, _ in pairs], add_special_tokens=False)
        cut = [(q[: e.offsets[most - 1][1]] if len(e.ids) > most else q, c) for (q, c), e in zip(pairs, asked)]
        tokenizer.enable_truncation(max_tokens, stride=stride, strategy="only_second")
        try:
            found = tokenizer.encode_batch(cut)
        finally:
            tokenizer.no_truncation()
    return [[_placed(e, 1, bool(first.overflowing)) for e in (first, *first.overflowing)] for first in found]


def _placed(encoding: Encoding, part: int, truncated: bool) -> Placed:
    owners = zip(encoding.offsets, encoding.sequence_ids)
    encoded = Encoded(encoding.ids, encoding.type_ids, encoding.tokens, truncated)
    return Placed(encoded, [offsets if owner == part else None for offsets, owner in owners])


def first_pieces(words: Sequence[str], offsets: Sequence[tuple[int, int] | None]) -> list[int | None]:
    """Return the first token of each word of the text ``" ".join(words)``; None for a word that has none of its own.

    That is a word behind the cut, one that the tokenizer removes, or one that begins inside a token of the word before.
    """
    ends = itertools.accumulate(len(word) + 1 for word in words)
    spans = [(end - 1 - len(word), end - 1) for word, end in zip(words, ends)]
    found: list[int | None] = []
    token = 0
    for begin, end in spans:
        while token < len(offsets) and ((place := offsets[token]) is None or place[1] <= begin):
            token += 1
        place = offsets[token] if token < len(offsets) else None
        has_one = place is not None and place[0] < end and token not in found[-1:]
        found.append(token if has_one else None)
    return found


def tokens_of(begin: int, end: int, offsets: Sequence[tuple[int, int] | None]) -> tuple[int, int] | None:
    """Return the first and the last token of the characters from `begin` to `end`; None where the tokens do not hold them all."""
    held = [(i, place) for i, place in enumerate(offsets) if place is not None and place[0] < place[1]]
    if not held or held[0][1][0] > begin or held[-1][1][1] < end:
        return None
    inside = [i for i, place in held if place[1] > begin and place[0] < end]
    return (inside[0], inside[-1]) if inside else None
