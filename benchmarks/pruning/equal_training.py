"""How one student of the comparison at equal time is trained, in pieces where calls have to end early."""

from __future__ import annotations

import dataclasses
import functools
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from adtp_export.training.data import Examples
from adtp_export.training.evaluate import judge_teacher
from adtp_export.training.method_table import ANSWERS
from adtp_export.training.methods.base import Method
from adtp_export.training.models import save_model
from adtp_export.training.settings import BF16, TrainOptions
from adtp_export.training.stages import explained, train_student, train_teacher
from adtp_export.training.task import Task, read_task
from adtp_export.training.trainer import Audience, quiet, this_process
from benchmarks.pruning.equal_data import FULL, MAX_TOKENS, SITE, SIZES, SUFFIX

LAYERS, ADTP, SCHEDULE, BOTH = "layers", "adtp", "schedule", "both"
BOTH_DEPTH = 4


class Run(NamedTuple):
    """One student.

    arm: `LAYERS`, `ADTP`, `SCHEDULE`, or `BOTH`, which is AD-TP with `BOTH_DEPTH` layers. at: the number of dense layers that take as long
    in batches of `batch`; a student of `LAYERS` has so many. retention: the share of tokens that the cut keeps; 1 without one.
    """

    size: str
    dataset: str
    arm: str
    at: int
    batch: int
    retention: float
    seed: int

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Run:
        return cls(*(row[name] for name in cls._fields))

    @property
    def folder(self) -> str:
        return "-".join(map(str, self))

    @property
    def depth(self) -> int:
        return {LAYERS: self.at, BOTH: BOTH_DEPTH}.get(self.arm, FULL)

    @property
    def settings(self) -> dict[str, Any]:
        chosen: dict[str, Any] = {"method": ADTP if self.arm == BOTH else self.arm, "layers": self.depth}
        if self.arm != LAYERS:
            chosen |= {"prune_sites": SITE[self.dataset], "retention": f"{self.retention:g}"}
        if self.arm in (ADTP, BOTH):
            chosen |= {"ratio": "static", **SIZES[self.size][self.dataset].cut}
        return {**SIZES[self.size][self.dataset].student, **chosen, "seed": self.seed}


PRECISION = {"mixed_precision": BF16}


class TimeIsOverError(Exception):
    """A call has had the minutes that it was given."""


class Clock:
    """Ends a call at a step of training, or between two things to do."""

    def __init__(self, minutes: float | None) -> None:
        self.end = time.perf_counter() + 60 * (minutes or float("inf"))

    def check(self, done: int = 0, total: int = 0) -> None:
        """Raises TimeIsOverError when it is."""
        if time.perf_counter() > self.end:
            raise TimeIsOverError

    @property
    def audience(self) -> Audience:
        return Audience(self.check, functools.partial(print, flush=True))


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where everything lies."""

    splits: Path
    base: Path
    work: Path
    clock: Clock

    def files(self, size: str, dataset: str) -> dict[str, Path]:
        """Return the files of a data set: all rows of training, and the first ones of dev and test."""
        source, cut = self.splits / dataset, self.work / "rows" / size / dataset
        cut.mkdir(parents=True, exist_ok=True)
        files = {"train": source / f"train{SUFFIX[dataset]}"}
        for part in ("dev", "test"):
            whole = files[part] = source / f"{part}{SUFFIX[dataset]}"
            if (count := SIZES[size][dataset].rows.get(part)) is not None:
                files[part] = cut / whole.name
                lines = whole.read_text(encoding="utf-8").splitlines(keepends=True)
                files[part].write_text("".join(lines[: count + (whole.suffix == ".tsv")]), encoding="utf-8")
        return files

    def task(self, size: str, dataset: str, settings: dict[str, Any]) -> Task:
        """Read the rows of a data set as settings say."""
        files: dict[str, Any] = {part: str(path) for part, path in self.files(size, dataset).items()}
        return read_task(TrainOptions(**files, max_tokens=MAX_TOKENS[dataset], **PRECISION, **settings))

    def rows(self, size: str, dataset: str) -> Task:
        """Read the rows of a data set for no teacher in particular."""
        return self.task(size, dataset, {"base": str(self.base), **SIZES[size][dataset].teacher})

    def teacher(self, size: str, dataset: str) -> Path:
        """Return the teacher of a data set, and train it where it is not there."""
        place = self.work / f"{size}-{dataset}-teacher"
        if not (place / "config.json").exists():
            task = self.rows(size, dataset)
            unfinished = self.unfinished(place.name)
            with quiet():
                model = train_teacher(task, unfinished / "stage", self.clock.audience)
                save_model(model, task.tokenizer, unfinished / "whole")
            (unfinished / "whole").rename(place)
            shutil.rmtree(unfinished)
        return place

    def unfinished(self, folder: str) -> Path:
        """Return where the checkpoints of a student lie until it is recorded."""
        return self.work / "unfinished" / folder

    def quality(self, task: Task, teacher: Any) -> float:
        """Return the teacher's mean score on the test rows, which is kept beside it: its accuracy, or F1 of spans."""
        kept = Path(task.source) / "accuracy.txt"
        if not kept.exists():
            figures = judge_teacher(teacher, task.parts["test"], task.objective)
            kept.write_text(str(task.objective.main_score(figures)))
        return float(kept.read_text())


PART = 128
"""Rows that a teacher explains before what it said is written."""


def seen_by(teacher: Any, task: Task, place: Place) -> dict[str, Examples]:
    """Return the rows of training and dev with the teacher's view, part by part, so that a call may end between two."""
    found = {}
    for name in ("train", "dev"):
        whole = task.parts[name]
        answers, rows = [], []
        for begin in range(0, len(whole), PART):
            part = whole.some(range(begin, min(begin + PART, len(whole))))
            view = ANSWERS if name == "dev" else None
            part = explained(teacher, part, task, place.work / "views", place.clock.audience, view)
            answers += list(part.teacher_logits or ())
            rows += part.attribution or []
        found[name] = whole.with_teacher(answers, rows or None)
    return found


def folder_of(run: Run, changed: Mapping[str, Any]) -> str:
    return "-".join(map(str, (run.folder, *changed.values())))


def trained(run: Run, place: Place, **changed: Any) -> tuple[Method, Task, float]:
    """Train a student and write it; return it with the rows that it learned from, and the teacher's mean score.

    Its checkpoints stay until `forget` is called, so that a call that ends before the student is recorded loses no training.

    Args:
        changed: settings that differ from the run's.
    """
    source, settings = place.teacher(run.size, run.dataset), {**run.settings, **changed}
    folder = folder_of(run, changed)
    task = place.task(run.size, run.dataset, {"teacher": str(source), **settings})
    teacher = task.load_teacher(str(source), tuned=True).eval().requires_grad_(False)
    torch.nn.Module.to(teacher, this_process().device)
    score = place.quality(task, teacher)
    task = dataclasses.replace(task, parts={**task.parts, **seen_by(teacher, task, place)})
    with quiet():
        model = train_student(teacher, task, place.unfinished(folder), place.clock.audience)
    place.clock.check()
    save_model(model.student.cpu(), task.tokenizer, place.work / folder)
    torch.nn.Module.to(model, this_process().device)
    return model, task, score


def forget(run: Run, place: Place, **changed: Any) -> None:
    """Remove the checkpoints of a student that is recorded."""
    shutil.rmtree(place.unfinished(folder_of(run, changed)), ignore_errors=True)
