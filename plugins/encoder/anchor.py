"""The last token of each text stays at a cut, and says how many others do, where it alone has seen the whole text."""

from __future__ import annotations

import triton
import triton.language as tl

from .product import alive


@triton.jit
def anchor(
    x,
    order,
    cu_seqlens,
    texts,
    ratio_weight,
    ratio_bias,
    permille,
    count,
    num_rows,
    num_texts,
    hidden,
    candidates,
    min_tokens,
    BLOCK_C: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Give the last row of each text the highest score there is, and choose from it how many tokens of the text stay.

    Args:
        x: ``(num_rows, H)``, T. order: ``(num_rows,)`` fp32, scores, of which last rows get infinity.
        cu_seqlens: ``(num_texts + 1,) int32``. texts: ``(1,) int32``, B.
        ratio_weight, ratio_bias, permille, count, hidden, candidates, min_tokens: as in `scores`, but candidates may be 0. Then nothing
            but `order` is written, and `x` and what is about ratios may be any address.

    Grid: up to `num_texts` programs; any number from 1 on computes the same.

    Order of additions: as of ratios in `scores`.
    """
    for text in range(tl.program_id(0), alive(texts, num_texts), tl.num_programs(0)):
        begin = tl.minimum(tl.maximum(tl.load(cu_seqlens + text), 0), num_rows - 1)
        length = tl.minimum(tl.maximum(tl.load(cu_seqlens + text + 1) - begin, 1), num_rows - begin)
        last = begin + length - 1
        tl.store(order + last, float("inf"))
        if candidates > 0:
            candidate = tl.arange(0, BLOCK_C)
            is_candidate = candidate < candidates
            total = tl.zeros([BLOCK_C], tl.float32)
            for first in range(0, hidden, BLOCK_H):
                inner = first + tl.arange(0, BLOCK_H)
                left = tl.load(x + last.to(tl.int64) * hidden + inner, mask=inner < hidden, other=0.0).to(tl.float32)
                at = ratio_weight + candidate[:, None] * hidden + inner[None, :]
                right = tl.load(at, mask=is_candidate[:, None] & (inner < hidden)[None, :], other=0.0)
                total += tl.sum(left[None, :] * right, 1)
            total += tl.load(ratio_bias + candidate, mask=is_candidate, other=0.0)
            total = tl.where(is_candidate, total, float("-inf"))
            best = tl.min(tl.where(total == tl.max(total, 0), candidate, candidates - 1), 0)
            kept = tl.maximum((length * tl.load(permille + best) + 999) // 1000, min_tokens)
            tl.store(count + text, tl.minimum(length, kept))
