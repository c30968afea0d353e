"""Graph passes, one per file, and the one literal tuple per target that lists them in order."""

from __future__ import annotations

from collections.abc import Iterable

import onnx_ir as ir
from onnx_ir.passes import InPlacePass
from onnx_ir.passes.common import CommonSubexpressionEliminationPass, RemoveUnusedNodesPass

from .add_kept_site import AddKeptSite
from .collapse_reshapes import CollapseReshapes
from .convert_precision import ToBFloat16, ToFloat16
from .drop_unused_received import DropUnusedReceived
from .expose_settings import ExposeSettings
from .look_up_first_projections import LookUpFirstProjections
from .lower_to_ort_packed_attention import LowerToOrtPackedAttention
from .name_kept_rows import NameKeptRows
from .prepend_zeros_by_concat import PrependZerosByConcat
from .readable_names import ReadableNames
from .ship_attention_body import ShipAttentionBody, ShipFixedAttentionBody

PORTABLE: tuple[type[InPlacePass], ...] = (
    CollapseReshapes,
    CommonSubexpressionEliminationPass,
    RemoveUnusedNodesPass,
    DropUnusedReceived,
    ReadableNames,
    NameKeptRows,
    ShipAttentionBody,
)
FIXED: tuple[type[InPlacePass], ...] = (*PORTABLE[:-1], ShipFixedAttentionBody)
DEBUG_OUTPUTS: tuple[type[InPlacePass], ...] = (AddKeptSite,)
PRECISION: dict[str, tuple[type[InPlacePass], ...]] = {"fp16": (ToFloat16,), "bf16": (ToBFloat16,)}
PRECOMPUTE: tuple[type[InPlacePass], ...] = (LookUpFirstProjections,)
ORT_CUDA: tuple[type[InPlacePass], ...] = (LowerToOrtPackedAttention, PrependZerosByConcat)
MEASURED: tuple[type[InPlacePass], ...] = (ExposeSettings,)


def run_passes(model: ir.Model, passes: Iterable[type[InPlacePass]]) -> None:
    """Run passes in order, in place."""
    for cls in passes:
        cls()(model)


__all__ = ["DEBUG_OUTPUTS", "FIXED", "MEASURED", "PRECOMPUTE", "ORT_CUDA", "PORTABLE", "PRECISION", "run_passes"]
