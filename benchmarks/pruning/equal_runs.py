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
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from adtp_export.benchmarking.paired import Difference, difference
from adtp_export.model.flops import Shape
from adtp_export.model.registry import fields
from adtp_export.training.budget import flops_share
from adtp_export.training.evaluate import judge
from adtp_export.training.trainer import this_process
from benchmarks.harness import records
from benchmarks.harness.records import RECORDS, claim, read_lines, right_answers
from benchmarks.pruning.equal_data import AT, FULL, MAX_TOKENS, SIZES, TAGGED, answered, labelled
from benchmarks.pruning.equal_time import BATCHES, FP32, TABLE, retention_for
from benchmarks.pruning.equal_training import (
    ADTP,
    BOTH,
    BOTH_DEPTH,
    LAYERS,
    PRECISION,
    SCHEDULE,
    Clock,
    Place,
    Run,
    TimeIsOverError,
    forget,
    trained,
)
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


def student(run: Run, place: Place, **changed: Any) -> dict[str, Any]:
    """Train a student, write it, and return its row.

    Args:
        changed: settings that differ from the run's.
    """
    model, task, accuracy = trained(run, place, **changed)
    judgement, chosen_by = (judge(model, task.parts[part]) for part in ("test", "dev"))
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
        "settings": {**run.settings, **changed, **PRECISION, "max_tokens": MAX_TOKENS[run.dataset]},
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
        forget(run, place)


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
            forget(run, place, learning_rate=rate)
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
