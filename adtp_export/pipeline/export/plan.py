"""The plan of an export: everything is resolved, read and checked here, and what can be made is chosen, before any work."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ...artifacts.checks import checked_file
from ...artifacts.directory import OutputDirectory
from ...artifacts.hub import CARD, prepare
from ...artifacts.manifest import read_manifest
from ...artifacts.records import PLUGIN, Manifest, Note, ShapeRange
from ...contract import HUB, MODEL, PLAIN, layout_of, layout_path
from ...errors import InputError, quoted
from ...integrations.triton import repository as triton
from ...io import check_model_directory, directory_name
from ...plugins import operators
from ...runtimes import onnxruntime
from ...targets.specs import CPU, TargetSpec
from ..progress import Steps
from .options import ExportOptions
from .request import Request, fit_profile, read_request

if TYPE_CHECKING:
    from ...model.checkpoint import Checkpoint
    from .capabilities import Capabilities
    from .file_plan import EnginePlan, ModelFile, TargetPlan


@dataclass(frozen=True, kw_only=True)
class ExportPlan:
    """One export, of which all is known but what PyTorch and the runtimes answer.

    directory: becomes OUT. previous: the manifest of the one that is updated. repo: the repository that OUT is pushed to, with its owner.
    card: the model card that is replaced. files: ONNX files, each after those that it is made of. notes: on what is left out.
    triton_name: what models of a Triton repository are called.
    """

    request: Request
    checkpoint: Checkpoint
    directory: OutputDirectory
    out: Path
    previous: Manifest | None
    layout: str
    repo: str | None
    card: Path | None
    profile: Mapping[str, ShapeRange]
    files: tuple[ModelFile, ...]
    targets: tuple[TargetPlan, ...]
    engines: tuple[EnginePlan, ...]
    notes: tuple[Note, ...]
    triton_name: str

    @property
    def options(self) -> ExportOptions:
        return self.request.options

    @property
    def longest(self) -> int:
        """Tokens of the longest window that `load` reads: an update leaves those that other targets answer in."""
        return (self.previous or self).profile["seq"].max


def make_export_plan(options: ExportOptions, steps: Steps) -> ExportPlan:
    """Resolve and check everything, cheap things first, and load the checkpoint.

    Raises:
        InputError: a value that is not accepted, options that contradict one another, a place that cannot be written, a checkpoint that
            cannot be read, or what it cannot have.
        MissingDependencyError: a runtime is not installed.
    """
    model_dir, out = Path(options.model_dir), options.directory
    check_model_directory(model_dir)
    directory = OutputDirectory(out, options.force, options.update, protected=model_dir)
    with steps.step("import_s", "importing PyTorch and transformers"):
        request = read_request(options)
        from ...graph.debug import shows_kept
        from ...imports import open_checkpoint
        from .capabilities import Capabilities
        from .file_plan import plan_engines, plan_files, plan_targets
    previous = read_manifest(out) if options.update else None
    layout = _layout(out, options, previous)
    name = directory_name(model_dir) if options.triton_name is None else options.triton_name
    repo, card = prepare(options.push_to_hub, _surely_written(layout)) if options.push_to_hub else (None, None)
    if options.triton is not None:
        triton.check(Path(options.triton), name, out, options.force or options.update)
    with steps.step("load_s", f"loading {model_dir.name}"):
        checkpoint = open_checkpoint(model_dir, options)
    can = Capabilities(checkpoint)
    profile = fit_profile(request, checkpoint, can)
    if previous is not None:
        _check_previous(out, previous, checkpoint)
        if shows_kept(checked_file(out, previous, layout_path(MODEL, layout))):
            request = dataclasses.replace(request, options=dataclasses.replace(options, debug_outputs=True))
    files, notes = plan_files(request, checkpoint.student, can, profile, layout)
    targets = plan_targets(files, request, can)
    engines, more = plan_engines(files, request, can)
    return ExportPlan(
        request=request,
        checkpoint=checkpoint,
        directory=directory,
        out=out,
        previous=previous,
        layout=layout,
        repo=repo,
        card=card or (out / CARD if previous else None),
        profile=profile,
        files=tuple(files),
        targets=tuple(targets),
        engines=tuple(engines),
        notes=tuple(map(Note, (*notes, *more, *_without_operators(request, can, previous)))),
        triton_name=name,
    )


def _surely_written(layout: str) -> list[str]:
    """Name what every export of a layout has, whatever the model."""
    return [layout_path(MODEL, layout), *([CARD] if layout == HUB else [])]


def _check_previous(out: Path, previous: Manifest, checkpoint: Checkpoint) -> None:
    """Raises InputError where the directory that is to be updated is of another checkpoint or tokenizer."""
    from ...model.tokenizer_settings import TOKENIZER
    from ..companions import reads_alike

    if previous.checkpoint["sha256"] != checkpoint.sha256:
        raise InputError(f"--update: {out} was exported from another checkpoint; use --force to replace it")
    for name, value in checkpoint.describe().items():  # what an option decides is in no file of the checkpoint
        if name != "name" and previous.checkpoint.get(name, value) != value:  # a folder may be called otherwise now
            raise InputError(
                f"--update: {out} was exported with {name} {quoted(previous.checkpoint[name])}, and this is {quoted(value)}; "
                "use --force to replace it"
            )
    checked_file(out, previous, TOKENIZER)
    if not reads_alike(checkpoint, out):
        raise InputError(f"--update: {out} was exported with another tokenizer; use --force to replace it")


def _layout(out: Path, options: ExportOptions, previous: Manifest | None) -> str:
    """Return the layout that is asked for, or else that of the directory that is updated."""
    if previous is None:
        return options.layout or (HUB if options.push_to_hub else PLAIN)
    there = layout_of(previous.files)
    if options.layout not in (None, there):
        raise InputError(
            f"--update: {out} has the layout {there}, and this is {options.layout}; use --force to replace it"
        )
    return there


def _without_operators(request: Request, can: Capabilities, previous: Manifest | None) -> list[str]:
    """Say why files for ONNX Runtime on CPUs do not run with the attention operators, where they could."""
    if not request.operators or onnxruntime.installed() is None or not operators.enabled():
        return []
    there = previous is not None and any(
        target.attention == PLUGIN and TargetSpec.parse(name).device == CPU for name, target in previous.targets.items()
    )
    if there or not can.operators:
        return []
    return [f"batches of unequal lengths cost more than they must: {can.operators}; then export again"]
