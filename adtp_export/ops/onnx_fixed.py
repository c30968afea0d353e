"""Bodies of the attention operators in fixed sizes: one mask over all T rows, and no size that depends on data.

The portable bodies lay texts out by their lengths, so sizes inside them change from batch to batch. Here each row attends to all rows,
and a mask leaves those of its own text. That costs ``T * T`` whatever the lengths are, and every shape is known when an engine is
built. Rows past ``cu_seqlens[-1]`` are dead. Kernels of other layers do not write to them, so they may hold NaN. Neither a mask that is
added nor a probability of 0 hides that. So zeros take their place before rows meet.
"""

from __future__ import annotations

import functools

import onnx
from onnxscript import opset20 as op
from onnxscript import script

from ..contract import PLUGIN_NAMESPACE, PLUGIN_VERSION
from .onnx_disentangled import BucketOfPair, DistancesByHead
from .onnx_function import flat
from .onnx_grouped import TooFar
from .onnx_layout import END, FLOAT, INT32, INT64, OURS


@script(OURS)
def TextOfRow(cu_seqlens, q):
    """Number the text of each row, those that are dead as one more: ``(T, 1) int32``."""
    one = op.Constant(value_ints=[1])
    first = op.Constant(value_int=0)
    rows = op.Squeeze(op.Shape(q, start=0, end=1), op.Constant(value_ints=[0]))
    row = op.Unsqueeze(op.Range(first, rows, op.Constant(value_int=1)), one)
    ends = op.Slice(op.Cast(cu_seqlens, to=INT64), one, op.Constant(value_ints=[END]))
    return op.ReduceSum(op.Cast(op.GreaterOrEqual(row, ends), to=INT32), one, keepdims=1)


@script(OURS)
def Apart(cu_seqlens, q):
    """Say of each pair of rows whether they are of two texts: ``(T, T) bool``."""
    text = TextOfRow(cu_seqlens, q)
    return op.Not(op.Equal(text, op.Transpose(text, perm=[1, 0])))


@script(OURS)
def Live(cu_seqlens, q):
    """Say of each row whether a text has it: ``(T, 1) bool``."""
    first = op.Constant(value_int=0)
    rows = op.Squeeze(op.Shape(q, start=0, end=1), op.Constant(value_ints=[0]))
    row = op.Unsqueeze(op.Range(first, rows, op.Constant(value_int=1)), op.Constant(value_ints=[1]))
    end = op.Slice(op.Cast(cu_seqlens, to=INT64), op.Constant(value_ints=[-1]), op.Constant(value_ints=[END]))
    return op.Less(row, end)


@script(OURS)
def Heads(x, live, num_heads: int):
    """``(T, H)`` to ``(N, T, D)``, with zeros for dead rows."""
    zero = op.Constant(value_ints=[0])
    n_heads = op.Unsqueeze(op.Constant(value_int=num_heads), zero)
    known = op.Where(live, x, op.CastLike(op.Constant(value_float=0.0), x))
    split = op.Reshape(known, op.Concat(zero, n_heads, op.Constant(value_ints=[-1]), axis=0))
    return op.Transpose(split, perm=[1, 0, 2])


@script(OURS)
def AttendMasked(q, k, v, cu_seqlens, hidden, bias, num_heads: int, scale: float):
    """Attend under a mask ``(T, T) bool`` with biases that broadcast to ``(N, T, T)``: the result ``(T, H)``, and probabilities."""
    live = Live(cu_seqlens, q)
    q_heads = Heads(q, live, num_heads)
    scaled = op.Mul(q_heads, op.CastLike(op.Constant(value_float=scale), q_heads))
    scores = op.Cast(op.MatMul(scaled, op.Transpose(Heads(k, live, num_heads), perm=[0, 2, 1])), to=FLOAT)
    is_hidden = op.Cast(hidden, to=FLOAT)
    mask = op.Mul(is_hidden, op.CastLike(op.Constant(value_float=-1e4), is_hidden))
    probabilities = op.Softmax(op.Add(op.Add(scores, bias), mask), axis=-1)
    v_heads = Heads(v, live, num_heads)
    context = op.MatMul(op.CastLike(probabilities, v_heads), v_heads)
    return op.Flatten(op.Transpose(context, perm=[1, 0, 2]), axis=1), probabilities


