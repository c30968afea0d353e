"""Add the debug output ``kept_site (B, S) int32`` to a finished graph."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import InPlacePass, PassResult

from ...contract import KEPT_SITE as NAME
from .name_kept_rows import kept_rows
from .patterns import add_constant


class AddKeptSite(InPlacePass):
    """Index of the site that dropped each token, the number of sites if it stayed, -1 for padding.

    The rows of each cut are followed back to positions of the flattened input; whoever survives site i is
    overwritten with i + 1. A position one past the end is that of tokens which stand for empty texts, and is cut off.
    Nothing that leads to another output is touched.
    """

    def call(self, model: ir.Model) -> PassResult:
        graph = model.graph
        if any(output.name == NAME for output in graph.outputs):
            return PassResult(model, modified=False)

        def const(value: object, name: str) -> ir.Value:
            return add_constant(graph, f"{NAME}/{name}", np.asarray(value, np.int64))

        def add(op_type: str, inputs: list[ir.Value], name: str, **attributes: object) -> ir.Value:
            node = ir.node(op_type, inputs, attributes, name=f"{NAME}/{name}")
            node.outputs[0].name = node.name
            graph.append(node)
            return node.outputs[0]

        vector = const([-1], "vector")
        shape = add("Shape", [graph.inputs[0]], "shape")
        size = add("Shape", [add("Reshape", [graph.inputs[0], vector], "flat")], "size")
        minus_one = ir.tensor(np.array([-1], np.int64))
        longer = add("Add", [size, const([1], "one")], "longer")
        reached = add("ConstantOfShape", [longer], "padding", value=minus_one)
        origin = None
        for i, rows in enumerate(kept_rows(graph)):
            origin = rows if origin is None else add("Gather", [origin, rows], f"origin_{i}", axis=0)
            level = add("Expand", [const(i, f"level_{i}"), add("Shape", [origin], f"count_{i}")], f"reach_{i}")
            reached = add("ScatterElements", [reached, origin, level], f"reached_{i}", axis=0)
        reached = add("Slice", [reached, const([0], "begin"), size], "of_input")
        kept_site = add("Cast", [add("Reshape", [reached, shape], "rectangle")], "cast", to=ir.DataType.INT32)
        kept_site.name = NAME
        kept_site.dtype = ir.DataType.INT32
        kept_site.shape = graph.inputs[0].shape
        graph.outputs.append(kept_site)
        return PassResult(model, modified=True)
