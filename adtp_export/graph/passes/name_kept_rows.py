"""Give the row indices of the unpadding and of every cut a stable name, and take them off the graph's outputs."""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes import InPlacePass, PassResult, PreconditionError

from ...contract import KEPT_ROWS, UNPAD


class NameKeptRows(InPlacePass):
    """Outputs ``kept_rows/unpad``, ``kept_rows/<site>`` become inner values of those names.

    Whoever asks which tokens stayed (verification, the run-time API) finds them without a second graph.
    """

    def requires(self, model: ir.Model) -> None:
        if not any(output.name.startswith(KEPT_ROWS) for output in model.graph.outputs):
            raise PreconditionError(f"the graph has no {KEPT_ROWS}* outputs")

    def call(self, model: ir.Model) -> PassResult:
        kept = [output for output in model.graph.outputs if not output.name.startswith(KEPT_ROWS)]
        model.graph.outputs[:] = kept
        return PassResult(model, modified=True)


def kept_rows(graph: ir.Graph) -> list[ir.Value]:
    """Return the row indices in the order in which they apply: unpadding first, then each site."""
    values = [value for node in graph for value in node.outputs if value.name and value.name.startswith(KEPT_ROWS)]
    if not values or values[0].name != UNPAD:
        raise PreconditionError(f"the graph has no value {UNPAD}; was it exported by adtp-export?")
    return values
