"""Take the operators without `received` where nobody reads it: runtimes would compute it all the same."""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes import InPlacePass, PassResult

from ...contract import DOMAIN, RECEIVED


class DropUnusedReceived(InPlacePass):
    """``AdtpRaggedAttentionWindowReceived`` without a reader of its second output becomes ``AdtpRaggedAttentionWindow``.

    They are two operators, because ONNX Runtime refuses a node with fewer outputs than its function.
    """

    def call(self, model: ir.Model) -> PassResult:
        changed = False
        for node in model.graph:
            if node.domain != DOMAIN or not node.op_type.endswith(RECEIVED):
                continue
            received = node.outputs[1]
            if not received.uses() and not received.is_graph_output():
                node.op_type = node.op_type.removesuffix(RECEIVED)
                node.resize_outputs(1)
                changed = True
        return PassResult(model, modified=changed)
