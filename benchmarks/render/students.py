"""Render the training runs of `benchmarks/students/train.py` and `causal.py`; `benchmarks.render` puts them into the documents."""

from __future__ import annotations

import statistics
from collections import defaultdict
from typing import Any

from adtp_export.report.tuned import COLUMNS, cells
from benchmarks.render.tables import place, table

ADAPTIVE, STATIC, RANDOM = "adaptive", "static", "random"


def render_students(runs: dict[str, dict[str, Any]], group: str) -> str:
    """Return a group of training runs as a markdown table."""
    if group in ("sst2", "news"):
        return _one_student(runs[group])
    if group in ("tags", "spans"):
        alike = [run for run in runs.values() if run["task"] == group]
        return _cuts(alike) if group == "tags" else f"{_one_student(alike[0])}\n\n{_cuts(alike)}"
    if group == "retention":
        return _retention(runs)
    names = {
        "steps": ["m = 1", "m = 3", "m = 5", "m = 7"],
        "candidates": ["5 ratios", "10 ratios"],
        "losses": [
            *(f"without {term}" for term in ("ce", "logit", "ig", "tsp", "teacher")),
            "without self-attribution",
        ],
    }[group]
    adaptive = [runs[f"{ADAPTIVE}, seed {seed}"] for seed in (0, 1, 2)]
    lines = [
        "| run | accuracy | against the first row | tokens left | Spearman with the teacher's | student, minutes |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    chosen = {} if group == "steps" else {"as in the table above, seed 0": adaptive[0]}
    chosen |= {name: runs[name] for name in names}
    first, band = next(iter(chosen.values())), _noise(adaptive)
    for name, run in chosen.items():
        student = run["student"]
        difference = 100 * (student["accuracy"] - first["student"]["accuracy"])
        told = "" if run is first else f"{difference:+.1f}" + (" (within noise)" if abs(difference) <= band else "")
        ranks = f"{student['saliency']['teacher']['spearman']:.3f}"
        minutes = f"{run['durations_s']['student_s'] / 60:.1f}"
        lines.append(
            f"| {name} | {100 * student['accuracy']:.1f} | {told} | {student['retention']['0.ffn']:.1%} | {ranks} | {minutes} |"
        )
    told = (
        f"Noise: {band:.1f} points, twice the standard error of a difference: of two draws of {adaptive[0]['rows']['test']:,} test rows, "
        "and of two seeds. The same test rows are used each time, so it is an upper bound."
    )
    return "\n".join([*lines, "", told])


def _noise(runs: list[dict[str, Any]]) -> float:
    """Twice the standard error, in points, of the difference of two runs like these, which differ in the seed alone."""
    scores = [run["student"]["accuracy"] for run in runs]
    mean = statistics.mean(scores)
    drawn = mean * (1 - mean) / runs[0]["rows"]["test"]
    return 200 * (2 * (statistics.variance(scores) + drawn)) ** 0.5


def _retention(runs: dict[str, dict[str, Any]]) -> str:
    lines = [
        "| tokens chosen | accuracy, mean of three seeds | spread | adaptive is better by, mean and each seed | tokens left | "
        "FLOPs against packed dense |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    best = [100 * runs[f"{ADAPTIVE}, seed {seed}"]["student"]["accuracy"] for seed in (0, 1, 2)]
    for kind in (ADAPTIVE, STATIC, RANDOM):
        students = [runs[f"{kind}, seed {seed}"]["student"] for seed in (0, 1, 2)]
        scores = [100 * student["accuracy"] for student in students]
        kept = statistics.mean(student["retention"]["0.ffn"] for student in students)
        saved = statistics.mean(student["flops_reduction"]["packed"] for student in students)
        spread = f"{min(scores):.1f} to {max(scores):.1f}"
        ahead = [a - b for a, b in zip(best, scores)]
        mean, noise = statistics.mean(ahead), 2 * statistics.stdev(ahead) / 3**0.5
        told = f"{mean:+.2f} ({', '.join(f'{a:+.1f}' for a in ahead)})" + (" within noise" if mean <= noise else "")
        told = "" if kind == ADAPTIVE else told
        lines.append(f"| {kind} | {statistics.mean(scores):.2f} | {spread} | {told} | {kept:.1%} | 1 / {saved:.2f} |")
    return "\n".join(
        [*lines, "", "Within noise: the mean is no more than twice its standard error over the three seeds."]
    )


def _one_student(run: dict[str, Any]) -> str:
    student, teacher, settings = run["student"], run["teacher"], run["settings"]
    reduction, ranks = student["flops_reduction"], student["saliency"]
    measure, told = ("f1", "F1") if run["task"] == "spans" else ("accuracy", "accuracy")
    rows = [
        ("rows: training, dev, test", ", ".join(f"{run['rows'][split]:,}" for split in ("train", "dev", "test"))),
        ("tokens of a test row, mean", f"{student['tokens']:.1f}"),
        (f"{told} of the teacher", f"{teacher[measure]:.2%}"),
        (f"{told} of the student", f"{student[measure]:.2%} ({100 * (student[measure] - teacher[measure]):+.2f} points)"),
        *(_answers(run) if run["task"] == "spans" else ()),
        *((f"tokens left after {site}", f"{kept:.1%}") for site, kept in student["retention"].items()),
        (f"FLOPs against dense of the same depth, padded to {settings['max_tokens']}", f"1 / {reduction['padded']:.2f}"),
        ("FLOPs against dense of the same depth, packed", f"1 / {reduction['packed']:.2f}"),
        *((f"Spearman of saliency against attribution ({name})", _ranks(ranks[name])) for name in ranks),
        ("adtp-export, logits against PyTorch", f"{run['export']['status']}, {run['export']['max_abs_logit_diff']:.1e}"),
        ("time, teacher and student" if not run.get("resumed") else "time of the last part of a run that was interrupted",
         f"{sum(run['durations_s'].values()) / 60:.0f} minutes on {run['device']}"),
    ]  # fmt: skip
    return "\n".join(["| | |", "| --- | --- |", *(f"| {name} | {value} |" for name, value in rows)])


def _answers(run: dict[str, Any]) -> list[tuple[str, str]]:
    names = {"has_answer_f1": "F1 where there is an answer", "no_answer_accuracy": "right where there is none"}
    both = [(told, *(f"{run[who][name]:.1%}" for who in ("teacher", "student"))) for name, told in names.items()]
    rows = [(f"{told}: teacher, student", f"{teacher}, {student}") for told, teacher, student in both]
    return [*rows, ("noise of the difference in F1, at most", f"{_difference_noise(run, 'f1'):.1f} points")]


def _difference_noise(run: dict[str, Any], measure: str) -> float:
    """Twice the standard error, in points, of teacher and student drawn apart; no mean of values from 0 to 1 has a larger one."""
    spread = sum(run[who][measure] * (1 - run[who][measure]) for who in ("teacher", "student"))
    return 200 * (spread / run["rows"]["test"]) ** 0.5


def _cuts(runs: list[dict[str, Any]]) -> str:
    """Return students of one teacher, which cut at different places or learn for longer."""
    measure, told = ("f1", "F1") if runs[0]["task"] == "spans" else ("accuracy", "accuracy")
    lines = [
        f"| cuts | epochs | tokens left | {told} of the teacher | of the student | points | FLOPs against packed dense | exported |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | --- |",
    ]
    for run in runs:
        teacher, student = run["teacher"][measure], run["student"]
        sites = ", ".join(f"`{site}`" for site in student["retention"])
        kept = ", ".join(f"{share:.1%}" for share in student["retention"].values())
        lines.append(
            f"| {sites} | {run['settings']['epochs']:g} | {kept} | {teacher:.2%} | {student[measure]:.2%} "
            f"| {100 * (student[measure] - teacher):+.2f} | 1 / {student['flops_reduction']['packed']:.2f} "
            f"| {run['export']['status']}, {run['export']['max_abs_logit_diff']:.1e} |"
        )
    rows, kind = runs[0]["rows"], {"spans": "questions", "tags": "sentences"}[runs[0]["task"]]
    noise = max(_difference_noise(run, measure) for run in runs)
    told = f"{rows['train']:,} {kind} of training, {rows['test']:,} of test. Noise of a difference, at most: {noise:.1f} points."
    return "\n".join([*lines, "", told])


def _ranks(ranks: dict[str, float]) -> str:
    return f"{ranks['spearman']:.3f} within a text, {ranks['spearman_pooled']:.3f} over all"


def render_causal(record: dict[str, Any]) -> str:
    """Return what students of a causal model of vectors lose, by method: means of all seeds, and each seed's loss."""
    teacher, *rows = record["results"]
    methods = defaultdict(list)
    for row in rows:
        methods[row["name"].split(",")[0]].append(row)
    lines = []
    for name, runs in methods.items():
        losses = [100 * run["loss"] for run in runs]
        mean, drawn = statistics.mean(losses), 100 * max(run["margin"] for run in runs)
        each = ", ".join(f"{loss:+.1f}" for loss in losses)
        saved = statistics.mean(run["flops_reduction"]["packed"] for run in runs)
        close = statistics.mean(run["cosine"] for run in runs)
        accuracy = 100 * statistics.mean(run["accuracy"] for run in runs)
        lines.append(
            [
                f"`{name}`",
                f"1 / {saved:.2f}",
                f"{close:.3f}",
                f"{accuracy:.2f}",
                _with_noise(mean, drawn, statistics.variance(losses), len(runs)),
                each,
            ]
        )
    heads = [
        "method",
        "FLOPs against packed dense",
        "cosine with the teacher's vector",
        "accuracy",
        "points lost",
        "by seed",
    ]
    verified = sum(row["status"] == "verified" for row in rows)
    told = (
        f"The teacher has {teacher['accuracy']:.2%}. {record['rows']:,} rows of training, {record['test']:,} of test, "
        f"{record['neighbours']} neighbours; means of all seeds. Of {len(rows)} exported students {verified} are verified. "
        f"`python -m benchmarks.students.causal`; {place(record)}.\n\n"
        "After ±: the 95% interval of the paired difference over the test rows, the widest of any seed, and twice the standard error over "
        "seeds, added as squares."
    )
    return f"{table(heads, lines)}\n\n{told}"


def _with_noise(mean: float, margin: float, variance: float, seeds: int) -> str:
    """Return points with their noise: the margin over rows, and twice the standard error over seeds, added as squares."""
    noise = (margin**2 + 4 * variance / seeds) ** 0.5
    return f"{mean:+.2f} ± {noise:.1f}{' (within noise)' if abs(mean) <= noise else ''}"


def render_masking(record: dict[str, Any]) -> str:
    """Return what targets of pruners and masks of prompts change, each against the first of its kind."""
    lines, first = [], ""
    for row in record["results"]:
        mean, seeds = 100 * row["gain"], len(row["by_seed"])
        told = _with_noise(mean, 100 * row["margin"], (100 * row["deviation"]) ** 2, seeds)
        told = told if row["kind"] == first else ""
        each = "" if row["kind"] != first else ", ".join(f"{100 * gain:+.1f}" for gain in row["by_seed"])
        first = row["kind"]
        saved = statistics.mean(row["flops_reduction"])
        masked = f"{statistics.mean(row['masked_texts']):,.0f}" if any(row["masked_texts"]) else ""
        lines.append(
            [f"{row['kind']}: {row['name']}", f"1 / {saved:.2f}", masked, f"{100 * row['accuracy']:.2f}", told, each]
        )
    heads = ["student", "FLOPs against the teacher", "texts masked", "accuracy", "points gained", "by seed"]
    told = (
        f"The teacher has {record['teacher']:.2%}, from {record['rows']:,} prompts; students learn from {record['student_rows']:,} of them "
        f"for {record['epochs']} epochs, and {record['test']:,} are of test. Means of {record['seeds']} seeds. Texts masked: up to the "
        f"checkpoint kept, repeats counted. `python -m benchmarks.students.masking`; {place(record)}.\n\n"
        "Gains are against the first student of the same kind. After ±: the 95% interval of the paired difference over the test prompts, "
        "and twice the standard error over seeds, added as squares."
    )
    return f"{table(heads, lines)}\n\n{told}"


def render_tuned(record: dict[str, Any]) -> str:
    """Return what a run of `adtp-tune` found, beside the model in INT8."""
    int8 = next((each["speedup"] for each in record["candidates"] if each["name"] == "model"), None)
    lines = []
    for each in record["candidates"]:
        name, *figures = cells(each)
        over = f"{each['speedup'] / int8:.2f}x" if int8 else ""
        lines.append([f"{name} (chosen)" if each == record["chosen"] else name, figures[0], over, *figures[1:]])
    heads = [COLUMNS[0], "speedup over the model", "over its INT8", *COLUMNS[2:]]
    minutes = sum(record["durations_s"].values()) / 60
    told = (
        f"{len(record['trials'])} trials; {minutes:.0f} minutes; the verdict is {record['verdict']}. The model scores "
        f"{record['teacher']['test']:.2%} on {record['rows']['test']:,} confirmation rows. {record['shows'][0].upper()}"
        f"{record['shows'][1:]}. {place(record)}."
    )
    return f"{table(heads, lines)}\n\n{told}"


def render_dropped(record: dict[str, Any]) -> str:
    """Return what flow and attribution say of dropped tokens, beside as many random ones."""

    def cell(figure: dict[str, float], points: int) -> str:
        return f"{figure['mean']:.{points}f} ± {figure['margin']:.{points}f}"

    rows = {(row["pruner"], row["measure"], row["choice"]): row for row in record["results"]}
    lines = [
        [
            pruner,
            measure,
            *(
                cell(rows[pruner, measure, choice][figure], 2)
                for figure in ("share", "auc")
                for choice in ("own", "random")
            ),
        ]
        for pruner, measure, choice in rows
        if choice == "own"
    ]
    heads = [
        "pruner learned from",
        "measure",
        "share of dropped tokens",
        "of random ones",
        "AUC of kept tokens",
        "of random ones",
    ]
    told = (
        "Share: mean over dropped tokens, over the mean of all. AUC: how often a kept token has more than a dropped one. "
        f"{record['texts']} test texts, means of {record['seeds']} seeds; after ±: the 95% interval over texts. "
        f"`python -m benchmarks.students.dropped`; {place(record)}."
    )
    return f"{table(heads, lines, texts=2)}\n\n{told}"
