"""Dense BERT at any depth from one trace of three layers: PyTorch's exporter takes half a second per layer it traces.

The result is the graph that the exporter makes of the deep network, node for node and weight for weight.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import onnx_ir as ir
import torch
from onnx_ir.tensor_adapters import TorchTensor

TRACED = 3
"""The first layer, one that is repeated, and the last."""


@dataclass
class Layered:
    """A network that can be built at any depth.

    trace: makes a graph of a network with that many layers; nothing is optimised, so weights have their names.
    weights: the state dict of the network with that many layers, by the names in the graph.
    layers: what the names of its layers' weights begin with, such as ``encoder.layer.``.
    """

    trace: Callable[[int], torch.onnx.ONNXProgram]
    weights: Callable[[int], Mapping[str, torch.Tensor]]
    layers: str
    _shallow: torch.onnx.ONNXProgram | None = field(default=None, init=False)

    def graph(self, depth: int) -> torch.onnx.ONNXProgram:
        """Return the graph of the network with `depth` layers, not optimised."""
        if depth < TRACED:
            return self.trace(depth)
        self._shallow = self._shallow or self.trace(TRACED)
        deep = copy.copy(self._shallow)
        deep.model = self._shallow.model.clone()
        repeat_layer(deep.model.graph, self.layers, depth)
        for name, tensor in self.weights(depth).items():
            if name in deep.model.graph.initializers:
                deep.model.graph.initializers[name].const_value = TorchTensor(tensor.detach(), name)
        return deep


def repeat_layer(graph: ir.Graph, layers: str, depth: int) -> None:
    """Turn a graph of three layers into one of `depth` layers, in place: the middle one is repeated.

    Args:
        layers: what the names of the layers' weights begin with. Repeated layers share the values of the middle one's.
    """
    middle = f"{layers}1."
    before, after = (_states_after(graph, f"{layers}{i}.") for i in range(2))
    uses, nodes = tuple(after.uses()), list(_between(graph, before, after, middle))
    for value in _weights(graph, f"{layers}2."):
        value.name = str(value.name).replace(f"{layers}2.", f"{layers}{depth - 1}.")
    states, place = after, nodes[-1]
    for i in range(2, depth - 1):
        copies = {before: states}
        for value in _weights(graph, middle):
            name = str(value.name).replace(middle, f"{layers}{i}.")
            copies[value] = ir.Value(name=name, shape=value.shape, type=value.type, const_value=value.const_value)
            graph.register_initializer(copies[value])
        for node in nodes:
            made = _copy(node, copies, suffix=f"_{i}")
            graph.insert_after(place, made)
            place = made
        states = copies[after]
    for use in uses:
        use.node.replace_input_with(use.idx, states)


def _weights(graph: ir.Graph, layer: str) -> list[ir.Value]:
    return [value for name, value in graph.initializers.items() if name.startswith(layer)]


def _states_after(graph: ir.Graph, layer: str) -> ir.Value:
    """Return the output of the last node that reads a weight of the layer: its LayerNormalization."""
    weights = set(_weights(graph, layer))
    return [node for node in graph if not weights.isdisjoint(node.inputs)][-1].outputs[0]


def _between(graph: ir.Graph, before: ir.Value, after: ir.Value, layer: str) -> Iterator[ir.Node]:
    """Yield the nodes that depend on `before` or on weights of the layer, up to the one that gives `after`."""
    reached = {before, *_weights(graph, layer)}
    for node in graph:
        if not reached.isdisjoint(node.inputs):
            yield node
            reached.update(node.outputs)
        if after in node.outputs:
            return


def _copy(node: ir.Node, copies: dict[ir.Value, ir.Value], suffix: str) -> ir.Node:
    """Copy a node: it reads the copies of values that have one, and its outputs' copies are added to them."""
    outputs = [ir.Value(name=f"{value.name}{suffix}", shape=value.shape, type=value.type) for value in node.outputs]
    made = ir.Node(
        node.domain,
        node.op_type,
        inputs=[value if value is None else copies.get(value, value) for value in node.inputs],
        attributes=list(node.attributes.values()),
        overload=node.overload,
        outputs=outputs,
        version=node.version,
    )
    copies.update(zip(node.outputs, outputs))
    return made
