"""Matrix products of packed rows: ``out = act(rows(a) @ weight.T + bias)``, for as many rows as the device counts.

Every kernel of this package reads how many rows are alive from device memory, because a cut decides that there. Rows beyond are
dead: they are neither read nor written. The work is numbered flat, and a program takes every ``num_programs``-th item of what is
alive. So a grid as large as the bucket gives each program one item at most, and a smaller one, such as the processors times those that fit
on each, makes the same kernel persistent: dead tiles of a large bucket cost nothing.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def alive(live, num_rows):
    """Read a count on the device; whatever is there, it is from 0 to `num_rows`."""
    return tl.minimum(tl.maximum(tl.load(live), 0), num_rows)


@triton.jit
def sources(index, indexed, rows, is_row, source_rows):
    """Return which row each of `rows` is read from: itself, or, where `indexed` is not 0, what `index` says."""
    is_indexed = rows * 0 + indexed != 0
    found = tl.where(is_indexed, tl.load(index + rows, mask=is_row & is_indexed, other=0), rows)
    return tl.minimum(tl.maximum(found, 0), source_rows - 1).to(tl.int64)


@triton.jit
def erf(x):
    """The error function, within 1e-7 of itself, without the branch that CUDA's has for each thread.

    Source: the form and the coefficients are N. Juffa's (stackoverflow.com/q/35148198): one polynomial for small x, and one in
    an exponent.
    """
    size, square = tl.abs(x), x * x
    near = -5.96761703e-4
    near = near * square + 4.99119423e-3
    near = near * square + -2.67681349e-2
    near = near * square + 1.12819925e-1
    near = near * square + -3.76125336e-1
    near = near * square + 1.28379166e-1
    near = near * x + x
    far = -1.72853470e-5 * size + 3.83197126e-4
    far = far * square + (-3.88396438e-3 * size + 2.42546219e-2)
    far = far * size + -1.06777877e-1
    far = far * size + -6.34846687e-1
    far = far * size + -1.28717512e-1
    far = far * size - size
    far = 1.0 - tl.exp2(far * 1.4426950408889634)
    return tl.where(size > 0.927734375, tl.where(x < 0, -far, far), near)


@triton.jit
def activated(x, ACTIVATION: tl.constexpr):
    """Apply an activation in fp32: "none", "gelu" (the exact one, with erf), "tanh" or "relu"."""
    if ACTIVATION == "gelu":
        x = 0.5 * x * (1.0 + erf(x * 0.7071067811865476))
    elif ACTIVATION == "tanh":
        shrunk = tl.exp2(tl.abs(x) * -2.885390081777927)  # exp(-2 |x|), which cannot overflow
        size = (1.0 - shrunk) / (1.0 + shrunk)
        x = tl.where(x < 0, -size, size)
    elif ACTIVATION == "relu":
        x = tl.maximum(x, 0.0)
    return x


@triton.jit
def product(
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
    a_stride,
    out_stride,
    parts,
    indexed,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    """Multiply rows by a weight that is stored as PyTorch stores it.

    Args:
        a: ``(source_rows, a_stride)`` of which K columns are read, in dtype T (fp16, bf16 or fp32).
        index: ``(num_rows,) int32``, the row of `a` that each row is computed from. Read only where `indexed` is 1; otherwise any
            address will do.
        weight: ``(N, K)``, T. bias: ``(N,)``, T; None in variants that write parts.
        out: ``(num_rows, out_stride)``, T, and fp32 in variants for any N, which give logits; in variants that write parts
            ``(parts, num_rows, out_stride)`` fp32.
        live: ``(1,) int32``, how many rows are computed; at most `num_rows`, which is the bucket's.
        n, k: N, K. K, a_stride and, in aligned variants, N and out_stride are multiples of 8; addresses, of 16 bytes.
        parts: into how many the sum over K is split; 1 in variants that write T. Part p sums the blocks of columns from
            ``p * ceil(ceil(K / BLOCK_K) / parts)`` on; one that has none writes zeros.
        indexed: 0 or 1.

    Grid: up to ``ceil(num_rows / BLOCK_M) * ceil(N / BLOCK_N) * parts`` programs; any number from 1 on computes the same.

    Order of additions: columns ascending, BLOCK_K in one tensor-core product after the other, in fp32; then the bias.
    fp32 is multiplied as three products of tf32.
    """
    rows = alive(live, num_rows)
    tiles_n = tl.cdiv(n, BLOCK_N)
    tiles = tl.cdiv(rows, BLOCK_M) * tiles_n
    in_part = tl.cdiv(tl.cdiv(k, BLOCK_K), parts) * BLOCK_K
    for item in range(tl.program_id(0), tiles * parts, tl.num_programs(0)):
        part = item // tiles
        tile = item - part * tiles
        tile_m = tile // tiles_n
        row = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
        column = (tile - tile_m * tiles_n) * BLOCK_N + tl.arange(0, BLOCK_N)
        is_row, is_column = row < rows, column < n
        from_a = a + sources(index, indexed, row, is_row, source_rows)[:, None] * a_stride
        from_weight = weight + column.to(tl.int64)[:, None] * k
        total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for first in range(part * in_part, tl.minimum((part + 1) * in_part, k), BLOCK_K):
            inner = first + tl.arange(0, BLOCK_K)[None, :]
            left = tl.load(from_a + inner, mask=is_row[:, None] & (inner < k), other=0.0)
            right = tl.load(from_weight + inner, mask=is_column[:, None] & (inner < k), other=0.0)
            total = tl.dot(left, tl.trans(right), total, input_precision="tf32x3")
        if bias is not None:
            total += tl.load(bias + column, mask=is_column, other=0.0).to(tl.float32)[None, :]
        result = activated(total, ACTIVATION).to(out.dtype.element_ty)
        to = out + (part.to(tl.int64) * num_rows + row)[:, None] * out_stride + column[None, :]
        tl.store(to, result, mask=is_row[:, None] & is_column[None, :])
