"""Export a student: `torch.onnx` (dynamo) on its packed form, then the passes of `graph.passes`."""

from __future__ import annotations

import contextlib
import json
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch
from onnxscript import opset20 as op
from torch import Tensor

from ..contract import (
    BATCH,
    CU_SEQLENS,
    INPUT_IDS,
    KEPT_ROWS,
    MASKS,
    METADATA,
    OUTPUTS,
    OVERFLOW,
    PACKED_INPUTS,
    SEQUENCE,
    TOKEN_TYPE_IDS,
    TOKENS,
    UNPAD,
)
from ..model.encoder import PrunedEncoder
from ..model.fixed import FixedInputs, StaticSize
from ..model.packed import PackedInputs, PackedStudent, in_eval_mode
from ..ops import onnx_function
from .passes import DEBUG_OUTPUTS, FIXED, ORT_CUDA, PORTABLE, PRECISION, PRECOMPUTE, Passes, linear, run_passes

OPSET = 20
"""The lowest with Gelu as an operator; every runtime served here takes it, newer ones add nothing this graph uses."""

INLINE_LIMIT_BYTES = 2**31 - 2**24
"""Above this, weights go to a file beside the graph: a protobuf message ends at 2 GiB."""


@dataclass(frozen=True, kw_only=True)
class Form:
    """What is traced: a network, its inputs by name with an example of each, and which of their axes are free: None for none.
    passes: what makes the graph of it. further: names of outputs beside the head's."""

    network: Callable[[PrunedEncoder], torch.nn.Module]
    inputs: Mapping[str, Tensor]
    dims: tuple[dict[int, Any], ...] | None
    passes: Passes = PORTABLE
    further: tuple[str, ...] = ()


def padded_form(student: PrunedEncoder) -> Form:
    """Inputs are rectangles ``(batch, sequence)``."""
    dims = {i: torch.export.Dim(axis) for i, axis in enumerate((BATCH, SEQUENCE))}
    names = student.input_names
    example = {name: torch.ones(3, 7, dtype=torch.int64) for name in names}  # no axis of size 1: those would be fixed
    return Form(network=PackedStudent, inputs=example, dims=(dims,) * len(names))


def packed_form(student: PrunedEncoder) -> Form:
    """Inputs are packed: `contract.PACKED_INPUTS`."""
    batch, tokens = torch.export.Dim(BATCH), torch.export.Dim(TOKENS)
    example = {
        INPUT_IDS: torch.ones(17, dtype=torch.int64),
        CU_SEQLENS: torch.tensor([0, 7, 12, 17], dtype=torch.int32),
    }
    axes: list[dict[int, Any]] = [{0: tokens}, {0: batch + 1}]
    if TOKEN_TYPE_IDS in student.input_names:
        example[TOKEN_TYPE_IDS] = torch.ones(17, dtype=torch.int64)
        axes.append({0: tokens})
    return Form(network=PackedInputs, inputs=example, dims=tuple(axes))


def fixed_form(size: StaticSize, student: PrunedEncoder) -> Form:
    """Inputs are packed, and as many as a static size has."""
    names = [name for name in PACKED_INPUTS if name == CU_SEQLENS or name in student.input_names]
    # One tensor for each name: the exporter takes a tensor that comes twice for one input.
    example = {name: torch.ones(size.tokens, dtype=torch.int64) for name in names}
    return Form(
        network=lambda student: FixedInputs(student, size),
        inputs={**example, CU_SEQLENS: torch.arange(size.texts + 1, dtype=torch.int32)},
        dims=None,
        passes=FIXED,
        further=(OVERFLOW,) if size.kept else (),
    )


def export_portable(
    student: PrunedEncoder, metadata: Mapping[str, Any], form: Callable[[PrunedEncoder], Form] = padded_form
) -> ir.Model:
    """Export the packed form of a student as the portable fp32 graph.

    Args:
        student: weights in fp32.
        metadata: written to the model's metadata properties, each under ``adtp.``; values other than text as JSON.
        form: of its inputs, `padded_form` or `packed_form`.

    Returns:
        The model in memory: int64 ``(batch, sequence)`` inputs, or those of `form`; the outputs of `contract.OUTPUTS` fp32.
    """
    made = form(student)
    model = finish(trace(student, made), metadata, made.passes)
    for output in model.graph.outputs:
        if made.dims and output.shape is not None and str(output.shape[0]) not in (BATCH, TOKENS):
            output.shape[0] = ir.SymbolicDim(BATCH)  # the exporter knows it as one less than an input's axis
        if MASKS in OUTPUTS[student.config.head].get(output.name or "", ()) and output.shape is not None:
            output.shape[1] = ir.SymbolicDim(MASKS)  # which it gives a number
    return model


def trace(student: PrunedEncoder, form: Form | None = None) -> torch.onnx.ONNXProgram:
    """Trace the packed form of a student, and optimise nothing yet: weights keep their names."""
    made = form or padded_form(student)
    kept = [UNPAD, *(f"{KEPT_ROWS}{site}" for site in student.site_names)]
    names = [*OUTPUTS[student.config.head], *kept, *made.further]
    with in_eval_mode(student):
        return trace_network(
            lambda: made.network(student), tuple(made.inputs.values()), made.dims, list(made.inputs), names
        )


