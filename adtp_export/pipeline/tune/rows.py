"""Rows to train on, to choose on and to confirm on: apart from each other, in groups of overlapping texts, and enough of them."""

from __future__ import annotations

import bisect
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np

from ...contract import HEAD_EMBEDDING, HEAD_SPANS, HEAD_TOKENS
from ...data.labelled import Question
from ...data.overlaps import joined, normalized, overlapping
from ...errors import InputError, quoted
from ...training.data import Table, told
from ...training.objectives import for_head
from ...training.settings import TrainOptions
from ...training.task import Task, choose_head, make_task
from .choice import ALPHA
from .options import TuneOptions

HELD_OUT = 0.2
"""Of the training rows, where no dev rows are given."""
CONFIRM = 0.4
"""Of the dev rows: they are looked at once, when all is chosen."""
DISAGREEMENT = 0.1
"""Share of the answers on which a student and its teacher are not alike right, as students of one point less were found to be."""
TOO_LARGE = 0.05
"""Share of all rows that makes a group large, and by which a part may exceed what it should have."""
LEAST = 20
"""Groups of rows, below which no share of them says anything."""


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Data of a run.

    task: with "train", "dev" to choose on, and "test" to confirm on. groups: of "dev" and "test", by table row. variance: of what a student
    loses in a row, as `variance_of` estimates it. left_out: says which dev rows are not used; "" where all are.
    """

    task: Task
    groups: dict[str, np.ndarray]
    variance: float
    left_out: str


def read(chosen: TuneOptions) -> Rows:
    """Read model and rows, and part them.

    Raises:
        InputError: too few rows for what is asked, or for a step, or no dev rows but those of train; or as `training.task.read_task`.
    """
    settings = TrainOptions(
        train=str(chosen.train),
        dev=None if chosen.dev is None else str(chosen.dev),
        teacher=str(chosen.model),
        text_column=chosen.text_column,
        label_column=chosen.label_column,
        task=chosen.task,
        max_tokens=chosen.max_tokens,
        method="layers",
        batch_size=chosen.batch_size,
        learning_rate=chosen.learning_rate,
        evaluations=1,
        mixed_precision=chosen.mixed_precision,
        seed=chosen.seed,
    )
    objective = for_head(choose_head(settings))
    if objective.head == HEAD_EMBEDDING:
        raise InputError("adtp-tune takes classification, tags and spans; for vectors use adtp-train and adtp-export")
    train = objective.read(Path(chosen.train), settings)
    if objective.kind(objective.labels(train, settings)) == "regression":
        raise InputError(
            f"{train.source}: its labels are numbers, and adtp-tune takes classes; if they name classes, type --task classification"
        )
    left_out = ""
    if chosen.dev is None:
        train, dev, groups = hold_out(train, chosen.seed)
    else:
        dev, left_out = without_known(train, objective.read(Path(chosen.dev), settings))
        groups = groups_of(dev.texts)
    if chosen.batch_size > len(train):
        raise InputError(
            f"--batch-size: got {chosen.batch_size:,}; {train.source} has {len(train):,} rows to train on; accepted is at most that"
        )
    choose, confirm = halves(groups, chosen.seed)
    check_enough(groups, (choose, confirm), chosen, left_out)
    parts = {"dev": choose, "test": confirm}
    tables = {"train": train, **{part: dev.rows(at.tolist(), f"{dev.source}, {part}") for part, at in parts.items()}}
    task = make_task(settings, objective, tables)
    return Rows(
        task=task,
        groups={part: renumbered(groups[at]) for part, at in parts.items()},
        variance=variance_of(objective.head, dev.texts),
        left_out=left_out,
    )


def groups_of(texts: Sequence[Any]) -> np.ndarray:
    """Number the groups of rows that overlap, or are pairs of one first text, from 0: ``(rows,) int64``."""
    groups = overlapping([told(row) for row in texts])
    if all(isinstance(row, tuple) for row in texts):
        groups = joined(groups, overlapping([row[0] for row in texts]))
    return np.array(groups)


def identity(row: Any) -> str:
    """Return what makes two rows the same row."""
    return normalized(f"{row.question} {row.context}" if isinstance(row, Question) else told(row))


def without_known(train: Table, dev: Table) -> tuple[Table, str]:
    """Return dev without rows of train, whatever their case and punctuation, and what to say of these; "" where there are none.

    Raises:
        InputError: all rows are rows of train.
    """
    known = {identity(row) for row in train.texts}
    in_both = np.array([identity(row) in known for row in dev.texts], bool)
    both, new = np.flatnonzero(in_both), np.flatnonzero(~in_both)
    if not len(both):
        return dev, ""
    said = (
        f"{len(both):,} of {len(dev):,} rows of {dev.source} are rows of {train.source}, too, such as row {both[0] + 1}, "
        f"{quoted(told(dev.texts[both[0]])[:80])}. What a student has learned by heart says nothing of other texts"
    )
    if not len(new):
        raise InputError(f"--dev: {said}: give other rows, or leave --dev out")
    return dev.rows(new.tolist(), dev.source), f"{said}, so these rows are left out"


def hold_out(table: Table, seed: int) -> tuple[Table, Table, np.ndarray]:
    """Part the training rows by groups of overlapping texts; return those to train on, those held out, and the groups of these."""
    groups = groups_of(table.texts)
    chosen, rest = parted(groups, HELD_OUT, seed)
    if not len(rest):
        raise InputError(f"{table.source}: all its rows overlap, so none can be held out; give others as --dev FILE")
    train = table.rows(rest.tolist(), table.source)
    return train, table.rows(chosen.tolist(), f"{len(chosen)} rows held out of {table.source}"), groups[chosen]


def halves(groups: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the numbers of the rows to choose on, and of those to confirm on; no group is in both."""
    confirm, choose = parted(groups, CONFIRM, seed)
    return choose, confirm


