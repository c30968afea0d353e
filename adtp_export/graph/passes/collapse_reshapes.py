"""Remove reshapes that change nothing: the exporter guards every index and every scalar read with one."""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir import convenience
from onnx_ir.passes import InPlacePass, PassResult


class CollapseReshapes(InPlacePass):
    """``Reshape(x, [-1])`` of a vector is x; ``Gather(Reshape(x, [-1]), 0)`` of a scalar is x."""

    def call(self, model: ir.Model) -> PassResult:
        removed = 0
        for node in list(model.graph):
            source = _unchanged_input(node)
            if source is not None:
                convenience.replace_all_uses_with(node.outputs[0], source)
                removed += 1
        return PassResult(model, modified=removed > 0)


def _unchanged_input(node: ir.Node) -> ir.Value | None:
    if node.outputs[0].is_graph_output():
        return None
    if node.op_type == "Reshape" and _rank(node.inputs[0]) == 1 and _constant(node.inputs[1]) == [-1]:
        return node.inputs[0]
    if node.op_type == "Gather" and _constant(node.inputs[1]) == 0:
        reshape = node.inputs[0].producer()
        if reshape is not None and reshape.op_type == "Reshape" and _rank(reshape.inputs[0]) == 0:
            return reshape.inputs[0]
    return None


def _rank(value: ir.Value) -> int | None:
    return None if value.shape is None else len(value.shape)


def _constant(value: ir.Value) -> object:
    tensor = ir.convenience.get_const_tensor(value)
    return None if tensor is None else tensor.numpy().tolist()
