"""The directory of a run: what it was begun with, whether it is finished, and what is published in it."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from ...artifacts.checks import contents
from ...artifacts.directory import OutputDirectory, alone_in, foreign, writing
from ...errors import InputError
from ...io import check_readable_name, flush, flush_alone, json_text, read_json, written_whole
from ..train.directory import MODEL_FILES, PARTIAL, TOKENIZER_FILES
from .options import GOAL, TuneOptions

BuiltT = TypeVar("BuiltT")

SETTINGS, RESULTS, PAGE, WORK = "tune.json", "results.json", "tune.html", "work"
TABLE, PLAN, TRIALS = "table.json", "plan.json", "trials"
"""In `WORK`: the times of shapes, the plan, and the folder of all students."""
STUDENT, EXPORT = "student", "export"
"""What is published: the checkpoint and its export."""
TOLD = "dev.npz"
"""A student's answers to dev, which stay in `WORK`."""
_STUDENT_FILES = re.compile(f"({MODEL_FILES}|{TOKENIZER_FILES}){PARTIAL}")
"""What trials write into a student's folder."""


def described(chosen: TuneOptions) -> dict[str, Any]:
    """Return the options of a run with the hashes of its files, as they are kept."""
    hashes = contents({name: getattr(chosen, name) for name in ("train", "dev", "workload", "model")})
    return json.loads(json.dumps({"options": chosen.stored(), "sha256": hashes}))


@contextlib.contextmanager
def claimed(chosen: TuneOptions) -> Iterator[bool]:
    """Keep other runs out of `out` in a block; yield whether a run has chosen there before.

    Raises:
        InputError: no run may begin, go on or choose anew there.
    """
    out = Path(chosen.out)
    check_readable_name(out)
    if not (out / SETTINGS).is_file():
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise InputError(f"--out: {out} exists and holds no run of adtp-tune; give a new or an empty directory")
        if chosen.resume:
            raise InputError(f"--resume: {out} holds no run of adtp-tune; leave --resume out to start one")
    with writing(out):
        out.mkdir(parents=True, exist_ok=True)
    with alone_in(out):
        yield _opened(out, chosen)


def _opened(out: Path, chosen: TuneOptions) -> bool:
    """See that settings are those of the run in `out`, or begin one; return whether it is finished."""
    finished, planned = (out / RESULTS).is_file(), (out / WORK / PLAN).is_file()
    begun = finished or planned or (out / WORK / TABLE).is_file()  # else settings that are there made nothing
    settings, stored = described(chosen), out / SETTINGS
    if stored.is_file():
        before = read_json(stored)
        if not _are_settings(before):
            raise InputError(f"--out: {stored} is not of adtp-tune; give a new or an empty directory")
        may_differ = GOAL if finished else () if planned else (*GOAL, "hours")
        hashes = before["sha256"]  # an earlier version did not have all of today's
        by_content = {name.rstrip("/") for name in settings["sha256"].keys() & hashes.keys()}  # wherever it lies now
        differing = _differing(settings["options"], before["options"])
        names = [name for name in differing if name not in may_differ and name not in by_content]
        changed = (name for name, now in settings["sha256"].items() if hashes.get(name, now) != now)
        names += [f"the content of {name.rstrip('/')}" for name in changed]
        if names and begun:
            raise InputError(
                f"--out: {out} holds a run of other settings ({', '.join(names)}); give them as they were, or another --out"
            )
        if finished and not planned:
            raise InputError(
                f"--out: {out} holds a run without its {WORK}/, so nothing else can be chosen; give another --out"
            )
        if finished:
            published(out)
        if planned and not finished and not chosen.resume:
            raise InputError(f"--out: {out} holds an unfinished run; add --resume to go on, or give another --out")
    if not planned:  # times of shapes alone may be there
        with writing(out):
            (out / WORK).mkdir(exist_ok=True)
            write(stored, settings)
    return finished


def _are_settings(document: object) -> bool:
    parts = document if isinstance(document, dict) else {}
    return parts.keys() == {"options", "sha256"} and all(isinstance(part, dict) for part in parts.values())


def _differing(options: dict[str, Any], before: dict[str, Any]) -> list[str]:
    """Return the names of options that differ from before; an earlier version did not have all of today's."""
    return [name for name, value in options.items() if value != before.get(name, getattr(TuneOptions, name, None))]


def stored(path: Path, build: Callable[[Any], BuiltT]) -> BuiltT:
    """Build something from a JSON document that this run, or an earlier call of it, wrote in `WORK`.

    Raises:
        InputError: the document is damaged.
    """
    from ...training.checkpoints import reason

    try:
        document = read_json(path)
    except InputError as error:
        raise InputError(f"--out: {error}; give another --out") from error
    try:
        return build(document)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        told = f"{type(error).__name__}: {reason(error)}"
        raise InputError(f"--out: {path} is damaged, or of another version ({told}); give another --out") from error


def write(path: Path, document: Any) -> None:
    """Write JSON whole or not at all."""
    with written_whole(path) as partial:
        partial.write_text(json_text(document), encoding="utf-8")
    flush_alone(path.parent)


class _PublishedStudent(OutputDirectory):
    """What lies in `STUDENT` is replaced where all its files have names that trials write."""

    def _check_ours(self) -> None:
        if others := foreign(self.path, lambda name, _: _STUDENT_FILES.fullmatch(name) is not None):
            raise InputError(
                f"{self.path} holds more than a student, and another choice would delete that: {', '.join(others)}; move that elsewhere"
            )


def published(out: Path) -> tuple[OutputDirectory, OutputDirectory]:
    """Return the places of the student and of its export.

    Raises:
        InputError: one holds what no run wrote.
    """
    return _PublishedStudent(out / STUDENT, force=True), OutputDirectory(out / EXPORT, force=True)


def publish(out: Path, student: Path | None, exported: Path) -> None:
    """Put a student and its export in place of those that were chosen before; None: the model itself is exported, and no student.

    Both are copied first, so that a full disk changes nothing, and a kill leaves a pair of two choices only between two exchanges.

    Raises:
        InputError: a place holds what no run wrote, or cannot be written.
    """
    from ...training.checkpoints import HASHES

    places = published(out)
    with contextlib.ExitStack() as stack:
        for source, place in zip((student, exported), places, strict=True):
            stack.enter_context(place)
            if source is not None:
                with writing(place.path):
                    shutil.copytree(source, place.work, dirs_exist_ok=True, ignore=shutil.ignore_patterns(TOLD, HASHES))
                    flush(place.work)
        for place in places:
            place.publish()
    if student is None:  # an empty folder took its place
        with writing(places[0].path):
            places[0].path.rmdir()