@script(OURS)
def OverRows(probabilities):
    """Sum over heads and queries: ``(T,)``. Dead rows give nothing to live ones."""
    return op.ReduceSum(probabilities, op.Constant(value_ints=[0, 1]), keepdims=0)


@script(OURS)
def Distances(positions):
    """From each query to each key: ``(T, T) int64``."""
    place = op.Cast(positions, to=INT64)
    return op.Sub(op.Unsqueeze(place, op.Constant(value_ints=[0])), op.Unsqueeze(place, op.Constant(value_ints=[1])))


@script(OURS)
def FromTable(positions, table):
    """Look each pair's bias up: ``(N, T, T) fp32``."""
    middle = op.Div(op.Shape(table, start=0, end=1), op.Constant(value_ints=[2]))
    pairs = op.Gather(table, op.Add(Distances(positions), middle))
    return op.Transpose(op.Cast(pairs, to=FLOAT), perm=[2, 0, 1])


@script(OURS)
def FromDistances(q, k, cu_seqlens, positions, distance_keys, distance_queries, buckets, num_heads: int, scale: float):
    """Gather each pair's products with distances: ``(N, T, T) fp32``."""
    live = Live(cu_seqlens, q)
    zero = op.Constant(value_ints=[0])
    place = op.Cast(positions, to=INT64)
    place_q = op.Unsqueeze(place, op.Constant(value_ints=[0, 2]))  # (1, T, 1)
    place_k = op.Unsqueeze(place, op.Constant(value_ints=[0, 1]))
    rows = op.Shape(q, start=0, end=1)
    pairs = op.Concat(op.Unsqueeze(op.Constant(value_int=num_heads), zero), rows, rows, axis=0)
    by_query = op.Expand(BucketOfPair(place_q, place_k, buckets), pairs)
    by_key = op.Expand(BucketOfPair(place_k, place_q, buckets), pairs)
    q_heads = Heads(q, live, num_heads)
    factor = op.CastLike(op.Constant(value_float=scale), q_heads)
    of_queries = op.MatMul(op.Mul(q_heads, factor), DistancesByHead(distance_keys, num_heads))  # (N, T, R)
    k_heads = op.Mul(Heads(k, live, num_heads), factor)
    of_keys = op.MatMul(k_heads, DistancesByHead(distance_queries, num_heads))
    first = op.Cast(op.GatherElements(of_queries, by_query, axis=2), to=FLOAT)
    second = op.Cast(op.GatherElements(of_keys, by_key, axis=2), to=FLOAT)
    return op.Add(first, op.Transpose(second, perm=[0, 2, 1]))


@script(OURS)
def Far(cu_seqlens, q, positions, window: int):
    """Say of each pair of rows whether they are of two texts or too far apart: ``(T, T) bool``."""
    reach = op.Greater(op.Abs(Distances(positions)), op.Constant(value_int=window))
    return op.Or(Apart(cu_seqlens, q), reach)


@script(OURS)
def AdtpRaggedAttention(
    q,
    k,
    v,
    cu_seqlens,
    num_heads: int,
    scale: float,
    plugin_version: str = PLUGIN_VERSION,
    plugin_namespace: str = PLUGIN_NAMESPACE,
):
    hidden = Apart(cu_seqlens, q)
    output, _all = AttendMasked(q, k, v, cu_seqlens, hidden, op.Constant(value_float=0.0), num_heads, scale)
    return output


@script(OURS)
def AdtpRaggedAttentionReceived(
    q,
    k,
    v,
    cu_seqlens,
    num_heads: int,
    scale: float,
    plugin_version: str = PLUGIN_VERSION,
    plugin_namespace: str = PLUGIN_NAMESPACE,
):
    hidden = Apart(cu_seqlens, q)
    output, probabilities = AttendMasked(q, k, v, cu_seqlens, hidden, op.Constant(value_float=0.0), num_heads, scale)
    return output, OverRows(probabilities)


@script(OURS)
def AdtpRaggedAttentionFromOthersReceived(q, k, v, cu_seqlens, num_heads: int, scale: float):
    hidden = Apart(cu_seqlens, q)
    output, probabilities = AttendMasked(q, k, v, cu_seqlens, hidden, op.Constant(value_float=0.0), num_heads, scale)
    own = op.EyeLike(op.Cast(hidden, to=FLOAT))
    from_others = op.Mul(probabilities, op.Sub(op.CastLike(op.Constant(value_float=1.0), own), own))
    return output, OverRows(from_others)


