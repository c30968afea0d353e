"""`export`: a checkpoint becomes a verified ONNX file and engines. All is planned once; then each step does what the plan says."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...artifacts.records import Manifest, Note
from ...contract import HUB
from ...errors import needs_extras
from ...io import JSON_BYTES, read_document
from ...options import takes
from ..progress import Steps
from .options import ExportOptions
from .plan import ExportPlan, make_export_plan

if TYPE_CHECKING:
    from .context import ExportContext


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
    if _may_generate(chosen):
        from .decoder import export_decoder, is_decoder
        from .tower import export_vision_tower, holds_tower

        if holds_tower(chosen):
            return export_vision_tower(chosen, steps)
        if is_decoder(chosen):
            return export_decoder(chosen, steps)
    plan = make_export_plan(chosen, steps)
    from .context import ExportContext
    from .publish import REPORTS, hand_on

    with plan.directory as directory:
        if plan.previous is not None:
            directory.carry_over(plan.previous, but=REPORTS)  # those are written anew
        run = ExportContext(
            checkpoint=plan.checkpoint,
            work=directory.work,
            profile=plan.profile,
            steps=steps,
            windows=plan.checkpoint.student.windows.within(min(plan.longest, plan.profile["seq"].max)),
            out=plan.out,
        )
        manifest = _fill(run, plan)
        directory.publish()
    hand_on(plan, steps)
    return manifest


_TOLD_BY = ("ForCausalLM", "vision_config", "vision_model", "clip_text_model", "siglip")
"""Every configuration of a model that generates text or reads pictures has one of these words; those of some encoders do, too."""


def _may_generate(options: ExportOptions) -> bool:
    """Whether PyTorch is to be imported, which takes seconds, to find out whether the model generates text, or reads pictures."""
    with contextlib.suppress(OSError, ValueError):
        text = read_document(Path(options.model_dir) / "config.json", JSON_BYTES)
        return options.pruning is not None or any(word in text for word in _TOLD_BY)
    return options.pruning is not None


def _fill(run: ExportContext, plan: ExportPlan) -> Manifest:
    """Write all files of an output directory."""
    from ..companions import write_companions
    from .context import StepResult
    from .engines import build_engines, ship_plugin_libraries
    from .manifest import joined, known, make_manifest, unchanged, with_times
    from .model_files import write_model_files
    from .publish import write_reports
    from .quantize import calibrate, quantize, uncalibrated
    from .reference import type_oracles, verify_with
    from .timing import time_targets
    from .verify import verify_strings, verify_targets

    request, previous = plan.request, plan.previous
    with run.writing():
        write_companions(run.checkpoint, run.work, run.checkpoint.student.windows.within(plan.longest))
    calibration = calibrate(run, request.calibration) if request.recipes and request.calibration else None
    tokens = run.profile["seq"].max if request.bounds_lengths else run.checkpoint.max_tokens
    random = None if plan.options.verify_data else tokens  # that says what to compare on
    verification = verify_with(run, request.verify_text, random) if not plan.options.skip_parity_check else None
    oracles = type_oracles(run, verification.oracle, request.typed) if verification else {}
    quantized = {
        file.name: quantize(
            run, calibration or uncalibrated(oracles.get("fp32")), file.recipe, oracles.get("fp32"), request.points
        )
        for file in plan.files
        if file.recipe
    }
    written, notes = write_model_files(run, plan.files, oracles, quantized, plan.options.debug_outputs)
    found = StepResult(notes=(*map(Note, run.checkpoint.notes), *(verification.notes if verification else ())))
    found += verify_strings(run, written, request.verify_text)
    found += StepResult(notes=notes)
    found += verify_targets(run, plan.targets, written)
    times: Mapping[str, Mapping[str, Any]] = {}
    if verification:
        least = 1 if plan.layout == HUB else 2  # a model card has times
        before = known(previous, unchanged(previous, run.work)) if previous else {}
        times, notes = time_targets(run, verification.oracle, found.targets, before, least)
        found += StepResult(notes=notes)
    found += build_engines(run, plan.engines, written)
    targets = {**(previous.targets if previous else {}), **found.targets}
    found += ship_plugin_libraries(run, targets, plan.options.precompute_embedding_projections)
    found += StepResult(notes=plan.notes)
    manifest = make_manifest(run, found, verification, calibration)
    if previous is not None:
        manifest = joined(manifest, previous, run.work, timed=bool(times))
    manifest = with_times(manifest, times)
    return write_reports(run, plan, manifest, verification.views if verification else None)
