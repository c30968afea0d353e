"""Give attention to ONNX Runtime's own packed kernel, which its CUDA provider has."""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes import InPlacePass, PassResult

from ...contract import ATTENTION, NUM_HEADS, SCALE
from ...contract import DOMAIN as OURS
from ...ops import onnx_layout

DOMAIN, OPERATOR = "com.microsoft", "PackedMultiHeadAttention"


class LowerToOrtPackedAttention(InPlacePass):
    """Each ragged attention becomes a PackedMultiHeadAttention; each cut's token offsets are computed once.

    That kernel does not say what attention tokens received, so nodes that do stay as they are, with their function.
    """

    def call(self, model: ir.Model) -> PassResult:
        function = ir.serde.deserialize_function(onnx_layout.token_offset_function())
        offsets: dict[ir.Value, ir.Value] = {}
        for node in list(model.graph):
            if (node.domain, node.op_type) != (OURS, ATTENTION):
                continue
            q, k, v, cu_seqlens = node.inputs
            assert cu_seqlens is not None
            if cu_seqlens not in offsets:
                offset = ir.node(
                    function.name, [cu_seqlens], domain=function.domain, name=f"token_offset_{len(offsets)}"
                )
                offset.outputs[0].name = offset.name
                model.graph.insert_before(node, offset)
                offsets[cu_seqlens] = offset.outputs[0]
            packed = ir.node(
                OPERATOR,
                [q, k, v, None, offsets[cu_seqlens], cu_seqlens],
                {"num_heads": node.attributes[NUM_HEADS].as_int(), "scale": node.attributes[SCALE].as_float()},
                domain=DOMAIN,
                name=node.name,
            )
            ir.convenience.replace_nodes_and_values(model.graph, node, [node], [packed], node.outputs, packed.outputs)
        if not offsets:
            return PassResult(model, modified=False)
        del model.functions[OURS, ATTENTION, ""]
        model.functions[function.identifier()] = function
        model.opset_imports[DOMAIN] = 1
        return PassResult(model, modified=True)
