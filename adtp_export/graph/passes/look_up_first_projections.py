"""Look up what layer 0's query, key and value are made of, where a matrix product would compute it.

An embedding is ``LayerNorm(word + type + position)``: a sum of table rows, centred, divided by one number per token, and
scaled. All of that but the division is linear, and so is the product after it: it moves into the tables. What is left
is ``(row + row) / deviation + bias``. Source: Graef, "Transformer tricks: Precomputing the first layer", arXiv
2402.13388, which has it for models without learned positions and with RMSNorm.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import InPlacePass, PassResult, PreconditionError

from ...contract import QKV, product
from .patterns import add_constant

PRODUCT = product(0, QKV)


class LookUpFirstProjections(InPlacePass):
    """``Gemm(LayerNormalization(sum of embeddings))`` of layer 0 becomes two Gathers. The tables, fp32 ``(rows, 3H)``, are
    computed in fp64: one by word, ``12 H`` bytes a word, and one for all pairs of token type and position (for positions, where
    there are no types).
    """

    def requires(self, model: ir.Model) -> None:
        if not any(node.name == f"{PRODUCT}/Gemm" for node in model.graph):
            raise PreconditionError(f"the graph has no {PRODUCT}/Gemm")
        gemm = next(node for node in model.graph if node.name == f"{PRODUCT}/Gemm")
        norm = gemm.inputs[0].producer()
        if norm is None or norm.op_type != "LayerNormalization":
            raise PreconditionError(f"{PRODUCT} does not read the embeddings: a cut or a projection comes before")

    def call(self, model: ir.Model) -> PassResult:
        graph = model.graph
        gemm = next(node for node in graph if node.name == f"{PRODUCT}/Gemm")
        norm = gemm.inputs[0].producer()
        parameters = gemm.inputs[1:]
        weight, *bias = map(_fp64, parameters)  # (3H, H) and (3H,), but the exporter drops a bias of zeros
        gamma, *beta = map(_fp64, norm.inputs[1:])
        constants = sum(bias) + weight @ sum(beta, np.zeros_like(gamma))
        (words, ids), *others = sorted(_gathered(norm.inputs[0]), key=lambda pair: -len(pair[0]))

        def project(rows: np.ndarray) -> np.ndarray:
            return ((rows - rows.mean(1, keepdims=True)) * gamma) @ weight.T

        new: list[ir.Node] = []

        def constant(name: str, array: np.ndarray) -> ir.Value:
            return add_constant(graph, f"{PRODUCT}.{name}", array)

        def node(op_type: str, *inputs: ir.Value) -> ir.Value:
            made = ir.node(op_type, inputs, name=f"{PRODUCT}/{op_type}{len(new)}")
            made.outputs[0].name, made.outputs[0].type = made.name, inputs[0].type
            made.outputs[0].shape = gemm.outputs[0].shape if op_type == "Gather" else inputs[0].shape
            new.append(made)
            return made.outputs[0]

        norm.resize_outputs(3)
        _, mean, inverse = norm.outputs
        for value, name in ((mean, "mean"), (inverse, "inverse_deviation")):
            value.name, value.type = f"{norm.name}:{name}", norm.outputs[0].type
        total = node("Gather", constant("words", project(words).astype(np.float32)), ids)
        if others:  # positions, and token types where there are any
            (positions, pair), *types = others
            pairs = project(positions)
            for rows, type_ids in types:
                pair = node("Add", node("Mul", type_ids, constant("positions", np.array(len(pairs)))), pair)
                pairs = (project(rows)[:, None] + pairs).reshape(-1, pairs.shape[1])
            total = node("Add", total, node("Gather", constant("pairs", pairs.astype(np.float32)), pair))
        scaled = node("Mul", total, inverse)
        result = node("Add", scaled, constant("constant", constants.astype(np.float32)))
        ir.convenience.replace_nodes_and_values(graph, gemm, [gemm], new, gemm.outputs, [result])
        for value in parameters:
            if not value.uses():
                del graph.initializers[value.name]
        return PassResult(model, modified=True)


def _gathered(value: ir.Value) -> Iterator[tuple[np.ndarray, ir.Value]]:
    """Yield the table and the indices of each Gather that a sum consists of."""
    node = value.producer()
    if node.op_type == "Add":
        for part in node.inputs:
            yield from _gathered(part)
    else:
        table, indices = node.inputs
        assert indices is not None
        yield _fp64(table), indices


def _fp64(value: ir.Value) -> np.ndarray:
    return value.const_value.numpy().astype(np.float64)
