"""At equal measured time, what is the better student: one of fewer layers, one of fewer tokens, or both? The runs of that comparison.

    python -m benchmarks.pruning.equal_time SPLITS BASE                            # first: how long what takes
    python -m benchmarks.pruning.equal_runs train SPLITS BASE WORK [--minutes 9]   # adds to records/equal-time-trained.jsonl
    python -m benchmarks.pruning.equal_runs speed SPLITS BASE WORK [--minutes 9]   # adds to records/equal-time-exported.jsonl
    python -m benchmarks.pruning.equal_runs rates SPLITS BASE WORK [--minutes 9]   # adds to records/equal-time-rates.jsonl

What is recorded is not run again. --minutes ends a call early; the next one goes on from the last checkpoint in WORK. So runs can be
made in pieces, by several people: a run needs no files of other runs, and its teacher is made anew where WORK has none. `predictions.json`
was written before the first run.

Stop rule: where an arm of seed 0 is below fewer layers of its time by more than 3 points with its whole interval, other seeds of it are
not run. --size small has fewer rows and epochs than the plan, and says nothing of students that are trained to their end.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import shutil
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from adtp_export.benchmarking.paired import Difference, difference
from adtp_export.model.flops import Shape
from adtp_export.model.registry import fields
from adtp_export.training.budget import flops_share
from adtp_export.training.data import Examples
from adtp_export.training.evaluate import judge, judge_teacher
from adtp_export.training.method_table import ANSWERS
from adtp_export.training.models import load_teacher, save_model
from adtp_export.training.settings import BF16, TrainOptions
from adtp_export.training.stages import explained, train_student, train_teacher
from adtp_export.training.task import Task, read_task
from adtp_export.training.trainer import Audience, quiet, this_process
from benchmarks.harness import records
from benchmarks.harness.records import RECORDS, claim, read_lines, right_answers
from benchmarks.pruning.equal_data import AT, FULL, MAX_TOKENS, SITE, SIZES, SUFFIX, TAGGED, answered, labelled
from benchmarks.pruning.equal_time import BATCHES, FP32, TABLE, retention_for
from benchmarks.pruning.train import classes

TRAINED, EXPORTED = RECORDS / "equal-time-trained.jsonl", RECORDS / "equal-time-exported.jsonl"
RATED = RECORDS / "equal-time-rates.jsonl"
RESULTS = {"train": TRAINED, "speed": EXPORTED, "rates": RATED}
ROWS = RECORDS / "equal-time-rows.jsonl"
"""Of each data set and size the true classes of the test rows, and which rows overlap."""
SEEDS = (0, 1, 2)
SEEDS_OF_ONE_TEXT = (3, 4, 5)
"""For AD-TP at the times of one text at a time, and for what it is compared with: students of a seed need one teacher, and those of the
other seeds were not kept. Long texts have a student of all layers with the second."""
HOPELESS = -0.03
RATES, RATES_AT = (5e-5, 1e-4, 2e-4), (2, 3)
"""Learning rates, among which dev chooses, and the layers whose time the students have that learn at each of them."""
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
            chosen |= {"ratio": "static"}
        return {**SIZES[self.size][self.dataset].student, **chosen, "seed": self.seed}


PRECISION = {"mixed_precision": BF16}


def arms(dataset: str, table: Iterable[Mapping[str, Any]]) -> list[tuple[str, int, int, float]]:
    """Return arm, at, batch and retention of all students of a data set; times that no retention has are left out."""
    times = {row["batch"]: row for row in table if (row["dataset"], row["precision"]) == (dataset, FP32)}
    found: list[tuple[str, int, int, float]] = []

    def add(arm: str, at: int, batch: int, depth: int) -> None:
        if batch in times and (retention := retention_for(times[batch], depth, at)) is not None:
            found.append((arm, at, batch, retention))

    many, one = BATCHES
    for at in AT[dataset]:
        found.append((LAYERS, at, many, 1.0))
        add(ADTP, at, many, FULL)
    if dataset != TAGGED:
        add(BOTH, 2, many, BOTH_DEPTH)
    found.append((LAYERS, FULL, many, 1.0))
    if dataset == "sst2":
        for at in AT[dataset]:
            add(SCHEDULE, at, many, FULL)
        add(BOTH, 3, many, BOTH_DEPTH)
    for at in AT[dataset] if dataset != TAGGED else ():
        add(ADTP, at, one, FULL)
    return found


def planned(dataset: str, arm: tuple[str, int, int, float], seed: int) -> bool:
    """Say whether an arm is run with a seed."""
    kind, at, batch, _ = arm
    if seed in SEEDS_OF_ONE_TEXT:
        more = dataset == "20news" and (kind == BOTH or (kind, seed) == (LAYERS, SEEDS_OF_ONE_TEXT[1]))
        return dataset != TAGGED and (more or batch == BATCHES[1] or (kind == LAYERS and at < FULL))
    return seed == 0 or (dataset, kind, at) != ("20news", LAYERS, FULL)


def queue(size: str, table: list[dict[str, Any]]) -> Iterator[Run]:
    """All runs, the most needed ones first: long texts decide, and a seed is run of all arms before the next."""
    for dataset in AT:
        for seed in (*SEEDS, *SEEDS_OF_ONE_TEXT):
            yield from (Run(size, dataset, *arm, seed) for arm in arms(dataset, table) if planned(dataset, arm, seed))


def compared(first: list[dict[str, Any]], second: list[dict[str, Any]], rows: Mapping[str, Any]) -> Difference | None:
    """Compare two arms by the seeds that both have; None where there is none.

    Args:
        first, second: rows with "seed" and "answers". rows: of `ROWS`.
    """
    answers = [{row["seed"]: right_answers(row["answers"], rows["labels"]) for row in arm} for arm in (first, second)]
    seeds = sorted(set(answers[0]) & set(answers[1]))
    if not seeds:
        return None
    one, other = (np.stack([arm[seed] for seed in seeds]) for arm in answers)
    return difference(one, other, rows["groups"])


def hopeless(run: Run, done: list[dict[str, Any]], rows: Mapping[str, Any] | None) -> bool:
    """Say whether the stop rule ends an arm after seed 0."""
    if run.arm == LAYERS or run.seed == 0 or rows is None:
        return False
    first = [row for row in done if Run.of(row) == run._replace(seed=0)]
    layers = Run(run.size, run.dataset, LAYERS, run.at, BATCHES[0], 1.0, 0)
    found = compared(first, [row for row in done if Run.of(row) == layers], rows)
    return found is not None and found.high < HOPELESS


def left(
    runs: Iterable[Run], done: list[dict[str, Any]], rows: Mapping[tuple[str, str], Mapping[str, Any]]
) -> list[Run]:
    """Return what is still to be run, in order.

    Args:
        done: of `TRAINED`. rows: of `ROWS`, by size and data set.
    """
    known = {Run.of(row) for row in done}
    return [run for run in runs if run not in known and not hopeless(run, done, rows.get(run[:2]))]


def rate_queue(size: str, table: list[dict[str, Any]]) -> Iterator[tuple[Run, float]]:
    """Students of SST-2 at the time of fewer layers, seed 0, at each learning rate; those that are fastest first."""
    wanted = [run for run in queue(size, table) if (run.dataset, run.batch, run.seed) == ("sst2", BATCHES[0], 0)]
    for at in RATES_AT:
        yield from ((run, rate) for run in wanted if run.at == at for rate in RATES)


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
            unfinished = self.work / "unfinished" / place.name
            with quiet():
                model = train_teacher(task, unfinished / "stage", self.clock.audience)
                save_model(model, task.tokenizer, unfinished / "whole")
            (unfinished / "whole").rename(place)
            shutil.rmtree(unfinished)
        return place

    def quality(self, task: Task, teacher: Any) -> float:
        """Return the teacher's accuracy on the test rows, which is kept beside it."""
        kept = Path(task.source) / "accuracy.txt"
        if not kept.exists():
            kept.write_text(str(judge_teacher(teacher, task.parts["test"], task.objective)["accuracy"]))
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
            part = dataclasses.replace(
                whole, encoded=whole.encoded[begin : begin + PART], labels=whole.labels[begin : begin + PART]
            )
            view = ANSWERS if name == "dev" else None
            part = explained(teacher, part, task, place.work / "views", place.clock.audience, view)
            answers += list(part.teacher_logits or ())
            rows += part.attribution or []
        found[name] = whole.with_teacher(answers, rows or None)
    return found


