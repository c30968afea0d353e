"""The directory of a run: what it was begun with, whether it is finished, and what is published in it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...artifacts.directory import writing
from ...artifacts.records import sha256
from ...errors import InputError
from ...io import exchange, flush, flush_alone, hold, read_json, written_whole
from .options import GOAL, TuneOptions

SETTINGS, RESULTS, PAGE, WORK = "tune.json", "results.json", "tune.html", "work"
TABLE, PLAN = "table.json", "plan.json"
"""In `WORK`: the times of shapes, and the plan."""
STUDENT, EXPORT = "student", "export"
"""What is published: the checkpoint and its export."""


def described(chosen: TuneOptions) -> dict[str, Any]:
    """Return the options of a run with the hashes of its files, as they are kept."""
    files = {name: getattr(chosen, name) for name in ("train", "dev", "workload")}
    hashes = {name: sha256(Path(path)) for name, path in files.items() if path is not None and Path(path).is_file()}
    hashes["model"] = sha256(*sorted(Path(chosen.model).glob("*.safetensors")))
    return json.loads(json.dumps({"options": chosen.stored(), "sha256": hashes}))


@contextlib.contextmanager
def claimed(chosen: TuneOptions) -> Iterator[bool]:
    """Keep other runs out of `out` in a block; yield whether a run has chosen there before.

    Raises:
        InputError: no run may begin, go on or choose anew there.
    """
    out = Path(chosen.out)
    if not (out / SETTINGS).is_file():
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise InputError(f"--out: {out} exists and holds no run of adtp-tune; give a new or an empty directory")
        if chosen.resume:
            raise InputError(f"--resume: {out} holds no run of adtp-tune; leave --resume out to start one")
    with writing(out):
        out.mkdir(parents=True, exist_ok=True)
    try:
        lock = hold(out)
    except BlockingIOError:
        raise InputError(f"--out: another run works in {out}; wait for its end, or give another --out") from None
    try:
        yield _opened(out, chosen)
    finally:
        if lock is not None:
            os.close(lock)


def _opened(out: Path, chosen: TuneOptions) -> bool:
    """See that settings are those of the run in `out`, or begin one; return whether it is finished."""
    finished, planned = (out / RESULTS).is_file(), (out / WORK / PLAN).is_file()
    settings, stored = described(chosen), out / SETTINGS
    if stored.is_file():
        before = read_json(stored)
        if not isinstance(before, dict) or before.keys() != settings.keys():
            raise InputError(f"--out: {stored} is not of adtp-tune; give a new or an empty directory")
        may_differ = GOAL if finished else () if planned else (*GOAL, "hours")
        names = [name for name in _differing(settings, before, "options") if name not in may_differ]
        names += [f"the content of {name}" for name in _differing(settings, before, "sha256")]
        if names:
            raise InputError(
                f"--out: {out} holds a run of other settings ({', '.join(names)}); give them as they were, or another --out"
            )
        if finished and not planned:
            raise InputError(
                f"--out: {out} holds a run without its {WORK}/, so nothing else can be chosen; give another --out"
            )
        if planned and not finished and not chosen.resume:
            raise InputError(f"--out: {out} holds an unfinished run; add --resume to go on, or give another --out")
    if not planned:  # times of shapes alone may be there
        with writing(out):
            (out / WORK).mkdir(exist_ok=True)
            write(stored, settings)
    return finished


def _differing(settings: dict[str, Any], before: dict[str, Any], part: str) -> list[str]:
    """Return the names of what differs from before in a part of the settings; an earlier version did not have all of today's options."""
    known = before[part]
    return [
        name for name, value in settings[part].items() if value != known.get(name, getattr(TuneOptions, name, None))
    ]


def write(path: Path, document: Any) -> None:
    """Write JSON whole or not at all."""
    with written_whole(path) as partial:
        partial.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    flush_alone(path.parent)


def publish(out: Path, student: Path | None, exported: Path) -> None:
    """Put a student and its export in place of those that were chosen before; None: the model itself is exported, and no student."""
    if student is None:
        shutil.rmtree(out / STUDENT, ignore_errors=True)
    for source, place in ((student, out / STUDENT), (exported, out / EXPORT)):
        if source is None:
            continue
        made = out / WORK / f"{place.name}.new"
        with writing(out):
            shutil.rmtree(made, ignore_errors=True)
            shutil.copytree(source, made, ignore=shutil.ignore_patterns("dev.npz"))
            flush(made)
            if not place.exists():
                made.rename(place)
            elif not exchange(made, place):
                shutil.rmtree(place)
                made.rename(place)
            flush_alone(out)
            shutil.rmtree(made, ignore_errors=True)
