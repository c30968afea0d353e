"""`adtp::AdtpRaggedAttention` and `adtp::AdtpRaggedAttentionReceived`: ONNX operators with portable bodies.

Runtimes with a plugin or kernel of that name take the node as it is; all others inline the body below,
which uses standard operators only. It re-pads q, k and v to ``(B, N, longest, D)``, because dense matrix
products are what every runtime has. Re-padding and the head transpose are one Gather of D-wide rows
(and one Gather back), so no separate Transpose ever copies token states.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx
from onnx import helper
from onnxscript import opset20 as op
from onnxscript import script
from onnxscript.values import Opset

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


@script(Opset(DOMAIN, DOMAIN_VERSION))
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
    zero = op.Constant(value_ints=[0])
    one = op.Constant(value_ints=[1])
    minus_one = op.Constant(value_ints=[-1])
    n_heads = op.Constant(value_int=num_heads)

    # Index arithmetic: a function of cu_seqlens alone, so runtimes share it between the layers of one cut.
    bounds = op.Cast(cu_seqlens, to=_INT64)
    start = op.Slice(bounds, zero, minus_one)  # (B,) first packed row of each sequence
    length = op.Sub(op.Slice(bounds, one, op.Constant(value_ints=[_END])), start)  # (B,)
    longest = op.ReduceMax(length, keepdims=0)
    column = op.Range(op.Constant(value_int=0), longest, op.Constant(value_int=1))  # (longest,)
    length_2d = op.Unsqueeze(length, one)
    token = op.Add(op.Unsqueeze(start, one), op.Min(column, op.Sub(length_2d, one)))  # (B, longest)
    head = op.Unsqueeze(op.Range(op.Constant(value_int=0), n_heads, op.Constant(value_int=1)), one)  # (N, 1)
    head_row = op.Add(op.Mul(op.Unsqueeze(token, one), n_heads), head)  # (B, N, longest) rows of (T*N, D)
    is_padding = op.Cast(op.GreaterOrEqual(column, length_2d), to=_FLOAT)
    masked = op.CastLike(op.Constant(value_float=-1e4), is_padding)  # Polygraphy writes floats back as doubles
    bias = op.Unsqueeze(op.Mul(is_padding, masked), op.Constant(value_ints=[1, 2]))

    # Way back: token t of sequence b, head h is row b*N*longest + h*longest + (t - start[b]) of (B*N*longest, D).
    # Along the packed axis that row grows by 1 inside a sequence and jumps at each start: a scatter and a CumSum.
    jump = op.Add(op.Sub(op.Mul(n_heads, longest), length), one)
    jumps = op.Concat(zero, op.Slice(jump, zero, minus_one), axis=0)
    tokens = op.Slice(bounds, minus_one, op.Constant(value_ints=[_END]))  # T; from here, for it is shared too
    first_head = op.CumSum(op.ScatterElements(op.Expand(one, tokens), start, jumps), op.Constant(value_int=0))
    back = op.Add(op.Unsqueeze(first_head, one), op.Mul(op.Unsqueeze(op.Squeeze(head, one), zero), longest))  # (T, N)

    split_heads = op.Concat(zero, op.Unsqueeze(n_heads, zero), minus_one, axis=0)
    q_heads = op.Gather(op.Flatten(op.Reshape(q, split_heads), axis=2), head_row)  # (B, N, longest, D)
    k_heads = op.Gather(op.Flatten(op.Reshape(k, split_heads), axis=2), head_row)
    v_heads = op.Gather(op.Flatten(op.Reshape(v, split_heads), axis=2), head_row)

    scaled = op.Mul(q_heads, op.CastLike(op.Constant(value_float=scale), q_heads))
    scores = op.Cast(op.MatMul(scaled, op.Transpose(k_heads, perm=[0, 1, 3, 2])), to=_FLOAT)
    weights = op.CastLike(op.Softmax(op.Add(scores, bias), axis=-1), v_heads)
    context = op.MatMul(weights, v_heads)  # (B, N, longest, D)

    return op.Flatten(op.Gather(op.Flatten(context, axis=3), back), axis=1)  # (T, N, D), then (T, H)


@script(Opset(DOMAIN, DOMAIN_VERSION))
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
    return AdtpRaggedAttention.to_function_proto()


def portable_function_received() -> onnx.FunctionProto:
    """The body of `ATTENTION_RECEIVED`: that of `ATTENTION`, and sums over its fp32 softmax as a second output.

    Queries past the end of a sequence repeat its last token; a product with ``live (B, 1, 1, longest)`` leaves them out.
    """
    function = portable_function()
    function.name = ATTENTION_RECEIVED
    (probabilities,) = (node.output[0] for node in function.node if node.op_type == "Softmax")
    for op_type, inputs, output, attributes in (
        ("Less", ["column", "length_2d"], "is_live", {}),
        ("Cast", ["is_live"], "live_2d", {"to": _FLOAT}),
        ("Unsqueeze", ["live_2d", "one"], "live_3d", {}),
        ("Unsqueeze", ["live_3d", "one"], "live", {}),
        ("MatMul", ["live", probabilities], "by_head", {}),  # (B, N, 1, longest)
        ("Reshape", ["by_head", "minus_one"], "by_head_1d", {}),
        ("Gather", ["by_head_1d", "back"], "by_token", {}),  # (T, N)
        ("ReduceSum", ["by_token", "one"], "received", {"keepdims": 0}),
    ):
        name = f"n{len(function.node)}"
        function.node.append(helper.make_node(op_type, inputs, [output], name, **attributes))
    function.output.append("received")
    return function


def portable_functions() -> tuple[onnx.FunctionProto, ...]:
    """The bodies of all operators that exporters emit."""
    return portable_function(), portable_function_received()
