"""Render the committed records into the documents that show them: `python benchmarks/render.py`.

A document marks the place with ``<!-- figures: PATH -->`` and ``<!-- end of figures -->``; a PATH that ends in ``.jsonl#GROUP``
is that group of the runs of `benchmarks/students.py`.
"""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
DOCUMENTS = ("README.md", "docs/results.md")


def render(record: dict[str, Any]) -> str:
    """Return a record of `adtp-bench --json` as a markdown table with its conditions."""
    rows = {(row["workload"], row["contender"]): row for row in record["results"]}
    workloads = list(dict.fromkeys(workload for workload, _ in rows))
    some = rows[workloads[0], "student"]["vs"]
    same = next(name for name in some if name.startswith("packed"))
    full = "padded-dense-12"
    lines = [
        f"| workload | student, ms | {same}, ms | {full}, ms | speedup over {full} | realized fraction against {same} |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for workload in workloads:
        student = rows[workload, "student"]
        times = [f"{rows[workload, name]['p50_ms']:.1f}" for name in ("student", same, full)]
        speedup = f"{student['vs'][full]['speedup']:.1f}x"
        lines.append(
            f"| {workload} | {' | '.join(times)} | {speedup} | {student['vs'][same]['realized_fraction']:.2f} |"
        )
    device, versions = record["device"], record["versions"]
    lines += [
        "",
        f"`{record['command']}`: retention {record['retention']}. Medians, ONNX Runtime {versions['onnxruntime']}, fp32, "
        f"{device['model']}, {device['cores']} cores. Realized fraction = speedup / FLOPs reduction; *packed-dense* is the same "
        "graph with all tokens kept, *padded-dense-12* is BERT at 12 layers exported as usual.",
    ]
    return "\n".join(lines)


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
    return "\n".join(
        [*lines, "", f"Noise: {band:.1f} points, twice the standard deviation of a difference between two seeds."]
    )


def _noise(runs: list[dict[str, Any]]) -> float:
    """Twice the standard deviation, in points, of the difference of two runs that differ in the seed alone."""
    return 2 * 2**0.5 * statistics.stdev(100 * run["student"]["accuracy"] for run in runs)


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


def render_speed(record: dict[str, Any]) -> str:
    """Return a record of `precision.py speed` as a markdown table."""
    rows = {(row["workload"], row["precision"]): row for row in record["results"]}
    lines = [
        "| workload | fp32, ms | int8, ms | speedup | dynamic int8 of onnxruntime.quantization, speedup | CTranslate2 "
        "int8, dense, 12 layers, ms | times slower than int8 |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for workload in dict.fromkeys(workload for workload, _ in rows):
        names = ("fp32", "int8", "dynamic int8", "CTranslate2 dense-12 int8")
        fp32, int8, dynamic, dense = (rows[workload, name] for name in names)
        lines.append(
            f"| {workload} | {fp32['p50_ms']:.1f} | {int8['p50_ms']:.1f} | {int8['speedup']:.2f}x | {dynamic['speedup']:.2f}x | "
            f"{dense['p50_ms']:.1f} | {dense['p50_ms'] / int8['p50_ms']:.1f}x |"
        )
    device = record["device"]
    versions = record["versions"]
    told = f"{device['model']} with {', '.join(device['instructions'])}, ONNX Runtime {versions['onnxruntime']}"
    more = f"`python benchmarks/precision.py speed`, medians of runs in turns, {told}, CTranslate2 {versions['ctranslate2']}."
    return "\n".join([*lines, "", more])


def render_fidelity(record: dict[str, Any]) -> str:
    """Return a record of `precision.py fidelity` as a markdown table."""
    lines = [
        "| target | same prediction | same tokens kept | rows with another token | largest logit difference | accuracy lost, points |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    before = record["verification"]["accuracy"]
    for name, target in record["targets"].items():
        lost = 100 * (before - target["accuracy"])
        lines.append(
            f"| {name} | {target['prediction_agreement']:.2%} | {target['kept_token_agreement']:.2%} | {target['flips']:,} | "
            f"{target['max_abs_logit_diff']:.1e} | {lost:+.2f} |"
        )
    calibration = record["calibration"]
    told = f"{record['student']}, {record['verification']['rows']:,} rows of {calibration['text']}, calibrated on {calibration['rows']}"
    return "\n".join([*lines, "", f"`python benchmarks/precision.py fidelity STUDENT TEXT_FILE`: {told}."])


WHOLE_FILES = {"precision-speed.json": render_speed, "precision-fidelity.json": render_fidelity}


def fill(document: str) -> str:
    """Return a document with every marked place rendered anew."""

    def replace(match: re.Match[str]) -> str:
        name, _, group = match[1].partition("#")
        if not (path := ROOT / name).exists():
            return f"<!-- figures: {match[1]} -->\nNot run yet.\n<!-- end of figures -->"
        text = path.read_text(encoding="utf-8")
        try:
            if group:
                runs = {run["name"]: run for run in map(json.loads, text.splitlines())}
                figures = render_students(runs, group)
            else:
                figures = WHOLE_FILES.get(path.name, render)(json.loads(text))
        except KeyError as missing:
            figures = f"Not run yet ({missing.args[0]})."
        return f"<!-- figures: {match[1]} -->\n{figures}\n<!-- end of figures -->"

    return re.sub(r"<!-- figures: (\S+) -->\n.*?\n<!-- end of figures -->", replace, document, flags=re.DOTALL)


if __name__ == "__main__":
    for name in DOCUMENTS:
        path = ROOT / name
        path.write_text(fill(path.read_text(encoding="utf-8")), encoding="utf-8")
