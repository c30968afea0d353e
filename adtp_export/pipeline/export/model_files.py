"""The ONNX files of an export: the portable one in fp32, and those that are made of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ...artifacts.records import Note
from ...contract import (
    CHECKPOINT_SHA256,
    MODEL,
    ORT_CPU,
    PRECISION,
    PRECOMPUTED_MODEL,
    PRUNE_SITES,
    VERSION,
    __version__,
)
from ...graph import program
from ...graph.inlined import inlined
from ...io import with_weights
from ...model.fixed import static_size
from ...targets.specs import INLINE, PACKED, PRECOMPUTED, static_form
from ...verify.oracle import for_precision, typed
from .context import ExportContext, ModelFile

if TYPE_CHECKING:
    from ...model.encoder import PrunedEncoder
    from ...verify.oracle import OracleRun


def write_portable(run: ExportContext, oracle: OracleRun | None, debug_outputs: bool) -> ModelFile:
    """Write `model.onnx`, from which all others are made."""
    with run.steps.step("export_s", "exporting to ONNX"):
        _write(run, run.place(MODEL), program.padded_form, debug_outputs)
    return ModelFile(file=run.place(MODEL), precision="fp32", oracle=oracle)


def write_packed(run: ExportContext, oracle: OracleRun | None, debug_outputs: bool) -> ModelFile:
    """Write `model.packed.onnx`, the same network for texts that come packed."""
    file = run.place(_name(PACKED))
    with run.steps.step("export_packed_s", "exporting to ONNX with packed inputs"):
        _write(run, file, program.packed_form, debug_outputs)
    return ModelFile(file=file, precision="fp32", form=PACKED, oracle=oracle)


def write_static(run: ExportContext, oracle: OracleRun | None, sizes: Sequence[Sequence[int]]) -> list[ModelFile]:
    """Write `model.static_512x32.onnx` and the like, the same network in fixed sizes, the largest first."""
    student, texts = run.checkpoint.student, run.profile["batch"].max
    found: list[ModelFile] = []
    for tokens, *bounds in sizes:
        size = static_size(student, tokens, texts, bounds)
        form = static_form(size)
        file = run.place(_name(form))
        with run.steps.step(f"export_{form}_s", f"exporting to ONNX in fixed sizes, {tokens} tokens"):
            _write(run, file, partial(program.fixed_form, size), debug_outputs=False)
        details = {"rows_after_cuts": list(size.kept), "profile": {axis: str(p) for axis, p in run.profile.items()}}
        wider = found[0] if found else None
        found.append(ModelFile(file=file, precision="fp32", form=form, oracle=oracle, details=details, wider=wider))
    return found


def _write(run: ExportContext, file: Path, form: Callable[[PrunedEncoder], program.Form], debug_outputs: bool) -> None:
    student = run.checkpoint.student
    metadata = {
        VERSION: __version__,
        PRECISION: "fp32",
        CHECKPOINT_SHA256: run.checkpoint.sha256,
        PRUNE_SITES: list(student.site_names),
    }
    model = program.export_portable(student, metadata, form)
    if debug_outputs:
        program.add_debug_outputs(model)
    with run.writing():
        program.save(model, file)


def write_precomputed(run: ExportContext, portable: ModelFile) -> tuple[ModelFile, tuple[Note, ...]]:
    """Write `PRECOMPUTED_MODEL`; return it with a note on its size."""
    file = run.place(PRECOMPUTED_MODEL)
    with run.steps.step("precompute_s", "precomputing the first layer's projections"), run.writing():
        program.precompute_projections(portable.file, file)
    tables = _bytes(file) - _bytes(portable.file)
    note = f"{run.name(file)} is {tables / 1e6:.0f} MB larger than {run.name(portable.file)}, for tables in place of products"
    details = {"tables_bytes": tables}
    precomputed = ModelFile(
        file=file, precision="fp32", made_for=ORT_CPU, form=PRECOMPUTED, oracle=portable.oracle, details=details
    )
    return precomputed, (Note(note, run.name(file)),)


def write_typed(run: ExportContext, sources: Sequence[ModelFile], precision: str) -> list[ModelFile]:
    """Write `model.<precision>.onnx` and the like of fp32 files, and find out what PyTorch is off in that precision."""
    oracle = sources[0].oracle
    if oracle is not None:
        with run.steps.step(f"oracle_{precision}_s", f"running the PyTorch student in {precision}") as progress:
            oracle = for_precision(oracle, typed(run.checkpoint.student, precision), precision, progress)
    found: list[ModelFile] = []
    for source in sources:
        file = run.place(_name(source.form, precision))
        step = "_".join(filter(None, ("convert", source.form, precision, "s")))
        with run.steps.step(step, f"typing {source.file.name} in {precision}"), run.writing():
            program.convert_precision(source.file, file, precision)
        wider = next((v for v in found if source.wider and v.form == source.wider.form), None)
        found.append(dataclasses.replace(source, file=file, precision=precision, oracle=oracle, wider=wider))
    return found


def write_inlined(run: ExportContext, source: ModelFile) -> ModelFile:
    """Write `model.inline.onnx` and the like, the same graph without functions, for tools that drop them."""
    file = run.place(_name(INLINE, "" if source.precision == "fp32" else source.precision))
    with run.steps.step(f"inline_{source.precision}_s", f"inlining the functions of {source.file.name}"):
        model = inlined(source.file)
        with run.writing():
            program.save(model, file)
    return dataclasses.replace(source, file=file, form=INLINE)


def _name(*parts: str) -> str:
    """Return what the plain layout calls a file of a form and a precision."""
    return ".".join(filter(None, ("model", *parts, "onnx")))


def _bytes(file: Path) -> int:
    """Size of a model with its weights, wherever they are."""
    return sum(path.stat().st_size for path in with_weights(file))