def student(run: Run, place: Place, **changed: Any) -> dict[str, Any]:
    """Train a student, write it, and return its row.

    Args:
        changed: settings that differ from the run's.
    """
    source, settings = place.teacher(run.size, run.dataset), {**run.settings, **changed}
    folder = "-".join(map(str, (run.folder, *changed.values())))
    task = place.task(run.size, run.dataset, {"teacher": str(source), **settings})
    teacher = load_teacher(str(source), task.objective, task.labels, tuned=True).eval().requires_grad_(False)
    torch.nn.Module.to(teacher, this_process().device)
    accuracy = place.quality(task, teacher)
    task = dataclasses.replace(task, parts={**task.parts, **seen_by(teacher, task, place)})
    unfinished = place.work / "unfinished" / folder
    with quiet():
        model = train_student(teacher, task, unfinished, place.clock.audience)
    place.clock.check()
    judgement, chosen_by = (judge(model, task.parts[part]) for part in ("test", "dev"))
    save_model(model.student.cpu(), task.tokenizer, place.work / folder)
    shutil.rmtree(unfinished)
    sites, shape = list(model.student.site_names), Shape.of(fields(model.student.config.encoder_config))
    return {
        **run._asdict(),
        "answers": classes(answered(judgement.answers, task.parts["test"])),
        "accuracy": judgement.quality["accuracy"],
        "dev_accuracy": chosen_by.quality["accuracy"],
        "teacher_accuracy": accuracy,
        "left": judgement.retention,
        "flops": round(flops_share(shape, judgement.alive, sites) * shape.layers / FULL, 4),
        "tokens": round(float(judgement.alive[0].mean()), 2),
        "rows": {split: len(part) for split, part in task.parts.items()},
        "settings": {**settings, **PRECISION, "max_tokens": MAX_TOKENS[run.dataset]},
    }


