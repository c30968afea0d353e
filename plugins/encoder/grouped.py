"""Attention from some tokens to others of the same text, by position: fewer heads of keys than of queries, bounds on either side.

These are `adtp::ragged_attention_grouped` and what keys receive in it. Tiles find their text as in `kernel`, whose softmax this is.
What is particular here:

- A query sees keys by position, and positions have gaps where a cut dropped tokens. They rise within a text. So the keys that a tile
  may see are a range. Its ends lie within as many steps of where they would be without gaps as there are gaps, and are searched there.
  Without gaps nothing is searched. Causal attention walks half of a rectangle, and a window its width.
- Head sizes need not be powers of two: columns behind a head are not loaded.
- There are no atomics, so answers repeat to the bit.
"""

from __future__ import annotations

import triton
import triton.language as tl

SCAN = tl.constexpr(128)
"""Texts that a program looks at in one go."""

FAR = tl.constexpr(2**30)
"""How far one sees without a bound; positions lie below."""


@triton.jit
def _span(cu, text, num_rows):
    """Return where the rows of a text begin, and how many there are; whatever is in `cu`, they lie within `num_rows`."""
    begin = tl.minimum(tl.maximum(tl.load(cu + text), 0), num_rows)
    return begin, tl.minimum(tl.maximum(tl.load(cu + text + 1), begin), num_rows) - begin


