"""How texts are divided into batches on CPUs: few runs against little padding in attention."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

RUN_TOKENS = 16
"""What a run costs whatever is in it, as tokens of text that would take as long."""

CELLS_PER_TOKEN = 2000
"""Cells of attention's rectangle, a query and a key each, that cost as much as one token does in all else."""

MAX_TOKENS = 2048
"""Of one batch of several texts: past it the states of a layer leave the processor's caches. Measured on students of the widths of
BERT-base and MiniLM, with texts of 14 to 512 tokens: a token costs least at 1,000 to 2,000, and a tenth more at 8,000."""


def by_length(lengths: Sequence[int], most: int) -> list[list[int]]:
    """Divide texts into as few batches of like length as there can be; arguments and result as of `divide`.

    For GPUs, where a run of few texts costs as much as one of many.
    """
    order = np.argsort(lengths, kind="stable")
    return [order[begin : begin + most].tolist() for begin in range(0, len(order), most)]


def divide(lengths: Sequence[int], most: int, pads: bool = True) -> list[list[int]]:
    """Divide texts into batches of like length; return the indices of each batch's texts.

    A batch of n texts costs a run, its tokens, and a rectangle of n times the square of its longest length in attention. Tokens
    are the same however texts are divided, so the other two decide: the division of the sorted texts with the smallest sum.
    `benchmarks/cpu/batch_cost.py` measures what they cost.

    Args:
        lengths: ``(n,)`` tokens of each text, at least 1.
        most: texts in a batch.
        pads: attention does; else a run is all that a division costs.
    """
    cells_per_token = CELLS_PER_TOKEN if pads else np.inf
    order = np.argsort(lengths, kind="stable")
    sorted_lengths = np.asarray(lengths, np.int64)[order]
    tokens = np.concatenate([[0], np.cumsum(sorted_lengths)])
    ends = np.arange(1, len(order) + 1)
    fit = np.searchsorted(tokens, tokens[1:] - MAX_TOKENS)
    firsts = np.minimum(np.maximum(ends - most, fit), ends - 1).tolist()  # where the batch that ends there may begin
    texts, cells = np.arange(len(order), 0, -1), (sorted_lengths**2 / cells_per_token).tolist()
    cost, begins = np.zeros(len(order) + 1), [0] * (len(order) + 1)
    for end, (first, square) in enumerate(zip(firsts, cells), start=1):
        sums = cost[first:end] + texts[first - end :] * square
        best = int(sums.argmin())
        begins[end], cost[end] = first + best, sums[best] + RUN_TOKENS
    batches, end = [], len(order)
    while end:
        batches.append(order[begins[end] : end].tolist())
        end = begins[end]
    return batches[::-1]