def rows_of(size: str, dataset: str, place: Place) -> dict[str, Any]:
    """Return what differences between students are computed from, beside their answers."""
    task = place.rows(size, dataset)
    labels, groups = labelled(task.tables["test"].texts, task.parts["test"])
    return {"size": size, "dataset": dataset, "labels": classes(labels), "groups": groups}


def known_rows() -> dict[tuple[str, str], dict[str, Any]]:
    return {(row["size"], row["dataset"]): row for row in read_lines(ROWS)}


def know_rows(size: str, dataset: str, place: Place) -> None:
    """Record the test rows of a data set, once."""
    if (size, dataset) not in known_rows():
        row = rows_of(size, dataset, place)
        records.update(ROWS, [row], key=lambda one: (one["size"], one["dataset"]))


def train_all(size: str, datasets: Collection[str], seeds: Collection[int], place: Place) -> None:
    """Train what is not recorded."""
    wanted = [run for run in queue(size, read_lines(TABLE)) if run.dataset in datasets and run.seed in seeds]
    while runs := left(wanted, read_lines(TRAINED), known_rows()):
        run = runs[0]
        know_rows(size, run.dataset, place)
        place.clock.check()
        row = student(run, place) | records.told(torch.get_num_threads())
        print({name: value for name, value in row.items() if name != "answers"}, f"{len(runs) - 1} left", flush=True)
        records.update(TRAINED, [row], key=Run.of)


def rated(row: Mapping[str, Any]) -> tuple[Run, float]:
    return Run.of(row), row["settings"]["learning_rate"]


def train_rates(size: str, place: Place) -> None:
    """Train what is not recorded of `rate_queue`."""
    for run, rate in rate_queue(size, read_lines(TABLE)):
        if (run, rate) not in map(rated, read_lines(RATED)):
            know_rows(size, run.dataset, place)
            row = student(run, place, learning_rate=rate) | records.told(torch.get_num_threads())
            print({name: value for name, value in row.items() if name != "answers"}, flush=True)
            records.update(RATED, [row], key=rated)
            place.clock.check()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=RESULTS)
    for name in ("splits", "base", "work"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--size", choices=SIZES, default="plan")
    parser.add_argument("--dataset", choices=AT, nargs="*", help="default: all, long texts first; with rates sst2")
    parser.add_argument(
        "--seeds", type=int, choices=(*SEEDS, *SEEDS_OF_ONE_TEXT), nargs="*", help="default: all; with rates 0"
    )
    parser.add_argument(
        "--minutes", type=float, help="after which the call ends, at its next step (default: when all is done)"
    )
    options = parser.parse_args()
    if options.what == "rates" and (options.dataset or options.seeds):
        parser.error("rates: are tried on sst2 with seed 0; leave --dataset and --seeds out")
    chosen = options.size, options.dataset or list(AT), options.seeds or [*SEEDS, *SEEDS_OF_ONE_TEXT]
    claim(RESULTS[options.what])
    torch.set_num_threads(1)
    this_process()  # before the first teacher is trained
    options.work.mkdir(parents=True, exist_ok=True)
    place = Place(splits=options.splits, base=options.base, work=options.work, clock=Clock(options.minutes))
    try:
        if options.what == "train":
            train_all(*chosen, place)
        elif options.what == "rates":
            train_rates(options.size, place)
        else:
            from benchmarks.pruning.equal_speed import time_all

            time_all(*chosen, place)
    except TimeIsOverError:
        raise SystemExit("time is over; the same command goes on") from None


if __name__ == "__main__":
    main()
