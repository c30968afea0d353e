"""`adtp::AdtpRaggedAttention` and its relatives: ONNX operators with portable bodies.

Runtimes with a plugin or kernel of that name take the node as it is; all others inline the body below,
which uses standard operators only. It lays q, k and v out as four rectangles, ``(n, N, longest, D)`` of sequences of
like length, because dense matrix products are what every runtime has. Padding and the head transpose are one
Gather of D-wide rows (and one Gather back), so no separate Transpose ever copies token states. Attention in a window needs no
rectangles of sequences: it cuts the packed tokens into blocks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import onnx
import onnx.inliner
from onnx import helper
from onnxscript import opset20 as op
from onnxscript import script
from onnxscript.values import OnnxFunction

from ..contract import (
    ATTENTION,
    ATTENTION_DISENTANGLED,
    ATTENTION_FROM_OTHERS,
    ATTENTION_GROUPED,
    ATTENTION_GROUPED_RECEIVED,
    ATTENTION_GROUPED_WINDOW,
    ATTENTION_RECEIVED,
    ATTENTION_RELATIVE,
    ATTENTION_WINDOW,
    DOMAIN,
    DOMAIN_VERSION,
    KV_HEADS,
    NUM_HEADS,
    PLUGIN_NAMESPACE,
    PLUGIN_VERSION,
    RECEIVED,
    SCALE,
    WINDOW,
    WINDOW_AHEAD,
    WINDOW_BACK,
)
from .onnx_attend import Attend, AttendInGroups, ReceivedByRow, ReceivedInGroups
from .onnx_disentangled import (
    DISENTANGLED_PARTS,
    AdtpRaggedAttentionDisentangled,
    AdtpRaggedAttentionDisentangledReceived,
    disentangled,
)
from .onnx_grouped import (
    GROUPED_PARTS,
    AdtpRaggedAttentionGrouped,
    AdtpRaggedAttentionGroupedReceived,
    grouped,
    grouped_received,
)
from .onnx_grouped_window import WINDOW_PARTS, AdtpRaggedAttentionGroupedWindow
from .onnx_layout import (
    FLOAT,
    INT64,
    OURS,
    Blocks,
    ByHead,
    Divide,
    Layout,
    OfHeads,
    OutOfBlocks,
    Places,
    ReceivedFromBlocks,
    Rectangle,
    WayBack,
)


def register_schemas() -> None:
    """Make the operators known to onnx in this process, so that exporters can emit and check their nodes."""
    schema, param, attr = onnx.defs.OpSchema, onnx.defs.OpSchema.FormalParameter, onnx.defs.OpSchema.Attribute
    kind, output, received = onnx.defs.OpSchema.AttrType, param("output", "T"), param("received", "tensor(float)")
    positions, table = param("positions", "tensor(int32)"), param("table", "T")
    plugin = [
        attr(name, kind.STRING, "read by TensorRT's plugin lookup") for name in ("plugin_version", "plugin_namespace")
    ]
    distances = [positions, *(param(name, "T") for name in ("distance_keys", "distance_queries"))]
    distances.append(param("buckets", "tensor(int32)"))
    window = [attr(WINDOW, kind.INT, "how far apart positions may be that see each other")]
    groups = [attr(KV_HEADS, kind.INT, "heads of keys and values, a divisor of N")] + [
        attr(name, kind.INT, "how far a query sees on this side, -1 without a bound")
        for name in (WINDOW_BACK, WINDOW_AHEAD)
    ]
    groups += plugin
    integers = ("cu_seqlens", "cu_q", "cu_k", "positions_q", "positions_k")
    packed, *sides = (param(name, "tensor(int32)") for name in integers)
    for name, further, attributes, doc in (
        (ATTENTION, [], plugin, "Bidirectional multi-head attention over packed sequences."),
        (ATTENTION_RECEIVED, [], plugin, "The same, and the attention that each token received."),
        (ATTENTION_FROM_OTHERS, [], [], "The same, without what each token received from itself."),
        (ATTENTION_RELATIVE, [positions, table], [], "Attention with a bias by distance."),
        (f"{ATTENTION_RELATIVE}{RECEIVED}", [positions, table], [], "The same, and what each token received."),
        (ATTENTION_WINDOW, [positions], window, "Attention among tokens that are near."),
        (f"{ATTENTION_WINDOW}{RECEIVED}", [positions], window, "The same, and what each token received."),
        (ATTENTION_DISENTANGLED, distances, [], "Attention with products of queries and keys with distances."),
        (f"{ATTENTION_DISENTANGLED}{RECEIVED}", distances, [], "The same, and what each token received."),
        (ATTENTION_GROUPED, sides, groups, "Attention of grouped queries to keys that may be other tokens."),
        (ATTENTION_GROUPED_WINDOW, sides, groups, "The same with bounds on both sides."),
        (ATTENTION_GROUPED_RECEIVED, sides, groups, "The same with any bounds, and what each key received."),
    ):
        if onnx.defs.has(name, domain=DOMAIN):
            continue
        onnx.defs.register_schema(
            schema(
                name,
                DOMAIN,
                DOMAIN_VERSION,
                doc=doc,
                inputs=[*(param(name, "T") for name in "qkv"), *(further if further is sides else [packed, *further])],
                outputs=[output, received] if name.endswith(RECEIVED) else [output],
                type_constraints=[("T", ["tensor(float)", "tensor(float16)", "tensor(bfloat16)"], "")],
                attributes=[
                    attr(NUM_HEADS, kind.INT, "N, a divisor of H"),
                    attr(SCALE, kind.FLOAT, "factor on q @ k.T before the softmax"),
                    *attributes,
                ],
            )
        )


def translations() -> dict[Any, Callable[..., Any]]:
    """What `torch.onnx.export` writes for the torch ops: its `custom_translation_table`."""
    import torch  # here, because the graph passes use this module without it

    from . import disentangled_attention, grouped_attention  # noqa: F401 - register torch.ops.adtp, with those of ragged_attention

    plugin = {"plugin_version": PLUGIN_VERSION, "plugin_namespace": PLUGIN_NAMESPACE}

    def translation(name: str, **others: str) -> Callable[..., Any]:
        def translate(q: Any, k: Any, v: Any, cu_seqlens: Any, num_heads: int, scale: float) -> Any:
            return getattr(OURS, name)(q, k, v, cu_seqlens, **{NUM_HEADS: num_heads, SCALE: scale}, **others)

        return translate

    def relative(q: Any, k: Any, v: Any, cu: Any, positions: Any, table: Any, num_heads: int, scale: float) -> Any:
        operator = getattr(OURS, f"{ATTENTION_RELATIVE}{RECEIVED}")
        return operator(q, k, v, cu, positions, table, **{NUM_HEADS: num_heads, SCALE: scale})

    def near(q: Any, k: Any, v: Any, cu: Any, positions: Any, num_heads: int, scale: float, window: int) -> Any:
        numbers = {NUM_HEADS: num_heads, SCALE: scale, WINDOW: window}
        return getattr(OURS, f"{ATTENTION_WINDOW}{RECEIVED}")(q, k, v, cu, positions, **numbers)

    register_schemas()
    return {
        torch.ops.adtp.ragged_attention.default: translation(ATTENTION, **plugin),
        torch.ops.adtp.ragged_attention_received.default: translation(ATTENTION_RECEIVED, **plugin),
        torch.ops.adtp.ragged_attention_from_others.default: translation(ATTENTION_FROM_OTHERS),
        torch.ops.adtp.ragged_attention_relative.default: relative,
        torch.ops.adtp.ragged_attention_window.default: near,
        torch.ops.adtp.ragged_attention_disentangled.default: disentangled,
        torch.ops.adtp.ragged_attention_grouped.default: grouped,
        torch.ops.adtp.ragged_attention_grouped_received.default: grouped_received,
    }


@script(OURS)
def GivenToItself(probabilities):
    """Take what each query gives itself out of probabilities ``(n, N, L, L)``: ``(n*N*L,)``."""
    size = op.Shape(probabilities, start=3, end=4)
    zero = op.Constant(value_ints=[0])
    one = op.Constant(value_int=1)
    query = op.Range(op.Constant(value_int=0), op.Squeeze(size, zero), one)
    diagonal = op.Gather(op.Flatten(probabilities, axis=2), op.Mul(query, op.Add(size, one)), axis=1)
    return op.Reshape(diagonal, op.Constant(value_ints=[-1]))


@script(OURS)
def FromOthersByRow(probabilities, bias):
    return op.Sub(ReceivedByRow(probabilities, bias), GivenToItself(probabilities))


@script(OURS)
def FromOthersInGroups(p1, p2, p3, p4, b1, b2, b3, b4, back):
    """Sum the groups' probabilities over heads and the queries of other tokens: ``(T,)``."""
    by_row = op.Concat(
        FromOthersByRow(p1, b1), FromOthersByRow(p2, b2), FromOthersByRow(p3, b3), FromOthersByRow(p4, b4), axis=0
    )
    return op.ReduceSum(op.Gather(by_row, back), op.Constant(value_ints=[1]), keepdims=0)


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
    r1, r2, r3, r4, b1, b2, b3, b4, back = Layout(cu_seqlens, num_heads)
    output, _p1, _p2, _p3, _p4 = AttendInGroups(q, k, v, r1, r2, r3, r4, b1, b2, b3, b4, back, num_heads, scale)
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
    r1, r2, r3, r4, b1, b2, b3, b4, back = Layout(cu_seqlens, num_heads)
    output, p1, p2, p3, p4 = AttendInGroups(q, k, v, r1, r2, r3, r4, b1, b2, b3, b4, back, num_heads, scale)
    return output, ReceivedInGroups(p1, p2, p3, p4, b1, b2, b3, b4, back)


