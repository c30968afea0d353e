"""Type the graph in fp16 or bf16, all but what decides or turns: pruners and rotary embeddings stay in fp32, and so do the outputs."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx_ir as ir
from onnx_ir.passes import InPlacePass, PassResult, PostconditionError

from ...contract import (
    ASKED,
    DOMAIN,
    IMAGE_CUTS,
    METADATA,
    PAST,
    PRECISION,
    PRESENT,
    PRUNERS,
    RECEIVED,
    RMS,
    ROTATE,
)
from ...errors import InputError

SUMS_OF_SQUARES = ("ReduceL2",)
"""Of a vector that is normalized. They would overflow in fp16 from a length of 256 on, so they and what is divided by them is fp32."""


class ConvertPrecision(InPlacePass):
    """Weights are stored in the type. LayerNormalization sums in fp32 (its stash_type), the attention body takes its
    softmax in fp32, and a pruner's scores are fp32 from its weights on: what they flow into follows, until it is indices. So
    are those made of what tokens received, which the attention operator gives in fp32. Queries and keys are turned by their positions in
    fp32, between two casts, and image tokens chosen. Inputs stay in fp32, and caches have the type.

    Args:
        dtype: FLOAT16, where weights beyond its range are refused; or BFLOAT16, which has the range of fp32 and three significant digits.
    """

    def __init__(self, dtype: ir.DataType) -> None:
        self.dtype = dtype

    def call(self, model: ir.Model) -> PassResult:
        graph = model.graph
        self._cast_inputs(graph)
        kept = self._kept_in_fp32(graph)
        for value in graph.initializers.values():
            if value.dtype == ir.DataType.FLOAT and value not in kept:
                value.const_value = ir.tensor(self._convert(value), self.dtype, name=value.name)
                value.dtype = self.dtype
        for node in graph:
            for output in node.outputs:
                if output.dtype == ir.DataType.FLOAT and output not in kept:
                    output.dtype = self.dtype
                    self._set_type(node)
        for i, output in enumerate(graph.outputs):
            wanted = self.dtype if (output.name or "").startswith(PRESENT) else ir.DataType.FLOAT
            if output.dtype in (self.dtype, ir.DataType.FLOAT) and output.dtype != wanted:
                name, output.name = output.name, f"{output.name}/{output.dtype.name.lower()}"
                graph.outputs[i] = _cast(output, wanted, name)
                graph.append(graph.outputs[i].producer())
        model.metadata_props[f"{METADATA}{PRECISION}"] = {"FLOAT16": "fp16", "BFLOAT16": "bf16"}[self.dtype.name]
        return PassResult(model, modified=True)

    def _cast_inputs(self, graph: ir.Graph) -> None:
        """A cache has the type, and other inputs stay in fp32: behind them stands a Cast, which like all nodes will give the type."""
        for value in graph.inputs:
            if value.dtype == ir.DataType.FLOAT and (value.name or "").startswith(PAST):
                value.dtype = self.dtype
            elif value.dtype == ir.DataType.FLOAT:
                uses, result = list(value.uses()), _cast(value, ir.DataType.FLOAT, f"{value.name}/rounded")
                for node, i in uses:
                    node.replace_input_with(i, result)
                producer = result.producer()
                assert producer is not None
                graph.insert_before(graph[0], producer)

    def _set_type(self, node: ir.Node) -> None:
        """Some nodes say in an attribute what type they give: zeros to scatter into, a mask made a number."""
        if node.op_type == "Cast":
            node.attributes["to"] = ir.AttrInt64("to", self.dtype)
        elif node.op_type == "ConstantOfShape":
            value = (
                node.attributes["value"].as_tensor()
                if "value" in node.attributes
                else ir.tensor(np.zeros(1, np.float32))
            )
            node.attributes["value"] = ir.AttrTensor(
                "value", ir.tensor(value.numpy().astype(self.dtype.numpy()), self.dtype)
            )

    def _kept_in_fp32(self, graph: ir.Graph) -> set[ir.Value]:
        """Return the values that stay in fp32; what else flows into their nodes is cast to it."""
        precise = {value for name, value in graph.initializers.items() if name.startswith(PRUNERS)}
        precise |= {node.outputs[1] for node in graph if _gives_received(node)}
        casts: dict[ir.Value, ir.Value] = {}
        rounded = self._rounded_after_turning(graph)
        computing: set[ir.Node] = set()
        for node in list(graph):
            kept = node.op_type in SUMS_OF_SQUARES or _turns(node) or any(value in precise for value in node.inputs)
            if not kept or node in rounded:
                continue
            computing.add(node)
            precise.update(output for output in node.outputs if output.dtype == ir.DataType.FLOAT)
            for i, value in enumerate(node.inputs):
                if value is None or value.dtype != ir.DataType.FLOAT or value in precise:
                    continue
                if value.is_initializer():
                    precise.add(value)
                    continue
                if value not in casts:
                    casts[value] = _cast(value, ir.DataType.FLOAT, f"{value.name}/fp32")
                    graph.insert_before(node, casts[value].producer())
                node.replace_input_with(i, casts[value])
        for value in [value for value in graph.initializers.values() if value in precise]:
            self._part_from(value, [(node, i) for node, i in value.uses() if node not in computing])
        return precise | set(casts.values())

    def _part_from(self, value: ir.Value, uses: list[tuple[ir.Node, int]]) -> None:
        """Give nodes that do not compute in fp32 a copy of a constant, such as 0, that one which does reads, too."""
        if not uses:
            return
        kind = ir.TensorType(ir.DataType.FLOAT)  # not `value.type`, which would be one object for both
        copied = ir.Value(name=f"{value.name}/own", type=kind, shape=value.shape, const_value=value.const_value)
        uses[0][0].graph.register_initializer(copied)
        for node, i in uses:
            node.replace_input_with(i, copied)

    def _rounded_after_turning(self, graph: ir.Graph) -> set[ir.Node]:
        """Put a Cast after what turns queries and keys, and return these nodes. Like all others, they will give the type."""
        added = set()
        for value in [output for node in graph if _turns(node) for output in node.outputs]:
            # The body of a loop is a part of the node that has it.
            others = [(node, i) for node, i in value.uses() if node.graph is graph and not _turns(node)]
            if value.dtype == ir.DataType.FLOAT and others:
                result = _cast(value, ir.DataType.FLOAT, f"{value.name}/rounded")
                before, after = value.producer(), result.producer()
                assert before is not None
                assert after is not None
                for node, i in others:
                    node.replace_input_with(i, result)
                graph.insert_after(before, after)
                added.add(after)
        return added

    def ensures(self, model: ir.Model) -> None:
        for node in model.graph:
            found = {v.dtype for v in (*node.inputs, *node.outputs) if v is not None}
            if node.op_type != "Cast" and not _gives_received(node) and {ir.DataType.FLOAT, self.dtype} <= found:
                raise PostconditionError(f"{node.name} mixes {self.dtype.name} and FLOAT")

    def _convert(self, value: ir.Value) -> np.ndarray:
        weights = value.const_value.numpy()
        largest = float(ml_dtypes.finfo(self.dtype.numpy()).max)
        most = np.abs(weights[np.isfinite(weights)]).max(initial=0)  # any type has infinity, which masks are made of
        if most > largest:
            raise InputError(
                f"--precision: {value.name} holds {most:.3g}, beyond {self.dtype.name}'s {largest:.3g}; "
                "bf16 has fp32's range, type: --precision bf16"
            )
        return weights.astype(self.dtype.numpy())


def _turns(node: ir.Node) -> bool:
    """Whether a node turns queries and keys, is of a root mean square, or chooses image tokens: between casts, these compute in fp32."""
    name = node.name or ""
    return name.startswith(IMAGE_CUTS) or any(part in name for part in (ROTATE, RMS, ASKED))


def _gives_received(node: ir.Node) -> bool:
    return node.domain == DOMAIN and node.op_type.endswith(RECEIVED)


def _cast(value: ir.Value, dtype: ir.DataType, name: str) -> ir.Value:
    node = ir.node("Cast", [value], {"to": dtype}, name=name)
    node.outputs[0].name, node.outputs[0].dtype, node.outputs[0].shape = name, dtype, value.shape
    return node.outputs[0]
