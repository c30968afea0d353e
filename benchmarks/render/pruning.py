"""Render the comparison of pruning systems; `benchmarks.render` puts it into the documents, and the plots beside them."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from adtp_export.benchmarking.paired import difference
from adtp_export.report.plot import X_BEGIN, X_END, Y_END, Plot, scale
from benchmarks.harness.records import read_lines
from benchmarks.render.tables import place, table

Row = dict[str, Any]
NAMES = {
    "adtp": "AD-TP",
    "ltp": "LTP",
    "top": "ToP",
    "transkimmer": "Transkimmer",
    "schedule": "schedule",
    "random": "random",
    "adtp, gradient difference": "AD-TP, gradient difference",
    "lat": "Length-Adaptive Transformer",
    "power": "PoWER-BERT",
    "layers": "fewer layers",
}
OWN_SITES = " at its own sites"
NAMES |= {f"{name}{OWN_SITES}": f"{NAMES[name]}, own sites" for name in ("ltp", "top", "transkimmer", "schedule")}
DATASETS = {"sst2": "SST-2", "20news": "20 Newsgroups", "ewt-pos": "EWT tags", "subjqa": "SubjQA"}
DRAWN = ("adtp", "ltp", "top", "transkimmer", "schedule", "random")


def ran(row: Row) -> str:
    """Say on what a row was measured."""
    versions = row["versions"]
    return f"{place(row)}, ONNX Runtime {versions['onnxruntime']}, PyTorch {versions['torch']}"


# What is forced: systems-speed.jsonl


def forced(rows: list[Row], part: str) -> str:
    """Return what of the FLOPs that a system saves becomes time saved, or what its sums of attention cost ("sums").

    Args:
        part: "realized": forced to its paper's figure without padding. "whole": forced to a figure that holds padding. Or "sums", "masked".
    """
    rows = [
        row for row in rows if (row["forced"] == row["paper_reduction"] and row["padding"] > 1) == (part == "whole")
    ]
    workloads = list(dict.fromkeys(row["workload"] for row in rows))
    cells = {(row["system"], row["workload"]): row for row in rows}
    systems = list(dict.fromkeys(row["system"] for row in rows))
    made = {"realized": _realized, "whole": _realized, "sums": _sums, "masked": _masked}
    return made[part](systems, workloads, cells)


Cells = Mapping[tuple[str, str], Row]


def _realized(systems: list[str], workloads: list[str], cells: Cells) -> str:
    heads = ["system", "its paper's reduction", "of it padding", "asked", "workload", "ms", "speedup", "FLOPs saved"]
    lines = []
    for system, workload in itertools.product(systems, workloads):
        if (row := cells.get((system, workload))) is not None:
            padding = f"{row['padding']:.1f}x" if row["padding"] > 1 else "not known"
            reductions = (f"{row['paper_reduction']:g}x", padding, f"{row['forced']:.1f}x")
            speedup = f"{row['speedup']:.2f}x ± {row['margin']:.2f}"
            timed = (workload, f"{row['ms']:.0f}", speedup, f"{row['flops_ratio']:.2f}x")
            reading = (row["dense_weights_ms"], row["weights_ms"])
            realized = (
                row["realized_fraction"],
                if_weights_are_read_first(row["dense_ms"], row["flops_ratio"], *reading),
            )
            lines.append([NAMES[system], *reductions, *timed, *(f"{share:.2f}" for share in realized)])
    some = next(iter(cells.values()))
    how = f"Against packed dense BERT of the same depth. `python -m benchmarks.pruning.flops_to_time`: medians, {ran(some)}."
    return f"{table([*heads, 'realized', 'if weights are read first'], lines)}\n\n{how}"


def if_weights_are_read_first(dense_ms: float, flops_ratio: float, dense_weights_ms: float, weights_ms: float) -> float:
    """Return the realized fraction if dense BERT and a student first read all their weights, and then compute equally fast.

    Args:
        dense_ms: of a run of dense BERT. dense_weights_ms, weights_ms: of it and of the student's, to read the weights.
    """
    return dense_ms / ((dense_ms - dense_weights_ms) / flops_ratio + weights_ms) / flops_ratio


def _sums(systems: list[str], workloads: list[str], cells: Cells) -> str:
    def cell(row: Row | None) -> str:
        if row is None or "without_sums" not in row:
            return ""
        return f"{100 * (1 - row['without_sums']):+.1f}% ± {100 * row['without_sums_margin']:.1f}"

    with_sums = [s for s in systems if any("without_sums" in row for (name, _), row in cells.items() if name == s)]
    lines = [[NAMES[system], *(cell(cells.get((system, w))) for w in workloads)] for system in with_sums]
    return table(["system", *(f"{w}, share of a run" for w in workloads)], lines)


def _masked(systems: list[str], workloads: list[str], cells: Cells) -> str:
    rows = [row for row in cells.values() if "masked" in row]
    return table(
        ["workload", "exported, ms", "the masked loop takes"],
        ([row["workload"], f"{row['ms']:.0f}", f"{row['masked']:.1f}x ± {row['masked_margin']:.1f}"] for row in rows),
    )


# What was trained: systems-trained.jsonl, with systems-exported.jsonl and systems-latency.jsonl


def key(row: Row) -> tuple[str, float]:
    return row["method"] + (OWN_SITES if row.get("sites") == "own" else ""), row["budget"]


def groups(rows: Iterable[Row], dataset: str) -> dict[tuple[str, float], list[Row]]:
    """Return the rows of a data set by method and budget: one row per seed."""
    found: dict[tuple[str, float], list[Row]] = {}
    for row in rows:
        if row["dataset"] == dataset:
            found.setdefault(key(row), []).append(row)
    order = list(NAMES)
    return dict(sorted(found.items(), key=lambda item: (-item[0][1], order.index(item[0][0]))))


def with_all_seeds(rows: Iterable[Row], dataset: str) -> dict[tuple[str, float], list[Row]]:
    """Return `groups` without those of which seeds are still to be run."""
    found = groups(rows, dataset)
    most = max(map(len, found.values()), default=0)
    return {at: runs for at, runs in found.items() if len(runs) == most}


def spread(values: list[float]) -> str:
    """Return the mean in percent with how far the seeds lie apart, from the lowest to the highest."""
    low, high = 100 * min(values), 100 * max(values)
    return f"{100 * statistics.mean(values):.1f} ({low:.1f} to {high:.1f})"


def trained(folder: Path, dataset: str) -> str:
    """Return the students of a data set as a table, with what is known of their exports and their speed."""
    rows = read_lines(folder / "systems-trained.jsonl")
    found = {at: runs for at, runs in with_all_seeds(rows, dataset).items() if "," not in at[0]}
    if not found:
        raise KeyError(dataset)
    told = next((row for row in read_lines(folder / "systems-rows.jsonl") if row["dataset"] == dataset), None)
    exports = groups(read_lines(folder / "systems-exported.jsonl"), dataset)
    latency = {at: runs[0] for at, runs in groups(read_lines(folder / "systems-latency.jsonl"), dataset).items()}
    lines = []
    for at, runs in found.items():
        verified = sum(row["status"] == "verified" for row in exports.get(at, ()))
        lines.append(
            [
                NAMES[at[0]],
                f"{at[1]:.0%}",
                f"{statistics.mean(row['flops'] for row in runs):.1%}",
                spread([row["accuracy"] for row in runs]),
                f"{100 * statistics.mean(row['accuracy'] - row['teacher_accuracy'] for row in runs):+.1f}",
                against_adtp(at, found, told),
                f"{verified} of {len(runs)}" if at in exports else "not yet",
                *_speed(latency.get(at)),
            ]
        )
    heads = [
        "method",
        "FLOPs asked",
        "left",
        "accuracy, mean of the seeds",
        "points",
        "against AD-TP",
        "verified exports",
    ]
    heads += ["against packed dense", "against padded dense"]
    return f"{table(heads, lines)}\n\n{_sizes(next(iter(found.values()))[0], latency)}"


def against_adtp(at: tuple[str, float], found: Mapping[tuple[str, float], list[Row]], told: Row | None) -> str:
    """Return the points that students are ahead of AD-TP at their budget, or at the next lower one that it has, with the interval.

    Args:
        found: students by method and budget.
        told: the row of `systems-rows.jsonl`; None leaves the cell empty, and so do rows without answers.
    """
    budgets = [budget for method, budget in found if method == "adtp" and budget <= at[1]]
    if told is None or at[0] == "adtp" or not budgets:
        return ""
    one, other = found[at], found["adtp", max(budgets)]
    if not all("answers" in row for row in (*one, *other)):
        return ""
    labels = np.array(list(told["labels"]))
    scores = (
        np.stack([np.array(list(row["answers"])) == labels for row in sorted(runs, key=lambda row: row["seed"])])
        for runs in (one, other)
    )
    apart = difference(*scores, told["groups"])
    return f"{100 * apart.mean:+.1f} ({100 * apart.low:+.1f} to {100 * apart.high:+.1f})"


def _speed(row: Row | None) -> list[str]:
    if row is None:
        return ["", ""]
    return [f"{row['vs'][name]['speedup']:.2f}x ± {row['vs'][name]['margin']:.2f}" for name in ("packed", "padded")]


def _sizes(row: Row, latency: Mapping[Any, Row]) -> str:
    sizes = ", ".join(f"{row['rows'][part]:,} {part}" for part in ("train", "dev", "test"))
    share = row["teacher_accuracy"]
    noise = 200 * (share * (1 - share) / row["rows"]["test"]) ** 0.5
    told = (
        f"Rows: {sizes}; {row['tokens']:.0f} tokens in the mean of test. Teacher: {share:.1%}, ± {noise:.1f} for the rows that were drawn. "
        "Points: from it. In brackets: lowest and highest seed; of points against AD-TP, at the same budget or the next lower one, "
        f"95% over groups of overlapping rows and seeds. {ran(row)}."
    )
    if latency:
        some = next(iter(latency.values()))
        told += f" Speed: batches of 32 of these texts, median of runs in turns, seed 0, {ran(some)}."
    return told


def attribution(rows: list[Row]) -> str:
    """Return both kinds of attribution, seed by seed."""
    kinds = {"adtp": "integrated-gradients", "adtp, gradient difference": "gradient-difference"}
    other = [row for row in rows if row["method"] in kinds and "," in row["method"]]
    if not other:
        raise KeyError("gradient-difference")
    first = other[0]
    found = groups(rows, first["dataset"])
    lines = []
    for method, name in kinds.items():
        runs = found[method, first["budget"]]
        lines.append(
            [
                f"`{name}`",
                f"{100 * statistics.mean(row['accuracy'] for row in runs):.1f}",
                ", ".join(f"{100 * row['accuracy']:.1f}" for row in runs),
                f"{statistics.mean(row['flops'] for row in runs):.1%}",
                f"{statistics.mean(row['retention']['0.ffn'] for row in runs):.1%}",
            ]
        )
    heads = ["`--attribution`", "accuracy, mean", "each seed", "FLOPs left", "tokens left"]
    told = (
        f"{DATASETS[first['dataset']]}, `--flops {first['budget']:g}`; {first['rows']['train']:,} rows of training, "
        f"{first['rows']['test']:,} of test, teacher {first['teacher_accuracy']:.1%}. `python -m benchmarks.pruning.train train`."
    )
    return f"{table(heads, lines)}\n\n{told}"


# What tokens are worth to a teacher: systems-importance.jsonl


def worth(rows: list[Row], dataset: str) -> dict[str, list[list[float]]]:
    """Return for each way to choose tokens the accuracies at each retention; several where seeds differ."""
    found: dict[str, list[list[float]]] = {}
    for row in rows:
        if row["dataset"] == dataset:
            points = found.setdefault(row["kind"].partition(", seed")[0], [[] for _ in row["retention"]])
            for values, accuracy in zip(points, row["accuracy"]):
                values.append(accuracy)
    return found


def importance(rows: list[Row], dataset: str) -> str:
    """Return the teacher's accuracy by how many tokens are left, and how they were chosen."""
    found = worth(rows, dataset)
    if not found:
        raise KeyError(dataset)
    some = next(row for row in rows if row["dataset"] == dataset)
    lines = [[kind, *(f"{100 * statistics.mean(v):.1f}" for v in points)] for kind, points in found.items()]
    told = f"{some['rows']} test rows; random: mean of three seeds. {ran(some)}."
    picture = f"![accuracy by tokens that are left](systems-{dataset}-importance.svg)"
    return f"{picture}\n\n{table(['tokens chosen by', *(f'{r:.0%}' for r in some['retention'])], lines)}\n\n{told}"


