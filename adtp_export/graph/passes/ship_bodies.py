"""Put the portable bodies of operators into the model, beside the nodes that call them."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import onnx
import onnx_ir as ir
from onnx_ir.passes import InPlacePass, PassResult, PostconditionError

from ...contract import DOMAIN


class ShipBodies(InPlacePass):
    """Runtimes without a kernel of that name inline the function; the others never look at it.

    Args:
        bodies: gives the functions of all operators.
    """

    def __init__(self, bodies: Callable[[], Iterable[onnx.FunctionProto]]) -> None:
        self.bodies = bodies

    def call(self, model: ir.Model) -> PassResult:
        called = {node.op_identifier() for node in model.graph}
        wanted = [body for body in self.bodies() if (body.domain, body.name, body.overload) in called]
        for function in map(ir.serde.deserialize_function, wanted):
            model.functions[function.identifier()] = function
        return PassResult(model, modified=bool(wanted))

    def ensures(self, model: ir.Model) -> None:
        for node in model.graph:
            if node.domain == DOMAIN and node.op_identifier() not in model.functions:
                raise PostconditionError(f"{node.name} calls {node.op_type}, which has no body in the model")
