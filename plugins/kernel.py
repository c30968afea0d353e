"""Ragged attention on the GPU: one Triton kernel for every dtype, head size and architecture.

Forward attention over packed sequences, as `adtp::ragged_attention` defines it. What is particular here:

- The launch needs no longest length. Tiles are numbered flat: sequence ``b`` owns the numbers from
  ``cu_seqlens[b] // BLOCK_M + b`` on, which leaves it enough of them wherever it begins. A program counts the
  sequences whose first number is not above its own, and so finds its sequence with one round of loads instead of a
  search. ``T // BLOCK_M + B`` tiles are enough; the few that nobody needs end at once.
- Softmax in one pass over the keys (Milakov and Gimelshein 2018; FlashAttention-2, Dao 2023), in base 2, in fp32. The
  mask is a bias in the multiply-add that scales the scores, so it costs no instruction of its own.
"""

from __future__ import annotations

import triton
import triton.language as tl

SCAN = tl.constexpr(128)
"""Sequences that a program looks at in one go."""


@triton.jit
def ragged_attention(
    q,
    k,
    v,
    cu_seqlens,
    out,
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
        num_tokens: T. num_sequences: B. num_heads: N.
        scale: fp32 factor on ``q @ k.T``.

    Grid: ``(T // BLOCK_M + B) * N`` programs. Whatever is in `cu_seqlens`, nothing outside the T rows is read or written:
    builders may time a layer on memory that nobody has filled.
    """
    program = tl.program_id(0)
    tile = program // num_heads
    head = program % num_heads  # neighbours share rows of memory

    sequence = -1
    for first in range(0, num_sequences, SCAN):
        candidate = first + tl.arange(0, SCAN)
        is_there = candidate < num_sequences
        begins = tl.load(cu_seqlens + candidate, mask=is_there, other=0)
        sequence += tl.sum((is_there & (begins // BLOCK_M + candidate <= tile)).to(tl.int32))
    sequence = tl.maximum(sequence, 0)
    begin = tl.minimum(tl.maximum(tl.load(cu_seqlens + sequence), 0), num_tokens)
    length = tl.minimum(tl.maximum(tl.load(cu_seqlens + sequence + 1), begin), num_tokens) - begin
    first_row = (tile - begin // BLOCK_M - sequence) * BLOCK_M
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
    v += first_element

    log2_scale = scale * 1.4426950408889634
    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    context = tl.zeros([BLOCK_M, HEAD_SIZE], tl.float32)
    for start in range(0, length, BLOCK_N):
        is_key = start + k_rows < length
        at = start * row_stride + offsets
        keys = tl.load(k + at, mask=is_key[:, None], other=0.0)
        values = tl.load(v + at, mask=is_key[:, None], other=0.0)
        bias = tl.where(is_key, 0.0, float("-inf"))
        scores = tl.dot(queries, tl.trans(keys), input_precision="tf32x3") * log2_scale + bias[None, :]
        peak = tl.maximum(highest, tl.max(scores, 1))
        weights = tl.exp2(scores - peak[:, None])
        shrink = tl.exp2(highest - peak)
        highest = peak
        total = total * shrink + tl.sum(weights, 1)
        context = tl.dot(weights.to(values.dtype), values, context * shrink[:, None], input_precision="tf32x3")

    result = (context * (1.0 / total)[:, None]).to(out.dtype.element_ty)
    first_element = begin * num_heads * HEAD_SIZE + head * HEAD_SIZE
    offsets = q_rows[:, None] * (num_heads * HEAD_SIZE) + columns[None, :]
    tl.store(out + first_element + offsets, result, mask=q_rows[:, None] < length)