# Plots


def plots(folder: Path) -> dict[str, str]:
    """Return the plots of the records in a folder: path to SVG."""
    rows, latency = read_lines(folder / "systems-trained.jsonl"), read_lines(folder / "systems-latency.jsonl")
    chosen = read_lines(folder / "systems-importance.jsonl")
    drawn = {}
    for dataset, name in DATASETS.items():
        found = with_all_seeds(rows, dataset)
        fast = {at: runs[0]["vs"]["packed"]["speedup"] for at, runs in groups(latency, dataset).items()}
        if found:
            shares = {at: statistics.mean(row["flops"] for row in runs) for at, runs in found.items()}
            drawn[f"docs/systems-{dataset}-flops.svg"] = accuracy_by(
                found, shares, "{:.0%}", f"{name}: FLOPs left, of packed dense"
            )
        if fast:
            title = f"{name}: measured speedup over packed dense"
            drawn[f"docs/systems-{dataset}-speedup.svg"] = accuracy_by(found, fast, "{:.1f}x", title)
        if curves := worth(chosen, dataset):
            drawn[f"docs/systems-{dataset}-importance.svg"] = _curves(curves, f"{name}: tokens left")
    return drawn


def ticks(low: float, high: float, told: str) -> list[tuple[float, str]]:
    """Return the round numbers of a range, at most 7 of them, each with its text."""
    step = next(step for step in (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5) if (high - low) / step <= 6)
    return [(i * step, told.format(i * step)) for i in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _axes(values: list[float], x: Callable[[float], float]) -> Plot:
    """Return a plot whose y axis is an accuracy, with room around all values."""
    low, high = min(values) - 0.02, max(values) + 0.02
    plot = Plot(x, scale(low, high, Y_END, 10))
    plot.axis_y(ticks(low, high, "{:.0%}"))
    return plot


def accuracy_by(
    found: Mapping[tuple[str, float], list[Row]], places: Mapping[tuple[str, float], float], form: str, title: str
) -> str:
    """Draw accuracy, as mean and range of the seeds, against a number for each method and budget; dashed: the teacher."""
    names = [name for name in DRAWN if any(at[0] == name for at in places)]
    shown = {at: [row["accuracy"] for row in runs] for at, runs in found.items() if at[0] in names and at in places}
    teacher = next(iter(found.values()))[0]["teacher_accuracy"]
    low, high = min(places[at] for at in shown), max(places[at] for at in shown)
    edge = 0.08 * (high - low) or 0.1
    low, high = low - edge, high + edge
    plot = _axes([teacher, *(value for values in shown.values() for value in values)], scale(low, high, X_BEGIN, X_END))
    plot.axis_x(ticks(low, high, form), f"{title}; upwards: accuracy")
    plot.line([(low, teacher), (high, teacher)], "one")
    lines = {}
    for i, name in enumerate(names):
        mine = sorted((places[at], at) for at in shown if at[0] == name)
        for x, at in mine:
            plot.line([(x, min(shown[at])), (x, max(shown[at]))], f"s{i}")
        lines[NAMES[name]] = [(x, statistics.mean(shown[at])) for x, at in mine]
    plot.curves(lines, "{name}: {x:.2f}, {y:.1%}")
    return plot.file(title, list(lines))


def _curves(curves: Mapping[str, list[list[float]]], title: str) -> str:
    plot = _axes(
        [value for points in curves.values() for values in points for value in values], scale(0, 1, X_BEGIN, X_END)
    )
    plot.axis_x(ticks(0, 1, "{:.0%}"), f"{title}; upwards: accuracy")
    lines = {}
    for i, (name, points) in enumerate(curves.items()):
        at = [j / (len(points) - 1) for j in range(len(points))]
        for x, values in zip(at, points):
            if len(values) > 1:
                plot.line([(x, min(values)), (x, max(values))], f"s{i}")
        short = name.removesuffix(" layer")  # a legend is narrow
        lines[short] = [(x, statistics.mean(values)) for x, values in zip(at, points)]
    plot.curves(lines, "{name}: {x:.0%} left, {y:.1%}")
    return plot.file(title, list(lines))


def render_systems(path: Path, part: str) -> str:
    """Return a part of one of the records of the comparison as markdown; its name is `path`'s without ``systems-``.

    Raises:
        FileNotFoundError: it is not there. KeyError: it has nothing of that part yet.
    """
    kind = path.stem.removeprefix("systems-")
    if not path.exists():
        raise FileNotFoundError(path)
    if kind == "speed":
        return forced(read_lines(path), part)
    if kind == "importance":
        return importance(read_lines(path), part)
    return attribution(read_lines(path)) if part == "attribution" else pictured(path.parent, part)


def pictured(folder: Path, dataset: str) -> str:
    """Return the table of a data set below its plots."""
    whole = trained(folder, dataset)
    kinds = [
        "flops",
        *(
            ["speedup"]
            if any(row["dataset"] == dataset for row in read_lines(folder / "systems-latency.jsonl"))
            else []
        ),
    ]
    told = {"flops": "accuracy by FLOPs that are left", "speedup": "accuracy by measured speedup"}
    return "\n\n".join([*(f"![{told[kind]}](systems-{dataset}-{kind}.svg)" for kind in kinds), whole])
