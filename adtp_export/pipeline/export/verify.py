"""The targets of an export: each file opened in its runtimes and compared with the oracle, timed, or built into engines."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ...artifacts.records import (
    BUILT_NOT_RUN,
    INCONCLUSIVE,
    ORT_PACKED,
    PLUGIN,
    UNVERIFIED,
    VERIFIED,
    Note,
    Parity,
    Target,
)
from ...contract import HUB, ORT_CPU
from ...environment import fingerprint, machine
from ...errors import MissingDependencyError, VerificationError
from ...graph import program
from ...graph.debug import debug_form
from ...model.padded import layers_read
from ...runtimes import Engine, onnxruntime, openvino
from ...runtimes.packed import Judged, StaticEngines
from ...targets.sizes import together
from ...targets.specs import CPU, CUDA, PACKED, PRECOMPUTED, RUNTIMES, TargetSpec
from .context import ExportContext, ModelFile, StepResult

if TYPE_CHECKING:
    from ...verify.oracle import OracleRun

TIMING_SECONDS = 2.0
EXCUSED_LISTED = 3
"""Rows with excused flips that the notes name one by one."""


def add_cpu_targets(
    run: ExportContext, variants: Iterable[ModelFile], openvino_too: bool = False, plugin_too: bool = False
) -> StepResult:
    """Verify ONNX files in ONNX Runtime, on request with the attention operators as well; in OpenVINO on request, where it is
    the only one installed, and where ONNX Runtime's CPU provider has no arithmetic for them (bf16).

    Raises:
        MissingDependencyError: there is nothing to verify in.
        VerificationError: one does not equal the oracle, or loses more accuracy than it may.
    """
    variants = list(variants)
    verifying = any(variant.oracle is not None for variant in variants)
    if verifying and not onnxruntime.installed() and not openvino.installed():
        raise MissingDependencyError(
            "verification needs a runtime, and none is installed; type: pip install 'adtp-export[cpu]', or add --skip-parity-check"
        )
    found = reduce(StepResult.__add__, (_on_cpu(run, variant, openvino_too) for variant in variants), StepResult())
    if plugin_too:
        return reduce(StepResult.__add__, (_with_plugin(run, variant) for variant in variants), found)
    return found


def _with_plugin(run: ExportContext, variant: ModelFile) -> StepResult:
    """Judge a file in ONNX Runtime with the attention operators, where they have arithmetic for it."""
    if variant.made_for not in ("", ORT_CPU) or variant.form not in ("", PRECOMPUTED, PACKED):
        return StepResult()
    spec = TargetSpec(
        runtime="onnxruntime",
        device=CPU,
        precision=variant.precision,
        form=variant.form,
        attention=PLUGIN,
    )
    return judge(run, spec, variant) if RUNTIMES[spec.runtime].runs_here(spec) else StepResult()


def _on_cpu(run: ExportContext, variant: ModelFile, openvino_too: bool) -> StepResult:
    """Judge one file wherever it runs on the CPU."""
    if variant.made_for:
        form = variant.form or variant.made_for.removeprefix(ORT_CPU)
        spec = TargetSpec(runtime="onnxruntime", device=CPU, precision=variant.precision, form=form)
        if onnxruntime.installed():
            return judge(run, spec, variant)
        return _unverified(run, spec, variant, f"that takes ONNX Runtime; {_install('cpu')}")
    in_onnxruntime, in_openvino = (
        TargetSpec(runtime=name, device=CPU, precision=variant.precision, form=variant.form)
        for name in ("onnxruntime", "openvino")
    )
    able = [spec for spec in (in_onnxruntime, in_openvino) if RUNTIMES[spec.runtime].runs_here(spec)]
    if not able and variant.precision == "bf16":
        why = f"ONNX Runtime's CPU provider has no bf16; {_install('openvino')}"
        return _unverified(run, in_openvino, variant, why)
    if not able:
        return _unverified(run, in_onnxruntime, variant, f"no runtime is installed; {_install('cpu')}")
    judged = [spec for spec in able if spec is able[0] or openvino_too]
    return reduce(StepResult.__add__, (judge(run, spec, variant) for spec in judged), StepResult())


def _install(extra: str) -> str:
    return f"type: pip install 'adtp-export[{extra}]'"


def _unverified(run: ExportContext, spec: TargetSpec, variant: ModelFile, why: str) -> StepResult:
    target = Target(file=run.name(variant.file), status=UNVERIFIED, attention=spec.attention, details=variant.details)
    return StepResult({str(spec): target}, (Note(f"{run.name(variant.file)} has not been verified: {why}", str(spec)),))


def judge(run: ExportContext, spec: TargetSpec, variant: ModelFile) -> StepResult:
    """Compare a file, run as a target, with the oracle.

    Raises:
        VerificationError: it does not equal the oracle, or loses more accuracy than it may.
    """
    runtime, wider = RUNTIMES[spec.runtime], variant.wider

    def open_here(path: Path, wider_path: Path | None) -> Engine:
        engine = runtime.open(path, spec, keep_plugin_unloaded=True)
        if wider is None or wider_path is None:
            return engine
        larger = runtime.open(wider_path, dataclasses.replace(spec, form=wider.form), keep_plugin_unloaded=True)
        return Judged(together(engine, larger).engines)

    def open_both() -> tuple[Engine, Engine | None]:
        engine = open_here(variant.file, wider.file if wider else None)
        with debug_form(variant.file) as path, debug_form(wider.file) if wider else nullcontext() as wider_path:
            return engine, None if path == variant.file else open_here(path, wider_path)

    return judge_engine(run, spec, variant, open_both)


def judge_engine(
    run: ExportContext,
    spec: TargetSpec,
    variant: ModelFile,
    open_both: Callable[[], tuple[Engine, Engine | None]],
    details: Mapping[str, object] | None = None,
) -> StepResult:
    """Compare what `open_both` opens, an engine and its debug form, with the oracle.

    Args:
        details: of the target in the manifest, beside those of the file.
    """
    from ...verify.loss import lost
    from ...verify.parity import judged, rows_wanted
    from .quantize import check_loss

    name, details = str(spec), {**(details or {}), **variant.details}
    file = str(details.pop("file", run.name(variant.file)))
    oracle = variant.oracle
    if oracle is None:
        return StepResult({name: Target(file=file, status=UNVERIFIED, attention=spec.attention, details=details)})
    with run.steps.step(f"verify_{name}_s", f"verifying {name} on {oracle.rows} rows") as progress:
        engine, debug = open_both()
        own = (lambda: engine.own) if isinstance(engine, Judged) else None
        parity, answers = judged(oracle, engine, debug, exact_debug=False, progress=progress, own=own)
    own_rows = oracle.rows
    if isinstance(engine, StaticEngines):
        details["rows_in_this_size"] = own_rows = engine.engines[0].rows_run
        if not own_rows:
            raise VerificationError(
                f"{name}: no text of the verification fits it, so nothing is known. Nothing was published"
            )
    if parity.failure:
        raise VerificationError(f"{name} does not equal the PyTorch student: {parity.failure}. Nothing was published")
    notes = list(_excused(name, parity))
    if variant.points is not None:
        loss = lost(oracle.judge, oracle.answers, answers)
        notes += check_loss(name, loss, oracle, variant.points)
        details["points_lost"] = dataclasses.asdict(loss)
    enough = rows_wanted(oracle.rows, own_rows)
    status = VERIFIED if parity.rows_compared >= enough else INCONCLUSIVE
    if status == INCONCLUSIVE:
        notes.insert(
            0, f"{name}: {parity.rows_compared} of {parity.rows} rows could be compared, and a verdict takes {enough}"
        )
    same_bits = (spec.runtime, spec.device, spec.precision) == ("onnxruntime", CPU, "fp32")  # mostly
    if parity.debug_diff and same_bits:
        notes.append(
            f"{name}: on this processor the graph answers otherwise where it also says which tokens it keeps, by up to "
            f"{parity.debug_diff:.1e}; both are within {parity.tolerance:.1e} of PyTorch"
        )
    target = Target(file=file, status=status, attention=spec.attention, parity=parity, details=details)
    return StepResult({name: target}, tuple(Note(note, name) for note in notes))


def _excused(name: str, parity: Parity) -> tuple[str, ...]:
    notes = [
        f"{name}: row {flip.row} keeps other tokens from site {flip.site} on. The decision was too close to call: its margin is "
        f"{flip.margin:.2e}, below the rounding error of {flip.bound:.2e}"
        for flip in parity.excused_flips[:EXCUSED_LISTED]
    ]
    if (more := len(parity.excused_flips) - EXCUSED_LISTED) > 0:
        notes.append(f"{name}: {more} other rows of {parity.rows} keep other tokens, too; manifest.json lists them")
    return tuple(notes)


def time_targets(run: ExportContext, oracle: OracleRun | None, found: StepResult) -> StepResult:
    """Time verified CPU targets in turns, and say which precision is no faster than a higher one.

    Files that are run node by node to prove them for another runtime are left out.
    """
    specs = {name: TargetSpec.parse(name) for name, t in found.targets.items() if t.status == VERIFIED}
    timed = {name: spec for name, spec in specs.items() if spec.device == CPU and not spec.is_proof}
    if oracle is None or len(timed) < (1 if run.layout == HUB else 2):  # a model card has times
        return StepResult()
    from ...benchmarking.interleaved_timing import in_this_process, measure
    from ...benchmarking.workloads import Workload

    engines = {
        name: RUNTIMES[spec.runtime].open(run.work / found.targets[name].file, spec, stop_spinning=True)
        for name, spec in timed.items()
    }
    batch = max((b.batch for b in oracle.batches), key=lambda batch: batch["input_ids"].size)
    shape = "x".join(map(str, batch["input_ids"].shape))
    with run.steps.step("timing_s", f"timing {', '.join(engines)} on {shape}") as progress:
        workload = Workload(shape, (batch,))
        times = measure(workload, list(engines), in_this_process(engines), TIMING_SECONDS, progress)
    medians = {name: round(float(np.median(ms)), 3) for name, ms in times.items()}
    where = {"timed_on": shape, "machine": machine(), "fingerprint": fingerprint()}
    targets = {
        name: dataclasses.replace(t := found.targets[name], details={**t.details, **where, "p50_ms": p50})
        for name, p50 in medians.items()
    }
    return StepResult(targets, _no_faster(timed, medians, shape))


def _no_faster(timed: Mapping[str, TargetSpec], medians: Mapping[str, float], shape: str) -> tuple[Note, ...]:
    best: dict[str, str] = {}
    for name, spec in timed.items():
        variant = f"{spec.precision}-{PRECOMPUTED}" if spec.form == PRECOMPUTED else spec.precision
        best[variant] = min(name, best.get(variant, name), key=medians.__getitem__)
    ms, notes, ordered = {variant: medians[name] for variant, name in best.items()}, [], list(best)
    for i, lower in enumerate(ordered[1:], start=1):
        higher = min(ordered[:i], key=ms.__getitem__)
        if ms[lower] >= ms[higher]:
            text = (
                f"{lower} is not faster than {higher} on this machine's CPU: {ms[lower]:.1f} ms against "
                f"{ms[higher]:.1f} ms on {shape}"
            )
            notes.append(Note(text, best[lower]))
    return tuple(notes)


def add_ort_cuda(run: ExportContext, variants: Iterable[ModelFile], precisions: Iterable[str]) -> StepResult:
    """Write files for ONNX Runtime's CUDA provider, and verify them where that runs. It has no bf16 for this."""
    portable = {variant.precision: variant for variant in variants if not variant.made_for and not variant.form}
    student = run.checkpoint.student
    layers = range(student.backbone.num_layers)
    positional = {i for i in layers if student.backbone.attention(i).positional}
    if left := len(positional | layers_read(student.pruners).keys()):
        lacks = "knows no distances between tokens" if positional else "cannot say what tokens received"
        note = (
            f"ONNX Runtime's packed attention {lacks}, and {left} of {len(layers)} layers need that. They keep the decomposed form in "
            "files for its CUDA provider"
        )
        if left == len(layers):
            return StepResult(notes=(Note(f"no file for ONNX Runtime's CUDA provider: {note}"),))
        return add_ort_cuda_files(run, portable, precisions) + StepResult(notes=(Note(note),))
    return add_ort_cuda_files(run, portable, precisions)


