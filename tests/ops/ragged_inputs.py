"""Inputs of the attention operators, and how far an implementation may be off on them."""

import numpy as np
import torch

from adtp_export.ops.disentangled_attention import ragged_attention_disentangled
from adtp_export.ops.ragged_attention import (
    ragged_attention_from_others,
    ragged_attention_received,
    ragged_attention_relative,
    ragged_attention_window,
)

RAGGED = ([1], [5], [1, 1, 1], [15, 16, 17], [1, 63, 64, 65], [2, 90, 1, 7])

HEADS, HEAD_SIZE = 4, 8


def make_inputs(lengths, heads=HEADS, head_size=HEAD_SIZE, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    tokens = sum(lengths)
    q, k, v = (torch.randn(tokens, heads * head_size, generator=generator).to(dtype) for _ in range(3))
    cu_seqlens = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
    return q, k, v, cu_seqlens, heads, head_size**-0.5


def probabilities(q, k, cu_seqlens, heads, scale, bias=0.0):
    """Attention without packing: ``(N, T, T)`` over all tokens at once, 0 between sequences."""
    sequence = torch.bucketize(torch.arange(len(q)), cu_seqlens[1:], right=True)
    scores = torch.einsum("qnd,knd->nqk", q.unflatten(1, (heads, -1)), k.unflatten(1, (heads, -1))) * scale + bias
    return scores.masked_fill(sequence[:, None] != sequence, -torch.inf).softmax(-1)


def make_distances(heads, head_size, columns=40, reach=25, dtype=torch.float32, seed=0):
    """Tables of DeBERTa's attention, and buckets that are the wider the farther tokens are apart."""
    generator = torch.Generator().manual_seed(seed)
    tables = [torch.randn(heads * head_size, columns, generator=generator).to(dtype) for _ in range(2)]
    steps = torch.linspace(-1, 1, 2 * reach - 1)
    buckets = ((steps.sign() * steps.abs().sqrt() + 1) / 2 * (columns - 1)).round().int()
    return {"distance_keys": tables[0], "distance_queries": tables[1], "buckets": buckets}


def reference(
    q, k, v, cu_seqlens, heads, scale, *, positions=None, table=None, window=0, from_others=False, **distances
):
    """Output and received of the operator that has these inputs and attributes."""
    if distances:
        return ragged_attention_disentangled(q, k, v, cu_seqlens, positions, *distances.values(), heads, scale)
    if table is not None:
        return ragged_attention_relative(q, k, v, cu_seqlens, positions, table, heads, scale)
    if window:
        return ragged_attention_window(q, k, v, cu_seqlens, positions, heads, scale, window)
    operator = ragged_attention_from_others if from_others else ragged_attention_received
    return operator(q, k, v, cu_seqlens, heads, scale)


def distance_terms(q, k, positions, distance_keys, distance_queries, buckets, heads):
    """Both products of disentangled attention with distances, not scaled, ``(N, T, T)`` over all tokens at once."""
    middle = len(buckets) // 2
    index = buckets[(positions[:, None].long() - positions + middle).clamp(0, 2 * middle)].long()
    keys, queries = (t.unflatten(0, (heads, -1))[:, :, index] for t in (distance_keys, distance_queries))
    q, k = (t.unflatten(1, (heads, -1)) for t in (q, k))
    return torch.einsum("qnd,ndqk->nqk", q, keys) + torch.einsum("knd,ndqk->nqk", k, queries)


def bounds(q, k, v, cu_seqlens, heads, scale, *, positions=None, table=None, window=0, from_others=False, **distances):
    """The exact answers, and what an implementation that sums in fp32 may differ by, element by element.

    With u the rounding of the dtype of `q` and w that of fp32, a score of D terms is off by at most d = (2u + (D + 4) w)
    times ``scale * |q| @ |k|``: the scaled query and the score are rounded to the dtype, sums and the exponent to fp32.
    A bias is one more term, and disentangled attention has twice as many: a sum of products with distances, which is where the
    product of queries and keys may begin. A probability then changes by at most a factor exp(2d), and each sum over n terms adds n
    roundings. A weight may be too small for fp32, so each key that is hidden may get the least one.

    Returns:
        Output ``(T, H)`` and its bound, received ``(T,)`` and its bound, all fp64 numpy.
    """
    u, w = (torch.finfo(dtype).eps / 2 for dtype in (q.dtype, torch.float32))
    q, k, v = (t.double() for t in (q, k, v))
    table = None if table is None else table.double()
    distances = {name: t.double() if t.is_floating_point() else t for name, t in distances.items()}
    form = {"positions": positions, "table": table, "window": window, "from_others": from_others, **distances}
    output, received = reference(q, k, v, cu_seqlens, heads, scale, **form)
    bias, hidden = torch.zeros((), dtype=torch.float64), torch.tensor(False)
    if positions is not None:
        distance = (positions - positions[:, None]).long()
        hidden = distance.abs() > window if window else hidden
        if table is not None:
            bias = table[(distance + len(table) // 2).clamp(0, len(table) - 1)].permute(2, 0, 1)
    sizes = 0.0
    if distances:
        bias = scale * distance_terms(q, k, positions, *distances.values(), heads)
        absolute = {name: t.abs() for name, t in distances.items()}
        sizes = scale * distance_terms(q.abs(), k.abs(), positions, *absolute.values(), heads)
    p = probabilities(q, k, cu_seqlens, heads, scale, bias.masked_fill(hidden, -torch.inf))
    reach = (
        sizes
        + torch.einsum("qnd,knd->nqk", q.abs().unflatten(1, (heads, -1)), k.abs().unflatten(1, (heads, -1))) * scale
    )
    terms = q.shape[1] // heads * (2 if distances else 1) + (4 if table is None and not distances else 6)
    d = (2 * u + terms * w) * torch.where(p > 0, reach + bias.abs(), 0).amax(-1, keepdim=True)
    longest = int(cu_seqlens.diff().max())
    shift = p * (torch.expm1(2 * d) + (longest + 4) * w)
    least = longest * torch.finfo(torch.float32).tiny
    own = 1 - torch.eye(len(q), dtype=torch.float64) if from_others else 1.0
    received_bound = (shift * own).sum((0, 1)) + heads * (longest * w * received + least)
    change = torch.einsum("nqk,knd->qnd", shift + (u + longest * w) * p, v.abs().unflatten(1, (heads, -1))).flatten(1)
    change = change + least * v.abs().amax()
    return tuple(t.numpy() for t in (output, change + u * output.abs(), received, received_bound))