def trace_network(
    network: Callable[[], torch.nn.Module], example: tuple[Any, ...], dims: Any, inputs: list[str], outputs: list[str]
) -> torch.onnx.ONNXProgram:
    """Trace a network, which is made anew for each try.

    Args:
        example: of the inputs, tensors and lists of these. dims: which of their axes are free, as `torch.export` takes it. inputs,
            outputs: names of all tensors, in order.
    """

    def traced() -> torch.export.ExportedProgram:
        torch.compiler.reset()  # a loop of another size, traced before, would make this one's size unknown, which fails
        return torch.export.export(network(), example, dynamic_shapes=dims, strict=False)

    def translated(program: torch.export.ExportedProgram, translations: dict[Any, Any]) -> torch.onnx.ONNXProgram:
        onnx_program = torch.onnx.export(
            program,
            dynamo=True,
            verbose=False,
            opset_version=OPSET,
            input_names=inputs,
            output_names=outputs,
            dynamic_shapes=dims,
            optimize=False,
            custom_translation_table=translations,
        )
        assert onnx_program is not None
        return onnx_program

    with torch.no_grad(), quiet_exporter():
        program = traced()
        # The exporter would decompose it, which traces again and takes longer than all the rest.
        program.run_decompositions = lambda *_: program
        try:
            return translated(program, _translations() | _translations_of_composed())
        except torch.onnx.OnnxExporterError:  # an operator is composed of others, and has no translation itself
            return translated(traced(), _translations())


def finish(traced: torch.onnx.ONNXProgram, metadata: Mapping[str, Any], passes: Passes = PORTABLE) -> ir.Model:
    """Make the portable graph of a traced one, in place; see `export_portable`."""
    with quiet_exporter():
        traced.optimize()
    model = traced.model
    run_passes(model, passes)
    model.graph.name = "adtp_student"
    return describe(model, metadata)


def describe(model: ir.Model, metadata: Mapping[str, Any]) -> ir.Model:
    """Write who made a model, and its metadata properties, in place."""
    model.producer_name, model.producer_version = "adtp-export", str(metadata["version"])
    for key, value in metadata.items():
        model.metadata_props[f"{METADATA}{key}"] = value if isinstance(value, str) else json.dumps(value)
    return model


@contextlib.contextmanager
def quiet_exporter() -> Iterator[None]:
    """Keep the exporter from reporting its own internals: deprecations, torchvision being absent."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels):
            logger.setLevel(level)


def _translations() -> dict[Any, Any]:
    def floor_divide(a: Any, b: Any) -> Any:  # of counts, which are never negative: there Div is the floor
        return op.Div(a, b)

    def linear(x: Any, weight: Any, bias: Any = None) -> Any:
        """A matrix product is a Gemm with or without a bias, because quantization looks for those; weights keep their names."""
        if len(x.shape) == 2:
            return op.Gemm(x, weight, *([] if bias is None else [bias]), transB=1)
        product = op.MatMul(x, op.Transpose(weight, perm=[1, 0]))
        return product if bias is None else op.Add(product, bias)

    return {
        **onnx_function.translations(),
        torch.ops.aten.floor_divide.default: floor_divide,
        torch.ops.aten.linear.default: linear,
    }


def _translations_of_composed() -> dict[Any, Any]:
    """Translate what the exporter has no translation of, because it decomposes it."""

    def item(x: Any) -> Any:  # a count, which sizes are made of
        return op.Cast(op.Squeeze(x) if x.shape else x, to=ir.DataType.INT64)

    def to_dtype(x: Any, dtype: int, *_: Any) -> Any:
        return op.Cast(x, to=dtype)

    def index_copy(x: Any, dim: int, index: Any, source: Any) -> Any:
        assert dim == 0
        axes: Any = op.Constant(value_ints=[-1])
        return op.ScatterND(x, op.Unsqueeze(index, axes), source)

    def rsub(x: Any, other: Any, alpha: int = 1) -> Any:
        assert alpha == 1
        return op.Sub(op.CastLike(other, x), x)

    aten = torch.ops.aten
    return {
        aten.item.default: item,
        aten.to.dtype: to_dtype,
        aten.detach_.default: op.Identity,
        aten.__and__.Tensor: op.And,
        aten.__or__.Tensor: op.Or,
        aten.index_copy.default: index_copy,
        aten.rsub.Scalar: rsub,
    }


def add_debug_outputs(model: ir.Model) -> None:
    """Turn the graph into its debug form, in place: the same graph with the output ``kept_site`` as well."""
    run_passes(model, DEBUG_OUTPUTS)


def convert_precision(source: Path, path: Path, precision: str) -> None:
    """Write an exported fp32 file typed in fp16 or bf16.

    Raises:
        InputError: a weight is beyond the type's range.
    """
    model = ir.load(source)
    run_passes(model, PRECISION[precision])
    save(model, path)


def lower_linear(source: Path, path: Path) -> None:
    """Write the form of an exported fp32 file whose matrix products are operators in bf16: `passes.lower_linear`."""
    model = ir.load(source)
    run_passes(model, linear())
    save(model, path)


def precompute_projections(source: Path, path: Path) -> None:
    """Write the form of an exported fp32 file that trades memory for time: `passes.look_up_first_projections`."""
    model = ir.load(source)
    run_passes(model, PRECOMPUTE)
    save(model, path)


def lower_to_ort_cuda(source: Path, path: Path) -> None:
    """Write the form of an exported file that ONNX Runtime's CUDA provider runs with its packed attention."""
    model = ir.load(source)
    run_passes(model, ORT_CUDA)
    save(model, path)


def save(model: ir.Model, path: Path, inline_limit_bytes: int = INLINE_LIMIT_BYTES) -> list[Path]:
    """Write the model; return the files written. Weights past the limit go to ``<path>.data`` beside it."""
    size = sum(v.const_value.nbytes for v in model.graph.initializers.values() if v.const_value is not None)
    if size <= inline_limit_bytes:
        ir.save(ir.external_data.load_to_model(model), path)  # of a larger file, weights would stay in its data
        return [path]
    data = path.with_name(path.name + ".data")
    ir.save(model, path, external_data=data.name, size_threshold_bytes=1024)
    return [path, data]
