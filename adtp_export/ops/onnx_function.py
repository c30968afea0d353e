"""`adtp::AdtpRaggedAttention` and `adtp::AdtpRaggedAttentionReceived`: ONNX operators with portable bodies.

Runtimes with a plugin or kernel of that name take the node as it is; all others inline the body below,
which uses standard operators only. It lays q, k and v out as two rectangles, ``(n, N, longest, D)`` of the long and of
the short sequences, because dense matrix products are what every runtime has. Padding and the head transpose are one
Gather of D-wide rows (and one Gather back), so no separate Transpose ever copies token states.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx
import onnx.inliner
from onnx import helper
from onnxscript import opset20 as op
from onnxscript import script
from onnxscript.values import OnnxFunction, Opset

from ..contract import (
    ATTENTION,
    ATTENTION_RECEIVED,
    DOMAIN,
    DOMAIN_VERSION,
    NUM_HEADS,
    PLUGIN_NAMESPACE,
    PLUGIN_VERSION,
    SCALE,
)

_FLOAT, _INT64, _INT32 = onnx.TensorProto.FLOAT, onnx.TensorProto.INT64, onnx.TensorProto.INT32
_END = 2**63 - 1
_OURS = Opset(DOMAIN, DOMAIN_VERSION)


def register_schemas() -> None:
    """Make the operators known to onnx in this process, so that exporters can emit and check their nodes."""
    schema, param, attr = onnx.defs.OpSchema, onnx.defs.OpSchema.FormalParameter, onnx.defs.OpSchema.Attribute
    kind = onnx.defs.OpSchema.AttrType
    output, received = param("output", "T"), param("received", "tensor(float)")
    for name, outputs, doc in (
        (ATTENTION, [output], "Bidirectional multi-head attention over packed sequences."),
        (ATTENTION_RECEIVED, [output, received], "The same, and the attention that each token received."),
    ):
        if onnx.defs.has(name, domain=DOMAIN):
            continue
        onnx.defs.register_schema(
            schema(
                name,
                DOMAIN,
                DOMAIN_VERSION,
                doc=doc,
                inputs=[param("q", "T"), param("k", "T"), param("v", "T"), param("cu_seqlens", "tensor(int32)")],
                outputs=outputs,
                type_constraints=[("T", ["tensor(float)", "tensor(float16)", "tensor(bfloat16)"], "")],
                attributes=[
                    attr(NUM_HEADS, kind.INT, "N, a divisor of H"),
                    attr(SCALE, kind.FLOAT, "factor on q @ k.T before the softmax"),
                    attr("plugin_version", kind.STRING, "read by TensorRT's plugin lookup"),
                    attr("plugin_namespace", kind.STRING, "read by TensorRT's plugin lookup"),
                ],
            )
        )


def translations() -> dict[Any, Callable[..., Any]]:
    """What `torch.onnx.export` writes for the torch ops: its `custom_translation_table`."""
    import torch  # here, because the graph passes use this module without it

    from . import ragged_attention  # noqa: F401 - registers torch.ops.adtp

    def translation(name: str) -> Callable[..., Any]:
        def translate(q: Any, k: Any, v: Any, cu_seqlens: Any, num_heads: int, scale: float) -> Any:
            attributes = {NUM_HEADS: num_heads, SCALE: scale}
            return operator(
                q, k, v, cu_seqlens, **attributes, plugin_version=PLUGIN_VERSION, plugin_namespace=PLUGIN_NAMESPACE
            )

        operator = getattr(Opset(DOMAIN, DOMAIN_VERSION), name)
        return translate

    register_schemas()
    return {
        torch.ops.adtp.ragged_attention.default: translation(ATTENTION),
        torch.ops.adtp.ragged_attention_received.default: translation(ATTENTION_RECEIVED),
    }


@script(_OURS)
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
    bounds = op.Cast(cu_seqlens, to=_INT64)
    start = op.Slice(bounds, zero, op.Constant(value_ints=[-1]))
    length = op.Sub(op.Slice(bounds, one, op.Constant(value_ints=[_END])), start)
    by_length, order = op.TopK(length, op.Shape(length))
    longest = op.Gather(by_length, zero)

    # What a cut before place k saves: the B - k sequences from there on need no more than the longest of them.
    rest = op.Range(op.Size(length), op.Constant(value_int=0), op.Constant(value_int=-1))
    saved = op.Mul(rest, op.Sub(op.Mul(longest, longest), op.Mul(by_length, by_length)))
    # Of equals the first, so the long ones are longer than all others. TensorRT would refuse a second tensor called "_".
    _most_saved, k = op.TopK(saved, one)
    next_longest = op.Gather(by_length, k)
    none = op.Equal(k, zero)
    long_count = op.Add(k, op.Cast(none, to=_INT64))
    return bounds, start, by_length, order, k, next_longest, long_count, op.Where(none, one, longest)


@script(_OURS)
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
    is_padding = op.Unsqueeze(op.Cast(op.Greater(column, last), to=_FLOAT), one)
    masked = op.CastLike(op.Constant(value_float=-1e4), is_padding)  # Polygraphy writes floats back as doubles
    bias = op.Mul(is_padding, masked)
    origin = op.Constant(value_ints=[0, 0])
    long_end = op.Concat(long_count, long_width, axis=0)
    short_start = op.Concat(k, zero, axis=0)
    short_end = op.Concat(op.Constant(value_ints=[_END]), next_longest, axis=0)
    of_heads = op.Constant(value_ints=[0, 2])  # axes
    of_bias = op.Constant(value_ints=[0, 3])
    heads = op.Unsqueeze(op.Range(op.Constant(value_int=0), n_heads, op.Constant(value_int=1)), one)  # (N, 1)
    long_rows = op.Add(op.Slice(first_head, origin, long_end, of_heads), heads)
    short_rows = op.Add(op.Slice(first_head, short_start, short_end, of_heads), heads)
    long_bias = op.Slice(bias, origin, long_end, of_bias)
    return long_rows, long_bias, short_rows, op.Slice(bias, short_start, short_end, of_bias)


@script(_OURS)
def WayBack(bounds, start, by_length, order, k, next_longest, long_count, long_width, num_heads: int):
    """Find where each head of each token is in both groups' results, ``(., D)`` one after the other: ``(T, N)`` rows.

    The first head of token t is in row ``first + t - start``, each further one `width` rows on. Along the packed axis that row
    grows by 1 inside a sequence and jumps at each start: a scatter and a CumSum.
    """
    zero = op.Constant(value_ints=[0])
    one = op.Constant(value_ints=[1])
    minus_one = op.Constant(value_ints=[-1])
    end = op.Constant(value_ints=[_END])
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


@script(_OURS)
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


@script(_OURS)
def Attend(q, k, v, rows, bias, scale: float):
    """Attend in one group: ``q, k, v (T*N, D)`` to the fp32 probabilities ``(n, N, L, L)`` and the result ``(n*N*L, D)``."""
    q_heads = op.Gather(q, rows)  # (n, N, L, D)
    k_heads = op.Gather(k, rows)
    v_heads = op.Gather(v, rows)
    scaled = op.Mul(q_heads, op.CastLike(op.Constant(value_float=scale), q_heads))
    scores = op.Cast(op.MatMul(scaled, op.Transpose(k_heads, perm=[0, 1, 3, 2])), to=_FLOAT)
    probabilities = op.Softmax(op.Add(scores, bias), axis=-1)
    context = op.MatMul(op.CastLike(probabilities, v_heads), v_heads)
    return probabilities, op.Flatten(context, axis=3)


@script(_OURS)
def SplitHeads(x, num_heads: int):
    """``(T, H)`` to ``(T*N, D)``."""
    n_heads = op.Constant(value_int=num_heads)
    zero = op.Constant(value_ints=[0])
    split = op.Concat(zero, op.Unsqueeze(n_heads, zero), op.Constant(value_ints=[-1]), axis=0)
    return op.Flatten(op.Reshape(x, split), axis=2)


@script(_OURS)
def ReceivedByRow(probabilities, bias):
    """Sum probabilities ``(n, N, L, L)`` over the queries that are no padding: ``(n*N*L,)``."""
    live = op.Cast(op.Equal(bias, op.CastLike(op.Constant(value_float=0.0), bias)), to=_FLOAT)  # (n, 1, 1, L)
    return op.Reshape(op.MatMul(live, probabilities), op.Constant(value_ints=[-1]))


@script(_OURS)
def AttendInGroups(q, k, v, cu_seqlens, num_heads: int, scale: float):
    """Attend in the long and in the short sequences.

    Returns:
        The result ``(T, N, D)``, both groups' probabilities and biases, the long one's first, and the way back: `Attend`, `Layout`.
    """
    long_rows, long_bias, short_rows, short_bias, back = Layout(cu_seqlens, num_heads)
    q_rows = SplitHeads(q, num_heads)
    k_rows = SplitHeads(k, num_heads)
    v_rows = SplitHeads(v, num_heads)
    long_probabilities, long_context = Attend(q_rows, k_rows, v_rows, long_rows, long_bias, scale)
    short_probabilities, short_context = Attend(q_rows, k_rows, v_rows, short_rows, short_bias, scale)
    heads = op.Gather(op.Concat(long_context, short_context, axis=0), back)
    return heads, long_probabilities, long_bias, short_probabilities, short_bias, back


@script(_OURS)
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
    heads, _long, _long_bias, _short, _short_bias, _back = AttendInGroups(q, k, v, cu_seqlens, num_heads, scale)
    return op.Flatten(heads, axis=1)


@script(_OURS)
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
    heads, long_probabilities, long_bias, short_probabilities, short_bias, back = AttendInGroups(
        q, k, v, cu_seqlens, num_heads, scale
    )
    by_row = op.Concat(
        ReceivedByRow(long_probabilities, long_bias), ReceivedByRow(short_probabilities, short_bias), axis=0
    )
    received = op.ReduceSum(op.Gather(by_row, back), op.Constant(value_ints=[1]), keepdims=0)
    return op.Flatten(heads, axis=1), received


@script(_OURS)
def AdtpTokenOffset(cu_seqlens):
    """Positions in the padded (B, longest) layout: those of the tokens in packed order, then those of the padding."""
    zero = op.Constant(value_ints=[0])
    one = op.Constant(value_ints=[1])
    minus_one = op.Constant(value_ints=[-1])
    axis = op.Constant(value_int=0)
    bounds = op.Cast(cu_seqlens, to=_INT64)
    length = op.Sub(op.Slice(bounds, one, op.Constant(value_ints=[_END])), op.Slice(bounds, zero, minus_one))
    longest = op.ReduceMax(length, keepdims=0)
    column = op.Range(op.Constant(value_int=0), longest, op.Constant(value_int=1))
    is_token_2d = op.Less(column, op.Unsqueeze(length, one))  # (B, longest)
    is_token = op.Reshape(is_token_2d, minus_one)
    token = op.Cast(is_token, to=_INT64)
    tokens = op.Slice(bounds, minus_one, op.Constant(value_ints=[_END]))
    after_tokens = op.Add(tokens, op.CumSum(op.Sub(one, token), axis))
    rank = op.Sub(op.Where(is_token, op.CumSum(token, axis), after_tokens), one)
    position = op.Range(op.Constant(value_int=0), op.Squeeze(op.Shape(rank), zero), op.Constant(value_int=1))
    order = op.ScatterElements(rank, rank, position)  # the inverse permutation
    return op.Cast(op.Reshape(order, op.Shape(is_token_2d)), to=_INT32)


def token_offset_function() -> onnx.FunctionProto:
    """``cu_seqlens (B+1,) int32`` to the ``token_offset (B, longest) int32`` of ONNX Runtime's packed attention."""
    return AdtpTokenOffset.to_function_proto()


