"""The portable body of attention with grouped queries: the queries of a group are rows of one product with the keys that they share.

Nothing is repeated: ``(n, KV, L*G, D) @ (n, KV, D, L)``, where G heads of queries read one head of keys. The rectangles are those of
full attention, also where a window bounds what queries see.
"""

from __future__ import annotations

from onnxscript import opset20 as op
from onnxscript import script

from ..contract import ATTENTION_GROUPED, KV_HEADS, NUM_HEADS, SCALE, WINDOW_AHEAD, WINDOW_BACK
from .onnx_layout import FLOAT, INT64, OURS, ByHead, Layout

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
def AttendGrouped(
    q,
    k,
    v,
    rows,
    bias,
    by_group,
    positions,
    num_heads: int,
    kv_heads: int,
    scale: float,
    window_back: int,
    window_ahead: int,
):
    """Attend in some texts, whose ``rows (n, KV, L)`` are of ``q (T*KV, G*D)`` and ``k, v (T*KV, D)``: ``(n*KV*L, G*D)``.

    There may be none, so no size is left to Reshape but in `by_group`, which is ``(-1, G*D)``.
    """
    heads = op.Constant(value_int=kv_heads)
    group = op.Unsqueeze(op.Div(op.Constant(value_int=num_heads), heads), op.Constant(value_ints=[0]))
    k_heads = op.Gather(k, rows)  # (n, KV, L, D)
    v_heads = op.Gather(v, rows)
    size = op.Shape(k_heads, start=3, end=4)
    longest = op.Shape(rows, start=2, end=3)
    leading = op.Shape(rows, start=0, end=2)
    q_heads = op.Gather(q, rows)  # (n, KV, L, G*D)
    scaled = op.Mul(q_heads, op.CastLike(op.Constant(value_float=scale), q_heads))
    folded = op.Reshape(scaled, op.Concat(leading, op.Mul(longest, group), size, axis=0), allowzero=1)
    scores = op.Cast(op.MatMul(folded, op.Transpose(k_heads, perm=[0, 1, 3, 2])), to=FLOAT)  # (n, KV, L*G, L)
    token = op.Div(op.Gather(rows, op.Constant(value_int=0), axis=1), heads)  # (n, L)
    place = op.Cast(op.Gather(positions, token), to=INT64)
    distance = op.Sub(
        op.Unsqueeze(place, op.Constant(value_ints=[1])), op.Unsqueeze(place, op.Constant(value_ints=[2]))
    )
    is_far = op.Cast(TooFar(distance, window_back, window_ahead), to=FLOAT)
    hidden = op.Mul(is_far, op.CastLike(op.Constant(value_float=-1e4), is_far))
    masks = op.Add(op.Unsqueeze(hidden, op.Constant(value_ints=[1])), bias)  # (n, 1, L, L)
    apart = op.Concat(leading, longest, group, longest, axis=0)
    pairs = op.Add(op.Reshape(scores, apart, allowzero=1), op.Unsqueeze(masks, op.Constant(value_ints=[3])))
    probabilities = op.Reshape(op.Softmax(pairs, axis=-1), op.Shape(scores), allowzero=1)
    context = op.MatMul(op.CastLike(probabilities, v_heads), v_heads)
    return op.Reshape(context, by_group)


@script(OURS)
def AdtpRaggedAttentionGrouped(
    q, k, v, cu_seqlens, positions, num_heads: int, kv_heads: int, scale: float, window_back: int, window_ahead: int
):
    r1, r2, r3, r4, b1, b2, b3, b4, back = Layout(cu_seqlens, kv_heads)
    by_group = ByHead(q, kv_heads)
    by_head = ByHead(k, kv_heads)
    q_rows = op.Reshape(q, by_group)
    k_rows = op.Reshape(k, by_head)
    v_rows = op.Reshape(v, by_head)
    c1 = AttendGrouped(
        q_rows, k_rows, v_rows, r1, b1, by_group, positions, num_heads, kv_heads, scale, window_back, window_ahead
    )
    c2 = AttendGrouped(
        q_rows, k_rows, v_rows, r2, b2, by_group, positions, num_heads, kv_heads, scale, window_back, window_ahead
    )
    c3 = AttendGrouped(
        q_rows, k_rows, v_rows, r3, b3, by_group, positions, num_heads, kv_heads, scale, window_back, window_ahead
    )
    c4 = AttendGrouped(
        q_rows, k_rows, v_rows, r4, b4, by_group, positions, num_heads, kv_heads, scale, window_back, window_ahead
    )
    return op.Flatten(op.Gather(op.Concat(c1, c2, c3, c4, axis=0), back), axis=1)


GROUPED_PARTS = (TooFar, AttendGrouped)


def grouped(q, k, v, cu_seqlens, positions, num_heads, kv_heads, scale, window_back, window_ahead):
    """Write the node that `torch.onnx.export` makes of `ragged_attention_grouped`."""
    sizes = {NUM_HEADS: num_heads, KV_HEADS: kv_heads, WINDOW_BACK: window_back, WINDOW_AHEAD: window_ahead}
    return getattr(OURS, ATTENTION_GROUPED)(q, k, v, cu_seqlens, positions, **sizes, **{SCALE: scale})
