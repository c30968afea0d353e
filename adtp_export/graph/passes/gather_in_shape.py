"""Gather in the shape of the indices: no size of a rectangle has to come back to the host for it."""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir import convenience
from onnx_ir.passes import InPlacePass, PassResult


class GatherInShape(InPlacePass):
    """``Reshape(Gather(x, Reshape(i, [-1])), shape of i)`` of a vector x becomes ``Gather(x, i)``.

    The target of the outer Reshape holds a length that depends on data, and ONNX Runtime's CUDA provider reads it on the host.
    """

    def call(self, model: ir.Model) -> PassResult:
        changed = False
        for node in list(model.graph):
            found = _flattened_gather(node)
            if found is None:
                continue
            values, indices = found
            gather = ir.node("Gather", [values, indices], {"axis": 0}, name=node.name)
            convenience.replace_nodes_and_values(model.graph, node, [node], [gather], node.outputs, gather.outputs)
            changed = True
        return PassResult(model, modified=changed)


def _flattened_gather(reshape: ir.Node) -> tuple[ir.Value, ir.Value] | None:
    """Return the vector and the indices, if a Reshape gives their shape back to what was gathered by them flat."""
    gather = _maker(reshape, "Reshape", "Gather", 0)
    flatten = None if gather is None else _maker(gather, "Gather", "Reshape", 1)
    if gather is None or flatten is None:
        return None
    values, indices, shape = gather.inputs[0], flatten.inputs[0], reshape.outputs[0].shape
    if values is None or indices is None or values.shape is None or len(values.shape) != 1 or shape is None:
        return None
    return (values, indices) if shape == indices.shape and is_known(shape) else None


def _maker(node: ir.Node, op_type: str, by: str, place: int) -> ir.Node | None:
    """Return the node that makes an input of another, if both are of these operators."""
    value = node.inputs[place] if (node.domain, node.op_type) == ("", op_type) else None
    maker = None if value is None else value.producer()
    return maker if maker is not None and (maker.domain, maker.op_type) == ("", by) else None


def is_known(shape: ir.Shape) -> bool:
    """Say whether each axis has a size or a name: two axes of which nothing is known need not be equal."""
    return all(isinstance(axis, int) or axis.value is not None for axis in shape)
