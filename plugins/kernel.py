"""Ragged attention on the GPU: two Triton kernels for every dtype, head size and architecture.

Forward attention over packed sequences, as `adtp::ragged_attention` defines it, and what each token received, as
`adtp::ragged_attention_received` defines it. What is particular here:

- The launch needs no longest length. Tiles are numbered flat: sequence ``b`` owns the numbers from
  ``cu_seqlens[b] // BLOCK_M + b`` on, which leaves it enough of them wherever it begins. A program counts the
  sequences whose first number is not above its own, and so finds its sequence with one round of loads instead of a
  search. ``T // BLOCK_M + B`` tiles are enough; the few that nobody needs end at once.
- Softmax in one pass over the keys (Milakov and Gimelshein 2018; FlashAttention-2, Dao 2023), in base 2, in fp32. The
  mask is a bias in the multiply-add that scales the scores, so it costs no instruction of its own.
- What was received takes two launches. The first is the forward kernel without values, for each row's log-sum-exp. The second
  turns the scores around: a tile of keys walks the queries of its sequence. There are no atomics, so answers repeat to the bit.
"""

from __future__ import annotations

import triton
import triton.language as tl

SCAN = tl.constexpr(128)
"""Sequences that a program looks at in one go."""


@triton.jit
def _rows_of(tile, cu_seqlens, num_tokens, num_sequences, BLOCK_M: tl.constexpr):
    """Find the sequence of a tile: its first token, its length, and the row in it that the tile begins with.

    A tile that nobody needs begins before the sequence's first row or behind its last.
    """
    sequence = -1
    for first in range(0, num_sequences, SCAN):
        candidate = first + tl.arange(0, SCAN)
        is_there = candidate < num_sequences
        begins = tl.load(cu_seqlens + candidate, mask=is_there, other=0)
        sequence += tl.sum((is_there & (begins // BLOCK_M + candidate <= tile)).to(tl.int32))
    sequence = tl.maximum(sequence, 0)
    begin = tl.minimum(tl.maximum(tl.load(cu_seqlens + sequence), 0), num_tokens)
    length = tl.minimum(tl.maximum(tl.load(cu_seqlens + sequence + 1), begin), num_tokens) - begin
    return begin, length, (tile - begin // BLOCK_M - sequence) * BLOCK_M


@triton.jit
def ragged_attention(
    q,
    k,
    v,
    cu_seqlens,
    out,
    lse,
    row_stride,
    num_tokens,
    num_sequences,
    num_heads,
    scale,
    HEAD_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Attend from one tile of ``BLOCK_M`` tokens of one head to all tokens of the same sequence.

    Args:
        q, k, v: pointers to the first row of each, 16-byte aligned, fp16, bf16 or fp32; rows lie `row_stride` elements
            apart (``N*D``, or ``3*N*D`` where the three are columns of one tensor).
        cu_seqlens: ``(B+1,) int32``, from 0 to T, non-decreasing.
        out: ``(T, N*D)``, contiguous, in the dtype of q.
        lse: ``(N, T) fp32``: log2 of the sum of ``2 ** score`` over a row's keys, scores times log2(e). One of `out` and `lse` is
            None; without `out`, so is `v`.
        num_tokens: T. num_sequences: B. num_heads: N.
        scale: fp32 factor on ``q @ k.T``.

    Grid: ``(T // BLOCK_M + B) * N`` programs. Whatever is in `cu_seqlens`, nothing outside the T rows is read or written:
    builders may time a layer on memory that nobody has filled.
    """
    program = tl.program_id(0)
    tile = program // num_heads
    head = program % num_heads  # neighbours share rows of memory
    begin, length, first_row = _rows_of(tile, cu_seqlens, num_tokens, num_sequences, BLOCK_M)
    if (first_row < 0) | (first_row >= length):
        return

    columns = tl.arange(0, HEAD_SIZE)
    begin = begin.to(tl.int64)
    first_element = begin * row_stride + head * HEAD_SIZE
    q_rows = first_row + tl.arange(0, BLOCK_M)
    k_rows = tl.arange(0, BLOCK_N)
    offsets = k_rows[:, None] * row_stride + columns[None, :]
    queries = tl.load(
        q + first_element + q_rows[:, None] * row_stride + columns[None, :], mask=q_rows[:, None] < length, other=0.0
    )
    k += first_element
    if out is not None:
        v += first_element

    log2_scale = scale * 1.4426950408889634
    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    context = tl.zeros([BLOCK_M, HEAD_SIZE], tl.float32)
    for start in range(0, length, BLOCK_N):
        is_key = start + k_rows < length
        at = start * row_stride + offsets
        keys = tl.load(k + at, mask=is_key[:, None], other=0.0)
        if out is not None:
            values = tl.load(v + at, mask=is_key[:, None], other=0.0)
        bias = tl.where(is_key, 0.0, float("-inf"))
        scores = tl.dot(queries, tl.trans(keys), input_precision="tf32x3") * log2_scale + bias[None, :]
        peak = tl.maximum(highest, tl.max(scores, 1))
        weights = tl.exp2(scores - peak[:, None])
        shrink = tl.exp2(highest - peak)
        highest = peak
        total = total * shrink + tl.sum(weights, 1)
        if out is not None:
            context = tl.dot(weights.to(values.dtype), values, context * shrink[:, None], input_precision="tf32x3")

    if out is not None:
        result = (context * (1.0 / total)[:, None]).to(out.dtype.element_ty)
        first_element = begin * num_heads * HEAD_SIZE + head * HEAD_SIZE
        offsets = q_rows[:, None] * (num_heads * HEAD_SIZE) + columns[None, :]
        tl.store(out + first_element + offsets, result, mask=q_rows[:, None] < length)
    else:
        tl.store(lse + head.to(tl.int64) * num_tokens + begin + q_rows, highest + tl.log2(total), mask=q_rows < length)


@triton.jit
def received_attention(
    q,
    k,
    cu_seqlens,
    lse,
    received,
    row_stride,
    num_tokens,
    num_sequences,
    num_heads,
    scale,
    HEAD_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Sum what one tile of ``BLOCK_M`` tokens receives of all tokens of its sequence, in all heads.

    Args: those of `ragged_attention`, and
        lse: what it wrote.
        received: ``(T,) fp32``.
        HEADS: heads at a time, one for each warp.

    Grid: ``T // BLOCK_M + B`` programs. Heads are added in one order, so that answers repeat to the bit. As there, nothing
    outside the T rows is read or written.
    """
    begin, length, first_row = _rows_of(tl.program_id(0), cu_seqlens, num_tokens, num_sequences, BLOCK_M)
    if (first_row < 0) | (first_row >= length):
        return

    begin = begin.to(tl.int64)
    k_rows = first_row + tl.arange(0, BLOCK_M)
    q_rows = tl.arange(0, BLOCK_N)
    columns = tl.arange(0, HEAD_SIZE)[None, None, :]
    k += begin * row_stride + k_rows[None, :, None] * row_stride + columns
    q += begin * row_stride + q_rows[None, :, None] * row_stride + columns
    lse += begin + q_rows[None, None, :]

    log2_scale = scale * 1.4426950408889634
    total = tl.zeros([HEADS, BLOCK_M], tl.float32)
    for first_head in range(0, num_heads, HEADS):
        head = first_head + tl.arange(0, HEADS)[:, None, None]
        is_head = head < num_heads
        keys = tl.load(k + head * HEAD_SIZE, mask=is_head & (k_rows[None, :, None] < length), other=0.0)
        for start in range(0, length, BLOCK_N):
            is_query = start + q_rows < length
            at = start * row_stride + head * HEAD_SIZE
            queries = tl.load(q + at, mask=is_head & is_query[None, :, None], other=0.0)
            at = head.to(tl.int64) * num_tokens + start
            bias = tl.load(lse + at, mask=is_head & is_query[None, None, :], other=float("inf"))
            scores = tl.dot(keys, tl.trans(queries, 0, 2, 1), input_precision="tf32x3") * log2_scale - bias
            total += tl.sum(tl.exp2(scores), 2)
    tl.store(received + begin + k_rows, tl.sum(total, 0), mask=k_rows < length)
