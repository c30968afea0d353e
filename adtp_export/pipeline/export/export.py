"""`export`: a checkpoint becomes a verified ONNX file and engines."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ...artifacts.hub import CARD
from ...artifacts.records import Manifest, Note, Target
from ...errors import InputError, needs_extras, quoted
from ...options import takes
from ..progress import Steps
from .options import ExportOptions
from .plan import ExportPlan, fit_profile, kernel_obstacle, make_export_plan

if TYPE_CHECKING:
    from ...model.checkpoint import Checkpoint
    from .context import ExportContext, ModelFile, StepResult
    from .quantize import Calibration
    from .reference import Verification

REPORTS = ("report.md", "report.html", CARD)


@takes(ExportOptions)
@needs_extras("export")
def export(chosen: ExportOptions) -> Manifest:
    """Export a model, verify it against PyTorch, and publish the result as a directory.

    Returns:
        The manifest that was written: targets with their status, parity, retention, notes, files.

    Raises:
        InputError: bad input, or an output directory that may not be replaced.
        VerificationError: a target does not equal the PyTorch model.
        MissingDependencyError: the extra "export", or a runtime, is not installed.
        EngineBuildError: a runtime refuses the model.
        In all cases nothing is written to `out`, except where all is done but the Hub or the model repository refuses it.
    """
    steps = chosen.steps or Steps()
    with steps.step("import_s", "importing PyTorch and transformers"):
        plan = make_export_plan(chosen)
        from ...artifacts import hub
        from ...artifacts.directory import OutputDirectory
        from ...imports import open_checkpoint
        from . import reference as oracle  # noqa: F401 - so that a package that is missing is told before any work
        from .context import ExportContext
    repo = chosen.push_to_hub
    card = hub.prepare(repo, _surely_written(chosen)) if repo else None
    _check_triton(plan)
    directory = OutputDirectory(plan.out, chosen.force, chosen.update, protected=plan.model_dir)
    with steps.step("load_s", f"loading {plan.model_dir.name}"):
        checkpoint = open_checkpoint(plan.model_dir, chosen)
    profile = fit_profile(plan, checkpoint)
    previous = _previous(plan, checkpoint)
    with directory:
        if previous is not None:
            directory.carry_over(previous, but=REPORTS)  # those are written anew
        run = ExportContext(
            checkpoint=checkpoint,
            work=directory.work,
            profile=profile,
            steps=steps,
            layout=_layout(plan, previous),
            replaced_card=card or (plan.out / CARD if previous else None),
            out=plan.out,
        )
        manifest = _fill(run, plan, previous)
        directory.publish()
    if chosen.triton is not None:
        _write_triton(plan, steps)
    if repo:
        with steps.step("push_s", f"uploading to {repo}"):
            address = hub.push(plan.out, repo)
        steps.note(f"uploaded to {address}")
    return manifest


def _surely_written(chosen: ExportOptions) -> list[str]:
    """Name what every export that is pushed has, whatever the model."""
    from ...contract import HUB, MODEL, layout_path

    layout = chosen.layout or HUB
    return [layout_path(MODEL, layout), *([CARD] if layout == HUB else [])]


def _check_triton(plan: ExportPlan) -> None:
    """See that models may be written to the repository, before any work."""
    if (repository := plan.options.triton) is not None:
        from ...integrations.triton import repository as triton

        triton.check(Path(repository), plan.triton_name, plan.out, plan.options.force or plan.options.update)


def _write_triton(plan: ExportPlan, steps: Steps) -> None:
    """Write the published directory to the model repository."""
    from ...integrations.triton import repository as triton

    repository = Path(plan.options.triton or "")
    with steps.step("triton_s", f"writing models to {repository}"):
        replace = plan.options.force or plan.options.update
        names = triton.write(plan.out, repository, plan.triton_name, replace, steps.note)
    steps.note(f"models in {repository}: {', '.join(names)}")


def _previous(plan: ExportPlan, checkpoint: Checkpoint) -> Manifest | None:
    """Return the manifest of the directory that is to be updated."""
    from ...artifacts.manifest import read_manifest
    from .manifest import describe

    if not plan.options.update:
        return None
    previous = read_manifest(plan.out)
    if previous.checkpoint["sha256"] != checkpoint.sha256:
        raise InputError(f"--update: {plan.out} was exported from another checkpoint; use --force to replace it")
    for name, value in describe(checkpoint).items():  # what an option decides is in no file of the checkpoint
        if previous.checkpoint.get(name, value) != value:
            raise InputError(
                f"--update: {plan.out} was exported with {name} {quoted(previous.checkpoint[name])}, and this is {quoted(value)}; "
                "use --force to replace it"
            )
    return previous


def _layout(plan: ExportPlan, previous: Manifest | None) -> str:
    """Return the layout that is asked for, or else that of the directory that is updated."""
    from ...contract import HUB, PLAIN, layout_of

    asked = plan.options.layout or (HUB if plan.options.push_to_hub else None)
    if previous is None:
        return asked or PLAIN
    there = layout_of(previous.files)
    if asked not in (None, there):
        raise InputError(f"--update: {plan.out} has the layout {there}, and this is {asked}; use --force to replace it")
    return there


def _fill(run: ExportContext, plan: ExportPlan, previous: Manifest | None) -> Manifest:
    """Write all files of an output directory."""
    from ..companions import write_companions
    from .context import StepResult
    from .manifest import joined, make_manifest
    from .quantize import calibrate
    from .reference import verify_with

    with run.writing():
        write_companions(run.checkpoint, run.work, run.windows)
    calibration = calibrate(run, plan.calibration) if plan.recipes and plan.calibration else None
    verification = verify_with(run, plan.verify_text) if not plan.options.skip_parity_check else None
    variants, notes = _write_variants(run, plan, verification, calibration)
    told = (*map(Note, run.checkpoint.notes), *(verification.notes if verification else ()), *notes)
    found = StepResult(notes=told) + _targets(run, plan, variants, verification, previous.targets if previous else {})
    manifest = make_manifest(run, found, verification, calibration)
    if previous is not None:
        manifest = joined(manifest, previous, run.work)
    return _report(run, manifest, verification, plan.options.push_to_hub)


def _write_variants(
    run: ExportContext, plan: ExportPlan, verification: Verification | None, calibration: Calibration | None
) -> tuple[list[ModelFile], list[Note]]:
    """Write the ONNX files, the portable one first; return them, and notes."""
    from .model_files import write_inlined, write_packed, write_portable, write_precomputed, write_static, write_typed
    from .quantize import quantize

    oracle = verification.oracle if verification else None
    portable = write_portable(run, oracle, plan.options.debug_outputs)
    variants = [portable]
    notes: list[Note] = []
    if plan.options.with_tokenizer:
        from .strings import STRINGS, write_strings

        notes += [Note(note, run.name(run.place(STRINGS))) for note in write_strings(run, portable, plan)]
    if plan.options.precompute_embedding_projections:
        precomputed, more = write_precomputed(run, portable)
        variants.append(precomputed)
        notes += more
    sources = [portable]
    if plan.options.packed_inputs or plan.options.triton is not None:
        sources.append(write_packed(run, oracle, plan.options.debug_outputs))
    sources += write_static(run, oracle, plan.static_sizes)
    variants += sources[1:]
    for precision in plan.typed:
        variants += write_typed(run, sources, precision)
    if plan.options.inline:
        variants += [write_inlined(run, variant) for variant in variants if not (variant.form or variant.made_for)]
    if plan.recipes and plan.static_sizes:
        notes.append(Note("files of fixed sizes are not quantized: --static-tokens makes those in fp32, fp16 and bf16"))
    for recipe in plan.recipes:
        assert calibration is not None
        quantized, told = quantize(run, portable, calibration, recipe, plan.points)
        variants.append(quantized)
        notes += [Note(note, run.name(quantized.file)) for note in told]
    return variants, notes


def _targets(
    run: ExportContext,
    plan: ExportPlan,
    variants: list[ModelFile],
    verification: Verification | None,
    before: Mapping[str, Target],
) -> StepResult:
    """Verify, time and build; `before`: targets of the directory that is updated."""
    from . import verify as targets
    from .context import StepResult
    from .engines import add_engines

    obstacle = kernel_obstacle(run.checkpoint) if plan.cpu_plugin else None
    cpu_plugin = plan.cpu_plugin and not obstacle
    found = targets.add_cpu_targets(run, variants, plan.options.openvino, cpu_plugin)
    if obstacle:
        found += StepResult(notes=(Note(f"the attention operators for CPUs are not used: {obstacle}"),))
    found += targets.time_targets(run, verification.oracle if verification else None, found)
    if plan.options.ort_cuda:
        found += targets.add_ort_cuda(run, variants, plan.precisions)
    if plan.engines:
        found += add_engines(run, plan.engines, variants)
    return found + targets.ship_plugin_libraries(run, {**before, **found.targets}, cpu_plugin)


def _report(run: ExportContext, manifest: Manifest, verification: Verification | None, repo: str | None) -> Manifest:
    """Write reports and the manifest; in the layout of the Hub a model card, too."""
    from ...artifacts.manifest import write_manifest
    from ...contract import HUB
    from ...report import card, html, markdown

    with run.writing():
        manifest = write_manifest(manifest, run.work)  # once for the sizes that the report shows
    shown = verification.views if verification else None
    texts = [markdown.render(manifest), html.render(manifest, shown)]
    if run.layout == HUB:
        fields = card.metadata(manifest, run.checkpoint.directory, run.checkpoint.raw_config, run.replaced_card)
        texts.append(card.render(manifest, fields, repo or f"USER/{manifest.checkpoint['name']}"))
    with run.writing():
        for name, text in zip(REPORTS, texts):
            (run.work / name).write_text(text, encoding="utf-8")
        return write_manifest(manifest, run.work)
