"""An ONNX file that is one `adtp::AdtpEncoder`: the operator's plan, its weights, its inputs and outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..contract import DOMAIN, ENCODER
from ..errors import InputError, needs_extras
from ..plugins import plan as plans

if TYPE_CHECKING:
    import onnx_ir as ir


@dataclass(frozen=True, kw_only=True)
class EncoderFile:
    """What a file holds. inputs, outputs: names, with types and axes in the words of `plugins/cpp/signature.h`, such as
    ``("int64", "texts", "length")``. weights: bytes of each, in the plan's order. metadata: by name."""

    plan: plans.Plan
    inputs: dict[str, tuple[str, ...]]
    outputs: dict[str, tuple[str, ...]]
    weights: tuple[np.ndarray, ...]
    metadata: dict[str, str]


@needs_extras("a file for our own CUDA kernels", "cuda")
def read(path: Path) -> EncoderFile:
    """Read a file that ``adtp-export --cuda`` wrote.

    Raises:
        InputError: it is none, or it is damaged.
        MissingDependencyError: onnx-ir is not installed.
    """
    import onnx_ir as ir
    from google.protobuf.message import DecodeError

    try:
        return _read(ir.load(path))
    except (ValueError, KeyError, OSError, DecodeError) as error:
        raise InputError(
            f"{path}: got no ONNX file with one {DOMAIN}::{ENCODER}; accepted: what adtp-export --cuda wrote"
        ) from error


def _read(model: ir.Model) -> EncoderFile:
    (node,) = (node for node in model.graph if (node.domain, node.op_type) == (DOMAIN, ENCODER))
    said = {name: node.attributes[name].as_string() for name in ("plan", "inputs", "outputs")}
    inputs = _named(node.inputs, said["inputs"])
    return EncoderFile(
        plan=plans.read(said["plan"]),
        inputs=inputs,
        outputs=_named(node.outputs, said["outputs"]),
        weights=tuple(map(_bytes, node.inputs[len(inputs) :])),
        metadata=dict(model.metadata_props),
    )


def _named(values: Sequence[ir.Value | None], said: str) -> dict[str, tuple[str, ...]]:
    return {value.name or "": tuple(one.split()) for value, one in zip(values, said.split(";")) if value is not None}


def _bytes(weight: ir.Value | None) -> np.ndarray:
    """Return what is in the file, or in the one beside it."""
    import onnx_ir as ir

    tensor = None if weight is None else weight.const_value
    if tensor is None:
        raise ValueError("a weight is missing")
    if isinstance(tensor, ir.ExternalTensor) and Path(tensor.location).name != str(tensor.location):
        raise ValueError(tensor.location)
    return np.ascontiguousarray(tensor.numpy()).reshape(-1).view(np.uint8)
