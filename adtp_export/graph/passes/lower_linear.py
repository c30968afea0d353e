"""Give the encoder's matrix products, each with the GELU or the Split behind it, to the operators of lower precision."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import InPlacePass, PassResult, PostconditionError

from ...contract import (
    BF16_LINEAR,
    DOMAIN,
    DOMAIN_VERSION,
    GELU,
    IN_FEATURES,
    IN_THREE,
    INT8_LINEAR,
    METADATA,
    PRECISION,
    PRODUCTS,
)
from ...ops import onnx_linear
from .patterns import add_constant, is_exact_gelu, is_split_in_three, read_once


@dataclass(frozen=True)
class Int8Weight:
    """A product's weights ``(N, K) int8``, the scale of each row, ``(N,) float32``, and by what inputs are multiplied before they are
    rounded: ``(K,) float32``, or ``(1,)`` of 1.
    """

    stored: np.ndarray
    scale: np.ndarray
    factors: np.ndarray


class LowerLinear(InPlacePass):
    """A product is ``layers.<i>.<place>/Gemm``. All else stays in fp32: norms, attention, pruners, heads.

    Args:
        int8: weights of the products that become INT8, by their names; None: all products become bf16.
    """

    def __init__(self, int8: Mapping[str, Int8Weight] | None = None) -> None:
        self.int8 = int8

    def call(self, model: ir.Model) -> PassResult:
        graph = model.graph
        for gemm in list(graph):
            name = (gemm.name or "").removesuffix("/Gemm")
            wanted = name.endswith(PRODUCTS) if self.int8 is None else name in self.int8
            if gemm.op_type == "Gemm" and wanted:
                self._lower(graph, gemm, name)
        for name in [name for name, value in graph.initializers.items() if not value.uses()]:
            if not graph.initializers[name].is_graph_output():
                graph.initializers.pop(name)
        model.opset_imports[DOMAIN] = DOMAIN_VERSION
        model.metadata_props[f"{METADATA}{PRECISION}"] = "bf16" if self.int8 is None else "int8"
        return PassResult(model, modified=True)

    def _lower(self, graph: ir.Graph, gemm: ir.Node, name: str) -> None:
        x, weight, *bias = gemm.inputs
        assert x is not None
        assert weight is not None
        assert weight.const_value is not None
        n, k = weight.const_value.shape
        if self.int8 is None:
            operator, tensors = BF16_LINEAR, {"weight": onnx_linear.bf16_weight(weight.const_value.numpy())}
        else:
            chosen = self.int8[name]
            stored, sums = onnx_linear.int8_weight(chosen.stored)
            tensors = {"factors": chosen.factors, "weight": stored, "scale": chosen.scale, "sums": sums}
            operator = INT8_LINEAR
        constants = [add_constant(graph, f"{name}.{operator}/{key}", array) for key, array in tensors.items()]
        constants += bias or [add_constant(graph, f"{name}.{operator}/bias", np.zeros(n, np.float32))]
        last, ending = _behind(gemm, int(n))
        operator += ending
        linear = ir.node(
            operator,
            [x, *constants],
            {IN_FEATURES: int(k)},
            domain=DOMAIN,
            name=f"{name}/{operator}",
            num_outputs=len(last.outputs),
        )
        old = [gemm] if last is gemm else [last, gemm]
        graph.insert_before(last, linear)
        ir.convenience.replace_all_uses_with(last.outputs, linear.outputs)
        for result, made in zip(last.outputs, linear.outputs):
            made.name, made.type, made.shape = result.name, result.type, result.shape
        graph.remove(old, safe=True)

    def ensures(self, model: ir.Model) -> None:
        if self.int8 is not None:
            wanted = len(self.int8)
            found = sum(node.op_type.startswith(INT8_LINEAR) for node in model.graph)
            if found != wanted:
                raise PostconditionError(f"{found} of {wanted} products became {INT8_LINEAR}")


def _behind(gemm: ir.Node, width: int) -> tuple[ir.Node, str]:
    """Return the last node that an operator takes the place of, and the ending of its name."""
    if not read_once(gemm.outputs[0]):
        return gemm, ""
    ((following, _),) = gemm.outputs[0].uses()
    if is_exact_gelu(following):
        return following, GELU
    if is_split_in_three(following) and width % (3 * onnx_linear.COLUMNS) == 0:
        return following, IN_THREE
    return gemm, ""
