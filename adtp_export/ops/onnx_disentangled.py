"""`adtp::AdtpRaggedAttentionDisentangled`: the portable body of DeBERTa's attention, whose scores have two products with distances.

Both products are made for all distances that the model tells apart, token by token, and each pair of tokens gathers its numbers from
them.
"""

from __future__ import annotations

from typing import Any

from onnxscript import opset20 as op
from onnxscript import script

from ..contract import ATTENTION_DISENTANGLED, NUM_HEADS, RECEIVED, SCALE
from .onnx_attend import AttendInGroups, ReceivedInGroups
from .onnx_layout import FLOAT, INT64, OURS, Layout


@script(OURS)
def BucketOfPair(place_q, place_k, buckets):
    """Look up the buckets of queries ``(..., L, 1)`` and keys ``(..., 1, L)``, int64: ``(..., L, L) int32``."""
    middle = op.Div(op.Shape(buckets), op.Constant(value_ints=[2]))
    row = op.Add(op.Sub(place_q, place_k), middle)
    last = op.Add(middle, middle)
    return op.Gather(buckets, op.Max(op.Min(row, last), op.Constant(value_ints=[0])))


@script(OURS)
def DistancesByHead(table, num_heads: int):
    """``(H, R)`` to ``(N, D, R)``."""
    n_heads = op.Unsqueeze(op.Constant(value_int=num_heads), op.Constant(value_ints=[0]))
    shape = op.Concat(n_heads, op.Constant(value_ints=[-1]), op.Shape(table, start=1, end=2), axis=0)
    return op.Reshape(table, shape)


@script(OURS)
def WithDistances(x, table, num_heads: int, scale: float):
    """Multiply the scaled heads of each token ``(T, H)`` by all distances ``(H, R)``: ``(N*T*R,)``, by head, token and bucket."""
    n_heads = op.Unsqueeze(op.Constant(value_int=num_heads), op.Constant(value_ints=[0]))
    shape = op.Concat(op.Constant(value_ints=[0]), n_heads, op.Constant(value_ints=[-1]), axis=0)
    scaled = op.Mul(x, op.CastLike(op.Constant(value_float=scale), x))
    heads = op.Transpose(op.Reshape(scaled, shape), perm=[1, 0, 2])
    return op.Reshape(op.MatMul(heads, DistancesByHead(table, num_heads)), op.Constant(value_ints=[-1]))


@script(OURS)
def AddDistances(bias, rows, of_queries, of_keys, positions, buckets, columns, num_heads: int):
    """Add both products to a group's biases: ``(n, 1, 1, L)`` to ``(n, N, L, L)``. of_queries and of_keys are as of `WithDistances`, and
    `columns` is R, ``(1,)``.
    """
    first_head = op.Gather(rows, op.Constant(value_int=0), axis=1)  # (n, L); the first head of token t is row t * N
    token = op.Div(first_head, op.Constant(value_int=num_heads))
    place = op.Cast(op.Gather(positions, token), to=INT64)
    of_query = op.Constant(value_ints=[1, 3])
    of_key = op.Constant(value_ints=[1, 2])
    bucket = BucketOfPair(op.Unsqueeze(place, of_query), op.Unsqueeze(place, of_key), buckets)
    heads = op.Range(op.Constant(value_int=0), op.Constant(value_int=num_heads), op.Constant(value_int=1))
    begin = op.Mul(op.Unsqueeze(heads, of_key), op.Mul(op.Shape(positions), columns))  # (N, 1, 1)
    pair = op.Add(op.Cast(bucket, to=INT64), begin)  # (n, N, L, L)
    row = op.Mul(token, columns)
    first = op.Cast(op.Gather(of_queries, op.Add(pair, op.Unsqueeze(row, of_query))), to=FLOAT)
    second = op.Cast(op.Gather(of_keys, op.Add(pair, op.Unsqueeze(row, of_key))), to=FLOAT)
    return op.Add(op.Add(first, second), bias)


@script(OURS)
def AttendWithDistances(
    q, k, v, cu_seqlens, positions, distance_keys, distance_queries, buckets, num_heads: int, scale: float
):
    """Attend in groups with both products: the result ``(T, H)``, and what `ReceivedInGroups` takes."""
    r1, r2, r3, r4, b1, b2, b3, b4, back = Layout(cu_seqlens, num_heads)
    first = WithDistances(q, distance_keys, num_heads, scale)
    second = WithDistances(k, distance_queries, num_heads, scale)
    columns = op.Shape(distance_keys, start=1, end=2)
    t1 = AddDistances(b1, r1, first, second, positions, buckets, columns, num_heads)
    t2 = AddDistances(b2, r2, first, second, positions, buckets, columns, num_heads)
    t3 = AddDistances(b3, r3, first, second, positions, buckets, columns, num_heads)
    t4 = AddDistances(b4, r4, first, second, positions, buckets, columns, num_heads)
    output, p1, p2, p3, p4 = AttendInGroups(q, k, v, r1, r2, r3, r4, t1, t2, t3, t4, back, num_heads, scale)
    return output, p1, p2, p3, p4, b1, b2, b3, b4, back


@script(OURS)
def AdtpRaggedAttentionDisentangled(
    q, k, v, cu_seqlens, positions, distance_keys, distance_queries, buckets, num_heads: int, scale: float
):
    output, _p1, _p2, _p3, _p4, _b1, _b2, _b3, _b4, _back = AttendWithDistances(
        q, k, v, cu_seqlens, positions, distance_keys, distance_queries, buckets, num_heads, scale
    )
    return output


@script(OURS)
def AdtpRaggedAttentionDisentangledReceived(
    q, k, v, cu_seqlens, positions, distance_keys, distance_queries, buckets, num_heads: int, scale: float
):
    output, p1, p2, p3, p4, b1, b2, b3, b4, back = AttendWithDistances(
        q, k, v, cu_seqlens, positions, distance_keys, distance_queries, buckets, num_heads, scale
    )
    return output, ReceivedInGroups(p1, p2, p3, p4, b1, b2, b3, b4, back)


def disentangled(*arguments: Any) -> Any:
    """What `torch.onnx.export` writes for ``ragged_attention_disentangled``: its tensors, heads and scale."""
    *tensors, num_heads, scale = arguments
    operator = getattr(OURS, f"{ATTENTION_DISENTANGLED}{RECEIVED}")
    return operator(*tensors, **{NUM_HEADS: num_heads, SCALE: scale})


DISENTANGLED_PARTS = (BucketOfPair, DistancesByHead, WithDistances, AddDistances, AttendWithDistances)
