"""Batches to time: a grid of shapes, batches of very unequal lengths, and real lengths from a file."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from tokenizers import Tokenizer

from ..data.readers import Text
from ..data.tokenize import Batch, TokenizedText, encode, pad
from ..data.truncate import MAX_CHARACTERS, portions, unset
from ..errors import InputError

SHAPE = re.compile(r"[1-9]\d{0,4}x[1-9]\d{0,4}")
"""Texts in a batch and tokens of the longest one."""
SHORTEST = 8
"""Tokens of a shape: its shortest texts have a quarter of them, of which two are special."""
MOST_TOKENS = 1 << 20
"""Of a batch."""
GRID = ("1x32", "1x128", "1x384", "8x128", "32x64")
DATA_ROWS, BATCH = 256, 32
MAX_TOKENS = 512

MIXED, ONE_LONG = f"mixed-{BATCH}", f"one-long-{BATCH}"
SKEWED = (MIXED, ONE_LONG)
"""Batches of 32 as servers get them: lengths of 5 to 512 tokens, log-normal; and one text of 512 among 31 of 10."""

MIXED_BATCHES, MEDIAN, SIGMA, MIN_TOKENS, SHORT = 4, 36, 1.1, 5, 10
"""Of those: how many batches, the log-normal distribution, its shortest length, and the length of 31 texts."""


@dataclass(frozen=True)
class Workload:
    """Batches that are run in turn; `name` is ``BxS`` for a shape, one of `SKEWED`, or ``data-B`` for real lengths.

    skewed: lengths differ so much that splitting a batch by length is worth trying.
    """

    name: str
    batches: tuple[Batch, ...]
    skewed: bool = False


def grid_lengths(batch: int, padded: int) -> np.ndarray:
    """Lengths of a ``BxS`` workload: S for one sequence, else uniform from S/4 to S with the first set to S."""
    if batch == 1:
        return np.array([padded])
    lengths = np.random.default_rng(0).integers(padded // 4, padded + 1, batch)
    lengths[0] = padded
    return lengths


def skewed_lengths(name: str, longest: int = MAX_TOKENS) -> list[np.ndarray]:
    """Lengths of one of `SKEWED`, batch by batch, ``(32,)`` each, at most `longest`."""
    if name == ONE_LONG:
        return [np.minimum([MAX_TOKENS, *[SHORT] * (BATCH - 1)], longest)]
    drawn = np.random.default_rng(0).lognormal(np.log(MEDIAN), SIGMA, (MIXED_BATCHES, BATCH))
    return list(np.minimum(drawn.round().astype(np.int64).clip(MIN_TOKENS, MAX_TOKENS), longest))


def make_workloads(
    wanted: Sequence[str],
    names: Sequence[str],
    vocab_size: int,
    tokenizer: Tokenizer | None = None,
    texts: Sequence[Text] = (),
    longest: int = MAX_TOKENS,
) -> list[Workload]:
    """Make the workloads of the names `wanted`: running text cut to length where there is a tokenizer, random ids where not.

    Args:
        wanted: ``BxS``, or of `SKEWED`.
        names: of the model's inputs.
        longest: what the model reads; longer texts of skewed batches are cut.
    """
    stream = _text_ids(tokenizer, texts) if tokenizer is not None else _random_ids(vocab_size)

    def batch(lengths: np.ndarray) -> Batch:
        rows = []
        for n in lengths:
            ids = _framed(tokenizer, list(itertools.islice(stream, int(n))))
            rows.append(TokenizedText(ids, [0] * len(ids), False))
        return pad(rows, 0, names)

    workloads = []
    for name in wanted:
        skewed = name in SKEWED
        drawn = skewed_lengths(name, longest) if skewed else [grid_lengths(*shape_of(name))]
        workloads.append(Workload(name, tuple(map(batch, drawn)), skewed))
    return workloads


SHAPES = f"texts x tokens such as 8x128, of at least {SHORTEST} tokens, and {MOST_TOKENS:,} in all"
"""What shapes are accepted, for messages."""


def is_shape(name: str) -> bool:
    """Say whether a name is that of a workload of the grid, and of one that can be made."""
    texts, tokens = shape_of(name) if SHAPE.fullmatch(name) else (0, 0)
    return tokens >= SHORTEST and texts * tokens <= MOST_TOKENS


def shape_of(name: str) -> tuple[int, int]:
    """Read the name of a workload of the grid, such as ``32x64``."""
    batch, padded = map(int, name.split("x"))
    return batch, padded


def real_lengths(tokenizer: Tokenizer, texts: Sequence[Text], names: Sequence[str], max_tokens: int) -> list[Workload]:
    """Make workloads of real texts in the order of the file: one at a time, and in batches of 32."""
    rows = encode(tokenizer, texts[:DATA_ROWS], max_tokens)
    return [
        Workload(f"data-{size}", tuple(pad(rows[i : i + size], 0, names) for i in range(0, len(rows), size)), size > 1)
        for size in (1, BATCH)
        if len(rows) >= size
    ]


def _random_ids(vocab_size: int) -> Iterator[int]:
    generator = np.random.default_rng(1)
    while True:
        yield from generator.integers(min(1000, vocab_size - 1), vocab_size, 4096).tolist()


def _text_ids(tokenizer: Tokenizer, texts: Sequence[Text]) -> Iterator[int]:
    unset(tokenizer)
    joined = [text if isinstance(text, str) else " ".join(text) for text in texts]
    read = portions(text[:MAX_CHARACTERS] for text in joined)
    found = (encoding for portion in read for encoding in tokenizer.encode_batch(portion, add_special_tokens=False))
    ids = [i for encoding in found for i in encoding.ids]
    if not ids:
        raise InputError("--data: its texts have no tokens; give others")
    return itertools.cycle(ids)


def _framed(tokenizer: Tokenizer | None, ids: list[int]) -> list[int]:
    """Put [CLS] first and [SEP] last without changing the length."""
    if tokenizer is None or len(ids) < 2:
        return ids
    alone = tokenizer.encode("").ids  # none where texts stand in a chat template
    first, last = alone[:1], alone[-1:]
    return first + ids[len(first) : len(ids) - len(last)] + last
