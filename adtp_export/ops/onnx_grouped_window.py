"""The portable body of attention with grouped queries and bounds on both sides.

Each text is cut into blocks of queries, which see those rows alone that any of them sees. No block has two texts.
"""

from __future__ import annotations

from onnxscript import opset20 as op
from onnxscript import script

from ..contract import PLUGIN_NAMESPACE, PLUGIN_VERSION
from .onnx_grouped import AttendGrouped, Sides, TextOf
from .onnx_layout import INT64, OURS, ByHead, OfHeads

BLOCK = 64
"""Queries of a block, at most: fewer see fewer keys in vain, more read each key less often."""


@script(OURS)
def InBlocks(cu_q, rows):
    """Cut each text's queries into blocks of C, n in all.

    Returns:
        own: ``(n, C)`` rows of queries; past a text's end its last one is repeated. text: ``(n, 1)``. block, offset: ``(T,)``, where each
        query is. size: ``(1,)``, C.
    """
    zero = op.Constant(value_ints=[0])
    one = op.Constant(value_ints=[1])
    axis = op.Constant(value_int=0)
    step = op.Constant(value_int=1)
    bounds, start, length = Sides(cu_q)
    size = op.Max(one, op.Min(op.Constant(value_ints=[BLOCK]), op.ReduceMax(length, zero)))
    past = op.CumSum(op.Div(op.Sub(op.Add(length, size), one), size), axis)
    of_blocks = op.Concat(zero, past, axis=0)
    count = op.Gather(past, op.Constant(value_ints=[-1]))
    text = TextOf(of_blocks, count)
    number = op.Sub(op.Range(axis, op.Squeeze(count, zero), step), op.Gather(of_blocks, text))
    first = op.Unsqueeze(op.Add(op.Gather(start, text), op.Mul(number, size)), one)
    last = op.Unsqueeze(op.Sub(op.Gather(bounds, op.Add(text, one)), one), one)
    own = op.Min(op.Add(first, op.Range(axis, op.Squeeze(size, zero), step)), last)
    text_of_row = TextOf(bounds, rows)
    in_text = op.Sub(op.Range(axis, op.Squeeze(rows, zero), step), op.Gather(start, text_of_row))
    block = op.Min(op.Add(op.Gather(of_blocks, text_of_row), op.Div(in_text, size)), op.Sub(count, one))
    return own, op.Unsqueeze(text, one), block, op.Mod(in_text, size), size


@script(OURS)
def KeysBefore(cu_k, positions_q, positions_k):
    """Count the keys before each place of each text, all texts on one line: ``(B*P + 1,)``, and P, above all positions: ``(1,)``.

    Keys at the same place form a run. TensorRT cannot scatter with a sum, so every key of a run writes the length of the run; equal writes
    do not conflict.
    """
    zero = op.Constant(value_ints=[0])
    one = op.Constant(value_ints=[1])
    axis = op.Constant(value_int=0)
    places = op.Cast(op.Concat(positions_q, positions_k, axis=0), to=INT64)
    span = op.Add(op.ReduceMax(places, zero), one)
    bounds, start, _length = Sides(cu_k)
    rows = op.Shape(positions_k)
    row = op.Range(axis, op.Squeeze(rows, zero), op.Constant(value_int=1))
    cell = op.Add(op.Mul(TextOf(bounds, rows), span), op.Cast(positions_k, to=INT64))
    end = op.Mul(op.Shape(start), span)
    last = op.Constant(value_ints=[-1])
    place = op.Where(op.Less(row, op.Gather(bounds, last)), cell, end)
    begins = op.Not(op.Equal(place, op.Concat(last, op.Slice(place, zero, last), axis=0)))
    # Runs are numbered from 1; keys that begin none write to slot 0, which is never read.
    run = op.CumSum(op.Cast(begins, to=INT64), axis)
    first = op.ScatterElements(
        op.Expand(rows, op.Add(rows, op.Constant(value_ints=[2]))), op.Where(begins, run, zero), row
    )
    count = op.Sub(op.Gather(first, op.Add(run, one)), op.Gather(first, run))
    marks = op.ScatterElements(op.Expand(zero, op.Add(end, one)), place, count)
    return op.CumSum(marks, axis, exclusive=1), span


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
    zero = op.Constant(value_ints=[0])
    one = op.Constant(value_ints=[1])
    heads = op.Constant(value_int=kv_heads)
    own, text, block, offset, size = InBlocks(cu_q, op.Shape(positions_q))
    before, span = KeysBefore(cu_k, positions_q, positions_k)
    place = op.Cast(op.Gather(positions_q, own), to=INT64)
    line = op.Mul(text, span)
    nearest = op.Max(op.Sub(place, op.Constant(value_int=window_back)), zero)
    farthest = op.Min(op.Add(op.Add(place, op.Constant(value_int=window_ahead)), one), span)
    begin = op.Gather(before, op.Add(line, op.Min(nearest, span)))  # (n, C): rows of keys that each query sees
    end = op.Gather(before, op.Add(line, farthest))
    first = op.ReduceMin(begin, one)
    past = op.ReduceMax(end, one)
    most = op.Max(op.ReduceMax(op.Sub(past, first), keepdims=0), op.Constant(value_int=1))
    row = op.Add(first, op.Range(op.Constant(value_int=0), most, op.Constant(value_int=1)))  # (n, K)
    seen = op.Max(op.Min(row, op.Sub(past, one)), zero)
    key = op.Unsqueeze(row, one)
    depth = op.Constant(value_ints=[2])
    hidden = op.Or(op.Less(key, op.Unsqueeze(begin, depth)), op.GreaterOrEqual(key, op.Unsqueeze(end, depth)))
    by_group = ByHead(q, kv_heads)
    by_head = ByHead(k, kv_heads)
    context, _probabilities = AttendGrouped(
        op.Reshape(q, by_group),
        op.Reshape(k, by_head),
        op.Reshape(v, by_head),
        OfHeads(own, kv_heads),
        OfHeads(seen, kv_heads),
        hidden,
        by_group,
        num_heads,
        kv_heads,
        scale,
    )  # (n*KV*C, G*D)
    first_head = op.Add(op.Mul(block, op.Mul(size, heads)), offset)
    head = op.Mul(op.Range(op.Constant(value_int=0), heads, op.Constant(value_int=1)), size)
    return op.Flatten(op.Gather(context, op.Add(op.Unsqueeze(first_head, one), head)), axis=1)


WINDOW_PARTS = (InBlocks, KeysBefore)
