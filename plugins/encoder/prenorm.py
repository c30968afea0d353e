"""Layers with norms before their sublayers, as decoders have them: RMS norms, heads turned by position, gated feed-forwards.

Such a layer adds to states that are never normalized themselves. So what a sublayer adds, and the norm before the next one, are one
launch with two results: the sum, and its normalized rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .product import alive, sources


@triton.jit
def _normed(states, weight, out, squares, hidden, eps, BLOCK_H: tl.constexpr):
    """Write a row divided by its root mean square, times a weight. squares: its sum of squares."""
    tl.debug_barrier()  # the row was written by this program, and is read again
    scale = tl.rsqrt(squares / hidden + eps)
    for first in range(0, hidden, BLOCK_H):
        column = first + tl.arange(0, BLOCK_H)
        is_column = column < hidden
        x = tl.load(states + column, mask=is_column, other=0.0).to(tl.float32)
        gain = tl.load(weight + column, mask=is_column, other=0.0).to(tl.float32)
        tl.store(out + column, (x * scale * gain).to(out.dtype.element_ty), mask=is_column)


@triton.jit
def look_up(
    input_ids,
    cu_seqlens,
    words,
    weight,
    states,
    out,
    positions,
    batch,
    padded,
    num_rows,
    hidden,
    num_words,
    eps,
    BLOCK_H: tl.constexpr,
):
    """Write each live token's row of a table, that row normalized, and its position.

    Args:
        input_ids: ``(B, S) int64``. cu_seqlens: what `unpad` wrote.
        words: ``(num_words, H)``, T. Ids outside take the nearest row.
        weight: ``(H,)``, T, of the first layer's norm. eps: fp32, added to the mean of squares.
        states, out: ``(num_rows, H)``, T: the rows, and what the norm makes of them.
        positions: ``(num_rows,) int32``, places of tokens in their texts.
        hidden: H, a multiple of 8. Addresses are multiples of 16 bytes.

    Grid: up to ``B * S`` programs; any number from 1 on computes the same.

    Order of additions: of squares BLOCK_H sums that take turns, then these in a fixed tree; in fp32.
    """
    for cell in range(tl.program_id(0), batch * padded, tl.num_programs(0)):
        text = cell // padded
        place = cell - text * padded
        row = tl.load(cu_seqlens + text) + place
        if (row >= 0) & (row < tl.minimum(tl.load(cu_seqlens + text + 1), num_rows)):
            word = tl.minimum(tl.maximum(tl.load(input_ids + cell), 0), num_words - 1)
            at = tl.cast(row, tl.int64) * hidden
            squares = tl.zeros([BLOCK_H], tl.float32)
            for first in range(0, hidden, BLOCK_H):
                column = first + tl.arange(0, BLOCK_H)
                is_column = column < hidden
                x = tl.load(words + word * hidden + column, mask=is_column, other=0.0)
                tl.store(states + at + column, x, mask=is_column)
                x = x.to(tl.float32)
                squares += x * x
            _normed(states + at, weight, out + at, tl.sum(squares, 0), hidden, eps, BLOCK_H)
            tl.store(positions + row, place)


@triton.jit
def add_rms(
    residual,
    index,
    parts,
    bias,
    weight,
    states,
    out,
    live,
    source_rows,
    num_rows,
    num_parts,
    hidden,
    eps,
    indexed,
    BLOCK_H: tl.constexpr,
):
    """Compute ``states = rows(residual) + (parts[0] + parts[1] + ... + bias)`` and ``out = states / rms(states) * weight``.

    Args:
        residual: ``(source_rows, H)``, T.
        index: ``(num_rows,) int32``, the row of `residual` for each row; as in `product`. Rows of `parts` are not indexed.
        parts: ``(num_parts, num_rows, H)`` fp32, as `product` writes them. Without any, bias is left out, too.
        bias: ``(H,)``, T, of the product. weight: ``(H,)``, T, of the norm. eps: fp32, added to the mean of squares.
        states: ``(num_rows, H)``, T; it may be `residual` where that is not indexed. The norm reads what is rounded to T.
        out: ``(num_rows, H)``, T.
        live: ``(1,) int32``, how many rows are computed, at most `num_rows`.
        hidden: H, a multiple of 8. Addresses are multiples of 16 bytes.
        indexed: 0 or 1.

    Grid: up to `num_rows` programs; any number from 1 on computes the same.

    Order of additions: parts ascending, the bias, the residual; of squares as in `look_up`.
    """
    rows = alive(live, num_rows)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        at = tl.cast(row, tl.int64) * hidden
        source = sources(index, indexed, row, row < rows, source_rows) * hidden
        squares = tl.zeros([BLOCK_H], tl.float32)
        for first in range(0, hidden, BLOCK_H):
            column = first + tl.arange(0, BLOCK_H)
            is_column = column < hidden
            total = tl.zeros([BLOCK_H], tl.float32)
            for part in range(num_parts):
                place = tl.cast(part, tl.int64) * num_rows * hidden + at + column
                total += tl.load(parts + place, mask=is_column, other=0.0)
            total += tl.load(bias + column, mask=is_column & (column * 0 + num_parts > 0), other=0.0).to(tl.float32)
            x = tl.load(residual + source + column, mask=is_column, other=0.0).to(tl.float32) + total
            x = x.to(states.dtype.element_ty)
            tl.store(states + at + column, x, mask=is_column)
            x = x.to(tl.float32)
            squares += x * x
        _normed(states + at, weight, out + at, tl.sum(squares, 0), hidden, eps, BLOCK_H)


@triton.jit
def turn(
    qkv,
    q_weight,
    k_weight,
    cos,
    sin,
    positions,
    index,
    new_positions,
    live,
    source_rows,
    num_rows,
    row_stride,
    num_heads,
    kv_heads,
    head_size,
    num_places,
    eps,
    normed,
    indexed,
    BLOCK_N: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
):
    """Normalize each head of queries and keys where they are, and turn it by its token's position; tell positions of rows.

    Args:
        qkv: ``(num_rows, row_stride)``, T: N heads of queries, then KV of keys, of D columns each; what follows is left alone.
        q_weight, k_weight: ``(D,)`` fp32, of the norms; read only where `normed` is 1. eps: fp32, added to the mean of squares.
        cos, sin: ``(num_places, D / 2)`` fp32: by which column i, and column ``i + D / 2``, are turned. Positions behind take the last.
        positions: ``(source_rows,) int32``. index: ``(num_rows,) int32``, the row of `positions` for each row; as in `product`.
        new_positions: ``(num_rows,) int32``, the rows' own; it may be `positions` where that is not indexed.
        live: ``(1,) int32``, how many rows are turned, at most `num_rows`.
        num_heads, kv_heads, head_size: N, KV, D; D is a multiple of 8, and at most 2 * HALF_BLOCK.
        normed, indexed: 0 or 1.

    Grid: up to `num_rows` programs; any number from 1 on computes the same.

    Order of additions: squares of both halves of a head, then these in a fixed tree; in fp32.
    """
    half = head_size // 2
    column = tl.arange(0, HALF_BLOCK)
    is_column = column < half
    rows = alive(live, num_rows)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        position = tl.load(positions + sources(index, indexed, row, row < rows, source_rows))
        tl.store(new_positions + row, position)
        angle = tl.minimum(tl.maximum(position, 0), num_places - 1).to(tl.int64) * half + column
        by_cos = tl.load(cos + angle, mask=is_column, other=0.0)[None, :]
        by_sin = tl.load(sin + angle, mask=is_column, other=0.0)[None, :]
        for first_head in range(0, num_heads + kv_heads, BLOCK_N):
            head = first_head + tl.arange(0, BLOCK_N)
            is_there = (head < num_heads + kv_heads)[:, None] & is_column[None, :]
            at = qkv + tl.cast(row, tl.int64) * row_stride + head[:, None] * head_size + column[None, :]
            first = tl.load(at, mask=is_there, other=0.0).to(tl.float32)
            second = tl.load(at + half, mask=is_there, other=0.0).to(tl.float32)
            if normed != 0:
                scale = tl.rsqrt(tl.sum(first * first + second * second, 1) / head_size + eps)[:, None]
                is_query = (head < num_heads)[:, None]
                of_q, of_k = q_weight + column[None, :], k_weight + column[None, :]
                gain = tl.load(of_q, mask=is_there & is_query, other=0.0)
                gain += tl.load(of_k, mask=is_there & (head >= num_heads)[:, None], other=0.0)
                first = first * scale * gain
                gain = tl.load(of_q + half, mask=is_there & is_query, other=0.0)
                gain += tl.load(of_k + half, mask=is_there & (head >= num_heads)[:, None], other=0.0)
                second = second * scale * gain
            tl.store(at, (first * by_cos - second * by_sin).to(qkv.dtype.element_ty), mask=is_there)
            tl.store(at + half, (second * by_cos + first * by_sin).to(qkv.dtype.element_ty), mask=is_there)


@triton.jit
def gated(
    a,
    index,
    weight,
    bias,
    out,
    live,
    source_rows,
    num_rows,
    n,
    k,
    indexed,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Multiply rows by gates and by values: ``out = silu(rows(a) @ gates.T + bias) * (rows(a) @ values.T + bias)``.

    Args:
        a: ``(source_rows, K)``, T. index: as in `product`.
        weight: ``(2 N, K)``, T: gates, then values. bias: ``(2 N,)``, T.
        out: ``(num_rows, N)``, T. live, source_rows, num_rows, indexed: as in `product`.
        n, k: N, K, multiples of 8. Addresses are multiples of 16 bytes.

    Grid: up to ``ceil(num_rows / BLOCK_M) * ceil(N / BLOCK_N)`` programs; any number from 1 on computes the same.

    Order of additions: of both products as in `product`.
    """
    rows = alive(live, num_rows)
    tiles_n = tl.cdiv(n, BLOCK_N)
    for tile in range(tl.program_id(0), tl.cdiv(rows, BLOCK_M) * tiles_n, tl.num_programs(0)):
        tile_m = tile // tiles_n
        row = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
        column = (tile - tile_m * tiles_n) * BLOCK_N + tl.arange(0, BLOCK_N)
        is_row, is_column = row < rows, column < n
        from_a = a + sources(index, indexed, row, is_row, source_rows)[:, None] * k
        from_gates = weight + column.to(tl.int64)[:, None] * k
        from_values = from_gates + tl.cast(n, tl.int64) * k
        gates = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        values = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for first in range(0, k, BLOCK_K):
            inner = first + tl.arange(0, BLOCK_K)[None, :]
            left = tl.load(from_a + inner, mask=is_row[:, None] & (inner < k), other=0.0)
            right = tl.load(from_gates + inner, mask=is_column[:, None] & (inner < k), other=0.0)
            gates = tl.dot(left, tl.trans(right), gates, input_precision="tf32x3")
            right = tl.load(from_values + inner, mask=is_column[:, None] & (inner < k), other=0.0)
            values = tl.dot(left, tl.trans(right), values, input_precision="tf32x3")
        gates += tl.load(bias + column, mask=is_column, other=0.0).to(tl.float32)[None, :]
        values += tl.load(bias + n + column, mask=is_column, other=0.0).to(tl.float32)[None, :]
        result = gates / (1.0 + tl.exp2(gates * -1.4426950408889634)) * values
        to = out + row.to(tl.int64)[:, None] * n + column[None, :]
        tl.store(to, result.to(out.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])
