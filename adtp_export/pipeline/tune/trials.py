"""Trials: students that were trained on a number of rows and judged on dev; each is run once, whatever happens to the run."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import random
import shutil
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from ...errors import InputError
from ...io import flush, flush_alone, written_whole
from ...training.checkpoints import broken_seal, reason, seal
from ...training.data import Examples, joined
from ...training.evaluate import ask, judge
from ...training.methods.base import Method
from ...training.models import save_model
from ...training.objectives import Objective
from ...training.settings import TrainOptions
from ...training.stages import explained, train_student
from ...training.task import Task
from ...training.trainer import Audience, DivergedError, Progress
from .directory import TOLD, TRIALS
from .rows import Rows, groups_of_examples
from .shapes import Arm

RECORD = "trials.jsonl"
VIEWS, UNFINISHED = "attribution", "unfinished"
WEIGHTS = "model.safetensors"


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A student. start: the name of the trial whose weights it began with, "" for the teacher's. loss: per row against the teacher's
    answers, infinite where training diverged, of which no weights are kept; drop: points below the teacher, both means over dev. rows: that
    it was trained on, counted in each epoch."""

    name: str
    arm: Arm
    rows: int
    start: str
    loss: float
    drop: float

    @property
    def diverged(self) -> bool:
        return not math.isfinite(self.loss)

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {"loss": None if self.diverged else self.loss}

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Trial:
        loss = math.inf if row["loss"] is None else row["loss"]
        return cls(**{**row, "arm": Arm(**row["arm"]), "loss": loss})


@dataclass(frozen=True)
class Told:
    """What a student does on dev. loss ``(examples,)``: of each row against the teacher's answer. score ``(rows,)``: of each table row."""

    loss: np.ndarray
    score: np.ndarray


def loss_by_row(answers: list[Tensor], examples: Examples, objective: Objective, temperature: float) -> np.ndarray:
    """Return L_logit of each row alone, ``(examples,)``."""
    found = []
    for number, answer in enumerate(answers):
        batch = examples.collate([number])
        own = objective.logit_loss(joined([answer]), batch["teacher_logits"], batch, temperature)
        found.append(own.item())
    return np.array(found)


