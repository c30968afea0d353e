"""The portable bodies of attention with separate queries and keys: a group's queries are rows of one product with the keys they share.

Nothing is repeated: ``(n, KV, L*G, D) @ (n, KV, D, K)``, where G heads of queries read one head of keys. Texts of like length make
rectangles, as in full attention. `onnx_grouped_window` has the form with bounds on both sides, which needs none.
"""

from __future__ import annotations

from typing import Any

from onnxscript import opset20 as op
from onnxscript import script

from ..contract import (
    ATTENTION_GROUPED,
    ATTENTION_GROUPED_RECEIVED,
    ATTENTION_GROUPED_WINDOW,
    KV_HEADS,
    NUM_HEADS,
    PLUGIN_NAMESPACE,
    PLUGIN_VERSION,
    SCALE,
    WINDOW_AHEAD,
    WINDOW_BACK,
)
from .onnx_layout import END, FLOAT, INT64, OURS, ByHead, Divide, Rectangle

FAR = 2**31 - 1


@script(OURS)
def TooFar(distance, window_back: int, window_ahead: int):
    """Say of distances from queries to keys, int64, which are out of bounds; -1 is no bound."""
    none = op.Constant(value_int=FAR)
    zero = op.Constant(value_int=0)
    back = op.Constant(value_int=window_back)
    ahead = op.Constant(value_int=window_ahead)
    before = op.Less(distance, op.Neg(op.Where(op.Less(back, zero), none, back)))
    return op.Or(before, op.Greater(distance, op.Where(op.Less(ahead, zero), none, ahead)))


@script(OURS)
def TextOf(bounds, rows):
    """Number the text of each row, ``(rows,) int64`` of ``bounds (B+1,) int64``; texts may be empty, and rows past the last are its own."""
    one = op.Constant(value_ints=[1])
    axis = op.Constant(value_int=0)
    row = op.Range(axis, op.Squeeze(rows, op.Constant(value_ints=[0])), op.Constant(value_int=1))
    inner = op.Slice(bounds, one, op.Constant(value_ints=[-1]))
    begun = op.Cast(op.GreaterOrEqual(op.Unsqueeze(row, one), inner), to=INT64)  # (rows, B-1)
    return op.ReduceSum(begun, one, keepdims=0)


@script(OURS)
def AttendGrouped(q, k, v, rows, seen, hidden, by_group, num_heads: int, kv_heads: int, scale: float):
    """Attend in n rectangles or blocks: ``q (T*KV, G*D)`` and ``k, v (T*KV, D)`` to ``(n*KV*L, G*D)``, and fp32 probabilities
    ``(n, KV, L, G, K)``.

    rows: ``(n, KV, L)`` of queries. seen: ``(n, KV, K)`` of keys. hidden: ``(n, L, K) bool``. There may be none, so no size is left to
    Reshape but in `by_group`, which is ``(-1, G*D)``.
    """
    heads = op.Constant(value_int=kv_heads)
    group = op.Unsqueeze(op.Div(op.Constant(value_int=num_heads), heads), op.Constant(value_ints=[0]))
    k_heads = op.Gather(k, seen)  # (n, KV, K, D)
    v_heads = op.Gather(v, seen)
    size = op.Shape(k_heads, start=3, end=4)
    longest = op.Shape(rows, start=2, end=3)
    leading = op.Shape(rows, start=0, end=2)
    q_heads = op.Gather(q, rows)  # (n, KV, L, G*D)
    scaled = op.Mul(q_heads, op.CastLike(op.Constant(value_float=scale), q_heads))
    folded = op.Reshape(scaled, op.Concat(leading, op.Mul(longest, group), size, axis=0), allowzero=1)
    scores = op.Cast(op.MatMul(folded, op.Transpose(k_heads, perm=[0, 1, 3, 2])), to=FLOAT)  # (n, KV, L*G, K)
    is_hidden = op.Cast(hidden, to=FLOAT)
    masks = op.Mul(is_hidden, op.CastLike(op.Constant(value_float=-1e4), is_hidden))
    apart = op.Concat(leading, longest, group, op.Shape(seen, start=2, end=3), axis=0)
    pairs = op.Add(op.Reshape(scores, apart, allowzero=1), op.Unsqueeze(masks, op.Constant(value_ints=[1, 3])))
    probabilities = op.Softmax(pairs, axis=-1)
    folded_back = op.Reshape(probabilities, op.Shape(scores), allowzero=1)
    context = op.MatMul(op.CastLike(folded_back, v_heads), v_heads)
    return op.Reshape(context, by_group), probabilities