@script(OURS)
def AdtpRaggedAttentionFromOthersReceived(q, k, v, cu_seqlens, num_heads: int, scale: float):
    r1, r2, r3, r4, b1, b2, b3, b4, back = Layout(cu_seqlens, num_heads)
    output, p1, p2, p3, p4 = AttendInGroups(q, k, v, r1, r2, r3, r4, b1, b2, b3, b4, back, num_heads, scale)
    return output, FromOthersInGroups(p1, p2, p3, p4, b1, b2, b3, b4, back)


@script(OURS)
def AddTable(bias, rows, positions, table, num_heads: int):
    """Add what the table says of each pair of tokens to a group's biases: ``(n, 1, 1, L)`` to ``(n, N, L, L)``."""
    first_head = op.Gather(rows, op.Constant(value_int=0), axis=1)  # (n, L); the first head of token t is row t * N
    token = op.Div(first_head, op.Constant(value_int=num_heads))
    place = op.Cast(op.Gather(positions, token), to=INT64)
    distance = op.Sub(
        op.Unsqueeze(place, op.Constant(value_ints=[1])), op.Unsqueeze(place, op.Constant(value_ints=[2]))
    )
    middle = op.Div(op.Shape(table, start=0, end=1), op.Constant(value_ints=[2]))
    pairs = op.Cast(op.Gather(table, op.Add(distance, middle)), to=FLOAT)  # (n, L, L, N)
    return op.Add(op.Transpose(pairs, perm=[0, 3, 1, 2]), bias)


