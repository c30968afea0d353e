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
def Divide(cu_seqlens):
    """Divide the sequences, sorted by length, into k long and all other, short ones: the division of the smallest area.

    k is 0 where one rectangle is as small. Then one token of the longest stands for the long ones, and nobody reads its result:
    runtimes differ in what they make of empty tensors.

    Returns:
        bounds: ``(B+1,) int64``. start: ``(B,)`` first packed row of each sequence.
        by_length: ``(B,)`` lengths, the longest first. order: ``(B,)`` whose they are.
        k, next_longest: ``(1,)`` how many are long, and the longest of the others.
        long_count, long_width: ``(1,)`` sizes of the long ones' rectangle, that of the stand-in included.
    """
    zero = op.Constant(value_ints=[0])
    one = op.Constant(value_ints=[1])
    bounds = op.Cast(cu_seqlens, to=INT64)
    start = op.Slice(bounds, zero, op.Constant(value_ints=[-1]))
    length = op.Sub(op.Slice(bounds, one, op.Constant(value_ints=[END])), start)
    by_length, order = op.TopK(length, op.Shape(length))
    longest = op.Gather(by_length, zero)

    # What a cut before place k saves: the B - k sequences from there on need no more than the longest of them.
    rest = op.Range(op.Size(length), op.Constant(value_int=0), op.Constant(value_int=-1))
    saved = op.Mul(rest, op.Sub(op.Mul(longest, longest), op.Mul(by_length, by_length)))
    # Of equals the first, so the long ones are longer than all others. TensorRT would refuse a second tensor called "_".
    _most_saved, k = op.TopK(saved, one)
    next_longest = op.Gather(by_length, k)
    none = op.Equal(k, zero)
    long_count = op.Add(k, op.Cast(none, to=INT64))
    return bounds, start, by_length, order, k, next_longest, long_count, op.Where(none, one, longest)


@script(OURS)
def Rectangles(start, by_length, order, k, next_longest, long_count, long_width, num_heads: int):
    """Lay each group out as ``(n, N, its longest)``: rows of ``(T*N, D)``, and biases of scores ``(n, 1, 1, longest) fp32``.

    Past its end a sequence repeats its last row.
    """
    zero = op.Constant(value_ints=[0])
    one = op.Constant(value_ints=[1])
    n_heads = op.Constant(value_int=num_heads)
    longest = op.Squeeze(op.Gather(by_length, zero), zero)
    column = op.Range(op.Constant(value_int=0), longest, op.Constant(value_int=1))
    rectangle = op.Constant(value_ints=[1, 2])
    last = op.Unsqueeze(op.Sub(by_length, one), rectangle)  # (B, 1, 1), counted from the start
    token = op.Add(op.Unsqueeze(op.Gather(start, order), rectangle), op.Min(column, last))  # (B, 1, longest)
    first_head = op.Mul(token, n_heads)
    is_padding = op.Unsqueeze(op.Cast(op.Greater(column, last), to=FLOAT), one)
    masked = op.CastLike(op.Constant(value_float=-1e4), is_padding)  # Polygraphy writes floats back as doubles
    bias = op.Mul(is_padding, masked)
    origin = op.Constant(value_ints=[0, 0])
    long_end = op.Concat(long_count, long_width, axis=0)
    short_start = op.Concat(k, zero, axis=0)
    short_end = op.Concat(op.Constant(value_ints=[END]), next_longest, axis=0)
    of_heads = op.Constant(value_ints=[0, 2])  # axes
    of_bias = op.Constant(value_ints=[0, 3])
    heads = op.Unsqueeze(op.Range(op.Constant(value_int=0), n_heads, op.Constant(value_int=1)), one)  # (N, 1)
    long_rows = op.Add(op.Slice(first_head, origin, long_end, of_heads), heads)
    short_rows = op.Add(op.Slice(first_head, short_start, short_end, of_heads), heads)
    long_bias = op.Slice(bias, origin, long_end, of_bias)
    return long_rows, long_bias, short_rows, op.Slice(bias, short_start, short_end, of_bias)


@script(OURS)
def WayBack(bounds, start, by_length, order, k, next_longest, long_count, long_width, num_heads: int):
    """Find where each head of each token is in both groups' results, ``(., D)`` one after the other: ``(T, N)`` rows.

    The first head of token t is in row ``first + t - start``, each further one `width` rows on. Along the packed axis that row
    grows by 1 inside a sequence and jumps at each start: a scatter and a CumSum.
    """
    zero = op.Constant(value_ints=[0])
    one = op.Constant(value_ints=[1])
    minus_one = op.Constant(value_ints=[-1])
    end = op.Constant(value_ints=[END])
    axis = op.Constant(value_int=0)
    n_heads = op.Constant(value_int=num_heads)
    width = op.Where(op.Greater(by_length, next_longest), long_width, next_longest)
    before = op.Add(op.CumSum(width, axis, exclusive=1), op.Sub(long_count, k))  # 1 for the stand-in
    first = op.ScatterElements(order, order, op.Mul(before, n_heads))
    length = op.Sub(op.Slice(bounds, one, end), start)
    last_row = op.Add(first, op.Sub(length, one))
    jumps = op.Sub(first, op.Concat(zero, op.Slice(last_row, zero, minus_one), axis=0))
    tokens = op.Slice(bounds, minus_one, end)  # T; from here, for it is shared too
    row = op.CumSum(op.ScatterElements(op.Expand(one, tokens), start, jumps), axis)
    row_2d = op.Unsqueeze(row, one)
    is_long = op.Less(row_2d, op.Mul(op.Mul(long_count, long_width), n_heads))
    head = op.Unsqueeze(op.Range(op.Constant(value_int=0), n_heads, op.Constant(value_int=1)), zero)  # (1, N)
    return op.Add(row_2d, op.Mul(op.Where(is_long, long_width, next_longest), head))


@script(OURS)
def Layout(cu_seqlens, num_heads: int):
    """Return both groups' rows and biases, the long one's first, and the way back: `Rectangles`, `WayBack`.

    Nothing here depends on token states, so runtimes share it between the layers of one cut.
    """
    bounds, start, by_length, order, k, next_longest, long_count, long_width = Divide(cu_seqlens)
    long_rows, long_bias, short_rows, short_bias = Rectangles(
        start, by_length, order, k, next_longest, long_count, long_width, num_heads
    )
    back = WayBack(bounds, start, by_length, order, k, next_longest, long_count, long_width, num_heads)
    return long_rows, long_bias, short_rows, short_bias, back


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
