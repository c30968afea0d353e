"""Texts in, right-padded batches out: tokenizing, and the checks that every batch passes before it is run."""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from tokenizers import Encoding, Tokenizer

from ..errors import AdtpError, InputError, ellipsize
from .readers import Text
from .truncate import MAX_CHARACTERS, Beginnings, portions, staying, unset

Batch = dict[str, np.ndarray]
UNFINISHED = "\ufffd"
"""What a tokenizer decodes bytes to that are no whole character yet."""


@dataclass(frozen=True)
class TokenizedText:
    """One tokenized text: ``input_ids`` and ``token_type_ids`` (lists of equal length), and whether it was longer. only_query: how many
    tokens at its end are not attended to."""

    input_ids: list[int]
    token_type_ids: list[int]
    truncated: bool
    only_query: int = 0


def encode(tokenizer: Tokenizer, texts: Sequence[Text], max_tokens: int) -> list[TokenizedText]:
    """Tokenize texts or pairs with special tokens, each cut at `max_tokens`; of a pair, the longer side is cut first.

    Of a long text only the beginning is tokenized (`data/truncate.py`), and never more than `truncate.MAX_CHARACTERS`.

    Raises:
        InputError: a text that is no valid Unicode (lone surrogates), one that the tokenizer cannot read, or one that has no token.
    """
    rows = [taken(*found) for found in tokenized(tokenizer, texts, max_tokens, offsets=False)]
    check_tokens(rows, texts)
    return rows


def encode_whole_second(tokenizer: Tokenizer, pairs: Sequence[tuple[str, str]], max_tokens: int) -> list[TokenizedText]:
    """Tokenize pairs as `encode` does, but cut the first text alone: "only_first" of `tokenizers`.

    Raises:
        InputError: as `encode` says; or a second text that leaves no room for the first.
    """
    short = functools.cache(Beginnings(tokenizer, max_tokens).of)  # one text comes with many labels
    with reading_texts():
        inputs = [(short(first), short(second)) for first, second in pairs]
    rows = []
    for encoding, pair in zip(read_whole(tokenizer, inputs, offsets=False), pairs):
        over, places = len(encoding) - max_tokens, [i for i, side in enumerate(encoding.sequence_ids) if side == 0]
        if over > 0 and len(places) <= over:
            raise InputError(
                f"texts: got {ellipsize(pair[1])!r} as the second of a pair, which leaves no room for the first in {max_tokens} tokens; "
                "give a shorter one"
            )
        gone = set(places[len(places) - over :]) if over > 0 else set()
        cut = bool(gone) or any(len(text) > MAX_CHARACTERS for text in pair)
        rows.append(taken(encoding, [i for i in range(len(encoding)) if i not in gone] if cut else None))
    return rows


def tokenized(
    tokenizer: Tokenizer, texts: Sequence[Text], max_tokens: int, offsets: bool = True
) -> Iterator[tuple[Encoding, list[int] | None]]:
    """Tokenize as `encode` does; yield what `tokenizers` says of each text, and which tokens of it stay: None for all.

    Args:
        offsets: also say where tokens are in their text, and of which word, which takes a tenth more time. Else these are empty.

    Raises:
        InputError: as `encode` says.
    """
    short = Beginnings(tokenizer, max_tokens)
    inputs: list[Text] = []
    with reading_texts():
        for text in texts:
            inputs.append(short.of(text) if isinstance(text, str) else (short.of(text[0]), short.of(text[1])))
    for encoding, text in zip(read_whole(tokenizer, inputs, offsets=offsets), texts):
        with reading_texts():
            stay = staying(encoding, tokenizer, text, max_tokens)
        yield encoding, stay


def read_whole(
    tokenizer: Tokenizer,
    texts: Iterable[Text | list[str]],
    words: bool = False,
    offsets: bool = True,
    special: bool = True,
) -> Iterator[Encoding]:
    """Tokenize texts or pairs with special tokens, and cut none. Those that are long together are tokenized one after the other.

    Args:
        words: each text is a list of its words. offsets: as in `tokenized`. special: add the tokenizer's special tokens.

    Raises:
        InputError: as `encode` says.
    """
    unset(tokenizer)
    run = tokenizer.encode_batch if offsets else tokenizer.encode_batch_fast
    for portion in portions(texts):
        with reading_texts():
            found: list[Encoding] = run(portion, is_pretokenized=words, add_special_tokens=special)
        yield from found


def check_tokens(rows: Iterable[TokenizedText], texts: Iterable[Text]) -> None:
    """Raises InputError where a text has no token: tokenizers of decoders may add none of their own, as Qwen's."""
    for i, (row, text) in enumerate(zip(rows, texts)):
        if not row.input_ids:
            raise InputError(
                f"texts: got {ellipsize(repr(text))} at index {i}, for which the tokenizer gives no token; leave such texts out"
            )