@script(OURS)
def AdtpRaggedAttentionRelative(q, k, v, cu_seqlens, positions, table, num_heads: int, scale: float):
    hidden = Apart(cu_seqlens, q)
    output, _all = AttendMasked(q, k, v, cu_seqlens, hidden, FromTable(positions, table), num_heads, scale)
    return output


@script(OURS)
def AdtpRaggedAttentionRelativeReceived(q, k, v, cu_seqlens, positions, table, num_heads: int, scale: float):
    hidden = Apart(cu_seqlens, q)
    output, probabilities = AttendMasked(q, k, v, cu_seqlens, hidden, FromTable(positions, table), num_heads, scale)
    return output, OverRows(probabilities)


@script(OURS)
def AdtpRaggedAttentionWindow(q, k, v, cu_seqlens, positions, num_heads: int, scale: float, window: int):
    hidden = Far(cu_seqlens, q, positions, window)
    output, _all = AttendMasked(q, k, v, cu_seqlens, hidden, op.Constant(value_float=0.0), num_heads, scale)
    return output


@script(OURS)
def AdtpRaggedAttentionWindowReceived(q, k, v, cu_seqlens, positions, num_heads: int, scale: float, window: int):
    hidden = Far(cu_seqlens, q, positions, window)
    output, probabilities = AttendMasked(q, k, v, cu_seqlens, hidden, op.Constant(value_float=0.0), num_heads, scale)
    return output, OverRows(probabilities)


@script(OURS)
def AdtpRaggedAttentionDisentangled(
    q, k, v, cu_seqlens, positions, distance_keys, distance_queries, buckets, num_heads: int, scale: float
):
    bias = FromDistances(q, k, cu_seqlens, positions, distance_keys, distance_queries, buckets, num_heads, scale)
    output, _all = AttendMasked(q, k, v, cu_seqlens, Apart(cu_seqlens, q), bias, num_heads, scale)
    return output


@script(OURS)
def AdtpRaggedAttentionDisentangledReceived(
    q, k, v, cu_seqlens, positions, distance_keys, distance_queries, buckets, num_heads: int, scale: float
):
    bias = FromDistances(q, k, cu_seqlens, positions, distance_keys, distance_queries, buckets, num_heads, scale)
    output, probabilities = AttendMasked(q, k, v, cu_seqlens, Apart(cu_seqlens, q), bias, num_heads, scale)
    return output, OverRows(probabilities)


@script(OURS)
def TextsApart(cu_q, cu_k, q, k):
    """Say of each query and key whether they are of two texts: ``(T, T') bool``."""
    return op.Not(op.Equal(TextOfRow(cu_q, q), op.Transpose(TextOfRow(cu_k, k), perm=[1, 0])))


@script(OURS)
def AttendGroupedMasked(
    q,
    k,
    v,
    cu_q,
    cu_k,
    positions_q,
    positions_k,
    num_heads: int,
    kv_heads: int,
    scale: float,
    window_back: int,
    window_ahead: int,
):
    """Attend as the operators for grouped queries do, each query to all keys under a mask: ``(T, N*D)``, and what `received` takes."""
    live = Live(cu_k, k)
    zero = op.Constant(value_ints=[0])
    rest = op.Constant(value_ints=[-1])
    k_heads = Heads(k, live, kv_heads)
    v_heads = Heads(v, live, kv_heads)
    q_heads = Heads(q, Live(cu_q, q), num_heads)
    scaled = op.Mul(q_heads, op.CastLike(op.Constant(value_float=scale), q_heads))
    size = op.Shape(k_heads, start=2, end=3)
    folded = op.Reshape(scaled, op.Concat(op.Shape(k_heads, start=0, end=1), rest, size, axis=0))  # (KV, G*T, D)
    scores = op.Cast(op.MatMul(folded, op.Transpose(k_heads, perm=[0, 2, 1])), to=FLOAT)
    n_heads = op.Unsqueeze(op.Constant(value_int=num_heads), zero)
    pairs = op.Concat(n_heads, op.Shape(q, start=0, end=1), op.Shape(k, start=0, end=1), axis=0)
    own = op.Unsqueeze(op.Cast(positions_q, to=INT64), op.Constant(value_ints=[1]))
    distance = op.Sub(op.Unsqueeze(op.Cast(positions_k, to=INT64), zero), own)
    hidden = op.Or(TextsApart(cu_q, cu_k, q, k), TooFar(distance, window_back, window_ahead))
    is_hidden = op.Cast(hidden, to=FLOAT)
    mask = op.Mul(is_hidden, op.CastLike(op.Constant(value_float=-1e4), is_hidden))
    probabilities = op.Softmax(op.Add(op.Reshape(scores, pairs), mask), axis=-1)  # (N, T, T')
    folded_back = op.Reshape(probabilities, op.Shape(scores))
    context = op.Reshape(op.MatMul(op.CastLike(folded_back, v_heads), v_heads), op.Shape(q_heads))
    return op.Flatten(op.Transpose(context, perm=[1, 0, 2]), axis=1), probabilities, is_hidden


