"""The manifest of an export, alone or joined with what an output directory held before."""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Iterable, Mapping
from pathlib import Path
from typing import Any

from ...artifacts.records import RANDOM_IDS, TIMING, UNVERIFIED, VERIFICATION, Manifest, Note, Target, file_entry
from ...environment import versions
from .context import ExportContext, StepResult
from .quantize import Calibration
from .reference import Verification

ROWS = ("text", "sha256", "rows", "languages", RANDOM_IDS, "accuracy", "quality", "windows")
"""What a target says of the rows that it was compared on: what they are, and what the PyTorch student makes of them."""
TIMES = ("timed_on", "machine", "fingerprint", "p50_ms")
"""What a target that was timed says in its details."""
JUDGED = (*TIMES, "points_lost", "rows_in_this_size")
"""What a target's details say of its answers and times; the others describe its file."""


def make_manifest(
    run: ExportContext, found: StepResult, verification: Verification | None, calibration: Calibration | None
) -> Manifest:
    """Say what was built, how far it is from PyTorch, and on what that was judged; files are not listed yet.

    Each target takes with it what it was compared and calibrated on, so that a later run may use other rows for others.
    """
    rows = {name: verification.record[name] for name in ROWS if name in verification.record} if verification else {}
    texts = {name: value for name, value in rows.items() if name != RANDOM_IDS}
    ranges = calibration.record if calibration else {}
    targets = {
        name: dataclasses.replace(
            target,
            verification=(texts if "recipe" in target.details else rows) if target.parity else {},
            calibration=ranges if target.details.get("ranges") else {},
        )
        for name, target in found.targets.items()
    }
    return Manifest(
        versions=versions(),
        checkpoint=run.checkpoint.describe(),
        profile=run.profile,
        retention=verification.oracle.retention if verification else {},
        targets=targets,
        verification=verification.record if verification else {},
        notes=found.notes,
        durations_s=dict(run.steps.durations_s),
    )


def unchanged(previous: Manifest, work: Path) -> set[str]:
    """Return the files of an earlier run's targets that are the same in `work`, and so are their weights beside them."""

    def same(name: str) -> bool:
        place, before = work / name, previous.files.get(name)
        return before is None or (place.is_file() and file_entry(place) == before)

    files = {target.file for target in previous.targets.values()}
    return {file for file in files if same(file) and same(f"{file}.data")}


def known(previous: Manifest, same: Container[str], written: Iterable[Target] = ()) -> dict[str, Target]:
    """Return the targets of an earlier run. Those whose files are in `same` keep what was found out about them; the others lose it.

    Args:
        written: targets of this run, which describe the files that it has changed.
    """
    of_files = {target.file: target for target in written}
    return {
        name: target if target.file in same else _forgotten(target, of_files.get(target.file))
        for name, target in previous.targets.items()
    }


def with_times(manifest: Manifest, times: Mapping[str, Mapping[str, Any]]) -> Manifest:
    """Put the details of targets that were timed in place of earlier ones.

    Earlier times of this kind of machine are forgotten where a target was not timed with the others.
    """
    here = {details["fingerprint"] for details in times.values()}
    targets = {}
    for name, target in manifest.targets.items():
        forgotten = TIMES if target.details.get("fingerprint") in here else ()
        details = {key: value for key, value in target.details.items() if key not in forgotten}
        targets[name] = dataclasses.replace(target, details={**details, **times.get(name, {})})
    return dataclasses.replace(manifest, targets=targets)


def joined(manifest: Manifest, previous: Manifest, work: Path, timed: bool = False) -> Manifest:
    """Add to the manifest of a run what an earlier one knew about files in `work`.

    Args:
        timed: this run timed targets, so that notes on earlier times no longer hold. Nor do they where a file that was timed has changed.
    """
    same = unchanged(previous, work)
    better = {
        name: _better_known(target, previous.targets[name])
        if name in previous.targets and target.file in same
        else target
        for name, target in manifest.targets.items()
    }
    targets = {**known(previous, same, manifest.targets.values()), **better}
    timed |= any("p50_ms" in target.details and target.file not in same for target in previous.targets.values())
    newest = manifest if manifest.verification else previous
    return dataclasses.replace(
        manifest,
        profile=previous.profile,  # of what was there; the engines of this run carry their own
        targets=targets,
        retention=newest.retention,
        verification=newest.verification,
        notes=_notes(manifest, previous, {n: t for n, t in targets.items() if t is previous.targets.get(n)}, timed),
    )


def _notes(manifest: Manifest, previous: Manifest, known: Mapping[str, Target], timed: bool) -> tuple[Note, ...]:
    """Return what still holds of earlier notes, and those of this run.

    Args:
        known: targets of which the earlier run knows more, so that its notes on them and on their files hold.
    """
    kept = {*known, *(target.file for target in known.values())}
    files = {target.file for target in manifest.targets.values()}
    rows = {VERIFICATION} if manifest.verification else set()
    rows |= {TIMING} if timed else set()
    again = {"", *(note.about for note in manifest.notes), *manifest.targets, *previous.targets, *files, *rows} - kept
    before = [note for note in previous.notes if note.about not in again]
    return (*before, *(note for note in manifest.notes if note.about not in kept))


def _forgotten(target: Target, written: Target | None) -> Target:
    """Forget what was found out about a file that this run has changed; `written` describes the new one, if it is of this run."""
    now = written or target
    details = {name: value for name, value in now.details.items() if name not in JUDGED}
    calibration = written.calibration if written else {}
    return dataclasses.replace(
        target, status=UNVERIFIED, parity=None, verification={}, calibration=calibration, details=details
    )


def _better_known(target: Target, before: Target) -> Target:
    """Keep what an earlier run found out about a file, where this run wrote the same one and did not look; times, too."""
    if target.parity is None and (before.parity is not None or target.status == UNVERIFIED):
        return before
    times = {key: before.details[key] for key in TIMES if key in before.details}
    return dataclasses.replace(target, details={**times, **target.details})
