"""Write sums before a norm, and biases before a GELU, as operators of ONNX Runtime that take one launch.

Its CUDA provider computes a Gemm with a bias in two launches, the bias first. Sums and norms that it fuses by itself have three axes, and
packed states have two.
"""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir import convenience
from onnx_ir.passes import InPlacePass, PassResult

from .lower_to_ort_packed_attention import DOMAIN
from .patterns import is_exact_gelu, made_by, read_once, sum_before


class FuseForOrtCuda(InPlacePass):
    """``LayerNormalization(Gemm + residual)`` becomes a SkipLayerNormalization that adds the Gemm's bias, and ``Gelu(Gemm)`` a
    BiasGelu. So does a norm of any other sum of two packed tensors. A sum that something else reads too stays.
    """

    def call(self, model: ir.Model) -> PassResult:
        changed = False
        for node in list(model.graph):
            if (total := sum_before(node)) is not None:
                old, made = [node, total], _skip_norm(node, total)
            elif is_exact_gelu(node) and _has_own_bias(node.inputs[0]):
                old, made = [node], ir.node("BiasGelu", [node.inputs[0], _take_bias(node.inputs[0])], domain=DOMAIN)
            else:
                continue
            made.name = node.name
            convenience.replace_nodes_and_values(model.graph, node, old, [made], node.outputs[:1], made.outputs)
            changed = True
        if changed:
            model.opset_imports[DOMAIN] = 1
        return PassResult(model, modified=changed)


def _skip_norm(norm: ir.Node, total: ir.Node) -> ir.Node:
    first, second = total.inputs
    if not _has_own_bias(first) and _has_own_bias(second):
        first, second = second, first
    further = [*norm.inputs[1:], None][:2]  # a norm may have no offset
    if _has_own_bias(first):
        further.append(_take_bias(first))
    epsilon = norm.attributes["epsilon"].as_float() if "epsilon" in norm.attributes else 1e-5
    return ir.node("SkipLayerNormalization", [first, second, *further], {"epsilon": epsilon}, domain=DOMAIN)


def _has_own_bias(value: ir.Value | None) -> bool:
    """Say whether a value comes from a Gemm with a bias for each of its columns, and goes to one reader."""
    gemm = made_by(value, "Gemm")
    if value is None or gemm is None or len(gemm.inputs) < 3 or not read_once(value):
        return False
    bias = gemm.inputs[2]
    if bias is None or not bias.is_initializer() or bias.shape is None or value.shape is None:
        return False
    scaled = "beta" in gemm.attributes and gemm.attributes["beta"].as_float() != 1
    return bias.shape == value.shape[1:] and not scaled


def _take_bias(value: ir.Value | None) -> ir.Value:
    """Take the bias off the Gemm that makes a value, and return it."""
    gemm = None if value is None else value.producer()
    assert gemm is not None
    bias = gemm.inputs[2]
    assert bias is not None
    gemm.resize_inputs(2)
    return bias
