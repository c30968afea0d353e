"""Where tokens go in the portable bodies of ragged attention: index arithmetic that does not depend on token states.

Runtimes share it between the layers of one cut. Padding and the head transpose are one Gather of D-wide rows, and so is the way
back.
"""

from __future__ import annotations

import onnx
from onnxscript import opset20 as op
from onnxscript import script
from onnxscript.values import Opset

from ..contract import DOMAIN, DOMAIN_VERSION

FLOAT, INT64, INT32 = onnx.TensorProto.FLOAT, onnx.TensorProto.INT64, onnx.TensorProto.INT32
END = 2**63 - 1
OURS = Opset(DOMAIN, DOMAIN_VERSION)


@script(OURS)
def ByHead(x, num_heads: int):
    """Return the shape ``(-1, D)``, which Reshape makes of ``(T, H)`` and ``(n, N, L, D)``; OpenVINO's Flatten would not if n is 0."""
    size = op.Div(op.Shape(x, start=1, end=2), op.Constant(value_int=num_heads))
    return op.Concat(op.Constant(value_ints=[-1]), size, axis=0)


@script(OURS)
def Divide(cu_seqlens):
    """Divide the sequences, sorted by length, into four groups: above 0.7 of the longest, above 0.4, above 0.2, and the others.

    All groups but the first may be empty.

    Returns:
        by_length: ``(B,)`` lengths, the longest first. order: ``(B,)`` whose they are. start: ``(B,)`` their first packed rows.
        width: ``(B,)`` the longest of each one's group.
        low, high: ``(8,)`` corners of the groups in a rectangle ``(B, longest)``: four sequences, then four tokens.
    """
    zero = op.Constant(value_ints=[0])
    one = op.Constant(value_ints=[1])
    bounds = op.Cast(cu_seqlens, to=INT64)
    packed_start = op.Slice(bounds, zero, op.Constant(value_ints=[-1]))
    length = op.Sub(op.Slice(bounds, one, op.Constant(value_ints=[END])), packed_start)
    count = op.Shape(length)
    by_length, order = op.TopK(length, count)
    shares = op.Mul(op.Gather(by_length, zero), op.Constant(value_ints=[7, 4, 2]))
    limits = op.Div(shares, op.Constant(value_ints=[10]))
    is_shorter = op.Cast(op.LessOrEqual(op.Unsqueeze(by_length, one), limits), to=INT64)  # (B, 3)
    cuts = op.Sub(count, op.ReduceSum(is_shorter, zero, keepdims=0))
    begin = op.Concat(zero, cuts, axis=0)  # (4,)
    longest = op.Gather(op.Concat(by_length, one, axis=0), begin)  # anything for an empty group
    width = op.Gather(longest, op.ReduceSum(is_shorter, one, keepdims=0))
    low = op.Concat(begin, op.Constant(value_ints=[0, 0, 0, 0]), axis=0)
    high = op.Concat(cuts, count, longest, axis=0)
    return by_length, order, op.Gather(packed_start, order), width, low, high


@script(OURS)
def Rectangle(first_head, bias, low, high, num_heads: int, group: int):
    """Cut a group out of all sequences: rows ``(n, N, its longest)`` of ``(T*N, D)``, biases of scores ``(n, 1, 1, its longest)``."""
    first_axis = op.Constant(value_ints=[0])
    which = op.Unsqueeze(op.Constant(value_int=group), first_axis)
    past = op.Constant(value_ints=[END])
    every_fourth = op.Constant(value_ints=[4])
    begin = op.Slice(low, which, past, first_axis, every_fourth)
    end = op.Slice(high, which, past, first_axis, every_fourth)
    n_heads = op.Constant(value_int=num_heads)
    heads = op.Range(op.Constant(value_int=0), n_heads, op.Constant(value_int=1))
    rows = op.Slice(first_head, begin, end, op.Constant(value_ints=[0, 2]))
    group_bias = op.Slice(bias, begin, end, op.Constant(value_ints=[0, 3]))
    return op.Add(rows, op.Unsqueeze(heads, op.Constant(value_ints=[1]))), group_bias


@script(OURS)
def WayBack(cu_seqlens, order, start, width, num_heads: int):
    """Find where each head of each token is in the groups' results, ``(., D)`` one after the other: ``(T, N)`` rows.

    The first head of token t is in row ``first + t - start``, each further one `width` rows on.
    """
    zero = op.Constant(value_ints=[0])
    one = op.Constant(value_ints=[1])
    axis = op.Constant(value_int=0)
    n_heads = op.Constant(value_int=num_heads)
    first = op.Mul(op.CumSum(width, axis, exclusive=1), n_heads)
    bounds = op.Cast(cu_seqlens, to=INT64)
    tokens = op.Slice(
        bounds, op.Constant(value_ints=[-1]), op.Constant(value_ints=[END])
    )  # T; from here, for it is shared too
    begins = op.ScatterElements(op.Expand(zero, tokens), start, op.Expand(one, op.Shape(start)))
    text = op.Sub(op.CumSum(begins, axis), one)
    place = op.Gather(op.ScatterElements(order, order, op.Sub(first, start)), text)
    row = op.Add(place, op.Range(axis, op.Squeeze(tokens, zero), op.Constant(value_int=1)))
    step = op.Unsqueeze(op.Gather(op.ScatterElements(order, order, width), text), one)
    heads = op.Range(axis, n_heads, op.Constant(value_int=1))
    return op.Add(op.Unsqueeze(row, one), op.Mul(step, heads))


