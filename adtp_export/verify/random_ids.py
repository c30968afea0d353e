"""Rows of token ids drawn at random: lengths, positions and ids that few texts have.

Kernels go wrong at the ends of their tiles, and tables in rows that are seldom looked up. So lengths lie around multiples of what
tiles are wide, up to the longest text, and ids are drawn evenly from all of the vocabulary: special and unused ones, too. Only
padding's is left out. transformers' RoBERTa takes it for padding wherever it stands, and a tokenizer gives it where somebody typed it.
"""

from __future__ import annotations

import itertools

import numpy as np

from ..contract import TOKEN_TYPE_IDS
from ..data.tokenize import Batch, TokenizedText, pad
from ..model.encoder import PrunedEncoder

LENGTHS = ((1, 16, 3, 31, 15, 32, 2, 33, 17), (65, 63, 64), (129, 127, 128))
"""Tokens of rows that run together. Those of long rows are alike, so that little time goes into padding."""

LONGEST = 2048
"""Tokens of a row at most, which bounds time and memory: the oracle's attention is padded, and in fp64."""

LONGEST_FLOPS = 1e12
"""FLOPs of a row at most."""


def draw(student: PrunedEncoder, longest: int, most: int) -> list[Batch]:
    """Return right-padded batches of at most `most` rows with up to `longest` tokens, always the same ones.

    No id comes twice before all have come once. Where the model takes token types, rows have them as pairs do.
    """
    generator = np.random.default_rng(0)
    vocabulary = student.dense.config.vocab_size
    ids = itertools.cycle(generator.permutation([i for i in range(vocabulary) if i != student.pad_id]).tolist())
    pairs = TOKEN_TYPE_IDS in student.input_names
    batches: list[Batch] = []
    for lengths in _lengths(_affordable(student, min(longest, LONGEST))):
        rows = []
        for n in lengths:
            first = int(generator.integers(1, n + 1)) if pairs else n
            rows.append(TokenizedText([*itertools.islice(ids, n)], [0] * first + [1] * (n - first), truncated=False))
        batches += [pad(rows[i : i + most], student.pad_id, student.input_names) for i in range(0, len(rows), most)]
    return batches


def _affordable(student: PrunedEncoder, longest: int) -> int:
    """Return the largest length up to `longest` at which a row is not too many FLOPs."""
    return max(1, int(np.searchsorted(student.flops(np.arange(1, longest + 1)), LONGEST_FLOPS, "right")))


def _lengths(longest: int) -> list[list[int]]:
    """Return the lengths of `LENGTHS` that a model reads, and that of its longest text, batch by batch."""
    known = {n for lengths in LENGTHS for n in lengths}
    end = [longest] if longest not in known else []
    return [fit for lengths in (*LENGTHS, end) if (fit := [n for n in lengths if 0 < n <= longest])]