@script(OURS)
def AttendWithTable(q, k, v, cu_seqlens, positions, table, num_heads: int, scale: float):
    """Attend in groups with a bias by distance: the result ``(T, H)``, and what `ReceivedInGroups` takes."""
    r1, r2, r3, r4, b1, b2, b3, b4, back = Layout(cu_seqlens, num_heads)
    t1 = AddTable(b1, r1, positions, table, num_heads)
    t2 = AddTable(b2, r2, positions, table, num_heads)
    t3 = AddTable(b3, r3, positions, table, num_heads)
    t4 = AddTable(b4, r4, positions, table, num_heads)
    output, p1, p2, p3, p4 = AttendInGroups(q, k, v, r1, r2, r3, r4, t1, t2, t3, t4, back, num_heads, scale)
    return output, p1, p2, p3, p4, b1, b2, b3, b4, back


@script(OURS)
def AdtpRaggedAttentionRelative(q, k, v, cu_seqlens, positions, table, num_heads: int, scale: float):
    output, _p1, _p2, _p3, _p4, _b1, _b2, _b3, _b4, _back = AttendWithTable(
        q, k, v, cu_seqlens, positions, table, num_heads, scale
    )
    return output


@script(OURS)
def AdtpRaggedAttentionRelativeReceived(q, k, v, cu_seqlens, positions, table, num_heads: int, scale: float):
    output, p1, p2, p3, p4, b1, b2, b3, b4, back = AttendWithTable(
        q, k, v, cu_seqlens, positions, table, num_heads, scale
    )
    return output, ReceivedInGroups(p1, p2, p3, p4, b1, b2, b3, b4, back)


