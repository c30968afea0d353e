"""Write sums before a norm, and biases before a GELU, as operators of ONNX Runtime that take one launch.

Its CUDA provider computes a Gemm with a bias in two launches, the bias first. Sums and norms that it fuses by itself have three axes, and
packed states have two.
"""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir import convenience
from onnx_ir.passes import InPlacePass, PassResult

from .gather_in_shape import is_known
from .lower_to_ort_packed_attention import DOMAIN

LAST_AXIS = (-1, 1)
"""Of packed states, which have two."""
FP32 = 1
"""The `stash_type` of a norm that sums in fp32, as SkipLayerNormalization is asked to."""


class FuseForOrtCuda(InPlacePass):
    """``LayerNormalization(Gemm + residual)`` becomes a SkipLayerNormalization that adds the Gemm's bias, and ``Gelu(Gemm)`` a
    BiasGelu. So does a norm of any other sum of two packed tensors. A sum that something else reads too stays.
    """

    def call(self, model: ir.Model) -> PassResult:
        changed = False
        for node in list(model.graph):
            if (total := sum_before(node)) is not None:
                old, made = [node, total], _skip_norm(node, total)
            elif _is_gelu_of_product(node):
                old, made = [node], ir.node("BiasGelu", [node.inputs[0], _take_bias(node.inputs[0])], domain=DOMAIN)
            else:
                continue
            made.name = node.name
            convenience.replace_nodes_and_values(model.graph, node, old, [made], node.outputs[:1], made.outputs)
            changed = True
        if changed:
            model.opset_imports[DOMAIN] = 1
        return PassResult(model, modified=changed)


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


def _skip_norm(norm: ir.Node, total: ir.Node) -> ir.Node:
    first, second = total.inputs
    if not _has_own_bias(first) and _has_own_bias(second):
        first, second = second, first
    further = [*norm.inputs[1:], None][:2]  # a norm may have no offset
    if _has_own_bias(first):
        further.append(_take_bias(first))
    epsilon = norm.attributes["epsilon"].as_float() if "epsilon" in norm.attributes else 1e-5
    return ir.node("SkipLayerNormalization", [first, second, *further], {"epsilon": epsilon}, domain=DOMAIN)


def _is_gelu_of_product(node: ir.Node) -> bool:
    if (node.domain, node.op_type) != ("", "Gelu") or not _has_own_bias(node.inputs[0]):
        return False
    return "approximate" not in node.attributes or node.attributes["approximate"].as_string() == "none"


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


def made_by(value: ir.Value | None, op_type: str, domain: str = "") -> ir.Node | None:
    """Return the node that makes a value, if it is the operator of that name, of ONNX or of another domain."""
    maker = None if value is None else value.producer()
    return maker if maker is not None and (maker.domain, maker.op_type) == (domain, op_type) else None


def read_once(value: ir.Value) -> bool:
    """Say whether one node reads a value, and nothing else."""
    return len(value.uses()) == 1 and not value.is_graph_output()


def _is_packed(value: ir.Value | None, like: ir.Value) -> bool:
    """Say whether a value has two axes, both known to be as long as those of another, so that nothing is broadcast."""
    shape = None if value is None else value.shape
    return shape is not None and len(shape) == 2 and shape == like.shape and is_known(shape)