@triton.jit
def _text_of(tile, cu, num_texts, BLOCK_M: tl.constexpr):
    """Return the text of a tile, and which of its rows the tile begins with, of rows that lie as `cu` says."""
    text = -1
    for first in range(0, num_texts, SCAN):
        candidate = first + tl.arange(0, SCAN)
        is_there = candidate < num_texts
        begins = tl.load(cu + candidate, mask=is_there, other=0)
        text += tl.sum((is_there & (begins // BLOCK_M + candidate <= tile)).to(tl.int32))
    text = tl.maximum(text, 0)
    return text, (tile - tl.load(cu + text) // BLOCK_M - text) * BLOCK_M


@triton.jit
def _below(positions, length, gaps, bound):
    """Count the rows of a text whose positions, which rise, are below a bound: it is the bound, or up to `gaps` less."""
    low = tl.minimum(tl.maximum(bound - gaps, 0), length)
    high = tl.minimum(tl.maximum(bound, 0), length)
    while low < high:
        middle = (low + high) // 2
        is_below = tl.load(positions + middle) < bound
        low = tl.where(is_below, middle + 1, low)
        high = tl.where(is_below, high, middle)
    return low


@triton.jit
def _in_reach(positions, length, least, most):
    """Return the range of a text's rows whose positions are from `least` to `most`."""
    gaps = tl.load(positions + length - 1, mask=length > 0, other=0) - (length - 1)
    return _below(positions, length, gaps, least), _below(positions, length, gaps, most + 1)


@triton.jit
def _ends(positions, first_row, length, BLOCK_M: tl.constexpr):
    """Return the positions of the first row of a tile and of its last one."""
    return tl.load(positions + first_row), tl.load(positions + tl.minimum(first_row + BLOCK_M, length) - 1)


@triton.jit
def _reach(window):
    return tl.where(window < 0, FAR, window)


@triton.jit
def grouped_attention(
    q,
    k,
    v,
    cu_q,
    cu_k,
    positions_q,
    positions_k,
    out,
    lse,
    q_stride,
    kv_stride,
    num_queries,
    num_keys,
    num_texts,
    num_heads,
    kv_heads,
    head_size,
    scale,
    window_back,
    window_ahead,
    HEAD_BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Attend from one tile of ``BLOCK_M`` queries of one head to the keys of the same text that they see.

    Args:
        q: ``(T, N*D)``, T, rows `q_stride` elements apart. k, v: ``(T', KV*D)``, rows `kv_stride` elements apart. Addresses are
            multiples of 16 bytes, strides and D of 8 elements.
        cu_q, cu_k: ``(B+1,) int32``. positions_q, positions_k: ``(T,)`` and ``(T',) int32``, which rise within a text.
        out: ``(T, N*D)``, contiguous, in the dtype of q.
        lse: ``(N, T) fp32``: log2 of the sum of ``2 ** score`` over a query's keys, scores times log2(e). One of `out` and `lse` is
            None; without `out`, so is `v`.
        num_queries, num_keys, num_texts, num_heads, kv_heads, head_size: T, T', B, N, KV, D; D is at most HEAD_BLOCK.
        scale: fp32 factor on ``q @ k.T``.
        window_back, window_ahead: how far before and behind its own position a query sees; below 0 without a bound.

    Grid: ``(T // BLOCK_M + B) * N`` programs. Whatever is in `cu_q`, `cu_k` and the positions, nothing outside the rows is read or
    written.
    """
    program = tl.program_id(0)
    tile = program // num_heads
    head = program % num_heads  # neighbours share keys
    text, first_row = _text_of(tile, cu_q, num_texts, BLOCK_M)
    begin, length = _span(cu_q, text, num_queries)
    if (first_row < 0) | (first_row >= length):
        return
    first_key, keys_there = _span(cu_k, text, num_keys)

    columns = tl.arange(0, HEAD_BLOCK)
    is_column = columns[None, :] < head_size
    q_rows = first_row + tl.arange(0, BLOCK_M)
    is_query = q_rows < length
    begin = begin.to(tl.int64)
    q += begin * q_stride + head * head_size
    queries = tl.load(q + q_rows[:, None] * q_stride + columns[None, :], mask=is_query[:, None] & is_column, other=0.0)
    at_queries = tl.load(positions_q + begin + q_rows, mask=is_query, other=0)
    back, ahead = _reach(window_back), _reach(window_ahead)
    least, most = at_queries - back, at_queries + ahead  # positions that each query sees
    first_key = first_key.to(tl.int64)
    positions_k += first_key
    nearest, farthest = _ends(positions_q + begin, first_row, length, BLOCK_M)
    first, past = _in_reach(positions_k, keys_there, nearest - back, farthest + ahead)

    kv_head = head * kv_heads // num_heads
    k += first_key * kv_stride + kv_head * head_size
    if out is not None:
        v += first_key * kv_stride + kv_head * head_size
    k_rows = tl.arange(0, BLOCK_N)
    offsets = k_rows[:, None] * kv_stride + columns[None, :]

    log2_scale = scale * 1.4426950408889634
    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    context = tl.zeros([BLOCK_M, HEAD_BLOCK], tl.float32)
    for start in range(first, past, BLOCK_N):
        is_key = start + k_rows < past
        at = tl.cast(start, tl.int64) * kv_stride
        keys = tl.load(k + at + offsets, mask=is_key[:, None] & is_column, other=0.0)
        if out is not None:
            values = tl.load(v + at + offsets, mask=is_key[:, None] & is_column, other=0.0)
        place = tl.load(positions_k + start + k_rows, mask=is_key, other=-1)[None, :]
        is_seen = is_key[None, :] & (place >= least[:, None]) & (place <= most[:, None])
        scores = tl.dot(queries, tl.trans(keys), input_precision="tf32x3") * log2_scale
        scores = tl.where(is_seen, scores, float("-inf"))
        peak = tl.maximum(highest, tl.max(scores, 1))
        finite = tl.where(peak == float("-inf"), 0.0, peak)  # a query may see no key of this block
        weights = tl.exp2(scores - finite[:, None])
        shrink = tl.exp2(highest - finite)
        highest = peak
        total = total * shrink + tl.sum(weights, 1)
        if out is not None:
            context = tl.dot(weights.to(values.dtype), values, context * shrink[:, None], input_precision="tf32x3")

    if out is not None:
        result = (context * (1.0 / total)[:, None]).to(out.dtype.element_ty)
        out += begin * num_heads * head_size + head * head_size
        offsets = q_rows[:, None] * (num_heads * head_size) + columns[None, :]
        tl.store(out + offsets, result, mask=is_query[:, None] & is_column)
    else:
        tl.store(lse + head.to(tl.int64) * num_queries + begin + q_rows, highest + tl.log2(total), mask=is_query)


@triton.jit
def grouped_received(
    q,
    k,
    cu_q,
    cu_k,
    positions_q,
    positions_k,
    lse,
    received,
    q_stride,
    kv_stride,
    num_queries,
    num_keys,
    num_texts,
    num_heads,
    kv_heads,
    head_size,
    scale,
    window_back,
    window_ahead,
    HEAD_BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Sum what one tile of ``BLOCK_M`` keys receives of the queries of its text that see them, in all heads.

    Args: those of `grouped_attention`, and
        lse: what it wrote.
        received: ``(T',) fp32``. Where `window_ahead` is 0, a sum is divided by the number of queries that see the key.

    Grid: ``T' // BLOCK_M + B`` programs. Heads and queries are added in one order.
    """
    text, first_row = _text_of(tl.program_id(0), cu_k, num_texts, BLOCK_M)
    begin, length = _span(cu_k, text, num_keys)
    if (first_row < 0) | (first_row >= length):
        return
    first_query, queries_there = _span(cu_q, text, num_queries)

    k_rows = first_row + tl.arange(0, BLOCK_M)
    is_key = k_rows < length
    begin = begin.to(tl.int64)
    at_keys = tl.load(positions_k + begin + k_rows, mask=is_key, other=0)
    back, ahead = _reach(window_back), _reach(window_ahead)
    least, most = at_keys - ahead, at_keys + back  # positions of queries that see each key
    first_query = first_query.to(tl.int64)
    positions_q += first_query
    nearest, farthest = _ends(positions_k + begin, first_row, length, BLOCK_M)
    first, past = _in_reach(positions_q, queries_there, nearest - ahead, farthest + back)

    columns = tl.arange(0, HEAD_BLOCK)
    is_column = columns[None, :] < head_size
    q_rows = tl.arange(0, BLOCK_N)
    k += begin * kv_stride
    q += first_query * q_stride
    lse += first_query
    of_keys = k_rows[:, None] * kv_stride + columns[None, :]
    of_queries = q_rows[:, None] * q_stride + columns[None, :]

    log2_scale = scale * 1.4426950408889634
    total = tl.zeros([BLOCK_M], tl.float32)
    seen = tl.zeros([BLOCK_M], tl.int32)
    group = num_heads // kv_heads
    for kv_head in range(kv_heads):
        keys = tl.load(k + kv_head * head_size + of_keys, mask=is_key[:, None] & is_column, other=0.0)
        for head in range(kv_head * group, (kv_head + 1) * group):
            for start in range(first, past, BLOCK_N):
                is_query = start + q_rows < past
                at = tl.cast(start, tl.int64) * q_stride + head * head_size
                queries = tl.load(q + at + of_queries, mask=is_query[:, None] & is_column, other=0.0)
                at = tl.cast(head, tl.int64) * num_queries + start
                sums = tl.load(lse + at + q_rows, mask=is_query, other=0.0)
                place = tl.load(positions_q + start + q_rows, mask=is_query, other=-1)[None, :]
                sees = is_query[None, :] & (place >= least[:, None]) & (place <= most[:, None])
                scores = tl.dot(keys, tl.trans(queries), input_precision="tf32x3") * log2_scale - sums[None, :]
                total += tl.sum(tl.where(sees, tl.exp2(scores), 0.0), 1)
                seen += tl.sum(tl.where(head == 0, sees.to(tl.int32), 0), 1)
    total = tl.where(window_ahead == 0, total / tl.maximum(seen, 1).to(tl.float32), total)
    tl.store(received + begin + k_rows, total, mask=is_key)
