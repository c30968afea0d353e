"""What several passes look for, and what they add."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from .gather_in_shape import is_known

LAST_AXIS = (-1, 1)
"""Of packed states, which have two."""
FP32 = 1
"""The `stash_type` of a norm that sums in fp32, as SkipLayerNormalization is asked to."""


def add_constant(graph: ir.Graph, name: str, array: np.ndarray) -> ir.Value:
    """Add an array to a graph's initializers; return its value, which has the array's type and shape."""
    value = ir.val(name, const_value=ir.tensor(array, name=name))
    graph.register_initializer(value)
    return value


def made_by(value: ir.Value | None, op_type: str, domain: str = "") -> ir.Node | None:
    """Return the node that makes a value, if it is the operator of that name, of ONNX or of another domain."""
    maker = None if value is None else value.producer()
    return maker if maker is not None and (maker.domain, maker.op_type) == (domain, op_type) else None


def read_once(value: ir.Value) -> bool:
    """Say whether one node reads a value, and nothing else."""
    return len(value.uses()) == 1 and not value.is_graph_output()


def sum_before(norm: ir.Node) -> ir.Node | None:
    """Return the sum of two packed tensors that a norm over their width is of, if nothing else reads it."""
    value = norm.inputs[0] if (norm.domain, norm.op_type) == ("", "LayerNormalization") else None
    total = made_by(value, "Add")
    if value is None or total is None or not read_once(value) or len(norm.outputs) > 1:
        return None
    axis, stash_type = (
        norm.attributes[name].as_int() if name in norm.attributes else default
        for name, default in (("axis", -1), ("stash_type", FP32))
    )
    is_packed = all(_is_packed(part, norm.outputs[0]) for part in total.inputs)
    return total if is_packed and axis in LAST_AXIS and stash_type == FP32 else None


def _is_packed(value: ir.Value | None, like: ir.Value) -> bool:
    """Say whether a value has two axes, both known to be as long as those of another, so that nothing is broadcast."""
    shape = None if value is None else value.shape
    return shape is not None and len(shape) == 2 and shape == like.shape and is_known(shape)


def is_split_in_three(node: ir.Node) -> bool:
    """Say whether a node divides packed states into three of equal widths, as queries, keys and values are."""
    if (node.domain, node.op_type) != ("", "Split") or "num_outputs" not in node.attributes or len(node.inputs) > 1:
        return False
    axis = node.attributes["axis"].as_int() if "axis" in node.attributes else 0
    return axis in LAST_AXIS and node.attributes["num_outputs"].as_int() == 3


def is_exact_gelu(node: ir.Node) -> bool:
    """Say whether a node is a GELU by the error function. Some models have an approximation by tanh, which gives other numbers."""
    if (node.domain, node.op_type) != ("", "Gelu"):
        return False
    return "approximate" not in node.attributes or node.attributes["approximate"].as_string() == "none"
