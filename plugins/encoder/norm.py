"""The sum of a sublayer's input and its product, normalized: one launch, and the place where the parts of a product meet."""

from __future__ import annotations

import triton
import triton.language as tl

from .product import alive, sources


@triton.jit
def normalized(x, weight, bias, column, hidden, eps):
    """Normalize ``x (BLOCK_H,) fp32``, whose numbers from `hidden` on are 0: first the mean, then the variance around it."""
    is_column = column < hidden
    mean = tl.sum(x, 0) / hidden
    centred = tl.where(is_column, x - mean, 0.0)
    scale = tl.rsqrt(tl.sum(centred * centred, 0) / hidden + eps)
    gain = tl.load(weight + column, mask=is_column, other=0.0).to(tl.float32)
    return centred * scale * gain + tl.load(bias + column, mask=is_column, other=0.0).to(tl.float32)


@triton.jit
def add_norm(
    residual,
    index,
    parts,
    bias,
    weight,
    norm_bias,
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
    """Compute ``out = LayerNorm(rows(residual) + (parts[0] + parts[1] + ... + bias))`` in fp32, row by row.

    Args:
        residual: ``(source_rows, H)``, T.
        index: ``(num_rows,) int32``, the row of `residual` for each row; as in `product`. Rows of `parts` are not indexed.
        parts: ``(num_parts, num_rows, H)`` fp32, as `product` writes them. In variants for whole products ``(num_rows, H)``, T, and
            num_parts is 1.
        bias: ``(H,)``, T, of the product; None in variants for whole products, which have added theirs.
        weight, norm_bias: ``(H,)``, T, of the norm. eps: fp32.
        out: ``(num_rows, H)``, T; it may be `residual` where that is not indexed.
        live: ``(1,) int32``, how many rows are computed, at most `num_rows`.
        hidden: H, a multiple of 8, at most BLOCK_H. Addresses are multiples of 16 bytes.
        indexed: 0 or 1.

    Grid: up to `num_rows` programs; any number from 1 on computes the same.

    Order of additions: parts ascending, the bias, the residual; sums over a row are a fixed tree.
    """
    rows = alive(live, num_rows)
    column = tl.arange(0, BLOCK_H)
    is_column = column < hidden
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        at = tl.cast(row, tl.int64) * hidden + column
        total = tl.load(parts + at, mask=is_column, other=0.0).to(tl.float32)
        for part in range(1, num_parts):
            total += tl.load(parts + tl.cast(part, tl.int64) * num_rows * hidden + at, mask=is_column, other=0.0)
        if bias is not None:
            total += tl.load(bias + column, mask=is_column, other=0.0).to(tl.float32)
        source = sources(index, indexed, row, row < rows, source_rows)
        x = tl.load(residual + source * hidden + column, mask=is_column, other=0.0).to(tl.float32) + total
        result = normalized(x, weight, norm_bias, column, hidden, eps)
        tl.store(out + at, result.to(out.dtype.element_ty), mask=is_column)