@script(OURS)
def Sides(cu_seqlens):
    """Return bounds ``(B+1,)``, where each text begins and its length, ``(B,)``: int64."""
    bounds = op.Cast(cu_seqlens, to=INT64)
    start = op.Slice(bounds, op.Constant(value_ints=[0]), op.Constant(value_ints=[-1]))
    end = op.Slice(bounds, op.Constant(value_ints=[1]), op.Constant(value_ints=[END]))
    return bounds, start, op.Sub(end, start)


@script(OURS)
def Keys(cu_k, kv_heads: int):
    """Divide texts by their keys, as `Layout` does: rows ``(n, KV, L)`` of each group, which are padding ``(n, 1, 1, L)``, and `Divide`'s
    order, widths and corners.
    """
    by_length, order, start, width, low, high = Divide(cu_k)
    zero = op.Constant(value_ints=[0])
    rectangle = op.Constant(value_ints=[1, 2])
    column = op.Range(op.Constant(value_int=0), op.Squeeze(op.Gather(by_length, zero), zero), op.Constant(value_int=1))
    last = op.Unsqueeze(op.Sub(by_length, op.Constant(value_ints=[1])), rectangle)
    token = op.Max(op.Add(op.Unsqueeze(start, rectangle), op.Min(column, last)), zero)  # (B, 1, longest)
    first_head = op.Mul(token, op.Constant(value_int=kv_heads))
    is_padding = op.Unsqueeze(op.Greater(column, last), op.Constant(value_ints=[1]))
    seen_1, padding_1 = Rectangle(first_head, is_padding, low, high, kv_heads, 0)
    seen_2, padding_2 = Rectangle(first_head, is_padding, low, high, kv_heads, 1)
    seen_3, padding_3 = Rectangle(first_head, is_padding, low, high, kv_heads, 2)
    seen_4, padding_4 = Rectangle(first_head, is_padding, low, high, kv_heads, 3)
    return seen_1, seen_2, seen_3, seen_4, padding_1, padding_2, padding_3, padding_4, order, width, low, high


@script(OURS)
def MostQueries(length, low, high, group: int):
    """Return the most queries of a text of a group, at least 1, and that for each of its texts: ``(1,)`` and ``(n,)``."""
    which = op.Constant(value_int=group)
    begin = op.Unsqueeze(op.Gather(low, which), op.Constant(value_ints=[0]))
    end = op.Unsqueeze(op.Gather(high, which), op.Constant(value_ints=[0]))
    some = op.Concat(op.Slice(length, begin, end), op.Constant(value_ints=[1]), axis=0)
    most = op.ReduceMax(some, op.Constant(value_ints=[0]))
    return most, op.Expand(most, op.Sub(end, begin))


@script(OURS)
def QueryRows(first_head, head, low, high, group: int):
    """Cut a group out of ``(B, 1, 1, longest)``: rows ``(n, KV, L)``."""
    which = op.Unsqueeze(op.Constant(value_int=group), op.Constant(value_ints=[0]))
    past = op.Constant(value_ints=[END])
    every_fourth = op.Constant(value_ints=[4])
    zero = op.Constant(value_ints=[0])
    begin = op.Slice(low, which, past, zero, every_fourth)
    end = op.Slice(high, which, past, zero, every_fourth)
    cut = op.Slice(first_head, begin, end, op.Constant(value_ints=[0, 3]))
    return op.Add(op.Squeeze(cut, op.Constant(value_ints=[1])), head)


