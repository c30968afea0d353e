"""Attention in groups of texts of like length, as the portable bodies compute it, and what it gives to each token."""

from __future__ import annotations

from onnxscript import opset20 as op
from onnxscript import script

from .onnx_layout import FLOAT, OURS, ByHead


@script(OURS)
def Attend(q, k, v, rows, seen, bias, by_head, scale: float):
    """Attend in one group: ``q, k, v (T*N, D)`` to the fp32 probabilities ``(n, N, L, K)`` and the result ``(n*N*L, D)``.

    Rows of queries are ``(n, N, L)``, those of the keys that they see ``(n, N, K)``.
    """
    q_heads = op.Gather(q, rows)  # (n, N, L, D)
    k_heads = op.Gather(k, seen)
    v_heads = op.Gather(v, seen)
    scaled = op.Mul(q_heads, op.CastLike(op.Constant(value_float=scale), q_heads))
    scores = op.Cast(op.MatMul(scaled, op.Transpose(k_heads, perm=[0, 1, 3, 2])), to=FLOAT)
    probabilities = op.Softmax(op.Add(scores, bias), axis=-1)
    context = op.MatMul(op.CastLike(probabilities, v_heads), v_heads)
    return probabilities, op.Reshape(context, by_head)


@script(OURS)
def AttendInGroups(q, k, v, r1, r2, r3, r4, b1, b2, b3, b4, back, num_heads: int, scale: float):
    """Attend in each group: their rows and biases, and the way back, as of `Layout`.

    Returns:
        The result ``(T, H)``, and each group's probabilities.
    """
    by_head = ByHead(k, num_heads)
    q_rows = op.Reshape(q, by_head)
    k_rows = op.Reshape(k, by_head)
    v_rows = op.Reshape(v, by_head)
    p1, c1 = Attend(q_rows, k_rows, v_rows, r1, r1, b1, by_head, scale)
    p2, c2 = Attend(q_rows, k_rows, v_rows, r2, r2, b2, by_head, scale)
    p3, c3 = Attend(q_rows, k_rows, v_rows, r3, r3, b3, by_head, scale)
    p4, c4 = Attend(q_rows, k_rows, v_rows, r4, r4, b4, by_head, scale)
    heads = op.Gather(op.Concat(c1, c2, c3, c4, axis=0), back)
    return op.Flatten(heads, axis=1), p1, p2, p3, p4


@script(OURS)
def ReceivedByRow(probabilities, bias):
    """Sum probabilities ``(n, N, L, L)`` over the queries that are no padding: ``(n*N*L,)``."""
    live = op.Cast(op.Equal(bias, op.CastLike(op.Constant(value_float=0.0), bias)), to=FLOAT)  # (n, 1, 1, L)
    return op.Reshape(op.MatMul(live, probabilities), op.Constant(value_ints=[-1]))


@script(OURS)
def ReceivedInGroups(p1, p2, p3, p4, b1, b2, b3, b4, back):
    """Sum the groups' probabilities over heads and queries: ``(T,)``."""
    by_row = op.Concat(
        ReceivedByRow(p1, b1), ReceivedByRow(p2, b2), ReceivedByRow(p3, b3), ReceivedByRow(p4, b4), axis=0
    )
    return op.ReduceSum(op.Gather(by_row, back), op.Constant(value_ints=[1]), keepdims=0)
