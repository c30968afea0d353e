"""Graph passes, one per file, and the one literal tuple per target that lists them in order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import onnx_ir as ir
from onnx_ir.passes import InPlacePass
from onnx_ir.passes.common import CommonSubexpressionEliminationPass, RemoveUnusedNodesPass

from ...ops import onnx_fixed, onnx_function, onnx_linear
from .add_kept_site import AddKeptSite
from .allow_bf16_attention import AllowBf16Attention
from .collapse_reshapes import CollapseReshapes
from .convert_precision import ConvertPrecision
from .drop_unused_received import DropUnusedReceived
from .expose_settings import ExposeSettings
from .fuse_add_norm import FuseAddNorm
from .fuse_for_ort_cuda import FuseForOrtCuda
from .gather_in_shape import GatherInShape
from .look_up_first_projections import LookUpFirstProjections
from .lower_linear import Int8Weight, LowerLinear
from .lower_to_ort_packed_attention import LowerToOrtPackedAttention
from .name_kept_rows import NameKeptRows
from .prepend_zeros_by_concat import PrependZerosByConcat
from .readable_names import ReadableNames
from .ship_bodies import ShipBodies

Passes: TypeAlias = tuple[InPlacePass, ...]

PORTABLE: Passes = (
    CollapseReshapes(),
    CommonSubexpressionEliminationPass(),
    RemoveUnusedNodesPass(),
    DropUnusedReceived(),
    ReadableNames(),
    NameKeptRows(),
    ShipBodies(onnx_function.portable_functions),
)
DECODER: Passes = tuple(each for each in PORTABLE if not isinstance(each, (DropUnusedReceived, NameKeptRows)))
FIXED: Passes = (*PORTABLE[:-1], ShipBodies(onnx_fixed.fixed_functions))
DEBUG_OUTPUTS: Passes = (AddKeptSite(),)
PRECISION: dict[str, Passes] = {
    "fp16": (ConvertPrecision(ir.DataType.FLOAT16),),
    "bf16": (ConvertPrecision(ir.DataType.BFLOAT16),),
}
PRECOMPUTE: Passes = (LookUpFirstProjections(),)
ORT_CUDA: Passes = (
    LowerToOrtPackedAttention(),
    PrependZerosByConcat(),
    GatherInShape(),
    FuseForOrtCuda(),
    RemoveUnusedNodesPass(),
)
MEASURED: Passes = (ExposeSettings(),)


def linear(int8: Mapping[str, Int8Weight] | None = None) -> Passes:
    """Those of products in lower precision; int8: as of `LowerLinear`."""
    return (LowerLinear(int8), FuseAddNorm(), AllowBf16Attention(), ShipBodies(onnx_linear.linear_functions))


def run_passes(model: ir.Model, passes: Passes) -> None:
    """Run passes in order, in place.

    onnx-ir's `Sequential` would turn every error into a `PassError`, and callers tell an InputError from a PreconditionError.
    """
    for each in passes:
        each(model)


__all__ = [
    "DEBUG_OUTPUTS",
    "DECODER",
    "FIXED",
    "MEASURED",
    "PRECOMPUTE",
    "ORT_CUDA",
    "PORTABLE",
    "PRECISION",
    "FuseAddNorm",
    "Int8Weight",
    "LowerLinear",
    "Passes",
    "linear",
    "run_passes",
]