@script(OURS)
def Queries(cu_q, positions_q, order, low, high, kv_heads: int):
    """Return the rows ``(n, KV, L)`` of each group's queries, and where each head of each query is in the results: ``(T, KV)``."""
    zero = op.Constant(value_ints=[0])
    one = op.Constant(value_ints=[1])
    axis = op.Constant(value_int=0)
    step = op.Constant(value_int=1)
    rectangle = op.Constant(value_ints=[1, 2])
    heads = op.Constant(value_int=kv_heads)
    rows = op.Shape(positions_q)
    bounds, start, own_length = Sides(cu_q)
    first = op.Gather(start, order)
    length = op.Gather(own_length, order)
    most_1, width_1 = MostQueries(length, low, high, 0)
    most_2, width_2 = MostQueries(length, low, high, 1)
    most_3, width_3 = MostQueries(length, low, high, 2)
    most_4, width_4 = MostQueries(length, low, high, 3)
    width = op.Concat(width_1, width_2, width_3, width_4, axis=0)
    corners = op.Concat(op.Slice(high, zero, op.Constant(value_ints=[4])), most_1, most_2, most_3, most_4, axis=0)

    column = op.Range(axis, op.Squeeze(op.ReduceMax(width, zero), zero), step)
    last = op.Unsqueeze(op.Sub(length, one), rectangle)
    token = op.Add(op.Unsqueeze(first, rectangle), op.Max(op.Min(column, last), zero))
    first_head = op.Unsqueeze(op.Mul(op.Min(token, op.Sub(rows, one)), heads), one)  # (B, 1, 1, longest)
    head = op.Unsqueeze(op.Range(axis, heads, step), one)
    rows_1 = QueryRows(first_head, head, low, corners, 0)
    rows_2 = QueryRows(first_head, head, low, corners, 1)
    rows_3 = QueryRows(first_head, head, low, corners, 2)
    rows_4 = QueryRows(first_head, head, low, corners, 3)

    text = TextOf(bounds, rows)
    place = op.Sub(op.Mul(op.CumSum(width, axis, exclusive=1), heads), first)
    row = op.Add(op.Gather(op.ScatterElements(order, order, place), text), op.Range(axis, op.Squeeze(rows, zero), step))
    apart = op.Gather(op.ScatterElements(order, order, width), text)
    back = op.Add(op.Unsqueeze(row, one), op.Mul(op.Unsqueeze(apart, one), op.Range(axis, heads, step)))
    return rows_1, rows_2, rows_3, rows_4, back


