"""Render what readers of questions answer: fewer layers against fewer tokens, over all folds that are recorded."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from adtp_export.benchmarking.paired import difference
from benchmarks.harness.records import read_lines
from benchmarks.pruning.splits import FOLDS
from benchmarks.render.equal_time import MANY, PRECISIONS, Arm, Row, Students, points
from benchmarks.render.pruning import ran
from benchmarks.render.tables import place, table

ASKED, TEACHER = "subjqa", "teacher"
Reader = tuple[str, int, str]
"""Arm, number of layers whose time it has, and precision; the teacher in fp32 is the first one."""


def read(path: Path) -> tuple[dict[Reader, list[Row]], list[int]]:
    """Read the folds in which all readers that were planned are recorded.

    Returns:
        The rows of each reader, fold by fold; and the number of each question's review.

    Raises:
        KeyError: no fold is whole yet. ValueError: a reader is recorded twice in a fold.
    """
    from benchmarks.pruning.equal_spans import PLANNED

    readers = [(arm, at, precision) for arm, at in PLANNED for precision in PRECISIONS]
    found: dict[str, dict[Reader, Row]] = {}
    for row in read_lines(path):
        reader = row["arm"], row["at"], row["precision"]
        if reader in found.setdefault(row["dataset"], {}):
            raise ValueError(f"{path.name}: {row['dataset']} has {reader} twice")
        found[row["dataset"]][reader] = row
    whole = [rows for _, rows in sorted(found.items()) if rows.keys() >= set(readers)]
    if not whole:
        raise KeyError(f"{ASKED}: a fold")
    groups: list[int] = []
    for rows in whole:
        groups += [1 + max(groups, default=-1) + number for number in rows[readers[0]]["groups"]]
    return {reader: [rows[reader] for rows in whole] for reader in readers}, groups


def joined(rows: Sequence[Row], name: str) -> np.ndarray:
    """Return the values of all folds, ``(questions,)``, as shares; they are recorded in percent."""
    return np.concatenate([row[name] for row in rows]) / 100


def read_students(path: Path) -> Students:
    """Return the readers of all folds as students of one seed, "right" being the F1 of each answer.

    Raises:
        KeyError: no fold is whole yet.
    """
    found, groups = read(path)
    arms = {
        (arm, at, MANY, precision): Arm(right={0: joined(rows, "f1")}, speed={0: _speed(rows)})
        for (arm, at, precision), rows in found.items()
    }
    first = next(iter(found.values()))
    return Students(arms=arms, groups=groups, row=first[0], teacher={}, folds=len(first))


def _speed(rows: Sequence[Row]) -> dict[str, float]:
    return {batch: figures["speedup"] for row in rows for batch, figures in row.get("speed", {}).items()}


def render_spans(path: Path) -> str:
    """Return how right each reader is, how far from its teacher and from fewer layers of its time, and how fast.

    Raises:
        KeyError: no fold is whole yet.
    """
    found, groups = read(path)
    teacher = next(iter(found.values()))
    answerable = np.concatenate([row["answerable"] for row in teacher]) == 1
    lines = []
    for (arm, at, precision), rows in found.items():
        compared = (
            _of_teacher(rows, teacher) if rows is not teacher else None,
            joined(found["layers", at, precision], "f1") if arm == "adtp" else None,
        )
        speed = _speed(rows).get(str(MANY))
        lines.append(
            [
                {TEACHER: "teacher", "layers": f"{at} layers", "adtp": f"AD-TP, time of {at} layers"}[arm],
                precision.upper(),
                *(f"{100 * share:.1f}" for share in _shares(rows, answerable)),
                *(_apart(rows, other, groups) for other in compared),
                f"{speed:.2f}x" if speed else "",
            ]
        )
    heads = [
        "readers",
        "precision",
        "F1",
        "with an answer",
        "without",
        "F1 to the teacher's answers",
        "minus teacher",
        "minus fewer layers",
    ]
    cut = [row for rows in found.values() for row in rows if "kept" in row]
    kept = (
        f"{np.mean([row['kept'][side] for row in cut]):.1%} of the tokens of {side}s"
        for side in ("question", "context")
    )
    timed = next((row["timed"] for rows in found.values() for row in rows if "timed" in row), None)
    told = (
        f"{len(teacher)} of {FOLDS} folds: {len(groups):,} questions about {1 + max(groups):,} reviews, each asked once, of readers that "
        f"learned from {teacher[0]['rows']['train']:,} others, or nearly so many; {teacher[0]['tokens']:.0f} tokens a window. "
        f"AD-TP keeps {' and '.join(kept)}. Differences in points; in brackets 95% over reviews. {ran(teacher[0])}."
    )
    if timed:
        told += f" Speedup over the teacher in fp32, batches of {MANY}, first fold: {place(timed)}."
    return f"{table([*heads, 'speedup'], lines, texts=2)}\n\n{told}"


def _shares(rows: Sequence[Row], answerable: np.ndarray) -> tuple[float, ...]:
    """Return mean F1: of all questions, of those with and without an answer, and to the teacher's answers."""
    f1 = joined(rows, "f1")
    return tuple(float(values.mean()) for values in (f1, f1[answerable], f1[~answerable], joined(rows, "agreed")))


def _of_teacher(rows: Sequence[Row], teacher: Sequence[Row]) -> np.ndarray:
    """Return the F1 of each answer of the teachers that readers learned from, which are other ones where they were trained anew."""
    own = [row.get("of_teacher", recorded["f1"]) for row, recorded in zip(rows, teacher, strict=True)]
    return np.concatenate(own) / 100


def _apart(rows: Sequence[Row], others: np.ndarray | None, groups: Sequence[int]) -> str:
    if others is None:
        return ""
    mean, interval = points(difference(joined(rows, "f1"), others, groups))
    return f"{mean} ({interval})"
