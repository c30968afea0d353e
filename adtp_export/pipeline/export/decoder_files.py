"""The files of a model that generates text: those that are traced, in fp32, and those of lower precision that are made of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...artifacts.directory import writing
from ...calibration.quantize import write_quantized
from ...calibration.recipes import built_in
from ...calibration.simulate import quantize_decoder
from ...contract import LINEAR, PREFILL_MODEL, STEP_MODEL, VISION_MODEL, in_precision
from ...graph import program
from ...graph.decoder import EXPORTS
from ...model.decoder import Decoder
from ..progress import Steps
from .options import ExportOptions, precisions_among

PRECISIONS = ("fp32", "fp16", "bf16", "int8")
"""Accepted ones. fp16 types all files. bf16 and INT8 are those of the products of layers, in operators that take and give fp32."""


def precisions_of(options: ExportOptions) -> tuple[str, ...]:
    """Return what is exported, fp32 first: all others are made of it.

    Raises:
        InputError: a precision that there is not for models that generate text.
    """
    return precisions_among(options, PRECISIONS, "models that generate text", ". fp8 is for engines")


def form_of(precision: str) -> str:
    """Return the form, as of a `TargetSpec`."""
    return LINEAR if precision in ("bf16", "int8") else ""


def names_of(decoder: Decoder, precision: str) -> dict[str, str]:
    """Return the file of each part in a precision, by its name in fp32."""
    parts = [name for name in EXPORTS if name != VISION_MODEL or decoder.image_token is not None]
    typed = parts if not form_of(precision) else [PREFILL_MODEL, STEP_MODEL]
    return {name: in_precision(name, precision) if name in typed else name for name in parts}


def write_files(decoder: Decoder, work: Path, metadata: Mapping[str, Any], steps: Steps) -> None:
    """Trace all parts."""
    for name in names_of(decoder, "fp32"):
        with steps.step(f"export_{Path(name).stem}_s", f"exporting {name}"):
            made = EXPORTS[name](decoder, metadata)
            with writing(work):
                program.save(made, work / name)


def write_lower(decoder: Decoder, work: Path, precision: str, steps: Steps) -> Decoder:
    """Write files of a lower precision; return the decoder that they have to equal, as `verify.prefill.for_precision` takes it.

    Raises:
        InputError: a weight is beyond the range of fp16.
    """
    rounded, plan = decoder, None
    with steps.step(f"convert_{precision}_s", f"writing files in {precision}"), writing(work):
        if precision == "int8":
            plan, rounded = quantize_decoder(decoder, built_in(LINEAR, precision))
        for name, lower in names_of(decoder, precision).items():
            if name == lower:
                continue
            if plan is not None:
                write_quantized(work / name, work / lower, plan)
            elif form_of(precision):
                program.lower_linear(work / name, work / lower)
            else:
                program.convert_precision(work / name, work / lower, precision)
    return rounded
