"""Packed sequences: token states without padding, and the index arithmetic that moves between a rectangle and them.

Everything here is written in operations that export to ONNX with dynamic shapes: no boolean indexing (NonZero), TopK per
row, and sizes that depend on data are read once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn


class Keys(NamedTuple):
    """Tokens that are attended to, where others only query. rows: ``(K,) int64``, which these are. cu_seqlens: ``(B+1,) int64``, bounds of
    each sequence in `rows`; every sequence has some, and they come first in it.
    """

    rows: Tensor
    cu_seqlens: Tensor

    @classmethod
    def first(cls, lengths: Tensor, cu_seqlens: Tensor) -> Keys:
        """Return the first ``lengths (B,)`` tokens of each sequence."""
        bounds = nn.functional.pad(lengths.cumsum(0), (1, 0))
        return cls(strung(cu_seqlens[:-1], lengths, bounds), bounds)


class Packed(NamedTuple):
    """A batch of B sequences without padding.

    states: ``(T, H)``. cu_seqlens: ``(B+1,) int64``, first element 0, last element T. positions: ``(T,) int64``, the place of each
    token in its text, which survives cuts. origin: ``(T,) int64``, its place in the input, which is flattened where it is ``(B, S)``.
    read: ``(B,) int64``, rows of the tokens that stay beside the first ones, and that the head reads where it reads one; None where
    there are none. keys: tokens that are attended to; None: all are. asked: ``(T,) bool``, tokens that the head answers for, where it does
    not for all; no cut keeps it.
    """

    states: Tensor
    cu_seqlens: Tensor
    positions: Tensor
    origin: Tensor
    read: Tensor | None = None
    keys: Keys | None = None
    asked: Tensor | None = None

    @property
    def last(self) -> Tensor:
        """Last row of each sequence, ``(B,) int64``; some row for those that are not there."""
        return (self.cu_seqlens[1:] - 1).clamp(min=0)

    @property
    def start(self) -> Tensor:
        """First row of each sequence, ``(B,) int64``."""
        return self.cu_seqlens[:-1]

    @property
    def lengths(self) -> Tensor:
        """Tokens of each sequence, ``(B,) int64``."""
        return self.cu_seqlens[1:] - self.cu_seqlens[:-1]

    def gather(self, rows: Tensor, cu_seqlens: Tensor) -> Packed:
        """Return the tokens ``rows (T',) int64``, whose bounds are ``cu_seqlens (B+1,)``."""
        states, positions, origin = (t.index_select(0, rows) for t in (self.states, self.positions, self.origin))
        read = self.read
        if read is not None:
            read = (rows < read[:, None]).sum(1).clamp(max=rows.shape[0] - 1)  # of texts that are not there, some row
        return Packed(states, cu_seqlens, positions, origin, read)

    @property
    def attended(self) -> Packed:
        """The tokens that are attended to, alone."""
        if self.keys is None:
            return self
        return self._replace(keys=None).gather(*self.keys)

    def gather_keys(self, rows: Tensor, cu_seqlens: Tensor) -> tuple[Packed, Tensor]:
        """Return of `keys` those in ``rows (K',) int64``, with these bounds, and all tokens that only query; and which rows these are."""
        assert self.keys is not None
        lengths = cu_seqlens[1:] - cu_seqlens[:-1]
        fewer = self.keys.cu_seqlens[1:] - self.keys.cu_seqlens[:-1] - lengths
        whole = self.lengths - fewer
        bounds = nn.functional.pad(whole.cumsum(0), (1, 0))
        keys = Keys.first(lengths, bounds)
        # The last tokens of each sequence, as many as stay: those that only query are right, and keys are put over the others.
        stay = strung(self.start + fewer, whole, bounds).index_copy(0, keys.rows, self.keys.rows.index_select(0, rows))
        return self._replace(keys=None).gather(stay, bounds)._replace(keys=keys), stay

    def max(self) -> Tensor:
        """Take the largest value of each coordinate over each sequence, ``(B, H)``."""
        return self.maxima()(self.states)

    def maxima(self) -> Callable[[Tensor], Tensor]:
        """Return a function that takes the largest values of each sequence, ``(B, n)`` of ``(T, n)``.

        It does so in three steps: of pieces, of pieces of these, and of what is left of a sequence; all repeat their last row. So one long
        sequence does not widen all others to its own length.
        """
        start, lengths, steps = self.start, self.lengths, []
        for _ in range(2):
            width = lengths.max().clamp(max=PIECE)
            pieces = (lengths + (width - 1)) // width
            bounds = nn.functional.pad(pieces.cumsum(0), (1, 0))
            piece = torch.arange(data_size(bounds[-1]), device=bounds.device)
            text = (bounds[1:, None] <= piece).sum(0)
            begin = start.index_select(0, text) + (piece - bounds.index_select(0, text)) * width
            row = begin[:, None] + torch.arange(data_size(width), device=bounds.device)
            steps.append(torch.minimum(row, (start + lengths - 1).index_select(0, text)[:, None]))
            start, lengths = bounds[:-1], pieces
        column = torch.arange(data_size(lengths.max()), device=start.device)
        steps.append(start[:, None] + torch.minimum(column, lengths[:, None] - 1))

        def largest(values: Tensor) -> Tensor:
            for rows in steps:
                values = nn.functional.embedding(rows, values).amax(1)  # values[rows], as one Gather
            return values

        return largest

    def mean(self) -> Tensor:
        """Average the states of each sequence, ``(B, H)``: one matrix product, ``(B, T) @ (T, H)``, that needs no rectangle."""
        states = self.states
        # Shares, not a sum to be divided: that would overflow in fp16 where texts are long.
        return (self.inside().to(states.dtype) / self.lengths[:, None].to(states.dtype)) @ states

    def sum(self, values: Tensor) -> Tensor:
        """Add up values over each sequence, ``(B, n)`` of ``(T, n)``, as `mean` does."""
        return self.inside().to(values.dtype) @ values

    def inside(self) -> Tensor:
        """Say of each sequence which rows are its own, ``(B, T) bool``."""
        row = torch.arange(self.states.shape[0], device=self.states.device)
        return (row >= self.cu_seqlens[:-1, None]) & (row < self.cu_seqlens[1:, None])


PIECE = 32
"""Rows that `Packed.maxima` looks at in its first step, at most. Texts of more have more pieces, and the last one is filled up."""


def rightmost(tokens: Packed, real: Tensor | None) -> Tensor:
    """Return the last row of each sequence that is ``real (T,) bool``, or its first one where none is: ``(B,) int64``; None: all are."""
    if real is None:
        return tokens.last
    row = torch.arange(real.shape[0], device=real.device)
    inside = (row >= tokens.cu_seqlens[:-1, None]) & (row < tokens.cu_seqlens[1:, None])
    return torch.where(inside & real, row, tokens.start[:, None]).amax(1)


def pack(lengths: Tensor, row_size: int) -> tuple[Tensor, Tensor]:
    """Index the live elements of a ``(B, row_size)`` rectangle whose row b holds ``lengths[b] >= 1`` of them first.

    Returns:
        ``(B+1,) int64`` cu_seqlens, and the ``(T,) int64`` flat positions of the live elements. Those grow by 1
        inside a row and jump at each start, so they are a cumulative sum of ones with the jumps scattered in.
    """
    cu_seqlens = nn.functional.pad(lengths.cumsum(0), (1, 0))
    return cu_seqlens, strung(torch.arange(lengths.shape[0], device=lengths.device) * row_size, lengths, cu_seqlens)


def strung(first: Tensor, lengths: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Index ``lengths[b] >= 1`` elements from ``first[b]`` on, for one b after the other: ``(T,) int64``, as `pack` does."""
    last = nn.functional.pad(first + lengths - 1, (1, 0))
    steps = torch.ones(data_size(cu_seqlens[-1]), dtype=torch.int64, device=lengths.device)
    return steps.scatter(0, cu_seqlens[:-1], first - last[:-1]).cumsum(0)


def rising(cu_seqlens: Tensor, tokens: int) -> Tensor:
    """Return ``(B+1,) int64`` bounds that rise from 0 and end at T or before: those given, where these are such bounds.

    Whoever runs a file may give any numbers. They decide how much memory a run takes, so none of them is taken on trust.
    """
    ends = cu_seqlens[1:].to(torch.int64).clamp(0, tokens)
    lengths = (ends - nn.functional.pad(ends, (1, 0))[:-1]).clamp(min=0)
    return nn.functional.pad(lengths.cumsum(0).clamp(max=tokens), (1, 0))


def places(cu_seqlens: Tensor, tokens: int) -> Tensor:
    """Return the place of each of T tokens in its text, ``(T,) int64``: it grows by 1, and begins anew at each start."""
    start = cu_seqlens[:-1]
    back = nn.functional.pad(1 - (cu_seqlens[1:] - start), (1, 0))[:-1]
    steps = torch.ones(tokens, dtype=torch.int64, device=start.device)
    return steps.scatter(0, start, back).cumsum(0)


def restore(values: Tensor, origin: Tensor, shape: torch.Size | None) -> Tensor:
    """Spread packed values ``(T, ...)`` over ``(B, S, ...)``, zeros elsewhere; `origin` as in `Packed`.

    Args:
        shape: of the input. ``(T,)`` where that is packed, too: then values whose origin is T belong to texts without tokens, and
            leave. None leaves values as they are.
    """
    if shape is None:
        return values
    if len(shape) == 1:
        return values.new_zeros(shape[0] + 1, *values.shape[1:]).index_copy(0, origin, values)[:-1]
    flat = values.new_zeros(shape[0] * shape[1], *values.shape[1:])  # numel() would fix the axes while exporting
    return flat.index_copy(0, origin, values).unflatten(0, (shape[0], shape[1]))


def rows_of(x: Tensor, wanted: Tensor | None) -> Tensor:
    """Select rows of packed states by ``wanted (n,) int64``; None selects all."""
    return x if wanted is None else x.index_select(0, wanted)


def data_size(value: Tensor) -> int:
    """Read a size that depends on data; sizes here are at least 1, since every text keeps a token."""
    size = cast(int, value.item())  # not int(): that would fix the size while exporting
    torch._check(size >= 1)
    return size


def at_least_fp32(x: Tensor) -> Tensor:
    """Return `x` in fp32, or in fp64 where it is that. The exporter takes `torch.promote_types` for an operation of the graph."""
    return x if x.dtype == torch.float64 else x.to(torch.float32)


def outside_autocast(x: Tensor) -> AbstractContextManager:
    """Return a context in which what is computed on the device of `x` has the precision of its inputs; what is traced stays as it is."""
    kind = x.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else contextlib.nullcontext()


def top_k(x: Tensor, k: int, largest: bool) -> tuple[Tensor, Tensor]:
    """Sorted TopK of each row whose ties go to the lower index, as ONNX defines it and torch does not."""
    if torch.compiler.is_exporting():
        return x.topk(k, dim=1, largest=largest, sorted=True)
    values, indices = x.sort(dim=1, descending=largest, stable=True)
    return values[:, :k], indices[:, :k]
