"""The ONNX files of an export: those that are traced, and those that are made of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import onnx_ir as ir

from ...artifacts.records import ORT_PACKED, Note
from ...calibration.quantize import write_quantized
from ...contract import CHECKPOINT_SHA256, LINEAR, PRECISION, PRUNE_SITES, VERSION, __version__
from ...graph import program, strings
from ...graph.encoder_function import enclosed
from ...graph.inlined import inlined
from ...model.checkpoint import Checkpoint
from ...plugins import plan as plans
from ...targets.specs import ADTP, INLINE, PACKED, PRECOMPUTED
from ...verify.oracle import OracleRun
from .capabilities import Capabilities
from .context import ExportContext, WrittenFile, stored_bytes
from .file_plan import STRINGS, ModelFile
from .quantize import Quantized


def write_model_files(
    run: ExportContext,
    files: Iterable[ModelFile],
    oracles: Mapping[str, OracleRun],
    quantized: Mapping[str, Quantized],
    debug_outputs: bool = False,
) -> tuple[dict[str, WrittenFile], tuple[Note, ...]]:
    """Write files in order; return them by name, and notes on them.

    Args:
        oracles: what files are compared with, by precision; empty without verification.
        quantized: how products are quantized, and what such files are compared with instead, by their names.
        debug_outputs: keep the output kept_site in what is traced.
    """
    written: dict[str, WrittenFile] = {}
    notes: list[Note] = []
    for file in files:
        chosen = quantized.get(file.name)
        step, text = _step(file)
        with run.steps.step(step, text):
            write = _writer(run, file, chosen, debug_outputs)
            with run.writing(file.name) as path:
                write(path)
        details, told = _told(run, file, chosen)
        notes += [Note(note, file.name) for note in told]
        oracle = chosen.oracle if chosen else oracles.get(file.precision)
        written[file.name] = WrittenFile(file=file, path=path, oracle=oracle, details=details)
    return written, tuple(notes)


def _step(file: ModelFile) -> tuple[str, str]:
    """Name the step in which a file is written, and say what it does."""
    if file.source is None:
        how = " with packed inputs" if file.form == PACKED else ""
        how = f" in fixed sizes, {file.size.tokens} tokens" if file.size else how
        return "_".join(filter(None, ("export", file.form, "s"))), f"exporting to ONNX{how}"
    source = Path(file.source.name).name
    if file.recipe is not None:
        return f"quantize_{file.recipe.target}.{file.recipe.format}_s", f"writing {Path(file.name).name}"
    if file.runtime == ADTP:
        return f"cuda_{file.precision}_s", f"planning the launches of {source}"
    if file.attention == ORT_PACKED:
        return f"ort_cuda_{file.precision}_s", f"packing the attention of {source}"
    made = {
        STRINGS: ("strings_s", "putting the tokenizer before the model"),
        PRECOMPUTED: ("precompute_s", "precomputing the first layer's projections"),
        LINEAR: (f"linear_{file.precision}_s", f"giving the products of {source} to operators in {file.precision}"),
        INLINE: (f"inline_{file.precision}_s", f"inlining the functions of {source}"),
    }
    step = "_".join(filter(None, ("convert", file.form, file.precision, "s")))
    return made.get(file.form, (step, f"typing {source} in {file.precision}"))


def _writer(
    run: ExportContext, file: ModelFile, quantized: Quantized | None, debug_outputs: bool
) -> Callable[[Path], object]:
    """Make what a file holds as far as nothing is written yet; return what writes it to a path."""
    checkpoint = run.checkpoint
    if file.source is None:
        return partial(program.save, _traced(checkpoint, file, debug_outputs))
    source = run.work / file.source.name
    if quantized is not None:
        return lambda path: write_quantized(source, path, quantized.plan)
    forms = {LINEAR: program.lower_linear, PRECOMPUTED: program.precompute_projections}
    if file.attention == ORT_PACKED or file.form in forms:
        return partial(forms.get(file.form, program.lower_to_ort_cuda), source)
    if file.runtime == ADTP:
        return partial(program.save, _of_own_kernels(run, file.precision, source))
    if file.form == INLINE:
        return partial(program.save, inlined(source))
    if file.form == STRINGS:
        student = checkpoint.student
        before = strings.tokenizing(checkpoint.tokenizer, checkpoint.max_tokens, student.input_names, student.pad_id)
        return partial(strings.join, before, source)
    return lambda path: program.convert_precision(source, path, file.precision)


def _of_own_kernels(run: ExportContext, precision: str, source: Path) -> ir.Model:
    """Enclose a portable graph in one operator, whose plan takes batches up to those of the profile."""
    most = run.profile["batch"].max * run.profile["seq"].max
    planned = Capabilities(run.checkpoint).planned(precision, most)
    return enclosed(ir.load(source), plans.write(planned.plan), planned.weights)


def _traced(checkpoint: Checkpoint, file: ModelFile, debug_outputs: bool) -> ir.Model:
    form = program.packed_form if file.form == PACKED else program.padded_form
    student, size = checkpoint.student, file.size
    metadata = {
        VERSION: __version__,
        PRECISION: file.precision,
        CHECKPOINT_SHA256: checkpoint.sha256,
        PRUNE_SITES: list(student.site_names),
    }
    model = program.export_portable(student, metadata, partial(program.fixed_form, size) if size else form)
    if debug_outputs and size is None:
        program.add_debug_outputs(model)
    return model


def _told(run: ExportContext, file: ModelFile, quantized: Quantized | None) -> tuple[Mapping[str, Any], Iterable[str]]:
    """Return what the manifest says of a file that was written, and notes for the user."""
    if quantized is not None:
        return quantized.details, quantized.notes
    if file.size is not None:
        profile = {axis: str(p) for axis, p in run.profile.items()}
        return {"rows_after_cuts": list(file.size.kept), "profile": profile}, ()
    if file.form == PRECOMPUTED and file.source is not None:
        tables = stored_bytes(run.work / file.name) - stored_bytes(run.work / file.source.name)
        larger = f"{file.name} is {tables / 1e6:.0f} MB larger than {file.source.name}, for tables in place of products"
        return {"tables_bytes": tables}, (larger,)
    return {}, ()
