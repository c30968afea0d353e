"""Render the training runs of `students.py`; `render.py` puts them into the documents."""

from __future__ import annotations

import statistics
from typing import Any

ADAPTIVE, STATIC, RANDOM = "adaptive", "static", "random"


def render_students(runs: dict[str, dict[str, Any]], group: str) -> str:
    """Return a group of training runs as a markdown table."""
    if group in ("sst2", "news"):
        return _one_student(runs[group])
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
    rows = [
        ("rows: training, dev, test", ", ".join(f"{run['rows'][split]:,}" for split in ("train", "dev", "test"))),
        ("tokens of a test row, mean", f"{student['tokens']:.1f}"),
        ("accuracy of the teacher", f"{teacher['accuracy']:.2%}"),
        ("accuracy of the student", f"{student['accuracy']:.2%} ({100 * (student['accuracy'] - teacher['accuracy']):+.2f} points)"),
        ("tokens left after 0.ffn", f"{student['retention']['0.ffn']:.1%}"),
        (f"FLOPs against dense of the same depth, padded to {settings['max_tokens']}", f"1 / {reduction['padded']:.2f}"),
        ("FLOPs against dense of the same depth, packed", f"1 / {reduction['packed']:.2f}"),
        *((f"Spearman of saliency against attribution ({name})", _ranks(ranks[name])) for name in ranks),
        ("adtp-export, logits against PyTorch", f"{run['export']['status']}, {run['export']['max_abs_logit_diff']:.1e}"),
        ("time, teacher and student" if not run.get("resumed") else "time of the last part of a run that was interrupted",
         f"{sum(run['durations_s'].values()) / 60:.0f} minutes on {run['device']}"),
    ]  # fmt: skip
    return "\n".join(["| | |", "| --- | --- |", *(f"| {name} | {value} |" for name, value in rows)])


def _ranks(ranks: dict[str, float]) -> str:
    return f"{ranks['spearman']:.3f} within a text, {ranks['spearman_pooled']:.3f} over all"
