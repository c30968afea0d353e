"""Choices among the image tokens of packed prompts: how many stay follows from how many there are.

Rectangles are ``(B, n)``, with n the most image tokens of a prompt; `live` says which cells have one. All is written in operations that
export without NonZero; greedy choices become one ONNX `Loop`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch._higher_order_ops.while_loop import while_loop

from .sequences import at_least_fp32, data_size, top_k


class ImageTokens(NamedTuple):
    """Where the image tokens of each prompt are.

    counts: ``(B,) int64``. live: ``(B, n) bool``. rows: ``(B, n) int64``, packed rows in order; T where there is none.
    """

    counts: Tensor
    live: Tensor
    rows: Tensor

    @classmethod
    def of(cls, image: Tensor, cu_seqlens: Tensor) -> ImageTokens:
        """Find them by ``image (T,) bool``."""
        tokens = image.shape[0]
        ends = torch.nn.functional.pad(image.to(torch.int64).cumsum(0), (1, 0))
        bounds = ends.index_select(0, cu_seqlens)
        counts = bounds[1:] - bounds[:-1]
        # Rows of image tokens come first and in order, all others after the last.
        row = torch.arange(tokens, device=image.device)
        order = torch.zeros_like(row).scatter(0, torch.where(image, ends[:-1], ends[-1:] + row - ends[:-1]), row)
        column = torch.arange(data_size(counts.max().clamp(min=1)), device=image.device)
        live = column < counts[:, None]
        place = torch.where(live, bounds[:-1, None] + column, 0)
        rows = order.index_select(0, place.flatten()).unflatten(0, place.shape)
        return cls(counts, live, torch.where(live, rows, tokens))

    def of_rows(self, values: Tensor) -> Tensor:
        """Lay packed values ``(T, ...)`` out as ``(B, n, ...)``; cells without a token have some row's."""
        row = torch.where(self.live, self.rows, 0)
        return values.index_select(0, row.flatten()).unflatten(0, row.shape)

    def copied(self, copies: Tensor, tokens: int) -> Tensor:
        """Say how often each of T rows is to follow, ``(T,) int64``: image tokens as ``copies (B, n)``, all others once."""
        once = torch.ones(tokens + 1, dtype=torch.int64, device=copies.device)
        return once.scatter(0, self.rows.flatten(), copies.flatten())[:-1]