def portable_function() -> onnx.FunctionProto:
    """The body of `ATTENTION` for `ModelProto.functions`: standard operators, opset 20, any float type."""
    return _flat(AdtpRaggedAttention)


def portable_function_received() -> onnx.FunctionProto:
    """The body of `ATTENTION_RECEIVED`: that of `ATTENTION`, and sums over its fp32 softmax as a second output."""
    return _flat(AdtpRaggedAttentionReceived)


def portable_functions() -> tuple[onnx.FunctionProto, ...]:
    """The bodies of all operators that exporters emit."""
    return portable_function(), portable_function_received()


def _flat(function: OnnxFunction) -> onnx.FunctionProto:
    """Return a function whose parts above are written out, for TensorRT takes no functions inside functions."""
    parts = [
        part.to_function_proto()
        for part in (Divide, Rectangles, WayBack, Layout, SplitHeads, Attend, AttendInGroups, ReceivedByRow)
    ]
    model = helper.make_model(
        helper.make_graph([], "", [], []),
        functions=[function.to_function_proto(), *parts],
        opset_imports=[helper.make_opsetid("", op.version), helper.make_opsetid(DOMAIN, DOMAIN_VERSION)],
    )
    flat = onnx.inliner.inline_selected_functions(model, [(DOMAIN, part.name) for part in parts])
    return next(f for f in flat.functions if f.name == function.name)
