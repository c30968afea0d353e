"""Trials: a student that is trained on a number of rows and judged on dev; each is run once, whatever happens to the run."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from ...training.data import Examples, joined
from ...training.evaluate import ask, judge
from ...training.methods.base import Method
from ...training.objectives import Objective
from ...training.settings import TrainOptions
from ...training.stages import explained, train_student
from ...training.task import Task
from ...training.trainer import Audience, DivergedError, Progress
from .rows import Rows, groups_of_examples
from .shapes import Arm
from .students import WEIGHTS, Students, Told, Trial

VIEWS, UNFINISHED = "attribution", "unfinished"


def loss_by_row(answers: list[Tensor], examples: Examples, objective: Objective, temperature: float) -> np.ndarray:
    """Return L_logit of each row alone, ``(examples,)``."""
    found = []
    for number, answer in enumerate(answers):
        batch = examples.collate([number])
        own = objective.logit_loss(joined([answer]), batch["teacher_logits"], batch, temperature)
        found.append(own.item())
    return np.array(found)


@dataclass(frozen=True, kw_only=True)
class Asked:
    """Rows with what the teacher says of them.

    parts: examples with its answers, and, of "train", the first that students learn from, with attribution. score ``(rows,)``: of each row
    of "dev" and "test". groups ``(examples,)``: of the examples of dev.
    """

    parts: Mapping[str, Examples]
    score: Mapping[str, np.ndarray]
    groups: np.ndarray


def _settled(task: Task, arm: Arm, epochs: float = 1.0) -> TrainOptions:
    return dataclasses.replace(task.settings, **arm.settings, epochs=epochs)


def ask_teacher(teacher: PreTrainedModel, rows: Rows, count: int, work: Path, audience: Audience) -> Asked:
    """Have the teacher explain so many training rows, if any, which is read where it is known, and answer the others.

    Args:
        teacher: in eval mode; its parameters need no gradient.
        work: the run's folder, for attribution.
    """
    task, parts, score = rows.task, dict[str, Examples](), dict[str, np.ndarray]()
    if count:
        order = list(range(len(task.parts["train"])))
        random.Random(task.settings.seed).shuffle(order)
        learning = dataclasses.replace(task, settings=_settled(task, Arm(1, "0.ffn", 0.5)))  # a method of attribution
        parts["train"] = explained(teacher, task.parts["train"].some(order[:count]), learning, work / VIEWS, audience)
    for part in ("dev", "test"):
        examples = task.parts[part]
        answers, _ = ask(teacher, examples, task.objective)
        parts[part] = examples.with_teacher(answers, None)
        score[part] = task.objective.row_scores(answers, examples)
    return Asked(parts=parts, score=score, groups=groups_of_examples(parts["dev"], rows.groups["dev"]))


class Trials:
    """Trains students of a run, and judges them.

    Args:
        teacher: in eval mode; its parameters need no gradient.
    """

    def __init__(self, students: Students, teacher: PreTrainedModel, rows: Rows, asked: Asked) -> None:
        self.students, self.teacher, self.rows, self.asked = students, teacher, rows, asked
        self.task = rows.task

    def task_of(self, arm: Arm, rows: int) -> Task:
        """Return what a student learns that is trained on so many rows, of which there may be fewer."""
        whole = self.asked.parts["train"]
        train = whole.some(range(min(rows, len(whole))))
        settings = _settled(self.task, arm, rows / len(train))
        return dataclasses.replace(self.task, settings=settings, parts={**self.asked.parts, "train": train})

    def name_of(self, arm: Arm, rows: int, start: Trial | None = None) -> str:
        shape = f"{arm.layers}-{arm.site}-{arm.retention:g}" if arm.site else f"{arm.layers}"
        return f"{shape}-rows-{rows}" + ("-warm" if start else "")

    def run(self, arm: Arm, rows: int, progress: Progress, start: Trial | None = None) -> Trial:
        """Train a student, or go on where that was interrupted, and record it.

        Args:
            start: trial whose weights it begins with; None: the teacher's.
        """
        name = self.name_of(arm, rows, start)
        unfinished, task = self.students.work / UNFINISHED / name, self.task_of(arm, rows)
        weights = load_file(self.students.sound(start) / WEIGHTS) if start else None
        student, told = None, self._nothing_right()
        with contextlib.suppress(DivergedError):
            model = train_student(self.teacher, task, unfinished, Audience(progress, lambda told: None), weights)
            found = self._told_of(model, task)
            if np.isfinite(found.loss).all():  # else the last step of all spoiled it
                student, told = model.student.cpu(), found
        self.students.keep(name, told, student, task.tokenizer)
        trial = Trial(
            name=name,
            arm=arm,
            rows=rows,
            start=start.name if start else "",
            loss=float(told.loss.mean()),
            drop=100 * float((self.asked.score["dev"] - told.score).mean()),
        )
        self.students.record(trial)
        shutil.rmtree(unfinished, ignore_errors=True)
        return trial

    def _told_of(self, model: Method, task: Task) -> Told:
        """Say what a student does on dev."""
        dev, objective = self.asked.parts["dev"], task.objective
        # There is one evaluation, at the end; a run that goes on from there has none.
        answers = (model.judged or judge(model, dev)).answers
        return Told(loss_by_row(answers, dev, objective, task.settings.temperature), objective.row_scores(answers, dev))

    def _nothing_right(self) -> Told:
        """Say what a student does on dev whose training diverged."""
        return Told(np.full(len(self.asked.parts["dev"]), np.inf), np.zeros_like(self.asked.score["dev"]))


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