def repeated(copies: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """Turn ``copies (T,) int64``, of 0, 1 or 2, into the rows that follow, in order, and their ``(B+1,) int64`` bounds."""
    ends = torch.nn.functional.pad(copies.cumsum(0), (1, 0))
    total, row = data_size(ends[-1]), torch.arange(copies.shape[0], device=copies.device)
    rows = torch.zeros(total + 1, dtype=torch.int64, device=copies.device)
    for copy in (0, 1):
        rows = rows.scatter(0, torch.where(copies > copy, ends[:-1] + copy, ends[-1:]), row)
    return rows[:-1], ends.index_select(0, cu_seqlens)


def best(order: Tensor, live: Tensor, count: Tensor) -> Tensor:
    """Return the ``count (B,)`` tokens of highest ``order (B, n)``, ties to the lower place: ``(B, n) bool``."""
    return (_ranks(order.masked_fill(~live, torch.finfo(order.dtype).min)) < count[:, None]) & live


def best_early_first(order: Tensor, live: Tensor, count: Tensor, candidates: Tensor, early: Tensor) -> Tensor:
    """Return ``count (B,)`` of the ``candidates (B,)`` best by `order`: those at places below ``early (B,)`` go first.

    Late tokens gain attention by their position alone; so the early ones among the best need not outdo them.

    Source: the code of Balanced Token Pruning (Li et al., NeurIPS 2025).
    """
    rank = _ranks(order.masked_fill(~live, torch.finfo(order.dtype).min))
    all_of_them = candidates[:, None]
    turn = torch.where(torch.arange(order.shape[1], device=order.device) < early[:, None], rank, rank + all_of_them)
    turn = torch.where(rank < all_of_them, turn, rank + 2 * all_of_them)
    return (_ranks(-turn) < count[:, None]) & live & (rank < all_of_them)


def _ranks(order: Tensor) -> Tensor:
    """Rank ``(B, n)`` by descending order, 0 the highest, ties to the lower place."""
    by_rank = top_k(order, order.shape[1], largest=True)[1]
    rank = torch.arange(order.shape[1], device=order.device).expand_as(by_rank)
    return torch.zeros_like(by_rank).scatter(1, by_rank, rank)


class Distances(NamedTuple):
    """How far tokens are from one another, by minus their cosine: as 1 - cosine, without another pass over all pairs.

    pairs: ``(B, n, n)`` fp32 at least, -inf from a token to itself. alone: ``(B, n)``, how far the nearest other token is.
    """

    pairs: Tensor
    alone: Tensor

    @classmethod
    def of(cls, states: Tensor, live: Tensor) -> Distances:
        """Measure ``states (B, n, H)``. Passes over all pairs take longer than all else here: there are few."""
        texts, count = live.shape
        precise = at_least_fp32(states)
        norm = torch.linalg.vector_norm(precise, dim=-1, keepdim=True).clamp(min=torch.finfo(precise.dtype).tiny)
        unit = precise / norm
        itself = torch.arange(count, device=live.device).expand(texts, -1)[:, :, None]
        others = (-unit @ unit.transpose(1, 2)).scatter(2, itself, torch.inf)
        alone = _nearest(others, live).masked_fill(~live, -torch.inf)
        return cls(others.scatter(2, itself, -torch.inf), alone)

    def to(self, chosen: Tensor) -> Tensor:
        """Return how far the nearest token of ``chosen (B, n) bool`` is, ``(B, n)``; infinite where none is chosen."""
        return _nearest(self.pairs, chosen)


def _nearest(pairs: Tensor, chosen: Tensor) -> Tensor:
    """Return the least of each row of ``pairs (B, n, n)`` among the columns ``chosen (B, n) bool``."""
    # A maximum with a row is one pass, and a `where` is three.
    lifted = torch.zeros(chosen.shape, dtype=pairs.dtype, device=pairs.device).masked_fill(chosen, -torch.inf)
    return torch.maximum(pairs, lifted.masked_fill(~chosen, torch.inf)[:, None]).amin(2)


def add_farthest(picked: Tensor | None, live: Tensor, distances: Distances, count: Tensor) -> Tensor:
    """Add ``count (B,)`` tokens to ``picked (B, n) bool``, one after the other: the one whose nearest picked token is farthest.

    Where nothing is picked, the first is the one whose nearest neighbour is farthest. Ties go to the lower place.

    Args:
        picked: None: nothing in any prompt. count: at most as many as are left.

    Source: Alvar et al., DivPrune (CVPR 2025), section 3.
    """
    pairs, alone = distances
    begins, prompt = (count > 0)[:, None], torch.arange(live.shape[0], device=live.device)
    nearest = torch.full_like(alone, torch.inf) if picked is None else distances.to(picked)
    if picked is not None:
        begins = begins & ~picked.any(1, keepdim=True)
    nearest = torch.where(begins, pairs[prompt, alone.argmax(1)], nearest).masked_fill(~live, -torch.inf)
    return (_pick(nearest, pairs, count - begins.sum(1)) == -torch.inf) & live


def spread_over(side: int) -> Tensor:
    """Return the turn of each place of a picture of ``side * side``, ``(side * side,) int64``: each is farthest, in steps along rows and
    columns, from those before it; the first is the corner.
    """
    place = torch.arange(side * side, device="cpu")
    row, column = place // side, place % side
    turn = torch.zeros_like(place)
    nearest = row + column
    for number in range(1, len(place)):
        pick = int(nearest.argmax())
        turn[pick] = number
        nearest = torch.minimum(nearest, (row - row[pick]).abs() + (column - column[pick]).abs())
        nearest[pick] = -1
    return turn


def _pick(nearest: Tensor, pairs: Tensor, count: Tensor) -> Tensor:
    """Pick ``count (B,)`` times the farthest token; return the distance to the nearest picked one, ``(B, n)``."""
    most, prompt, last = count.max(), torch.arange(count.shape[0], device=count.device), count[:, None]

    def goes_on(i: Tensor, nearest: Tensor) -> Tensor:
        return i < most

    def one_more(i: Tensor, nearest: Tensor) -> tuple[Tensor, Tensor]:
        # A picked token is -inf from itself, and so it is the farthest no more.
        closer = torch.minimum(nearest, pairs[prompt, nearest.argmax(1)])
        return i + 1, torch.where(i < last, closer, nearest)

    i = torch.zeros((), dtype=torch.int64, device=nearest.device)
    if torch.compiler.is_exporting():
        result: Tensor = while_loop(goes_on, one_more, (i, nearest))[1]
        return result
    while goes_on(i, nearest):
        i, nearest = one_more(i, nearest)
    return nearest
