"""Give sums and norms to the products in lower precision that they stand behind, and make one operator of a feed-forward network."""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir import convenience
from onnx_ir.passes import InPlacePass, PassResult

from ...contract import (
    ADD_NORM,
    BF16_FEED_FORWARD,
    BF16_LINEAR,
    DOMAIN,
    EPSILON,
    GELU,
    IN_FEATURES,
    INNER_FEATURES,
    INT8_FEED_FORWARD,
    INT8_LINEAR,
)
from .patterns import made_by, read_once, sum_before

FEED_FORWARD = {BF16_LINEAR: BF16_FEED_FORWARD, INT8_LINEAR: INT8_FEED_FORWARD}


class FuseAddNorm(InPlacePass):
    """``LayerNormalization(product + residual)`` becomes one operator. Where the product's input is that of another one with a GELU, and
    the residual is what went into that, the operator has both products. A value that something else reads too stays.
    """

    def call(self, model: ir.Model) -> PassResult:
        changed = False
        for norm in list(model.graph):
            total = sum_before(norm)
            if total is None or None in norm.inputs or len(norm.inputs) < 3:
                continue
            if (found := _product(total)) is not None:
                _fuse(model.graph, norm, total, *found)
                changed = True
        return PassResult(model, modified=changed)


def _product(total: ir.Node) -> tuple[ir.Node, ir.Value] | None:
    """Return the product in a sum that nothing else reads, and the residual."""
    for product, residual in (total.inputs, reversed(total.inputs)):
        for name in FEED_FORWARD:
            node = made_by(product, name, DOMAIN)
            if node is not None and residual is not None and read_once(product):
                return node, residual
    return None


def _fuse(graph: ir.Graph, norm: ir.Node, total: ir.Node, product: ir.Node, residual: ir.Value) -> None:
    x, *constants = product.inputs
    features = product.attributes[IN_FEATURES].as_int()
    epsilon = norm.attributes[EPSILON].as_float() if EPSILON in norm.attributes else 1e-5
    first = made_by(x, f"{product.op_type}{GELU}", DOMAIN)
    if first is not None and x is not None and read_once(x) and first.inputs[0] is residual:
        operator, old = FEED_FORWARD[product.op_type], [norm, total, product, first]
        inputs = [*first.inputs, *constants]
        sizes = {IN_FEATURES: first.attributes[IN_FEATURES].as_int(), INNER_FEATURES: features}
    else:
        operator, old = f"{product.op_type}{ADD_NORM}", [norm, total, product]
        inputs, sizes = [x, *constants, residual], {IN_FEATURES: features}
    attributes = {**sizes, EPSILON: epsilon}
    fused = ir.node(operator, [*inputs, *norm.inputs[1:]], attributes, domain=DOMAIN, name=norm.name)
    convenience.replace_nodes_and_values(graph, norm, old, [fused], norm.outputs[:1], fused.outputs)
