"""Let attention compute its products in bf16, in a file whose other products are in lower precision already."""

from __future__ import annotations

from collections import deque

import onnx_ir as ir
from onnx_ir.passes import InPlacePass, PassResult

from ...contract import ATTENTION, BF16_PRODUCTS, DOMAIN, QKV, RECEIVED


class AllowBf16Attention(InPlacePass):
    """Each attention operator says so, but for those whose queries, keys and values come from a product that stays in fp32.

    Those that give received attention do not say so either: it decides which tokens stay. Bodies do not read the attribute, so they
    compute in fp32 as before.
    """

    def call(self, model: ir.Model) -> PassResult:
        for function in model.functions.values():
            if _may(function.domain, function.name):
                function.attributes.add(ir.AttrInt64(BF16_PRODUCTS, 0))
        for node in model.graph.all_nodes():
            if _may(node.domain, node.op_type) and not _stays(node):
                node.attributes.add(ir.AttrInt64(BF16_PRODUCTS, 1))
        return PassResult(model, modified=True)


def _may(domain: str, operator: str) -> bool:
    return domain == DOMAIN and operator.startswith(ATTENTION) and not operator.endswith(RECEIVED)


def _stays(attention: ir.Node) -> bool:
    """Say whether the product that queries come from, the nearest one of that name before them, stays in fp32."""
    waiting, seen = deque([attention.inputs[0]]), set()
    while waiting:
        value = waiting.popleft()
        node = None if value is None else value.producer()
        if node is None or node in seen:
            continue
        seen.add(node)
        if (node.name or "").partition("/")[0].endswith(QKV) and (node.op_type == "Gemm" or node.domain == DOMAIN):
            return node.op_type == "Gemm"
        waiting.extend(node.inputs)
    return False
