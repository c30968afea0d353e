"""TensorRT engines of an export: built for groups of GPUs, and verified where one of them is here."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ...artifacts.records import BUILT_NOT_RUN, DECOMPOSED, EMULATED, PLUGIN, VERIFIED, Note, Target
from ...graph.debug import debug_form
from ...runtimes import Engine, tensorrt
from ...runtimes.tensorrt import Flavor
from ...targets.specs import CUDA, PACKED, RUNTIMES, TargetSpec, size_of
from .context import ExportContext, ModelFile, StepResult
from .plan import EnginePlan, plugin_obstacle
from .verify import judge_engine

FOLDER = "engines"


def add_engines(run: ExportContext, plan: EnginePlan, variants: Iterable[ModelFile]) -> StepResult:
    """Build engines in each precision, for each group of GPUs, with the attention that was asked for.

    Raises:
        EngineBuildError: the parser or the builder refuses a model.
        VerificationError: an engine that runs here does not equal the oracle.
    """
    variants = list(variants)
    made = {(variant.precision, variant.made_for): variant for variant in variants if not variant.form}
    found = StepResult()
    for precision, groups in plan.groups.items():
        variant = made.get((precision, "")) or made[precision, plan.flavor.short]
        chosen = [gpu for group in groups for gpu in group]
        if left := [gpu for gpu in plan.gpus if gpu not in chosen]:
            found += StepResult(
                notes=(Note(f"no {precision} engine for {', '.join(left)}: e4m3 products need sm_89 or newer"),)
            )
        forms = (PACKED,) if plan.flavor is tensorrt.TENSORRT else ()  # for servers, which load no engines of RTX
        further = [v for v in variants if v.precision == precision and (size_of(v.form) or v.form in forms)]
        for gpus in groups:
            for each in (variant, *further):
                found += _for_group(run, plan, each, gpus)
    return found


def _for_group(run: ExportContext, plan: EnginePlan, variant: ModelFile, gpus: tuple[str, ...]) -> StepResult:
    """Build one engine, or with "auto" both where that is possible, until the plugin's has been verified on this machine."""
    obstacle = plugin_obstacle(run.checkpoint, gpus)
    found, verified = StepResult(), False
    if obstacle and plan.attention == "auto":
        found += StepResult(notes=(Note(f"no engine with the attention plugin for {', '.join(gpus)}: {obstacle}"),))
    if plan.attention != DECOMPOSED and not obstacle:
        built = _one(run, plan.flavor, variant, gpus, PLUGIN)
        found, verified = found + built, any(t.status == VERIFIED for t in built.targets.values())
    if plan.attention == DECOMPOSED or (plan.attention == "auto" and not verified):
        found += _one(run, plan.flavor, variant, gpus, DECOMPOSED)
    return found


def _one(run: ExportContext, flavor: Flavor, variant: ModelFile, gpus: tuple[str, ...], attention: str) -> StepResult:
    spec = TargetSpec(
        runtime=flavor.short,
        device=CUDA,
        precision=variant.precision,
        gpus=gpus,
        attention=attention,
        form=variant.form,
    )
    file = run.work / FOLDER / f"{spec}.engine"
    with run.writing():
        file.parent.mkdir(exist_ok=True)
    details = {**_build(run, flavor, spec, variant.file, file), "model": run.name(variant.file)}
    if not RUNTIMES[spec.runtime].runs_here(spec):
        name, details = f"{FOLDER}/{file.name}", {**details, **variant.details}
        status = EMULATED if details.get("kernels_emulated") else BUILT_NOT_RUN
        return StepResult({str(spec): Target(file=name, status=status, attention=attention, details=details)})

    def open_both() -> tuple[Engine, Engine | None]:
        runtime = RUNTIMES[spec.runtime]
        engine = runtime.open(file, spec, keep_plugin_unloaded=True)
        with debug_form(variant.file) as debug_model:
            if debug_model == variant.file:
                return engine, None
            debug = debug_model.with_suffix(".engine")
            _build(run, flavor, spec, debug_model, debug)
            return engine, runtime.open(debug, spec, keep_plugin_unloaded=True)

    return judge_engine(run, spec, variant, open_both, details={**details, "file": f"{FOLDER}/{file.name}"})


def _build(run: ExportContext, flavor: Flavor, spec: TargetSpec, model: Path, file: Path) -> dict[str, Any]:
    with run.steps.step(f"build_{file.stem}_s", f"building {file.name}") as progress:
        engine, details = tensorrt.build(
            flavor, model, run.profile, spec.gpus, spec.attention, lambda phase, step, steps: progress(step, steps)
        )
        with run.writing(), file.open("wb") as stream:
            stream.write(engine)
    return {**details, "profile": {axis: str(p) for axis, p in run.profile.items()}}
