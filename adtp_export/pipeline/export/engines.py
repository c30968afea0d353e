"""TensorRT engines of an export: built for groups of GPUs, and verified where one of them is here; and the libraries that they need."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...artifacts.records import BUILT_NOT_RUN, EMULATED, PLUGIN, VERIFIED, Note, Target
from ...graph.debug import debug_form
from ...io import writing_scratch
from ...plugins import library, operators, runner
from ...runtimes import Engine, onnxruntime, tensorrt
from ...runtimes.packed import Judged
from ...targets.sizes import together
from ...targets.specs import CPU, RUNTIMES, TargetSpec
from .context import ExportContext, StepResult, WrittenFile
from .file_plan import EnginePlan
from .verify import judge_engine

FOLDER = "engines"


def build_engines(run: ExportContext, plans: Iterable[EnginePlan], written: Mapping[str, WrittenFile]) -> StepResult:
    """Build engines with each attention in turn, until one has been verified on this machine.

    Raises:
        EngineBuildError: the parser or the builder refuses a model.
        VerificationError: an engine that runs here does not equal the oracle.
    """
    found = StepResult()
    for plan in plans:
        for spec in plan.specs:
            built = _one(run, plan, spec, written)
            found += built
            if any(target.status == VERIFIED for target in built.targets.values()):
                break
    return found


def _one(run: ExportContext, plan: EnginePlan, spec: TargetSpec, written: Mapping[str, WrittenFile]) -> StepResult:
    model, name = written[plan.file.name], _name(spec)
    engine, known = _build(run, plan, spec, model.path, name)
    with run.writing(name) as file:
        file.write_bytes(engine)
    details = {**known, "model": model.file.name}
    if not plan.runs_here:
        status = EMULATED if details.get("kernels_emulated") else BUILT_NOT_RUN
        details |= model.details
        return StepResult({str(spec): Target(file=name, status=status, attention=spec.attention, details=details)})

    def open_both() -> tuple[Engine, Engine | None]:
        models = {spec: model.path}
        if plan.file.wider:  # for texts that do not fit this size
            models[dataclasses.replace(spec, form=plan.file.wider.form)] = written[plan.file.wider.name].path
        with contextlib.ExitStack() as scratch:
            engines, debug = [], []
            for each, path in models.items():
                debug_path = scratch.enter_context(debug_form(path))
                place = run.work / _name(each)
                if not place.exists():  # one with the other attention was verified, and is enough
                    engine = _build(run, plan, each, path, place.name)[0]
                    with writing_scratch("an engine to verify"):
                        place = Path(scratch.enter_context(tempfile.TemporaryDirectory()), place.name)
                        place.write_bytes(engine)
                engines.append(_open(place, each))
                if debug_path != path:
                    place = debug_path.with_suffix(".engine")
                    engine = _build(run, plan, each, debug_path, place.name)[0]
                    with writing_scratch("an engine to verify"):
                        place.write_bytes(engine)
                    debug.append(_open(place, each))
            return _joined(engines), _joined(debug) if debug else None

    return judge_engine(run, spec, model, open_both, details={**details, "file": name})


def _name(spec: TargetSpec) -> str:
    return f"{FOLDER}/{spec}.engine"


def _open(file: Path, spec: TargetSpec) -> Engine:
    return RUNTIMES[spec.runtime].open(file, spec, keep_plugin_unloaded=True)


def _joined(engines: Sequence[Engine]) -> Engine:
    """Return an engine; of one of a fixed size and a larger one, what runs each batch in the first that it fits."""
    return engines[0] if len(engines) == 1 else Judged(together(*engines).engines)


def _build(
    run: ExportContext, plan: EnginePlan, spec: TargetSpec, model: Path, name: str
) -> tuple[Any, dict[str, Any]]:
    """Return an engine, a buffer, and what the builder knows about it."""
    file = Path(name)
    with run.steps.step(f"build_{file.stem}_s", f"building {file.name}") as progress:
        engine, details = tensorrt.build(
            plan.flavor, model, run.profile, spec.gpus, spec.attention, lambda phase, step, steps: progress(step, steps)
        )
    return engine, {**details, "profile": {axis: str(p) for axis, p in run.profile.items()}}


def ship_plugin_libraries(run: ExportContext, targets: Mapping[str, Target], for_cpu: bool) -> StepResult:
    """Put the libraries that applications register beside the files that use them.

    Args:
        targets: of this run, and of the directory that it updates.
        for_cpu: the one for CPUs, too. Most have no use for it: it is in the package.
    """
    specs = [TargetSpec.parse(name) for name, target in targets.items() if target.attention == PLUGIN]
    wanted = {library if spec.gpus else runner for spec in specs if spec.device != CPU}
    built = {made: made.built() for made in wanted}
    if for_cpu and any(spec.device == CPU for spec in specs) and onnxruntime.operators_obstacle() is None:
        built[operators] = operators.library()
    notes = []
    for file in filter(None, built.values()):
        with run.writing(f"plugins/{file.name}") as path:
            shutil.copy(file, path)
    if runner in wanted and built[runner] is None:
        notes.append(
            f"files for our own CUDA kernels run with {runner.FILE}, which has not been built here; type: adtp-plugin build --cuda"
        )
    if library in wanted and built[library] is None:
        notes.append(
            "applications need the C++ library of the attention plugin to load its engines. It has not been built here; type: "
            "adtp-plugin build. adtp_export itself runs them without it"
        )
    return StepResult(notes=tuple(map(Note, notes)))
