"""The manifest of an export, alone or joined with what an output directory held before."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..model.checkpoint import Checkpoint
from ..records import UNVERIFIED, Manifest, Target, file_entry
from .environment import versions
from .oracle import Verification
from .quantization import Calibration
from .run import Found, Run

TIMES = ("timed_on", "machine", "fingerprint", "p50_ms")
"""What a target that was timed says in its details."""


def make_manifest(
    run: Run, found: Found, verification: Verification | None, calibration: Calibration | None
) -> Manifest:
    """Say what was built, how far it is from PyTorch, and on what that was judged; files are not listed yet."""
    return Manifest(
        versions=versions(),
        checkpoint=describe(run.checkpoint),
        profile=run.profile,
        retention=verification.oracle.retention if verification else {},
        targets=found.targets,
        verification=verification.record if verification else {},
        calibration=calibration.record if calibration else {},
        notes=found.notes,
        durations_s=dict(run.steps.durations_s),
    )


def joined(manifest: Manifest, previous: Manifest, work: Path) -> Manifest:
    """Add to the manifest of a run what an earlier one knew about files in `work`."""
    known = {name: _still_known(target, previous, work) for name, target in previous.targets.items()}
    better = {name: _better_known(name, target, previous, work) for name, target in manifest.targets.items()}
    return dataclasses.replace(
        manifest,
        profile=previous.profile,  # of what was there; the engines of this run carry their own
        targets={**known, **better},
        retention=manifest.retention or previous.retention,
        verification=manifest.verification or previous.verification,
        calibration=manifest.calibration or previous.calibration,
        notes=tuple(dict.fromkeys((*previous.notes, *manifest.notes))),
    )


def describe(checkpoint: Checkpoint) -> Mapping[str, Any]:
    """Say in the manifest what was exported: name, hash, backbone, head, method, sites and the method's settings."""
    config = checkpoint.student.config
    return {
        "name": checkpoint.directory.resolve().name,
        "sha256": checkpoint.sha256,
        "stored_dtype": checkpoint.stored_dtype,
        "backbone": config.encoder_config.model_type,
        "head": config.head,
        "method": config.method,
        "prune_sites": list(checkpoint.student.site_names),
        **(dataclasses.asdict(config.settings) if config.settings else {}),
        **checkpoint.settings,
        **checkpoint.read_with,
    }


def _still_known(target: Target, previous: Manifest, work: Path) -> Target:
    """Forget what was found out about a file that this run has changed."""
    if previous.files[target.file]["sha256"] == file_entry(work / target.file)["sha256"]:
        return target
    return dataclasses.replace(target, status=UNVERIFIED, parity=None)


def _better_known(name: str, target: Target, previous: Manifest, work: Path) -> Target:
    """Keep what an earlier run found out about a file, where this run wrote the same one and did not look.

    The same goes for times, which are comparable among the targets of one run.
    """
    before = previous.targets.get(name)
    if before is None or previous.files[before.file]["sha256"] != file_entry(work / target.file)["sha256"]:
        return target
    if target.status == UNVERIFIED:
        return before
    times = {key: before.details[key] for key in TIMES if key in before.details}
    return dataclasses.replace(target, details={**times, **target.details})