@script(OURS)
def Layout(cu_seqlens, num_heads: int):
    """Return the groups' rows, the longest one's first, their biases, and the way back: `Rectangle`, `WayBack`.

    Past its end a sequence repeats its last row. Nothing here depends on token states, so runtimes share it between the layers of
    one cut.
    """
    by_length, order, start, width, low, high = Divide(cu_seqlens)
    longest = op.Squeeze(op.Gather(by_length, op.Constant(value_ints=[0])), op.Constant(value_ints=[0]))
    column = op.Range(op.Constant(value_int=0), longest, op.Constant(value_int=1))
    rectangle = op.Constant(value_ints=[1, 2])
    last = op.Unsqueeze(op.Sub(by_length, op.Constant(value_ints=[1])), rectangle)  # (B, 1, 1), counted from the start
    token = op.Add(op.Unsqueeze(start, rectangle), op.Min(column, last))  # (B, 1, longest)
    first_head = op.Mul(token, op.Constant(value_int=num_heads))
    is_padding = op.Unsqueeze(op.Cast(op.Greater(column, last), to=FLOAT), op.Constant(value_ints=[1]))
    masked = op.CastLike(op.Constant(value_float=-1e4), is_padding)  # Polygraphy writes floats back as doubles
    bias = op.Mul(is_padding, masked)
    rows_1, bias_1 = Rectangle(first_head, bias, low, high, num_heads, 0)
    rows_2, bias_2 = Rectangle(first_head, bias, low, high, num_heads, 1)
    rows_3, bias_3 = Rectangle(first_head, bias, low, high, num_heads, 2)
    rows_4, bias_4 = Rectangle(first_head, bias, low, high, num_heads, 3)
    back = WayBack(cu_seqlens, order, start, width, num_heads)
    return rows_1, rows_2, rows_3, rows_4, bias_1, bias_2, bias_3, bias_4, back


@script(OURS)
def Places(cu_seqlens, positions, window: int):
    """Put all texts on one line, so far apart that no window reaches from one to the next: ``(T,) int32``, above `window`."""
    zero = op.Constant(value_ints=[0])
    one = op.Constant(value_ints=[1])
    reach = op.Constant(value_int=window)
    start = op.Slice(op.Cast(cu_seqlens, to=INT64), zero, op.Constant(value_ints=[-1]))
    begins = op.ScatterElements(op.Expand(zero, op.Shape(positions)), start, op.Expand(one, op.Shape(start)))
    text = op.CumSum(begins, op.Constant(value_int=0))  # from 1
    place = op.Cast(positions, to=INT64)
    apart = op.Add(op.Add(op.ReduceMax(place), reach), one)
    return op.Cast(op.Add(place, op.Mul(text, apart)), to=INT32)


@script(OURS)
def Blocks(cu_seqlens, positions, window: int):
    """Divide the packed tokens into n blocks of C. A block sees itself and the two beside it: positions rise, so a window of W
    positions reaches no farther than W rows.

    C is W, or less where all texts are shorter.

    Returns:
        first: ``(n, 1)`` first row of each block. offset: ``(C,)``. size: ``(1,)``, C. own: ``(n, C)`` rows of the tokens; past the
        end the last one is repeated. seen: ``(n, 3C)`` rows of what they see. bias: of scores, ``(n, 1, C, 3C) fp32``.
    """
    zero = op.Constant(value_ints=[0])
    one = op.Constant(value_ints=[1])
    axis = op.Constant(value_int=0)
    step = op.Constant(value_int=1)
    bounds = op.Cast(cu_seqlens, to=INT64)
    length = op.Sub(
        op.Slice(bounds, one, op.Constant(value_ints=[END])), op.Slice(bounds, zero, op.Constant(value_ints=[-1]))
    )
    farthest = op.Sub(op.ReduceMax(length), one)
    reach = op.Constant(value_int=window)
    size = op.Max(op.Constant(value_ints=[16]), op.Min(op.Unsqueeze(reach, zero), farthest))
    last = op.Sub(op.Shape(positions), one)
    count = op.Add(op.Div(last, size), one)
    offset = op.Range(axis, op.Squeeze(size, zero), step)
    first = op.Mul(op.Unsqueeze(op.Range(axis, op.Squeeze(count, zero), step), one), size)
    own = op.Min(op.Add(first, offset), last)
    around = op.Sub(op.Range(axis, op.Squeeze(op.Mul(size, op.Constant(value_ints=[3])), zero), step), size)
    wanted = op.Add(first, around)
    seen = op.Max(op.Min(wanted, last), zero)

    place = Places(cu_seqlens, positions, window)
    nowhere = op.CastLike(zero, place)  # what is before the first or after the last row is in no window
    seen_place = op.Where(op.Equal(seen, wanted), op.Gather(place, seen), nowhere)
    distance = op.Abs(
        op.Sub(op.Unsqueeze(seen_place, one), op.Unsqueeze(op.Gather(place, own), op.Constant(value_ints=[2])))
    )
    is_far = op.Unsqueeze(op.Cast(op.Greater(distance, op.CastLike(reach, place)), to=FLOAT), one)
    bias = op.Mul(is_far, op.CastLike(op.Constant(value_float=-1e4), is_far))
    return first, offset, size, own, seen, bias


