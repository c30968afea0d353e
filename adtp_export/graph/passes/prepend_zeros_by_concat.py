"""Prepend the zero of a cu_seqlens by Concat: ONNX Runtime's CUDA provider has no Pad of int64, so it leaves those to the CPU."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from onnx_ir import convenience
from onnx_ir.passes import InPlacePass, PassResult

from .patterns import add_constant


class PrependZerosByConcat(InPlacePass):
    """``Pad(x, [1, 0])`` of an int64 vector becomes ``Concat([0], x)``: no copy to the host and back, and no wait for one."""

    def call(self, model: ir.Model) -> PassResult:
        zero: ir.Value | None = None
        for node in list(model.graph):
            if not _prepends_zero(node):
                continue
            if zero is None:
                zero = add_constant(model.graph, "const/zero", np.zeros(1, np.int64))
            concat = ir.node("Concat", [zero, node.inputs[0]], {"axis": 0}, name=node.name)
            convenience.replace_nodes_and_values(model.graph, node, [node], [concat], node.outputs, concat.outputs)
        return PassResult(model, modified=zero is not None)


def _prepends_zero(node: ir.Node) -> bool:
    if (node.domain, node.op_type) != ("", "Pad") or any(value is not None for value in node.inputs[2:]):
        return False
    data, widths = node.inputs[:2]
    is_vector = data.dtype == ir.DataType.INT64 and data.shape is not None and len(data.shape) == 1
    mode = node.attributes["mode"].as_string() if "mode" in node.attributes else "constant"
    pads = convenience.get_const_tensor(widths)
    return is_vector and mode == "constant" and pads is not None and pads.numpy().tolist() == [1, 0]
