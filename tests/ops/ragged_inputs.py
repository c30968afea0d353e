"""Inputs of the attention operators, and how far an implementation may be off on them."""

import numpy as np
import torch

from adtp_export.ops.ragged_attention import ragged_attention_received

RAGGED = ([1], [5], [1, 1, 1], [15, 16, 17], [1, 63, 64, 65], [2, 90, 1, 7])

HEADS, HEAD_SIZE = 4, 8


def make_inputs(lengths, heads=HEADS, head_size=HEAD_SIZE, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    tokens = sum(lengths)
    q, k, v = (torch.randn(tokens, heads * head_size, generator=generator).to(dtype) for _ in range(3))
    cu_seqlens = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
    return q, k, v, cu_seqlens, heads, head_size**-0.5


def probabilities(q, k, cu_seqlens, heads, scale):
    """Attention without packing: ``(N, T, T)`` over all tokens at once, 0 between sequences."""
    sequence = torch.bucketize(torch.arange(len(q)), cu_seqlens[1:], right=True)
    scores = torch.einsum("qnd,knd->nqk", q.unflatten(1, (heads, -1)), k.unflatten(1, (heads, -1))) * scale
    return scores.masked_fill(sequence[:, None] != sequence, -torch.inf).softmax(-1)


def bounds(q, k, v, cu_seqlens, heads, scale):
    """The exact answers, and what an implementation that sums in fp32 may differ by, element by element.

    With u the rounding of the dtype of `q` and w that of fp32, a score of D terms is off by at most d = (2u + (D + 4) w)
    times ``scale * |q| @ |k|``: the scaled query and the score are rounded to the dtype, sums and the exponent to fp32.
    A probability then changes by at most a factor exp(2d), and each sum over n terms adds n roundings.

    Returns:
        Output ``(T, H)`` and its bound, received ``(T,)`` and its bound, all fp64 numpy.
    """
    u, w = (torch.finfo(dtype).eps / 2 for dtype in (q.dtype, torch.float32))
    q, k, v = (t.double() for t in (q, k, v))
    output, received = ragged_attention_received(q, k, v, cu_seqlens, heads, scale)
    p = probabilities(q, k, cu_seqlens, heads, scale)
    reach = torch.einsum("qnd,knd->nqk", q.abs().unflatten(1, (heads, -1)), k.abs().unflatten(1, (heads, -1))) * scale
    d = (2 * u + (q.shape[1] // heads + 4) * w) * torch.where(p > 0, reach, 0).amax(-1, keepdim=True)
    longest = int(cu_seqlens.diff().max())
    shift = p * (torch.expm1(2 * d) + (longest + 4) * w)
    received_bound = shift.sum((0, 1)) + heads * longest * w * received
    change = torch.einsum("nqk,knd->qnd", shift + (u + longest * w) * p, v.abs().unflatten(1, (heads, -1))).flatten(1)
    return tuple(t.numpy() for t in (output, change + u * output.abs(), received, received_bound))