@script(OURS)
def AdtpRaggedAttentionGroupedReceived(
    q,
    k,
    v,
    cu_q,
    cu_k,
    positions_q,
    positions_k,
    num_heads: int,
    kv_heads: int,
    scale: float,
    window_back: int,
    window_ahead: int,
    plugin_version: str = PLUGIN_VERSION,
    plugin_namespace: str = PLUGIN_NAMESPACE,
):
    output, probabilities, is_hidden = AttendGroupedMasked(
        q, k, v, cu_q, cu_k, positions_q, positions_k, num_heads, kv_heads, scale, window_back, window_ahead
    )
    total = OverRows(probabilities)
    one = op.CastLike(op.Constant(value_float=1.0), is_hidden)
    number = op.Max(op.ReduceSum(op.Sub(one, is_hidden), op.Constant(value_ints=[0]), keepdims=0), one)
    is_causal = op.Equal(op.Constant(value_int=window_ahead), op.Constant(value_int=0))
    return output, op.Where(is_causal, op.Div(total, number), total)


@script(OURS)
def AdtpRaggedAttentionGrouped(
    q,
    k,
    v,
    cu_q,
    cu_k,
    positions_q,
    positions_k,
    num_heads: int,
    kv_heads: int,
    scale: float,
    window_back: int,
    window_ahead: int,
    plugin_version: str = PLUGIN_VERSION,
    plugin_namespace: str = PLUGIN_NAMESPACE,
):
    output, _probabilities, _is_hidden = AttendGroupedMasked(
        q, k, v, cu_q, cu_k, positions_q, positions_k, num_heads, kv_heads, scale, window_back, window_ahead
    )
    return output


@script(OURS)
def AdtpRaggedAttentionGroupedWindow(
    q,
    k,
    v,
    cu_q,
    cu_k,
    positions_q,
    positions_k,
    num_heads: int,
    kv_heads: int,
    scale: float,
    window_back: int,
    window_ahead: int,
    plugin_version: str = PLUGIN_VERSION,
    plugin_namespace: str = PLUGIN_NAMESPACE,
):
    output, _probabilities, _is_hidden = AttendGroupedMasked(
        q, k, v, cu_q, cu_k, positions_q, positions_k, num_heads, kv_heads, scale, window_back, window_ahead
    )
    return output


_PARTS = (
    TextOfRow,
    Apart,
    TextsApart,
    AttendGroupedMasked,
    Live,
    Heads,
    AttendMasked,
    OverRows,
    Distances,
    FromTable,
    FromDistances,
    BucketOfPair,
    DistancesByHead,
    Far,
    TooFar,
)


@functools.cache
def fixed_functions() -> tuple[onnx.FunctionProto, ...]:
    """The bodies of all operators that exporters emit, as `onnx_function.portable_functions` has them."""
    return tuple(
        flat(operator, _PARTS)
        for operator in (
            AdtpRaggedAttention,
            AdtpRaggedAttentionReceived,
            AdtpRaggedAttentionFromOthersReceived,
            AdtpRaggedAttentionRelative,
            AdtpRaggedAttentionRelativeReceived,
            AdtpRaggedAttentionWindow,
            AdtpRaggedAttentionWindowReceived,
            AdtpRaggedAttentionDisentangled,
            AdtpRaggedAttentionDisentangledReceived,
            AdtpRaggedAttentionGrouped,
            AdtpRaggedAttentionGroupedWindow,
            AdtpRaggedAttentionGroupedReceived,
        )
    )
