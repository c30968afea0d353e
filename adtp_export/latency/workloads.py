"""Batches to time: a grid of shapes, and real lengths from a file."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from tokenizers import Tokenizer

from ..text import Batch, Encoded, Text, encode, pad

GRID = ((1, 32), (1, 128), (1, 384), (8, 128), (32, 64))
DATA_ROWS, DATA_BATCH = 256, 32


@dataclass(frozen=True)
class Workload:
    """Batches that are run in turn; `name` is ``BxS`` for the grid, ``data-B`` for real lengths."""

    name: str
    batches: tuple[Batch, ...]


def grid_lengths(batch: int, padded: int) -> np.ndarray:
    """Lengths of a ``BxS`` workload: S for one sequence, else uniform from S/4 to S with the first set to S."""
    if batch == 1:
        return np.array([padded])
    lengths = np.random.default_rng(0).integers(padded // 4, padded + 1, batch)
    lengths[0] = padded
    return lengths


def grid(
    shapes: Sequence[tuple[int, int]],
    names: Sequence[str],
    vocab_size: int,
    tokenizer: Tokenizer | None = None,
    texts: Sequence[Text] = (),
) -> list[Workload]:
    """Make the grid's batches: running text cut to length where there is a tokenizer, random ids where not."""
    stream = _text_ids(tokenizer, texts) if tokenizer is not None else _random_ids(vocab_size)
    workloads = []
    for batch, padded in shapes:
        rows = []
        for n in grid_lengths(batch, padded):
            ids = _framed(tokenizer, list(itertools.islice(stream, int(n))))
            rows.append(Encoded(ids, [0] * len(ids), [], False))
        workloads.append(Workload(f"{batch}x{padded}", (pad(rows, 0, names),)))
    return workloads


def real_lengths(tokenizer: Tokenizer, texts: Sequence[Text], names: Sequence[str], max_tokens: int) -> list[Workload]:
    """Make workloads of real texts in the order of the file: one at a time, and in batches of 32."""
    rows = encode(tokenizer, texts[:DATA_ROWS], max_tokens)
    return [
        Workload(f"data-{size}", tuple(pad(rows[i : i + size], 0, names) for i in range(0, len(rows), size)))
        for size in (1, DATA_BATCH)
        if len(rows) >= size
    ]


def _random_ids(vocab_size: int) -> Iterator[int]:
    generator = np.random.default_rng(1)
    while True:
        yield from generator.integers(min(1000, vocab_size - 1), vocab_size, 4096).tolist()


def _text_ids(tokenizer: Tokenizer, texts: Sequence[Text]) -> Iterator[int]:
    tokenizer.no_truncation()
    tokenizer.no_padding()
    joined = [text if isinstance(text, str) else " ".join(text) for text in texts]
    ids = [i for encoding in tokenizer.encode_batch(joined, add_special_tokens=False) for i in encoding.ids]
    return itertools.cycle(ids)


def _framed(tokenizer: Tokenizer | None, ids: list[int]) -> list[int]:
    """Put [CLS] first and [SEP] last without changing the length."""
    if tokenizer is None or len(ids) < 2:
        return ids
    first, last = tokenizer.encode("").ids[:1], tokenizer.encode("").ids[-1:]
    return first + ids[1:-1] + last
