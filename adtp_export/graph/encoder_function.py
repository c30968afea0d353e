"""A file whose whole graph is one local function, `adtp::AdtpEncoder`, which a library may run as one operator."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from ..contract import (
    BATCH,
    BOUNDS,
    DOMAIN,
    DOMAIN_VERSION,
    ENCODER,
    KEPT_SITE,
    PLUGIN_NAMESPACE,
    PLUGIN_VERSION,
    SEQUENCE,
    TOKENS,
)

_AXES = {BATCH: "texts", SEQUENCE: "length", TOKENS: "tokens", BOUNDS: "bounds"}
"""Words of the operator's attributes for the axes of a graph; numbers stand for themselves."""


def enclosed(model: ir.Model, plan: str, weights: Sequence[np.ndarray]) -> ir.Model:
    """Move the graph of a model into a function. A runtime that does not know the operator inlines it and gets the same graph back.

    The function's inputs are those of the graph, then `weights`. The body's initializers are matched to these by value: they are the
    same arrays, with zeros behind them where a kernel wants more columns than the model has. One that matches none is a constant.

    Args:
        model: any form; it is used up.
        plan: the operator's attribute of that name; `plugins.plan` says what is in it. Two more say types and axes of inputs and outputs,
            and by the others TensorRT's parser finds a plugin of the operator's name.
        weights: of the plan, in its order.
    """
    graph = model.graph
    graph.outputs[:] = [output for output in graph.outputs if output.name != KEPT_SITE]  # the plan does not answer that
    RemoveUnusedNodesPass()(model)
    attributes = {
        "plan": plan,
        "inputs": _said(graph.inputs),
        "outputs": _said(graph.outputs),
        "plugin_version": PLUGIN_VERSION,
        "plugin_namespace": PLUGIN_NAMESPACE,
    }
    outer = [_weight(i, array) for i, array in enumerate(weights)]
    inner = [ir.val(value.name, value.dtype, value.shape) for value in outer]
    given = [ir.val(value.name, value.dtype, value.shape) for value in graph.inputs]
    for value, replacement in zip(graph.inputs, given):
        ir.convenience.replace_all_uses_with(value, replacement)
    first = [node for value in [*graph.initializers.values()] for node in _replaced(value, inner, weights)]
    results, nodes = list(graph.outputs), list(graph)
    graph.outputs.clear()
    graph.remove(nodes)
    versions = {**graph.opset_imports, DOMAIN: DOMAIN_VERSION}
    body = ir.Graph([*given, *inner], results, nodes=[*first, *nodes], opset_imports=versions, name=ENCODER)
    declared = [ir.Attr(name, ir.AttributeType.STRING, None) for name in attributes]
    function = ir.Function(DOMAIN, ENCODER, graph=body, attributes=declared)
    inputs = [ir.val(value.name, value.dtype, value.shape) for value in graph.inputs]
    node = ir.node(ENCODER, [*inputs, *outer], attributes, domain=DOMAIN, num_outputs=len(results), name=ENCODER)
    for made, result in zip(node.outputs, results):
        made.name, made.type, made.shape = result.name, result.type, result.shape
    around = ir.Graph(inputs, node.outputs, nodes=[node], initializers=outer, opset_imports=versions, name=graph.name)
    return ir.Model(
        around,
        ir_version=model.ir_version,
        producer_name=model.producer_name,
        producer_version=model.producer_version,
        functions=[*model.functions.values(), function],
        metadata_props=dict(model.metadata_props),
    )


def _said(values: Sequence[ir.Value]) -> str:
    """Say types and axes in the words of `plugins/cpp/signature.h`."""
    words = []
    for value in values:
        assert value.dtype is not None
        assert value.shape is not None
        axes = [str(axis.value if isinstance(axis, ir.SymbolicDim) else axis) for axis in value.shape]
        words.append(" ".join([value.dtype.numpy().name, *(_AXES.get(axis, axis) for axis in axes)]))
    return "; ".join(words)


def _weight(i: int, array: np.ndarray) -> ir.Value:
    tensor = ir.tensor(array, name=f"weights.{i}")
    return ir.val(tensor.name, tensor.dtype, array.shape, const_value=tensor)


def _replaced(value: ir.Value, inner: Sequence[ir.Value], weights: Sequence[np.ndarray]) -> Iterator[ir.Node]:
    """Put a weight, the beginning of one, or a constant in an initializer's place; yield the nodes that this takes."""
    assert value.const_value is not None
    array = value.const_value.numpy()
    place = next((i for i, weight in enumerate(weights) if _begins(weight, array)), None)
    if place is not None and weights[place].shape == array.shape:
        ir.convenience.replace_all_uses_with(value, inner[place])
        return
    if place is None:
        node = ir.node("Constant", [], {"value": value.const_value})
    else:
        parts = [np.zeros(array.ndim, np.int64), np.array(array.shape), np.arange(array.ndim)]
        bounds = [ir.node("Constant", [], {"value": ir.tensor(part.astype(np.int64))}) for part in parts]
        for bound, what in zip(bounds, ("begin", "end", "axes")):
            bound.outputs[0].name = f"{value.name}/{what}"
        yield from bounds
        node = ir.node("Slice", [inner[place], *(bound.outputs[0] for bound in bounds)])
    made = node.outputs[0]
    made.type, made.shape = value.type, value.shape
    ir.convenience.replace_all_uses_with(value, made)
    made.name = value.name
    yield node


def _begins(weight: np.ndarray, array: np.ndarray) -> bool:
    """Say whether an array is what a weight begins with, and the rest of that is zeros."""
    if weight.dtype != array.dtype or weight.ndim != array.ndim or not array.ndim or weight.size < array.size:
        return False
    if any(own < wanted for own, wanted in zip(weight.shape, array.shape)):
        return False
    leading = weight[tuple(map(slice, array.shape))]
    same = np.array_equal(leading[:1], array[:1]) and np.array_equal(leading, array)
    return same and (weight.shape == array.shape or np.count_nonzero(weight) == np.count_nonzero(array))
