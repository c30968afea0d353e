"""Around the products of a head: tokens that fell come back, texts are pooled, and answers go where their input is."""

from __future__ import annotations

import triton
import triton.language as tl

from .product import alive


@triton.jit
def put_back(states, rows, out, live, num_rows, out_rows, hidden, BLOCK_H: tl.constexpr):
    """Put the states of tokens that stayed into those of all that came to their cut: ``out[rows[i]] = states[i]``.

    Args:
        states: ``(num_rows, H)``, T. rows: ``(num_rows,) int32``, what the choice wrote. out: ``(out_rows, H)``, T.
        live: ``(1,) int32``, how many stayed. hidden: H.

    Grid: up to `num_rows` programs; any number from 1 on computes the same.
    """
    column = tl.arange(0, BLOCK_H)
    for row in range(tl.program_id(0), alive(live, num_rows), tl.num_programs(0)):
        to = tl.minimum(tl.maximum(tl.load(rows + row), 0), out_rows - 1).to(tl.int64) * hidden
        for first in range(0, hidden, BLOCK_H):
            is_column = first + column < hidden
            x = tl.load(states + tl.cast(row, tl.int64) * hidden + first + column, mask=is_column)
            tl.store(out + to + first + column, x, mask=is_column)


@triton.jit
def spread(values, cu_seqlens, out, batch, padded, num_rows, first, columns, stride, BLOCK: tl.constexpr):
    """Spread packed rows over the rectangle of the input; padding gets zeros.

    Args:
        values: ``(num_rows, stride)``, T, of which `columns` columns from `first` on are read.
        cu_seqlens: ``(num_texts + 1,) int32``, where the rows of texts begin.
        out: ``(B, S, columns)`` fp32. batch, padded: B, S.

    Grid: up to ``ceil(B * S * columns / BLOCK)`` programs; any number from 1 on computes the same.
    """
    for begin in range(tl.program_id(0) * BLOCK, batch * padded * columns, tl.num_programs(0) * BLOCK):
        number = begin + tl.arange(0, BLOCK)
        is_there = number < batch * padded * columns
        cell = number // columns
        text = cell // padded
        row = tl.load(cu_seqlens + text, mask=is_there, other=0) + cell - text * padded
        end = tl.minimum(tl.load(cu_seqlens + text + 1, mask=is_there, other=0), num_rows)
        at = row.to(tl.int64) * stride + first + number - cell * columns
        x = tl.load(values + at, mask=is_there & (row >= 0) & (row < end), other=0.0).to(tl.float32)
        tl.store(out + number, x, mask=is_there)


FIRST = tl.constexpr(0)
MEAN = tl.constexpr(1)
LAST = tl.constexpr(3)


@triton.jit
def pool(x, cu_seqlens, texts, out, num_rows, num_texts, hidden, way, BLOCK_R: tl.constexpr, BLOCK_H: tl.constexpr):
    """Pool the states of each text.

    Args:
        x: ``(num_rows, H)``, T. cu_seqlens: ``(num_texts + 1,) int32``. texts: ``(1,) int32``, B. hidden: H.
        out: ``(num_texts, H)``, T or fp32. way: 0 for the first row, 1 for the mean, 2 for the largest of each column,
            3 for the last row.

    Grid: up to ``num_texts * ceil(H / BLOCK_H)`` programs; any number from 1 on computes the same.

    Order of additions: rows in BLOCK_R sums that take turns, then these in a fixed tree; in fp32.
    """
    blocks = tl.cdiv(hidden, BLOCK_H)
    for item in range(tl.program_id(0), alive(texts, num_texts) * blocks, tl.num_programs(0)):
        text = item // blocks
        column = (item - text * blocks) * BLOCK_H + tl.arange(0, BLOCK_H)
        is_column = column < hidden
        begin = tl.minimum(tl.maximum(tl.load(cu_seqlens + text), 0), num_rows - 1)
        length = tl.minimum(tl.maximum(tl.load(cu_seqlens + text + 1) - begin, 1), num_rows - begin)
        begin = tl.where(way == LAST, begin + length - 1, begin)
        length = tl.where((way == FIRST) | (way == LAST), 1, length)
        total = tl.zeros([BLOCK_R, BLOCK_H], tl.float32)
        most = tl.full([BLOCK_R, BLOCK_H], float("-inf"), tl.float32)
        for first in range(0, length, BLOCK_R):
            row = first + tl.arange(0, BLOCK_R)
            is_there = (row < length)[:, None] & is_column[None, :]
            at = (begin + row).to(tl.int64)[:, None] * hidden + column[None, :]
            value = tl.load(x + at, mask=is_there, other=0.0).to(tl.float32)
            total += value
            most = tl.where(is_there, tl.maximum(most, value), most)
        result = tl.where((way <= MEAN) | (way == LAST), tl.sum(total, 0) / length, tl.max(most, 0))
        tl.store(out + tl.cast(text, tl.int64) * hidden + column, result.to(out.dtype.element_ty), mask=is_column)


@triton.jit
def vectors(x, texts, out, num_texts, width, normalize, BLOCK: tl.constexpr):
    """Write vectors as answers, of length 1 on request: ``x / max(|x|, 1e-12)``, as PyTorch's normalize has it.

    Args:
        x: ``(num_texts, D)``, T. texts: ``(1,) int32``, B. out: ``(num_texts, D)`` fp32; it may be `x`.
        width: D. normalize: 0 or 1.

    Grid: up to `num_texts` programs; any number from 1 on computes the same.
    """
    column = tl.arange(0, BLOCK)
    for text in range(tl.program_id(0), alive(texts, num_texts), tl.num_programs(0)):
        at = tl.cast(text, tl.int64) * width + column
        squares = tl.zeros([BLOCK], tl.float32)
        for first in range(0, width, BLOCK):
            value = tl.load(x + at + first, mask=first + column < width, other=0.0).to(tl.float32)
            squares += value * value
        size = tl.where(normalize != 0, tl.maximum(tl.sqrt(tl.sum(squares, 0)), 1e-12), 1.0)
        for first in range(0, width, BLOCK):
            value = tl.load(x + at + first, mask=first + column < width, other=0.0).to(tl.float32)
            tl.store(out + at + first, value / size, mask=first + column < width)
