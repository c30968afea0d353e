"""The plan of a run: how many rows each trial is trained on. It is made once, from rates that were measured, and written down.

From then on no clock decides, so a run that is gone on with chooses the same student.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, set_seed

from ...errors import InputError
from ...training.evaluate import explain, judge
from ...training.methods import for_method
from ...training.models import make_student
from ...training.task import Task
from ...training.trainer import Progress, autocast
from .choice import KEPT
from .shapes import Arm, Level

RUNGS = (1, 3, 9)
"""Rows of the rungs, as multiples of those of the first."""
STEPS_LEAST = 16
"""Of the first rung: fewer tell nothing apart."""
REFINED, BISECTIONS = 2, 3
"""Shapes whose retention is bisected, and how often. A step takes as many rows as the second rung."""
SPARE = 0.25
"""Share that is added to the time that a refusal advises: the next run may find slower steps."""
SHORTLIST = 3
TIMED_STEPS, TIMED_ROWS = 4, 64
EXPORT_PER_TRACE = 6.0
"""Time of an export, verified and in all precisions, over that of an untrained one."""


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Seconds. train, judge: per row, by shape. explain: per row, of the teacher's view. export: for one student. timing: for the last
    timing."""

    train: Mapping[Arm, float]
    judge: Mapping[Arm, float]
    explain: float
    export: float
    timing: float = 100.0


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Counts. levels: shapes to try. rungs: rows that the arms of each are trained on. refined: rows of a step of bisection, 0 where a
    speedup is the goal, whose retention follows from the table. seconds: what each phase is expected to take."""

    levels: tuple[Level, ...]
    rungs: tuple[int, ...]
    refined: int
    seconds: Mapping[str, float]

    @property
    def arms(self) -> list[Arm]:
        return [arm for level in self.levels for arm in level.arms]

    def to_json(self) -> dict[str, Any]:
        return {
            "levels": [
                {
                    "speedup": round(level.speedup, 3),
                    "arms": [dataclasses.asdict(arm) for arm in level.arms],
                    "told": list(map(str, level.arms)),
                }
                for level in self.levels
            ],
            "rungs": list(self.rungs),
            "refined": self.refined,
            "seconds": {name: round(value, 1) for name, value in self.seconds.items()},
        }

    @classmethod
    def of(cls, stored: Mapping[str, Any]) -> Plan:
        levels = tuple(Level(row["speedup"], tuple(Arm(**arm) for arm in row["arms"])) for row in stored["levels"])
        rungs, refined = tuple(map(int, stored["rungs"])), int(stored["refined"])
        return cls(levels=levels, rungs=rungs, refined=refined, seconds={**stored["seconds"]})


def survivors(levels: Sequence[Level]) -> list[list[int]]:
    """Return how many arms of each level each rung trains. `choice.going_on` may let two more go on, and slower levels often end early."""
    counts = [[len(level.arms) for level in levels]]
    for _ in RUNGS[1:]:
        counts.append([math.ceil(KEPT * count) for count in counts[-1]])
    return counts


def seconds_for(
    rows: int, levels: Sequence[Level], rates: Rates, sizes: tuple[int, int], bisects: bool
) -> dict[str, float]:
    """Return what the phases take where the first rung has so many rows.

    Args:
        sizes: of the training rows, and of the dev rows to choose on.
    """
    train, dev = sizes

    def trial(arm: Arm, on: int) -> float:
        return on * rates.train[arm] + dev * rates.judge[arm]

    race = 0.0
    for times, counts in zip(RUNGS, survivors(levels)):
        for level, count in zip(levels, counts):
            race += sum(sorted((trial(arm, times * rows) for arm in level.arms), reverse=True)[:count])
    dearest = max((trial(arm, RUNGS[1] * rows) for level in levels for arm in level.arms), default=0.0)
    return {
        "teacher": (min(RUNGS[-1] * rows, train) + dev) * rates.explain,
        "race": race,
        "bisection": REFINED * BISECTIONS * bisects * dearest,
        "exports": (SHORTLIST + 1) * rates.export + rates.timing,
    }


def make_plan(
    levels: Sequence[Level],
    rates: Rates,
    sizes: tuple[int, int],
    time_given: tuple[float, float],
    limits: tuple[int, float, bool],
) -> Plan:
    """Return the plan with most rows that is done in time, give or take some minutes.

    Args:
        sizes: of the training rows, and of the dev rows to choose on.
        time_given: hours in all, and those that are left.
        limits: rows of a step, most epochs, and whether retentions are bisected.

    Raises:
        InputError: the time is too little for the first rung.
    """
    step, epochs, bisects = limits
    hours, hours_left = time_given
    if not levels:
        return Plan(levels=(), rungs=(), refined=0, seconds=seconds_for(0, levels, rates, sizes, False))
    left = 3600 * hours_left
    most = max(1, int(epochs * sizes[0] / RUNGS[-1]))
    least = min(STEPS_LEAST * step, most)

    def takes(rows: int) -> float:
        return sum(seconds_for(rows, levels, rates, sizes, bisects).values())

    if takes(least) > left:
        enough = hours + ((1 + SPARE) * takes(least) - left) / 3600
        raise InputError(
            f"--hours: after timing shapes {max(0.0, left) / 60:.1f} minutes are left. The first rung of {least} rows, with what follows "
            f"it, takes {takes(least) / 60:.1f} minutes. Give --hours {_rounded_up(enough)} or more"
        )
    rows = least + bisect.bisect_right(range(least + 1, most + 1), left, key=takes)
    return Plan(
        levels=tuple(levels),
        rungs=tuple(rows * times for times in RUNGS),
        refined=rows * RUNGS[1] * bisects,
        seconds=seconds_for(rows, levels, rates, sizes, bisects),
    )


def _rounded_up(hours: float) -> str:
    return f"{math.ceil(100 * hours) / 100:g}"


def measure_rates(
    teacher: PreTrainedModel, task: Task, arms: Sequence[Arm], trace_s: float, progress: Progress
) -> Rates:
    """Time a few rows of each kind of work.

    Args:
        trace_s: seconds that the export of an untrained student took.
    """
    rows = task.parts["train"].some(range(min(TIMED_ROWS, len(task.parts["train"]))))
    asked = dataclasses.replace(task.settings, **Arm(1, "0.ffn", 0.5).settings)
    size = next(teacher.get_input_embeddings().parameters()).shape[1]
    dimensions = max(1, round(asked.teacher_dimensions * size))

    def view() -> tuple[Any, Any]:
        return explain(teacher, rows, task.objective, asked.ig_steps, dimensions)

    answers = view()  # not timed: the first run of anything takes longer
    explain_s = _seconds(view)
    task = dataclasses.replace(task, parts={**task.parts, "train": rows.with_teacher(*answers)})
    train, judged = {}, {}
    for done, arm in enumerate(arms):
        train[arm], judged[arm] = _seconds_of(teacher, task, arm)
        progress(done + 1, len(arms))
    return Rates(train=train, judge=judged, explain=explain_s / len(rows), export=EXPORT_PER_TRACE * trace_s)


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _seconds_of(teacher: PreTrainedModel, task: Task, arm: Arm) -> tuple[float, float]:
    """Return the seconds that a row takes in training, from a few steps after an untimed one, and in judging."""
    settings = dataclasses.replace(task.settings, **arm.settings)
    set_seed(settings.seed)
    student = make_student(teacher, settings, task.objective.head)
    device = next(teacher.parameters()).device
    model = for_method(settings.method).of(student, settings, task.parts).train()
    nn.Module.to(model, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, fused=True)
    examples, size = task.parts["train"], settings.batch_size

    def steps(numbers: Iterable[int]) -> None:
        for number in numbers:
            rows = [(number * size + i) % len(examples) for i in range(size)]
            batch = {name: values.to(device) for name, values in examples.collate(rows).items()}
            with autocast(settings, device):
                loss = model(**batch)["loss"]
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    steps([0])
    train_s = _seconds(lambda: steps(range(1, TIMED_STEPS + 1))) / (TIMED_STEPS * size)
    return train_s, _seconds(lambda: judge(model, examples)) / len(examples)