def add_ort_cuda_files(run: ExportContext, portable: Mapping[str, ModelFile], precisions: Iterable[str]) -> StepResult:
    """Do so for each precision; `portable` has the file that each is made of."""
    found = StepResult()
    for precision in precisions:
        if precision not in ("fp32", "fp16"):
            note = f"no file for ONNX Runtime's CUDA provider in {precision}: its packed attention takes fp32 and fp16"
            found += StepResult(notes=(Note(note),))
            continue
        spec = TargetSpec(runtime="onnxruntime", device=CUDA, precision=precision, attention=ORT_PACKED)
        file = run.place(f"model.ort-cuda.{precision}.onnx")
        with run.writing():
            program.lower_to_ort_cuda(portable[precision].file, file)
        if not RUNTIMES[spec.runtime].runs_here(spec):
            found += StepResult(
                {str(spec): Target(file=run.name(file), status=BUILT_NOT_RUN, attention=spec.attention)}
            )
            continue
        found += judge(run, spec, dataclasses.replace(portable[precision], file=file))
    return found


def ship_plugin_libraries(run: ExportContext, targets: Mapping[str, Target], cpu_asked: bool) -> StepResult:
    """Put the libraries that applications register beside the files that use them.

    Args:
        targets: of this run, and of the directory that it updates.
        cpu_asked: the operators for CPUs are wanted where they are built.
    """
    from ...plugins import library, operators
    from ...runtimes import onnxruntime

    devices = {TargetSpec.parse(name).device for name, target in targets.items() if target.attention == PLUGIN}
    notes = []
    built = {CPU: operators.built() if CPU in devices else None, CUDA: library.built() if CUDA in devices else None}
    for file in filter(None, built.values()):
        with run.writing():
            (run.work / "plugins").mkdir(exist_ok=True)
            shutil.copy(file, run.work / "plugins" / file.name)
    if CUDA in devices and built[CUDA] is None:
        notes.append(
            "applications need the C++ library of the attention plugin to load its engines. It has not been built here; type: "
            "adtp-plugin build. adtp_export itself runs them without it"
        )
    if cpu_asked and CPU not in devices and (obstacle := onnxruntime.operators_obstacle()):
        notes.append(f"batches of unequal lengths cost more than they must: {obstacle}; then export again")
    return StepResult(notes=tuple(map(Note, notes)))