@script(OURS)
def HiddenInRectangle(
    rows, seen, padding, positions_q, positions_k, kv_heads: int, window_back: int, window_ahead: int
):
    """Say which keys each query does not see, ``(n, L, K) bool``: padding, and what is out of bounds."""
    heads = op.Constant(value_int=kv_heads)
    zero = op.Constant(value_int=0)
    own = op.Cast(op.Gather(positions_q, op.Div(op.Gather(rows, zero, axis=1), heads)), to=INT64)  # (n, L)
    place = op.Cast(op.Gather(positions_k, op.Div(op.Gather(seen, zero, axis=1), heads)), to=INT64)
    distance = op.Sub(op.Unsqueeze(place, op.Constant(value_ints=[1])), op.Unsqueeze(own, op.Constant(value_ints=[2])))
    return op.Or(TooFar(distance, window_back, window_ahead), op.Squeeze(padding, op.Constant(value_ints=[1])))


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
    s1, s2, s3, s4, p1, p2, p3, p4, order, _width, low, high = Keys(cu_k, kv_heads)
    r1, r2, r3, r4, back = Queries(cu_q, positions_q, order, low, high, kv_heads)
    h1 = HiddenInRectangle(r1, s1, p1, positions_q, positions_k, kv_heads, window_back, window_ahead)
    h2 = HiddenInRectangle(r2, s2, p2, positions_q, positions_k, kv_heads, window_back, window_ahead)
    h3 = HiddenInRectangle(r3, s3, p3, positions_q, positions_k, kv_heads, window_back, window_ahead)
    h4 = HiddenInRectangle(r4, s4, p4, positions_q, positions_k, kv_heads, window_back, window_ahead)
    by_group = ByHead(q, kv_heads)
    by_head = ByHead(k, kv_heads)
    q_rows = op.Reshape(q, by_group)
    k_rows = op.Reshape(k, by_head)
    v_rows = op.Reshape(v, by_head)
    c1, _p1 = AttendGrouped(q_rows, k_rows, v_rows, r1, s1, h1, by_group, num_heads, kv_heads, scale)
    c2, _p2 = AttendGrouped(q_rows, k_rows, v_rows, r2, s2, h2, by_group, num_heads, kv_heads, scale)
    c3, _p3 = AttendGrouped(q_rows, k_rows, v_rows, r3, s3, h3, by_group, num_heads, kv_heads, scale)
    c4, _p4 = AttendGrouped(q_rows, k_rows, v_rows, r4, s4, h4, by_group, num_heads, kv_heads, scale)
    return op.Flatten(op.Gather(op.Concat(c1, c2, c3, c4, axis=0), back), axis=1)


@script(OURS)
def ReceivedByKey(probabilities, hidden, cu_q, order, low, high, group: int, window_ahead: int):
    """Sum probabilities ``(n, KV, L, G, K)`` over heads and over the queries that see a key: ``(n*K,)``. Where the reach ahead is 0, divide
    by their number. A text repeats its last query past the end of its own: those do not count.
    """
    which = op.Constant(value_int=group)
    axis = op.Constant(value_ints=[0])
    one = op.Constant(value_ints=[1])
    depth = op.Constant(value_ints=[2])
    _bounds, _start, length = Sides(cu_q)
    begin = op.Unsqueeze(op.Gather(low, which), axis)
    own = op.Slice(op.Gather(length, order), begin, op.Unsqueeze(op.Gather(high, which), axis))
    longest = op.Squeeze(op.Shape(hidden, start=1, end=2), axis)
    column = op.Range(op.Constant(value_int=0), longest, op.Constant(value_int=1))
    is_query = op.Unsqueeze(op.Less(op.Unsqueeze(column, axis), op.Unsqueeze(own, one)), depth)  # (n, L, 1)
    by_query = op.ReduceSum(probabilities, op.Constant(value_ints=[1, 3]), keepdims=0)  # (n, L, K)
    none = op.CastLike(op.Constant(value_float=0.0), by_query)
    total = op.ReduceSum(op.Where(is_query, by_query, none), one, keepdims=0)
    sees = op.Cast(op.And(is_query, op.Not(hidden)), to=FLOAT)
    number = op.Max(op.ReduceSum(sees, one, keepdims=0), op.CastLike(op.Constant(value_float=1.0), sees))
    is_causal = op.Equal(op.Constant(value_int=window_ahead), op.Constant(value_int=0))
    return op.Reshape(op.Where(is_causal, op.Div(total, number), total), op.Constant(value_ints=[-1]))


