"""Put the portable body of ragged attention into the model, beside the nodes that call it."""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes import InPlacePass, PassResult, PostconditionError

from ...ops import onnx_function


class ShipAttentionBody(InPlacePass):
    """Runtimes without a kernel of that name inline the function; the others never look at it."""

    def call(self, model: ir.Model) -> PassResult:
        function = ir.serde.deserialize_function(onnx_function.portable_function())
        model.functions[function.identifier()] = function
        return PassResult(model, modified=True)

    def ensures(self, model: ir.Model) -> None:
        for node in model.graph:
            if node.domain == onnx_function.DOMAIN and node.op_identifier() not in model.functions:
                raise PostconditionError(f"{node.name} calls {node.op_type}, which has no body in the model")
