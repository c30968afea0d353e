"""Let attention compute its products in bf16, in a file whose other products are in lower precision already."""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes import InPlacePass, PassResult

from ...contract import ATTENTION, BF16_PRODUCTS, DOMAIN, QKV, RECEIVED


class AllowBf16Attention(InPlacePass):
    """Each attention operator says so whose queries, keys and values come from a product in lower precision.

    Those that give received attention do not: it decides which tokens stay. Bodies do not read the attribute, so they compute in fp32 as
    before.
    """

    def call(self, model: ir.Model) -> PassResult:
        for function in model.functions.values():
            if _may(function.domain, function.name):
                function.attributes.add(ir.AttrInt64(BF16_PRODUCTS, 0))
        lowered = {_module(node) for node in model.graph.all_nodes() if node.domain == DOMAIN}
        for node in model.graph.all_nodes():
            layer = _module(node).removesuffix(QKV.partition(".")[0])
            if _may(node.domain, node.op_type) and f"{layer}{QKV}" in lowered:
                node.attributes.add(ir.AttrInt64(BF16_PRODUCTS, 1))
        return PassResult(model, modified=True)


def _may(domain: str, operator: str) -> bool:
    return domain == DOMAIN and operator.startswith(ATTENTION) and not operator.endswith(RECEIVED)


def _module(node: ir.Node) -> str:
    """Return the module that a node comes from, such as ``layers.0.attention``."""
    return (node.name or "").partition("/")[0]
