"""Render the comparison at equal measured time: differences with their margins, and accuracy against speed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from adtp_export.benchmarking.paired import Difference, difference, holm
from adtp_export.report.plot import X_BEGIN, X_END, Y_END, Plot, scale
from benchmarks.harness.records import read_lines, right_answers
from benchmarks.render.pruning import DATASETS, NAMES, ran, ticks
from benchmarks.render.tables import table

Row = dict[str, Any]
PLAN, SMALL = "plan", "small"
ARMS = {"layers": NAMES["layers"], "adtp": NAMES["adtp"], "schedule": NAMES["schedule"], "both": "4 layers with a cut"}
PAIRS = (("adtp", "layers"), ("schedule", "layers"), ("both", "layers"), ("both", "adtp"))
FP32, INT8 = PRECISIONS = ("fp32", "int8")
MANY, ONE = 32, 1


@dataclass(frozen=True, kw_only=True)
class Arm:
    """Students of one arm, time and precision. right: by seed, ``(rows,)``, 1 where an answer is. speed: by seed and size of batches,
    against packed dense in fp32; seeds that are not timed have none."""

    right: Mapping[int, np.ndarray]
    speed: Mapping[int, Mapping[str, float]]

    def timed(self, batch: int) -> set[int]:
        """Return the seeds whose students were timed in batches of a size."""
        return {seed for seed, speeds in self.speed.items() if str(batch) in speeds}

    def fast(self, batch: int, seeds: Collection[int]) -> float:
        """Return the mean speedup of some seeds, which are timed."""
        return statistics.mean(self.speed[seed][str(batch)] for seed in seeds)

    def accuracy(self, seeds: Iterable[int]) -> float:
        """Return the mean accuracy of some seeds."""
        return float(np.mean([self.right[seed].mean() for seed in seeds]))


Key = tuple[str, int, int, str]
"""Arm, number of layers whose time it has, size of batches in which it has that time, and precision."""


@dataclass(frozen=True, kw_only=True)
class Students:
    """All students of a data set and a size of the runs. groups: of overlapping test rows. row: any, for what it was run on.
    teacher: its accuracy by seed; one that was trained again may have another. folds: number of them, each with a teacher and students of
    its own, where every row is of test once; 0 where there is one test."""

    arms: Mapping[Key, Arm]
    groups: list[int]
    row: Row
    teacher: Mapping[int, float]
    folds: int = 0

    @classmethod
    def read(cls, folder: Path, dataset: str, size: str) -> Students:
        """Raises KeyError where none is recorded."""

        def lines(name: str) -> list[Row]:
            found = read_lines(folder / f"equal-time-{name}.jsonl")
            return [row for row in found if (row["dataset"], row["size"]) == (dataset, size)]

        trained = lines("trained")
        if not trained:
            raise KeyError(f"{dataset}, {size}")
        (rows,) = lines("rows")
        answers = {(*_key(row, FP32), row["seed"]): row["answers"] for row in trained}
        speeds = {}
        for row in lines("exported"):
            place = (*_key(row, row["precision"]), row["seed"])
            answers[place] = row["answers"]
            speeds[place] = {batch: figures["speedup"] for batch, figures in row["speed"].items()}
        right = {place: right_answers(said, rows["labels"]) for place, said in answers.items()}
        arms = {
            key: Arm(
                right={seed: right[*key, seed] for *other, seed in right if tuple(other) == key},
                speed={seed: speeds[*key, seed] for *other, seed in speeds if tuple(other) == key},
            )
            for key in dict.fromkeys(tuple(place[:4]) for place in right)
        }
        by_seed = {row["seed"]: row["teacher_accuracy"] for row in trained}
        return cls(arms=arms, groups=rows["groups"], row=trained[0], teacher=by_seed)

    @property
    def teachers(self) -> str:
        """Tell the accuracy of the teacher; where it was trained again for later seeds, of which seeds each was."""
        seeds: dict[float, list[str]] = {}
        for seed, accuracy in sorted(self.teacher.items()):
            seeds.setdefault(accuracy, []).append(str(seed))
        if len(seeds) == 1:
            return f"teacher {next(iter(seeds)):.1%}"
        named = {share: " and ".join(filter(None, (", ".join(own[:-1]), own[-1]))) for share, own in seeds.items()}
        told = (f"{share:.1%} (seed{'s' * (len(seeds[share]) > 1)} {own})" for share, own in named.items())
        return f"teachers {', '.join(told)}"

    def find(self, arm: str, at: int, batch: int, precision: str = FP32) -> Arm | None:
        """Return students; those with fewer layers serve for all sizes of batches."""
        return self.arms.get((arm, at, MANY if arm == "layers" else batch, precision))

    def compare(self, first: Arm | None, second: Arm | None) -> Difference | None:
        """Compare two arms by the seeds that both have; None where there is none."""
        if first is None or second is None or not (seeds := sorted(set(first.right) & set(second.right))):
            return None
        one, other = (np.stack([arm.right[seed] for seed in seeds]) for arm in (first, second))
        return difference(one, other, self.groups)


def _key(row: Row, precision: str) -> Key:
    return row["arm"], row["at"], row["batch"], precision


def points(found: Difference) -> list[str]:
    """Return a difference and its interval in points."""
    return [f"{100 * found.mean:+.1f}", f"{100 * found.low:+.1f} to {100 * found.high:+.1f}"]


def compared(students: Students) -> Iterator[tuple[list[str], Difference]]:
    """Yield every difference at equal time: what it is of, in cells, and the difference."""
    times = sorted({(batch, at) for _, at, batch, _ in students.arms}, key=lambda time: (-time[0], -time[1]))
    for batch, at in times:
        for precision in PRECISIONS:
            for names in PAIRS:
                first, second = (students.find(name, at, batch, precision) for name in names)
                if (found := students.compare(first, second)) is None:
                    continue
                assert first is not None
                assert second is not None
                # Of seeds that both have: sessions and revisions differ between seeds.
                timed = first.timed(batch) & second.timed(batch)
                fast = [f"{arm.fast(batch, timed):.2f}x" for arm in (first, second)] if timed else []
                shared = first.right.keys() & second.right.keys()
                right = [f"{100 * arm.accuracy(shared):.1f}" for arm in (first, second)]
                what = [f"{ARMS[names[0]]} - {ARMS[names[1]]}", precision.upper(), str(batch), f"{at} layers"]
                yield [*what, " and ".join(fast), " and ".join(right)], found


def differences(folder: Path, dataset: str, size: str) -> str:
    """Return all differences between students that take equally long, as a table."""
    students = Students.read(folder, dataset, size)
    found = list(compared(students))
    if not found:
        raise KeyError(f"{dataset}, {size}: two arms of one time")
    adjusted = holm([one.p for _, one in found])
    heads = [
        "students",
        "precision",
        "batch",
        "at the time of",
        "measured speedups",
        "accuracies, %",
        "difference, points",
    ]
    lines = [
        [*cells, *points(one), f"{p:.3f}", str(one.seeds)] for (cells, one), p in zip(found, adjusted, strict=True)
    ]
    row = students.row
    sizes = ", ".join(f"{row['rows'][part]:,} {part}" for part in ("train", "dev", "test"))
    told = (
        f"{_named(size)}{DATASETS[dataset]}, {row['tokens']:.0f} tokens in the mean; rows: {sizes}, the last in "
        f"{len(set(students.groups)):,} groups; {students.teachers}. Intervals of 95% over groups and seeds; with one "
        "seed they do not know how far seeds lie apart. Speedups: means over the seeds that were timed for both, which may be fewer; dots "
        "of the plot are means over all that were timed. p: of no difference, adjusted by Holm for all rows of this table. "
        f"{ran(row)}."
    )
    return f"{table([*heads, '95%', 'p', 'seeds'], lines, texts=4)}\n\n{told}"


def _texts(dataset: str) -> str:
    """Return the name of a data set, or of that of which it is a fold."""
    return DATASETS[dataset] if dataset in DATASETS else DATASETS[dataset.rpartition("-")[0]]


def _named(size: str) -> str:
    return "" if size == PLAN else "Smaller than planned, and not trained to the end. "


def retentions(rows: list[Row]) -> str:
    """Return which retention takes as long as fewer layers."""
    from benchmarks.pruning.equal_data import SITE
    from benchmarks.pruning.equal_time import CUT_DEPTHS, DEPTHS, retention_for

    lines = []
    for row in rows:
        dense = {point["layers"]: point for point in row["dense"]}
        cells = [_texts(row["dataset"]), f"{row['tokens']:.0f}", str(row["batch"]), row["precision"].upper()]
        for layers in DEPTHS[1:]:
            speed = f"{dense[layers]['speedup']:.2f}x ± {dense[layers]['margin']:.2f}"
            kept = [retention_for(row, depth, layers) if layers < depth else math.nan for depth in CUT_DEPTHS]
            told = ("none" if one is None else "" if math.isnan(one) else f"{one:.0%}" for one in kept)
            cells.append(f"{speed}: {', '.join(one for one in told if one)}")
        lines.append(cells)
    heads = ["texts", "tokens", "batch", "precision", *(f"{layers} layers" for layers in DEPTHS[1:])]
    sites = " or ".join(dict.fromkeys(SITE[row["dataset"]] for row in rows))
    told = (
        f"Speedups over 6 dense layers of the same precision. Behind each the share of tokens that a cut at {sites} has to leave to be as "
        "fast, with 6 layers and with 4. `python -m benchmarks.pruning.equal_time`, "
        f"{'; '.join(dict.fromkeys(map(ran, rows)))}."
    )
    return f"{table(heads, lines)}\n\n{told}"


def rates(folder: Path) -> str:
    """Return what students reach at each learning rate, and how far they are from fewer layers where dev chooses the rate of each.

    Raises:
        KeyError: nothing is recorded.
    """
    found = read_lines(folder / "equal-time-rates.jsonl")
    if not found:
        raise KeyError("no learning rates")
    wanted = (found[0]["dataset"], found[0]["size"])
    found = [row for row in found if (row["dataset"], row["size"]) == wanted]
    (known,) = (row for row in read_lines(folder / "equal-time-rows.jsonl") if (row["dataset"], row["size"]) == wanted)
    tried = sorted({row["settings"]["learning_rate"] for row in found})
    students: dict[tuple[int, str], dict[float, Row]] = {}
    for row in found:
        students.setdefault((row["at"], row["arm"]), {})[row["settings"]["learning_rate"]] = row
    whole = {key: rows for key, rows in students.items() if len(rows) == len(tried)}
    chosen = {key: max(rows, key=lambda rate: rows[rate]["dev_accuracy"]) for key, rows in whole.items()}
    right = {key: right_answers(rows[chosen[key]]["answers"], known["labels"]) for key, rows in whole.items()}
    lines = []
    for (at, arm), rows in sorted(whole.items(), key=lambda item: (-item[0][0], list(ARMS).index(item[0][1]))):
        accuracies = [f"{rows[rate]['dev_accuracy']:.1%}, {rows[rate]['accuracy']:.1%}" for rate in tried]
        apart = [""] * 2
        if arm != "layers" and (at, "layers") in right:
            apart = points(difference(right[at, arm], right[at, "layers"], known["groups"]))
        lines.append([ARMS[arm], f"{at} layers", *accuracies, f"{chosen[at, arm]:g}", *apart])
    heads = ["students", "at the time of", *(f"{rate:g}" for rate in tried), "chosen", "minus fewer layers", "95%"]
    told = (
        f"{_named(wanted[1])}{DATASETS[wanted[0]]}: accuracies on dev and on test by learning rate, seed 0, equal epochs. Dev chooses the "
        f"rate of each; differences, in points on test, are between students at their own. {ran(found[0])}."
    )
    return f"{table(heads, lines, texts=2)}\n\n{told}"


def plots(folder: Path) -> dict[str, str]:
    """Return accuracy against measured speed of the same students, for each data set and size of batches: path to SVG."""
    drawn = {}
    for dataset in DATASETS:
        for size in (PLAN, SMALL):
            try:
                students = Students.read(folder, dataset, size)
            except KeyError:
                continue
            for batch in (MANY, ONE):
                if any(arm.timed(batch) for arm in students.arms.values()):
                    title = f"{DATASETS[dataset]}{'' if size == PLAN else ', small runs'}, batches of {batch}"
                    drawn[f"docs/equal-time-{dataset}-{batch}.svg"] = accuracy_by_speed(students, batch, title)
            break
    return drawn


def accuracy_by_speed(students: Students, batch: int, title: str) -> str:
    """Draw each arm in each precision: a dot for the mean of the seeds that are timed, and their range."""
    lines: dict[str, list[tuple[float, list[float]]]] = {}
    for (name, _, _, precision), arm in sorted(students.arms.items()):
        if (timed := arm.timed(batch)) and name != "schedule":
            right = [float(arm.right[seed].mean()) for seed in timed]
            lines.setdefault(f"{_short(name)} {precision.upper()}", []).append((arm.fast(batch, timed), right))
    speeds = [speed for points_of in lines.values() for speed, _ in points_of]
    values = [value for points_of in lines.values() for _, right in points_of for value in right]
    edge = 0.05 * (max(speeds) - min(speeds)) or 0.1
    low, high = min(speeds) - edge, max(speeds) + edge
    plot = Plot(scale(low, high, X_BEGIN, X_END), scale(min(values) - 0.01, max(values) + 0.01, Y_END, 10))
    plot.axis_y(ticks(min(values) - 0.01, max(values) + 0.01, "{:.0%}"))
    plot.axis_x(ticks(low, high, "{:.1f}x"), f"{title}: speedup over packed dense in fp32; upwards: accuracy")
    for i, points_of in enumerate(lines.values()):
        for speed, right in points_of:
            plot.line([(speed, min(right)), (speed, max(right))], f"s{i}")
    means = {name: sorted((speed, statistics.mean(right)) for speed, right in line) for name, line in lines.items()}
    plot.curves(means, "{name}: {x:.2f}x, {y:.1%}")
    return plot.file(title, list(means))


def _short(name: str) -> str:
    return {"layers": "layers", "adtp": "AD-TP", "both": "both"}[name]


def render_equal_time(path: Path, part: str) -> str:
    """Return a part of the comparison as markdown: "retentions", "rates", or a data set and a size, such as "sst2-plan".

    Raises:
        FileNotFoundError: it is not there. KeyError: it has nothing of that part yet.
    """
    if not path.exists():
        raise FileNotFoundError(path)
    if part == "retentions":
        return retentions(read_lines(path))
    if part == "rates":
        return rates(path.parent)
    dataset, _, size = part.rpartition("-")
    whole = differences(path.parent, dataset, size)
    pictures = [name for name in plots(path.parent) if f"-{dataset}-" in name]
    shown = (f"![accuracy by measured speed](../{name})".replace("../docs/", "") for name in pictures)
    return "\n\n".join([*shown, whole])
