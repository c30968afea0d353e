"""Questions about reviews: are readers with fewer layers better than readers with fewer tokens that take as long? All questions, in folds.

    python -m benchmarks.pruning.equal_spans train SPLITS BASE WORK [--folds 0 1] [--minutes 9]   # adds to records/equal-time-spans.jsonl
    python -m benchmarks.pruning.equal_spans speed SPLITS BASE WORK                               # times the first fold's exports

Each fold has a teacher of its own, and students that take equally long by `equal_time.py`. All are exported, and how right the exports
answer each question of test is recorded. What is recorded is not trained again, and a call that ends early goes on. Where WORK has no
teacher of a fold, one is trained anew, and students are compared with the one that they learned from.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from adtp_export.inference.answers.spans import exact_and_f1
from adtp_export.inference.predictor import Predictor
from adtp_export.pipeline.tune.trials import answers_of
from adtp_export.training.objectives.spans import QuestionExamples, decode
from adtp_export.training.trainer import this_process
from benchmarks.harness import records
from benchmarks.harness.records import RECORDS, claim, read_lines
from benchmarks.pruning.equal_data import ASKED, FULL, MAX_TOKENS, SIZES
from benchmarks.pruning.equal_speed import TARGETS, dense_teacher, exported, timed
from benchmarks.pruning.equal_time import BATCHES, FP32, TABLE, Timing, retention_for
from benchmarks.pruning.equal_training import (
    ADTP,
    LAYERS,
    PRECISION,
    Clock,
    Place,
    Run,
    TimeIsOverError,
    forget,
    trained,
)
from benchmarks.pruning.splits import FOLDS

SPANS = RECORDS / "equal-time-spans.jsonl"
TEACHER = "teacher"
SIZE = "plan"
AT = (3,)
"""Numbers of layers whose time students are given, in order."""
MANY = BATCHES[0]


def queue() -> Iterator[Run]:
    """All students, each after the one of its fold with fewer layers; a time is run in all folds before the next."""
    (row,) = (row for row in read_lines(TABLE) if Timing.of(row) == Timing(ASKED[0], MANY, FP32))
    for at in AT:
        kept = retention_for(row, FULL, at)
        assert kept is not None
        for dataset in ASKED:
            yield Run(SIZE, dataset, LAYERS, at, MANY, 1.0, 0)
            yield Run(SIZE, dataset, ADTP, at, MANY, kept, 0)


def teacher_of(dataset: str) -> Run:
    """Return the name under which a fold's teacher is recorded."""
    return Run(SIZE, dataset, TEACHER, FULL, MANY, 1.0, 0)


PLANNED = ((TEACHER, FULL), *((arm, at) for at in AT for arm in (LAYERS, ADTP)))
"""Arms and times that a fold has when it is whole."""


def percent(answered: Sequence[str], true: Sequence[Sequence[str]]) -> list[int]:
    """Return the F1 of each answer, in percent."""
    return [round(100 * exact_and_f1(own, accepted)[1]) for own, accepted in zip(answered, true, strict=True)]


def answers(out: Path, target: str, examples: QuestionExamples) -> list[str]:
    """Return an export's answer to each question, "" for none."""
    return decode(answers_of(Predictor(out, target).run, examples), examples)


def kept_by_side(out: Path, examples: QuestionExamples) -> dict[str, float]:
    """Return the share of the tokens that stay to the end, of questions and of contexts."""
    session, kept = Predictor(out, TARGETS[FP32]), {0: [0, 0], 1: [0, 0]}
    for numbers, batch in examples.batches():
        stayed = session.kept_site({name: batch[name].numpy() for name in examples.inputs})
        for number, row in zip(numbers, stayed, strict=True):
            sides = examples.placed[number].sides
            for side, count in kept.items():
                own = np.array([one == side for one in sides])
                count[0] += int((row[: len(sides)][own] == row.max()).sum())
                count[1] += int(own.sum())
    return {name: round(kept[side][0] / kept[side][1], 4) for side, name in enumerate(("question", "context"))}


def rows(run: Run, source: Path, place: Place, examples: QuestionExamples) -> Iterator[dict[str, Any]]:
    """Export a model and yield what it answers, a row for each precision. The teacher comes first: its answers are kept in WORK."""
    out, kept = place.work / "exported" / run.folder, answers_of_teacher(run.dataset, place)
    targets = exported(source, out, place.files(run.size, run.dataset)["dev"])
    said = {precision: answers(out, target, examples) for precision, target in TARGETS.items()}
    if run.arm == TEACHER:
        kept.parent.mkdir(exist_ok=True)
        kept.write_text(json.dumps(said[FP32]), encoding="utf-8")
    teacher = json.loads(kept.read_text(encoding="utf-8"))
    true = [question.answers for question in examples.questions]
    for precision, own in said.items():
        yield {
            **run._asdict(),
            "precision": precision,
            "status": targets[TARGETS[precision]]["status"],
            "f1": percent(own, true),
            "agreed": percent(own, [[theirs] if theirs else [] for theirs in teacher]),
            **({"of_teacher": percent(teacher, true)} if run.arm != TEACHER else {}),
            **({"kept": kept_by_side(out, examples)} if run.arm == ADTP and precision == FP32 else {}),
        }