@script(OURS)
def KeyPlaces(cu_k, positions_k, order, width):
    """Return where each key is in the groups' rectangles ``(n*K,)``, one after the other: ``(T',)``."""
    axis = op.Constant(value_int=0)
    rows = op.Shape(positions_k)
    bounds, start, _length = Sides(cu_k)
    place = op.Sub(op.CumSum(width, axis, exclusive=1), op.Gather(start, order))
    text = TextOf(bounds, rows)
    row = op.Range(axis, op.Squeeze(rows, op.Constant(value_ints=[0])), op.Constant(value_int=1))
    found = op.Add(op.Gather(op.ScatterElements(order, order, place), text), row)
    last = op.Sub(op.ReduceSum(width), op.Constant(value_ints=[1]))
    return op.Max(op.Min(found, last), op.Constant(value_ints=[0]))  # rows of no text are somewhere


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
    s1, s2, s3, s4, p1, p2, p3, p4, order, width, low, high = Keys(cu_k, kv_heads)
    r1, r2, r3, r4, back = Queries(cu_q, positions_q, order, low, high, kv_heads)
    h1 = HiddenInRectangle(r1, s1, p1, positions_q, positions_k, kv_heads, window_back, window_ahead)
    h2 = HiddenInRectangle(r2, s2, p2, positions_q, positions_k, kv_heads, window_back, window_ahead)
    h3 = HiddenInRectangle(r3, s3, p3, positions_q, positions_k, kv_heads, window_back, window_ahead)
    h4 = HiddenInRectangle(r4, s4, p4, positions_q, positions_k, kv_heads, window_back, window_ahead)
    by_group = ByHead(q, kv_heads)
    by_head = ByHead(k, kv_heads)
    q_rows = op.Reshape(q, by_group)
    k_rows = op.Reshape(k, by_head)
    v_rows = op.Reshape(v, by_head)
    c1, w1 = AttendGrouped(q_rows, k_rows, v_rows, r1, s1, h1, by_group, num_heads, kv_heads, scale)
    c2, w2 = AttendGrouped(q_rows, k_rows, v_rows, r2, s2, h2, by_group, num_heads, kv_heads, scale)
    c3, w3 = AttendGrouped(q_rows, k_rows, v_rows, r3, s3, h3, by_group, num_heads, kv_heads, scale)
    c4, w4 = AttendGrouped(q_rows, k_rows, v_rows, r4, s4, h4, by_group, num_heads, kv_heads, scale)
    by_key = op.Concat(
        ReceivedByKey(w1, h1, cu_q, order, low, high, 0, window_ahead),
        ReceivedByKey(w2, h2, cu_q, order, low, high, 1, window_ahead),
        ReceivedByKey(w3, h3, cu_q, order, low, high, 2, window_ahead),
        ReceivedByKey(w4, h4, cu_q, order, low, high, 3, window_ahead),
        axis=0,
    )
    output = op.Flatten(op.Gather(op.Concat(c1, c2, c3, c4, axis=0), back), axis=1)
    return output, op.Gather(by_key, KeyPlaces(cu_k, positions_k, order, width))


GROUPED_PARTS = (
    AttendGrouped,
    ReceivedByKey,
    KeyPlaces,
    HiddenInRectangle,
    TooFar,
    Keys,
    Queries,
    QueryRows,
    MostQueries,
    Sides,
    TextOf,
)


def grouped(q, k, v, cu_q, cu_k, positions_q, positions_k, *numbers: Any):
    """Write the node that `torch.onnx.export` makes of `ragged_attention_grouped`."""
    name = ATTENTION_GROUPED if min(numbers[-2:]) < 0 else ATTENTION_GROUPED_WINDOW
    return getattr(OURS, name)(q, k, v, cu_q, cu_k, positions_q, positions_k, **_attributes(*numbers))


def grouped_received(q, k, v, cu_q, cu_k, positions_q, positions_k, *numbers: Any):
    """The same of `ragged_attention_grouped_received`."""
    operator = getattr(OURS, ATTENTION_GROUPED_RECEIVED)
    return operator(q, k, v, cu_q, cu_k, positions_q, positions_k, **_attributes(*numbers))


def _attributes(num_heads: int, kv_heads: int, scale: float, window_back: int, window_ahead: int) -> dict[str, Any]:
    sizes = {NUM_HEADS: num_heads, KV_HEADS: kv_heads, WINDOW_BACK: window_back, WINDOW_AHEAD: window_ahead}
    return {**sizes, SCALE: scale, "plugin_version": PLUGIN_VERSION, "plugin_namespace": PLUGIN_NAMESPACE}