class Trials:
    """The students of a run: their record, the weights of those that may be chosen, and what each does on dev.

    Args:
        out: directory of the run.
        work: its folder for what only the run needs.
        teacher: asked in eval mode; its parameters need no gradient.
    """

    def __init__(self, out: Path, work: Path, teacher: PreTrainedModel, rows: Rows) -> None:
        self.out, self.work, self.teacher, self.rows = out, work, teacher, rows
        self.task = rows.task
        order = list(range(len(self.task.parts["train"])))
        random.Random(self.task.settings.seed).shuffle(order)
        self.order = order
        self.done = self._read()
        self.parts: dict[str, Examples] = {}
        self.teacher_score: dict[str, np.ndarray] = {}

    def _read(self) -> dict[str, Trial]:
        """Read the record; a line that a kill cut off is no trial, and goes.

        Raises:
            InputError: the record is damaged, or what a student does on dev is not there any more.
        """
        path = self.out / RECORD
        text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""  # what is none is no JSON
        lines = text.splitlines(keepends=True)
        whole = [line for line in lines if line.endswith("\n")]
        if len(whole) < len(lines):
            with written_whole(path) as partial:
                partial.write_text("".join(whole), encoding="utf-8")
        trials = [self._parsed(number, line) for number, line in enumerate(whole, start=1) if line.strip()]
        gone = [trial.name for trial in trials if not (self.student(trial) / TOLD).is_file()]
        if gone:
            raise InputError(
                f"--out: {self.work / TRIALS} has no {gone[0]} any more, so nothing can be chosen there; give another --out"
            )
        return {trial.name: trial for trial in trials}

    def _parsed(self, number: int, line: str) -> Trial:
        try:
            return Trial.of(json.loads(line))
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(
                f"--out: {self.out / RECORD}, line {number}: it is damaged ({reason(error)}); mend the line, or give another --out"
            ) from error

    def check_complete(self) -> None:
        """See that the record of a finished run names every student that lies there.

        Raises:
            InputError: it does not.
        """
        folder = self.work / TRIALS
        there = {place.parent.name for place in folder.glob(f"*/{TOLD}") if place.parent.suffix != ".partial"}
        if not self.done or there - self.done.keys():
            raise InputError(
                f"--out: {self.out / RECORD} does not name all students of the run that lie in {folder}; put the file back as it was, or "
                "give another --out"
            )

    def ask(self, rows: int, audience: Audience) -> None:
        """Have the teacher explain the first so many training rows, if any, which is read where it is known, and answer the others."""
        asked = self._settled(Arm(1, "0.ffn", 0.5))  # of a method that learns from attribution
        task, cache = dataclasses.replace(self.task, settings=asked), self.work / VIEWS
        if rows:
            train = self.task.parts["train"].some(self.order[: min(rows, len(self.order))])
            self.parts["train"] = explained(self.teacher, train, task, cache, audience)
        for part in ("dev", "test"):
            examples, objective = self.task.parts[part], self.task.objective
            answers, _ = ask(self.teacher, examples, objective)
            self.parts[part] = examples.with_teacher(answers, None)
            self.teacher_score[part] = objective.row_scores(answers, examples)
        self.groups = groups_of_examples(self.parts["dev"], self.rows.groups["dev"])

    def _settled(self, arm: Arm, epochs: float = 1.0) -> TrainOptions:
        return dataclasses.replace(self.task.settings, **arm.settings, epochs=epochs)

    def task_of(self, arm: Arm, rows: int) -> Task:
        """Return what a student learns that is trained on so many rows, of which there may be fewer."""
        whole = self.parts["train"]
        train = whole.some(range(min(rows, len(whole))))
        settings = self._settled(arm, rows / len(train))
        return dataclasses.replace(self.task, settings=settings, parts={**self.parts, "train": train})

    def name_of(self, arm: Arm, rows: int, start: Trial | None = None) -> str:
        shape = f"{arm.layers}-{arm.site}-{arm.retention:g}" if arm.site else f"{arm.layers}"
        return f"{shape}-rows-{rows}" + ("-warm" if start else "")

    def run(self, arm: Arm, rows: int, progress: Progress, start: Trial | None = None) -> Trial:
        """Train a student, or go on where that was interrupted, and record it.

        Args:
            start: trial whose weights it begins with; None: the teacher's.
        """
        name = self.name_of(arm, rows, start)
        unfinished, task = self.work / UNFINISHED / name, self.task_of(arm, rows)
        weights = load_file(self.sound(start) / WEIGHTS) if start else None
        student, told = None, self._nothing_right()
        with contextlib.suppress(DivergedError):
            model = train_student(self.teacher, task, unfinished, Audience(progress, lambda told: None), weights)
            found = self._told_of(model, task)
            if np.isfinite(found.loss).all():  # else the last step of all spoiled it
                student, told = model.student.cpu(), found
        self._keep(name, told, student, task)
        trial = Trial(
            name=name,
            arm=arm,
            rows=rows,
            start=start.name if start else "",
            loss=float(told.loss.mean()),
            drop=100 * float((self.teacher_score["dev"] - told.score).mean()),
        )
        with (self.out / RECORD).open("a", encoding="utf-8") as record:
            record.write(json.dumps(trial.to_json()) + "\n")
        flush(self.out / RECORD)
        shutil.rmtree(unfinished, ignore_errors=True)
        self.done[name] = trial
        return trial

    def _told_of(self, model: Method, task: Task) -> Told:
        """Say what a student does on dev."""
        dev, objective = self.parts["dev"], task.objective
        # There is one evaluation, at the end; a run that goes on from there has none.
        answers = (model.judged or judge(model, dev)).answers
        return Told(loss_by_row(answers, dev, objective, task.settings.temperature), objective.row_scores(answers, dev))

    def _nothing_right(self) -> Told:
        """Say what a student does on dev whose training diverged."""
        return Told(np.full(len(self.parts["dev"]), np.inf), np.zeros_like(self.teacher_score["dev"]))

    def _keep(self, name: str, told: Told, student: PreTrainedModel | None, task: Task) -> None:
        """Write a student, where there is one, and what it does, whole or not at all."""
        folder = self.work / TRIALS
        partial = folder / f"{name}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        if student is not None:
            save_model(student, task.tokenizer, partial)
        np.savez(partial / TOLD, loss=told.loss, score=told.score)
        seal(partial)
        flush(partial)
        shutil.rmtree(folder / name, ignore_errors=True)
        partial.rename(folder / name)
        flush_alone(folder)

    def student(self, trial: Trial) -> Path:
        """Return where a student lies."""
        return self.work / TRIALS / trial.name

    def sound(self, trial: Trial) -> Path:
        """Return where a student lies, all of whose files are as they were written.

        Raises:
            InputError: one is not.
        """
        place = self.student(trial)
        if told := broken_seal(place):
            raise InputError(f"--out: {place} is damaged ({told}), so that student cannot be used; give another --out")
        return place

    def told(self, trial: Trial) -> Told:
        """Raises InputError where it is damaged, or told of other rows: an earlier version parted them otherwise."""
        path = self.student(trial) / TOLD
        try:
            with np.load(path) as stored:
                told = Told(stored["loss"], stored["score"])
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            raise InputError(
                f"--out: {path} is damaged ({reason(error)}), so nothing can be chosen there; give another --out"
            ) from error
        if len(told.score) != len(self.rows.groups["dev"]):
            raise InputError(
                f"--out: {self.out} has a run of an earlier version, which chose on other rows; give another --out"
            )
        return told

    def forget(self, trial: Trial) -> None:
        """Remove the weights of a student that will not be chosen."""
        (self.student(trial) / WEIGHTS).unlink(missing_ok=True)
        seal(self.student(trial))

    def can_be_chosen(self) -> list[Trial]:
        """Return the trials whose weights are there."""
        return [trial for trial in self.done.values() if (self.student(trial) / WEIGHTS).is_file()]


def answers_of(run: Callable[[dict[str, np.ndarray]], np.ndarray], examples: Examples) -> list[Tensor]:
    """Return the answers of an exported file to all rows, in their order.

    Args:
        run: takes a batch of int64 ``(B, S)`` inputs, as `inference.session.Session.run`.
    """
    found: list[Tensor] = [torch.empty(0)] * len(examples)
    lengths = examples.lengths
    for numbers, batch in examples.batches():
        inputs = {name: batch[name].numpy() for name in examples.inputs}
        for number, row in zip(numbers, torch.from_numpy(run(inputs))):
            found[number] = row if row.dim() == 1 else row[: lengths[number]].clone()
    return found