@script(OURS)
def OfHeads(tokens, num_heads: int):
    """Rows of every head, ``(n, N, .)`` of ``(T*N, D)``, for rows of tokens ``(n, .)``."""
    one = op.Constant(value_ints=[1])
    n_heads = op.Constant(value_int=num_heads)
    heads = op.Unsqueeze(op.Range(op.Constant(value_int=0), n_heads, op.Constant(value_int=1)), one)  # (N, 1)
    return op.Add(op.Mul(op.Unsqueeze(tokens, one), n_heads), heads)


@script(OURS)
def OutOfBlocks(first, offset, size, positions, num_heads: int):
    """Find where each head of each token is in a result ``(n, N, C)``, flattened: ``(T, N)``."""
    n_heads = op.Constant(value_int=num_heads)
    heads = op.Range(op.Constant(value_int=0), n_heads, op.Constant(value_int=1))
    in_block = op.Unsqueeze(op.Add(op.Mul(first, n_heads), offset), op.Constant(value_ints=[2]))
    back = op.Flatten(op.Add(in_block, op.Mul(heads, size)), axis=2)
    zero = op.Constant(value_ints=[0])
    return op.Slice(back, zero, op.Shape(positions), zero)


@script(OURS)
def ReceivedFromBlocks(probabilities, first, offset, size, own, positions):
    """Sum probabilities ``(n, N, C, 3C)`` over heads and queries: ``(T,)``. Three blocks see each token, at most."""
    axis = op.Constant(value_ints=[2])
    live = op.Unsqueeze(op.Cast(op.Equal(op.Add(first, offset), own), to=FLOAT), op.Constant(value_ints=[1, 2]))
    by_block = op.ReduceSum(op.MatMul(live, probabilities), op.Constant(value_ints=[1, 2]), keepdims=0)  # (n, 3C)
    three = op.Constant(value_ints=[3])
    none = op.Expand(op.CastLike(op.Constant(value_floats=[0.0]), by_block), op.Mul(size, three))
    flat = op.Concat(none, op.Reshape(by_block, op.Constant(value_ints=[-1])), none, axis=0)
    # Token o of block b is 2C + o in what the block before saw, C + o in what its own saw, o in what the next one saw.
    in_block = op.Unsqueeze(op.Add(op.Mul(first, three), offset), axis)
    sources = op.Flatten(op.Add(in_block, op.Mul(size, op.Constant(value_ints=[2, 4, 6]))), axis=2)
    zero = op.Constant(value_ints=[0])
    shares = op.Gather(flat, op.Slice(sources, zero, op.Shape(positions), zero))
    return op.ReduceSum(shares, op.Constant(value_ints=[1]), keepdims=0)


@script(OURS)
def AdtpTokenOffset(cu_seqlens):
    """Positions in the padded (B, longest) layout: those of the tokens in packed order, then those of the padding."""
    zero = op.Constant(value_ints=[0])
    one = op.Constant(value_ints=[1])
    minus_one = op.Constant(value_ints=[-1])
    axis = op.Constant(value_int=0)
    bounds = op.Cast(cu_seqlens, to=INT64)
    length = op.Sub(op.Slice(bounds, one, op.Constant(value_ints=[END])), op.Slice(bounds, zero, minus_one))
    longest = op.ReduceMax(length, keepdims=0)
    column = op.Range(op.Constant(value_int=0), longest, op.Constant(value_int=1))
    is_token_2d = op.Less(column, op.Unsqueeze(length, one))  # (B, longest)
    is_token = op.Reshape(is_token_2d, minus_one)
    token = op.Cast(is_token, to=INT64)
    tokens = op.Slice(bounds, minus_one, op.Constant(value_ints=[END]))
    after_tokens = op.Add(tokens, op.CumSum(op.Sub(one, token), axis))
    rank = op.Sub(op.Where(is_token, op.CumSum(token, axis), after_tokens), one)
    position = op.Range(op.Constant(value_int=0), op.Squeeze(op.Shape(rank), zero), op.Constant(value_int=1))
    order = op.ScatterElements(rank, rank, position)  # the inverse permutation
    return op.Cast(op.Reshape(order, op.Shape(is_token_2d)), to=INT32)


def token_offset_function() -> onnx.FunctionProto:
    """``cu_seqlens (B+1,) int32`` to the ``token_offset (B, longest) int32`` of ONNX Runtime's packed attention."""
    return AdtpTokenOffset.to_function_proto()