@contextlib.contextmanager
def reading_texts() -> Iterator[None]:
    """Turn what a tokenizer raises into one clear message, a panic of its Rust code included."""
    try:
        yield
    except AdtpError:
        raise
    except BaseException as error:  # tokenizers raises bare Exception, and pyo3's PanicException is no Exception
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise InputError(f"the tokenizer cannot read a text: {ellipsize(str(error))}") from error


def taken(encoding: Encoding, stay: list[int] | None) -> TokenizedText:
    """Return the tokens of a text whose places are in `stay`, in order; None stands for all."""
    ids, types = encoding.ids, encoding.type_ids
    if stay is None:
        return TokenizedText(ids, types, truncated=False)
    return TokenizedText([ids[i] for i in stay], [types[i] for i in stay], truncated=True)


def unknown_id(tokenizer: Tokenizer) -> int | None:
    """Return the id of the token that stands for what the vocabulary lacks; None where there is none."""
    named = getattr(tokenizer.model, "unk_token", None)
    if named is not None:
        return tokenizer.token_to_id(named)
    unknown: int | None = json.loads(tokenizer.to_str())["model"].get("unk_id")  # a Unigram's, which no attribute has
    return unknown


def strings(tokenizer: Tokenizer, ids: Iterable[int]) -> list[str]:
    """Return tokens as the vocabulary writes them, such as "<unk>" for what it does not have; "?" where no token has that number."""
    return [tokenizer.id_to_token(int(i)) or "?" for i in ids]


def readable(tokenizer: Tokenizer, ids: Iterable[int]) -> list[str]:
    """Return tokens as text, a space before each that begins a word; one that is a part of a character is as `strings` has it."""
    spelled, decoder = strings(tokenizer, ids), tokenizer.decoder
    if decoder is None:
        return [token[2:] if token.startswith("##") else f" {token}" for token in spelled]
    texts = (decoder.decode(["a", token]).removeprefix("a") for token in spelled)
    return [token if UNFINISHED in text or not text else text for token, text in zip(spelled, texts)]


def pad(rows: Sequence[TokenizedText], pad_id: int, names: Iterable[str]) -> Batch:
    """Right-pad tokenized texts to int64 ``(B, S)`` arrays for the inputs in `names`."""
    longest = max(len(row.input_ids) for row in rows)
    batch = {
        "input_ids": np.full((len(rows), longest), pad_id, np.int64),
        "attention_mask": np.zeros((len(rows), longest), np.int64),
        "token_type_ids": np.zeros((len(rows), longest), np.int64),
    }
    for i, row in enumerate(rows):
        n = len(row.input_ids)
        batch["input_ids"][i, :n] = row.input_ids
        batch["attention_mask"][i, : n - row.only_query] = 1
        batch["token_type_ids"][i, :n] = row.token_type_ids
    return {name: batch[name] for name in names}


def check_batch(batch: Mapping[str, np.ndarray], vocab_size: int, type_vocab_size: int, max_tokens: int) -> None:
    """Refuse what the graph would answer wrongly.

    Args:
        batch: ``input_ids``, ``attention_mask`` and perhaps ``token_type_ids``, integer ``(B, S)``.

    Raises:
        InputError: shapes differ, a row is too long or empty, padding is not on the right, or an id is out of range.
    """
    ids, mask = batch["input_ids"], batch["attention_mask"]
    for name, array in batch.items():
        if array.ndim != 2 or array.shape != ids.shape or not np.issubdtype(array.dtype, np.integer):
            raise InputError(
                f"{name}: got {array.dtype} {array.shape}; accepted are integers (B, S), all inputs of one shape"
            )
    if 0 in ids.shape:
        raise InputError(f"input_ids: got an empty batch {ids.shape}; accepted is at least one row with one token")
    if ids.shape[1] > max_tokens:
        raise InputError(f"input_ids: got rows of {ids.shape[1]} tokens; accepted are at most {max_tokens}")
    if not np.isin(mask, (0, 1)).all():
        raise InputError("attention_mask: got values other than 0 and 1")
    empty = np.flatnonzero(mask.sum(1) == 0)
    if empty.size:
        raise InputError(f"attention_mask: row {empty[0]} has no live token; leave empty rows out of the batch")
    ragged = np.flatnonzero((mask[:, 1:] > mask[:, :-1]).any(1))  # differences of unsigned ones would wrap
    if ragged.size:
        raise InputError(
            f"attention_mask: row {ragged[0]} has padding before or between its tokens; "
            "accepted is right padding. Tokenize with padding_side='right'"
        )
    for name, size in (("input_ids", vocab_size), ("token_type_ids", type_vocab_size)):
        if name in batch and (wrong := batch[name][(batch[name] < 0) | (batch[name] >= size)]).size:
            raise InputError(f"{name}: got {wrong[0]}; accepted are ids from 0 to {size - 1}")
