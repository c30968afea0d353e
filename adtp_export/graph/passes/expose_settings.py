"""Let pruners be set from outside, for measurements: one file then serves every retention."""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes import InPlacePass, PassResult, PreconditionError

from ...contract import PRUNERS
from .name_kept_rows import kept_rows

SETTINGS = ("permille", "threshold")
"""Scalars of pruners that decide how many tokens stay: of schedules, and of LTP."""


def setting_name(site: str, setting: str) -> str:
    """Name a pruner's setting in the graph: ``cuts.0_ffn.pruner.permille`` for ``"0.ffn"``."""
    return f"{PRUNERS}{site.replace('.', '_')}.pruner.{setting}"


class ExposeSettings(InPlacePass):
    """Settings of pruners become inputs of their names and types, scalars, in the order of the sites.

    The exporter merges equal constants. So sites need different values when they are exported, and none that the graph uses.
    """

    def requires(self, model: ir.Model) -> None:
        found, sites = _settings(model.graph), len(kept_rows(model.graph)) - 1
        own = [value for value in found if len(value.uses()) == 1]
        if found and len(own) < sites:
            raise PreconditionError(
                f"{len(own)} of {sites} sites have a setting of their own: equal constants were merged"
            )

    def call(self, model: ir.Model) -> PassResult:
        graph = model.graph
        found = _settings(graph)
        for value in found:
            graph.initializers.pop(value.name)
            value.const_value = None
            graph.inputs.append(value)
        return PassResult(model, modified=bool(found))


def _settings(graph: ir.Graph) -> list[ir.Value]:
    return [
        value
        for name, value in graph.initializers.items()
        if name.startswith(PRUNERS) and name.rsplit(".", 1)[-1] in SETTINGS
    ]
