"""Export of a vision tower alone: one file, what it was found to be off, and what `encode_images` has to know."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...artifacts.directory import OutputDirectory, writing
from ...artifacts.records import DECOMPOSED, UNVERIFIED, VERIFIED, Manifest, Note, ShapeRange, Target
from ...contract import (
    CHECKPOINT_SHA256,
    HEAD_IMAGES,
    PRECISION,
    VERSION,
    VISION_MODEL,
    __version__,
    in_precision,
)
from ...environment import versions
from ...errors import VerificationError
from ...graph import program
from ...graph.decoder import export_tower
from ...io import directory_name, json_text, sha256
from ...model.checkpoint import read_config
from ...model.image_pruners import DIVPRUNE
from ...model.tower import Tower, is_tower, load_tower
from ...model.weights import weight_files
from ...runtimes import onnxruntime
from ...targets.specs import CPU, TargetSpec
from ...verify.pictures import PICTURES, compare_tower
from ..progress import Steps
from .decoder import check_taken, read_pruning
from .options import ExportOptions, precisions_among
from .publish import publish_with_report

TAKEN = ("model_dir", "out", "force", "pruning", "precisions", "skip_parity_check", "allow_pickle")
"""Options that vision towers have."""
COMPANIONS = ("preprocessor_config.json", "processor_config.json")
PRECISIONS = ("fp32", "fp16")


def holds_tower(options: ExportOptions) -> bool:
    """Whether the directory holds a vision tower; raises InputError for one of a kind that is not accepted."""
    directory = Path(options.model_dir)
    path = directory / "config.json"
    return path.is_file() and is_tower(read_config(directory), path)


def export_vision_tower(options: ExportOptions, steps: Steps) -> Manifest:
    """Export a vision tower; errors are those of `export`."""
    check_taken(options, TAKEN, "vision towers", "")
    precisions = precisions_among(options, PRECISIONS, "vision towers")
    model_dir = Path(options.model_dir)
    out = options.directory
    directory = OutputDirectory(out, options.force, protected=model_dir)
    with steps.step("load_s", f"loading {model_dir.name}"):
        tower = load_tower(model_dir, read_pruning(options.pruning, model_dir), allow_pickle=options.allow_pickle)
    hashed = sha256(model_dir / "config.json", *weight_files(model_dir, options.allow_pickle))
    described = _described(tower, model_dir, hashed)
    metadata = {
        VERSION: __version__,
        PRECISION: "fp32",
        CHECKPOINT_SHA256: hashed,
        "pruning": described["pruning"],
    }
    with directory:
        with writing(out):
            _write_companions(tower, directory.work)
        with steps.step("export_vision_s", f"exporting {VISION_MODEL}"):
            made = export_tower(tower, metadata)
            with writing(directory.work):
                program.save(made, directory.work / VISION_MODEL)
        targets = dict(_target(tower, directory.work, each, options, steps) for each in precisions)
        manifest = Manifest(
            versions=versions(),
            checkpoint=described,
            profile={"batch": ShapeRange(1, 1, 32), "seq": ShapeRange(*[tower.config.image_size] * 3)},
            retention={},
            targets=targets,
            verification={} if options.skip_parity_check else {"text": "random pictures", "rows": PICTURES},
            notes=_notes(tower),
            durations_s=dict(steps.durations_s),
        )
        return publish_with_report(directory, manifest)


def _described(tower: Tower, model_dir: Path, hashed: str) -> dict[str, Any]:
    """Say in the manifest what was exported."""
    pruning: list[Mapping[str, Any]] = []
    if tower.kept_tokens:
        layers, first = list(tower.feature_layers), not tower.leaves_first_out
        pruning = [{"method": DIVPRUNE, "kept_tokens": tower.kept_tokens, "layers": layers, "all_tokens": first}]
    return {
        "name": directory_name(model_dir),
        "sha256": hashed,
        "stored_dtype": str(tower.raw_config.get("dtype") or tower.raw_config.get("torch_dtype") or "float32"),
        "backbone": tower.config.model_type,
        "head": HEAD_IMAGES,
        "prune_sites": [],
        "pruning": pruning,
    }


def _write_companions(tower: Tower, work: Path) -> None:
    """Write how pictures are prepared, and the configuration with a block `adtp`."""
    for name in COMPANIONS:
        if (tower.directory / name).is_file():
            shutil.copyfile(tower.directory / name, work / name)
    block = {"image_size": tower.config.image_size, "vector_size": tower.size, "kept_tokens": tower.kept_tokens}
    plain = {name: value for name, value in tower.raw_config.items() if name != "pruning"}
    fields = {**plain, "adtp": {"head": HEAD_IMAGES, **block}}
    (work / "config.json").write_text(json_text(fields), encoding="utf-8")


def _target(tower: Tower, work: Path, precision: str, options: ExportOptions, steps: Steps) -> tuple[str, Target]:
    """Write the file of a lower precision, and compare it in ONNX Runtime."""
    file, parity = in_precision(VISION_MODEL, precision), None
    if precision != "fp32":
        with steps.step(f"convert_{precision}_s", f"writing {file}"), writing(work):
            program.convert_precision(work / VISION_MODEL, work / file, precision)
    spec = TargetSpec(runtime="onnxruntime", device=CPU, precision=precision, attention=DECOMPOSED)
    if not options.skip_parity_check:
        with steps.step(f"verify_{spec}_s", f"comparing {spec} with PyTorch"):
            parity = compare_tower(tower, onnxruntime.OnnxRuntimeEngine(work / file).run, precision)
        if parity.failure:
            raise VerificationError(f"{spec}: {parity.failure}")
    return str(spec), Target(
        file=file,
        status=VERIFIED if parity else UNVERIFIED,
        attention=DECOMPOSED,
        parity=parity,
        verification={"text": "random pictures", "rows": parity.rows} if parity else {},
    )


def _notes(tower: Tower) -> tuple[Note, ...]:
    notes = []
    if hasattr(tower.model, "text_model"):
        notes.append(Note("the model of texts was left out: only the vision tower is exported"))
    if not any((tower.directory / name).is_file() for name in COMPANIONS):
        notes.append(Note(f"pictures cannot be prepared: {tower.directory.name} has no {COMPANIONS[0]}"))
    return tuple(notes)