@script(OURS)
def AttendInBlocks(q, k, v, cu_seqlens, positions, num_heads: int, scale: float, window: int):
    """Attend in blocks: the result ``(T, H)``, and what `ReceivedFromBlocks` takes."""
    first, offset, size, own, seen, bias = Blocks(cu_seqlens, positions, window)
    by_head = ByHead(k, num_heads)
    q_rows = op.Reshape(q, by_head)
    k_rows = op.Reshape(k, by_head)
    v_rows = op.Reshape(v, by_head)
    own_rows = OfHeads(own, num_heads)
    seen_rows = OfHeads(seen, num_heads)
    probabilities, context = Attend(q_rows, k_rows, v_rows, own_rows, seen_rows, bias, by_head, scale)
    heads = op.Gather(context, OutOfBlocks(first, offset, size, positions, num_heads))
    return op.Flatten(heads, axis=1), probabilities, first, offset, size, own


@script(OURS)
def AdtpRaggedAttentionWindow(q, k, v, cu_seqlens, positions, num_heads: int, scale: float, window: int):
    output, _probabilities, _first, _offset, _size, _own = AttendInBlocks(
        q, k, v, cu_seqlens, positions, num_heads, scale, window
    )
    return output


@script(OURS)
def AdtpRaggedAttentionWindowReceived(q, k, v, cu_seqlens, positions, num_heads: int, scale: float, window: int):
    output, probabilities, first, offset, size, own = AttendInBlocks(
        q, k, v, cu_seqlens, positions, num_heads, scale, window
    )
    return output, ReceivedFromBlocks(probabilities, first, offset, size, own, positions)


@functools.cache
def portable_functions() -> tuple[onnx.FunctionProto, ...]:
    """The bodies of all operators that exporters emit, for `ModelProto.functions`: standard operators, opset 20, any float type."""
    return tuple(flat(operator, _PARTS) for operator in _OPERATORS.values())


_OPERATORS = {
    operator.name: operator
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
}
_PARTS = (
    Divide,
    Rectangle,
    WayBack,
    Layout,
    ByHead,
    Attend,
    AttendInGroups,
    AttendWithTable,
    AttendInBlocks,
    ReceivedByRow,
    ReceivedInGroups,
    GivenToItself,
    FromOthersByRow,
    FromOthersInGroups,
    AddTable,
    Places,
    Blocks,
    OfHeads,
    OutOfBlocks,
    ReceivedFromBlocks,
    *DISENTANGLED_PARTS,
    *GROUPED_PARTS,
    *WINDOW_PARTS,
)


def flat(function: OnnxFunction, written_out: Iterable[OnnxFunction]) -> onnx.FunctionProto:
    """Return a function whose parts are written out, for TensorRT takes no functions inside functions."""
    whole, *parts = (part.to_function_proto() for part in (function, *written_out))
    opsets = [helper.make_opsetid("", op.version), helper.make_opsetid(DOMAIN, DOMAIN_VERSION)]
    del whole.opset_import[:]
    whole.opset_import.extend(opsets)  # onnxscript names those that it calls itself
    model = helper.make_model(helper.make_graph([], "", [], []), functions=[whole, *parts], opset_imports=opsets)
    flat = onnx.inliner.inline_selected_functions(model, [(DOMAIN, part.name) for part in parts])
    return next(f for f in flat.functions if f.name == function.name)