def parted(groups: np.ndarray, share: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Draw whole groups until they hold a share of the rows; return the numbers of their rows and of all others, ascending.

    Large groups come last, and one that is much too large for what is left of the share stays among the others, unless there is none but
    such.
    """
    order = list(range(groups.max() + 1))
    random.Random(seed).shuffle(order)
    sizes, wanted, large = np.bincount(groups), share * len(groups), TOO_LARGE * len(groups)
    drawn, held = list[int](), 0
    for group in sorted(order, key=lambda group: sizes[group] > large):
        if held < wanted and held + sizes[group] <= wanted + large:
            drawn.append(group)
            held += sizes[group]
    inside = np.isin(groups, drawn or [min(order, key=lambda group: sizes[group])])
    return np.flatnonzero(inside), np.flatnonzero(~inside)


def renumbered(groups: np.ndarray) -> np.ndarray:
    """Number groups from 0 without gaps."""
    return np.unique(groups, return_inverse=True)[1]


def worth(groups: np.ndarray) -> float:
    """Return the number of independent rows that would be as informative as ``groups (rows,)``: n squared by the sum of squared sizes."""
    return len(groups) ** 2 / float(np.square(np.bincount(groups)).sum())


def variance_of(head: str, texts: Sequence[Any]) -> float:
    """Return the variance of what a student loses in a row, from 0 to 1, if it changes `DISAGREEMENT` of the answers.

    A row has one answer, but one for each word where words are tagged: its score is their mean, which varies less the more they are.
    """
    return DISAGREEMENT * float(np.mean([1 / len(row) if head == HEAD_TOKENS else 1 for row in texts]))


def resolved(rows: float, candidates: int = 1, variance: float = DISAGREEMENT) -> float:
    """Return the points that so many rows tell apart with a certainty of 95%, for all candidates together, where what a student loses in
    a row varies so much. A bound counts one more row, which is lost."""
    return 100 * (NormalDist().inv_cdf(1 - ALPHA / candidates) * math.sqrt(variance / rows) + 1 / rows)


def needed(drop: float, candidates: int = 1, variance: float = DISAGREEMENT) -> int:
    """Return how many confirmation rows it takes to prove that a student loses at most `drop` points, where it loses as many answers as
    it gains, and none of the other candidates is proven."""
    return bisect.bisect_left(range(10**9), -drop, lo=1, key=lambda rows: -resolved(rows, candidates, variance))


def least_needed(drop: float, candidates: int = 1) -> int:
    """Return how many it takes for the first of some candidates, where no answer becomes worse: Gaffke's bound, to the first order."""
    return math.ceil(math.log(candidates / ALPHA) / (drop / 100))


def check_enough(groups: np.ndarray, halved: Sequence[np.ndarray], chosen: TuneOptions, left_out: str) -> None:
    """Raises InputError where dev rows are too few for anything, or for a proof that is asked for.

    Args:
        groups: of all rows. halved: the numbers of those to choose on and of those to confirm on. left_out: says which are not among them.
    """
    also = f". {left_out}" if left_out else ""
    rows, apart = [len(half) for half in halved], [len(np.unique(groups[half])) for half in halved]
    if min(apart) < LEAST:
        raise InputError(
            f"--dev: {rows[0]} rows to choose on and {rows[1]} to confirm on, in {apart[0]} and {apart[1]} groups of texts that do not "
            f"overlap; at least {LEAST} groups of each are needed. Give more texts{also}"
        )
    drop, own = chosen.drop, worth(groups[halved[1]])
    if chosen.strict and drop is not None and own < (least := least_needed(drop)):
        holds = math.ceil(10 * 100 * math.log(1 / ALPHA) / own) / 10
        raise InputError(
            f"--dev: its {rows[1]} rows to confirm on{counted(rows[1], own)} cannot prove that at most {drop:g} points are lost. That "
            f"takes at least {least:,}, or {math.ceil(least / CONFIRM):,} dev rows, even for a student that answers all of them as MODEL "
            f"does. Give more rows, or leave --strict out{f', or type --max-drop {holds:.1f}' if holds < 100 else ''}{also}"
        )


def counted(rows: int, own: float) -> str:
    """Say what rows are worth, if they overlap."""
    return f", which count as {own:,.0f} that do not overlap," if own < 0.95 * rows else ""


def what_rows_show(groups: Mapping[str, np.ndarray], variance: float, drop: float | None, candidates: int) -> str:
    """Say what the dev rows resolve.

    Args:
        groups: of "dev" and "test", by row. variance: see `variance_of`. drop: points that may be lost, or None.
    """
    (choose, own), (confirm, confirming) = ((len(found), worth(found)) for found in (groups["dev"], groups["test"]))
    apart, bound = resolved(own, 1, variance), resolved(confirming, candidates, variance)
    said = (
        f"{choose:,} dev rows to choose on{counted(choose, own)} tell students apart that differ by some {apart:.1f} points, and "
        f"{confirm:,} rows to confirm on{counted(confirm, confirming)} bound a drop to within {bound:.1f} points"
    )
    if drop is None or confirming >= (wanted := needed(drop, candidates, variance)):
        return said
    proof, few = f"to prove a drop of at most {drop:g} takes", least_needed(drop, candidates)
    if confirming < few:
        return f"{said}: {proof} at least {few:,} of the latter, so a student can be likely at best"
    return f"{said}: {proof} some {wanted:,} of the latter for a student that changes a tenth of the answers, and fewer if it changes less"


def what_was_cut(task: Task) -> str:
    """Say of how many dev rows the end was not read; "" where of none. Contexts of questions are read in windows."""
    most, lengths = task.settings.max_tokens, task.parts["dev"].lengths
    cut = 0 if task.objective.head == HEAD_SPANS else sum(length == most for length in lengths)
    if not cut:
        return ""
    return (
        f"{cut:,} of {len(lengths):,} dev rows reach --max-tokens {most} and are read up to there, in training and in the verdict; the "
        "export reads on"
    )


def groups_of_examples(examples: Any, groups: np.ndarray) -> np.ndarray:
    """Return the group of each tokenized row: windows belong to their question."""
    return groups[np.asarray(getattr(examples, "owners", range(len(examples))))]