def answers_of_teacher(dataset: str, place: Place) -> Path:
    """Return the file of a teacher's answers in fp32, a list of texts."""
    return place.work / "answers" / f"{dataset}.json"


def key(row: dict[str, Any]) -> tuple[Run, str]:
    return Run.of(row), row["precision"]


def of_questions(examples: QuestionExamples) -> dict[str, Any]:
    """Return what all readers of a fold share: which questions have an answer, and whose review each is about, by number."""
    reviews = {question.context: None for question in examples.questions}
    numbers = {review: number for number, review in enumerate(reviews)}
    return {
        "answerable": [int(bool(question.answers)) for question in examples.questions],
        "groups": [numbers[question.context] for question in examples.questions],
    }


def train_fold(run: Run, place: Place, record: Path) -> None:
    """Train, export and ask a student, and its teacher where that was not asked."""
    source, task = place.teacher(run.size, run.dataset), place.rows(run.size, run.dataset)
    test = task.parts["test"]
    assert isinstance(test, QuestionExamples)
    shared = {**PRECISION, "max_tokens": MAX_TOKENS[run.dataset]}
    counts = {
        "rows": {split: len(table.texts) for split, table in task.tables.items()},
        "tokens": round(float(np.mean(test.lengths)), 2),
    }
    known = (teacher_of(run.dataset), FP32) in {key(row) for row in read_lines(record)}
    if not known or not answers_of_teacher(run.dataset, place).exists():
        more = {**of_questions(test), **counts, "settings": {**SIZES[run.size][run.dataset].teacher, **shared}}
        made = [row | more | told() for row in rows(teacher_of(run.dataset), source, place, test)]
        if not known:
            records.update(record, made, key=key)
    place.clock.check()
    _, _, score = trained(run, place)
    place.clock.check()
    more = {**counts, "teacher_f1": score, "settings": {**run.settings, **shared}}
    made = [row | more | told() for row in rows(run, place.work / run.folder, place, test)]
    for row in made:
        figures = {name: round(float(np.mean(row[name])), 2) for name in ("f1", "agreed")}
        print(run, row["precision"], row["status"], figures, row.get("kept", ""), flush=True)
    records.update(record, made, key=key)
    forget(run, place)


def told() -> dict[str, Any]:
    return records.told(torch.get_num_threads())


def time_first(place: Place, record: Path) -> None:
    """Time the exports of the first fold in turns with its teacher.

    Raises:
        SystemExit: WORK does not have them all.
    """
    found = [row for row in read_lines(record) if row["dataset"] == ASKED[0]]
    readers = list(dict.fromkeys(map(Run.of, found)))
    outs = {run: place.work / "exported" / run.folder for run in readers}
    missing = [run.folder for run, out in outs.items() if not (out / "manifest.json").exists()]
    if missing or teacher_of(ASKED[0]) not in outs:
        raise SystemExit(
            f"{place.work}: there is no export of {', '.join(missing) or ASKED[0]}; run train --folds 0 there first"
        )
    dense = dense_teacher(ASKED[0], outs[teacher_of(ASKED[0])])
    for run in readers:
        speeds = timed(outs[run], run, place, dense)
        print(run, speeds, flush=True)
        own = [row for row in found if Run.of(row) == run]
        made = [{**row, "speed": speeds[row["precision"]], "timed": records.told()} for row in own]
        records.update(record, made, key=key)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("train", "speed"))
    for name in ("splits", "base", "work"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--folds", type=int, choices=range(FOLDS), nargs="*", help="default: all")
    parser.add_argument(
        "--minutes", type=float, help="after which the call ends, at its next step (default: when all is done)"
    )
    parser.add_argument("--out", metavar="FILE", type=Path, default=SPANS)
    options = parser.parse_args()
    if options.what == "speed" and (options.folds or options.minutes):
        parser.error("speed: times the first fold, to its end; leave --folds and --minutes out")
    claim(options.out)
    torch.set_num_threads(1)
    this_process()
    options.work.mkdir(parents=True, exist_ok=True)
    place = Place(splits=options.splits, base=options.base, work=options.work, clock=Clock(options.minutes))
    if options.what == "speed":
        return time_first(place, options.out)
    wanted = [ASKED[fold] for fold in options.folds or range(FOLDS)]
    try:
        for run in (run for run in queue() if run.dataset in wanted):
            if (run, FP32) not in {key(row) for row in read_lines(options.out)}:
                place.clock.check()
                train_fold(run, place, options.out)
    except TimeIsOverError:
        raise SystemExit("time is over; the same command goes on") from None


if __name__ == "__main__":
    main()
