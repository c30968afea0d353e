"""Render the committed records, and the options of the commands, into the documents that show them: `python benchmarks/render.py`.

A document marks the place with ``<!-- figures: PATH -->`` and ``<!-- end of figures -->``; a PATH that ends in ``#PART`` is a part of
that record. Plots are files beside the documents.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import render_gpu
import render_options
import render_serving
import render_systems
from earlier_names import in_todays_names
from gpu_records import kind_of, read
from render_end_to_end import per_second, render_end_to_end
from render_rag import render_rag
from render_students import render_students

from adtp_export.benchmarking.profile import PRODUCTS
from adtp_export.report.plot import X_BEGIN, X_END, Y_END, Plot, decades, log_scale, speedup_by_retention

ROOT = Path(__file__).parent.parent
RECORDS = ROOT / "benchmarks" / "records"
PEERS, ARRIVALS = RECORDS / "cpu-peers.json", RECORDS / "arrivals.jsonl"
PRECOMPUTED, SPLIT = "student-precomputed", "student-sorted"
MARGIN = 0.05
"""The largest share of a ratio that its margin may be, for documents to quote it."""
DOCUMENTS = (
    "README.md",
    "docs/results.md",
    "docs/latency.md",
    "docs/gpu.md",
    "docs/systems.md",
    "docs/serving.md",
    "docs/scale.md",
    "docs/rag.md",
)


Rows = dict[tuple[str, str], dict[str, Any]]


def by_name(record: dict[str, Any]) -> tuple[Rows, list[str]]:
    """Return the rows of a record of `adtp-bench --json` by workload and contender, and the workloads in order."""
    rows = {(row["workload"], row["contender"]): row for row in record["results"]}
    return rows, list(dict.fromkeys(workload for workload, _ in rows))


def conditions(record: dict[str, Any]) -> str:
    device, versions, precision = record["device"], record["versions"], record["results"][0]["precision"]
    place = device.get("name") or f"{device['model']}, {device['cores']} cores"
    runtime = versions.get("onnxruntime") or versions["onnxruntime-gpu"]
    return f"`{record['command']}`: retention {record['retention']}. Medians, ONNX Runtime {runtime}, {precision}, {place}."


def quoted(versus: dict[str, Any]) -> str:
    """Return a speedup with its margin; nothing where it is not known within `MARGIN`."""
    share = versus["margin"] / versus["speedup"]
    return f"{versus['speedup']:.1f}x ± {math.ceil(100 * share)}%" if share <= MARGIN else ""


def render(record: dict[str, Any]) -> str:
    """Return a record of `adtp-bench --json` as a markdown table with its conditions."""
    rows, workloads = by_name(record)
    some = rows[workloads[0], "student"]["vs"]
    same = next(name for name in some if name.startswith("packed"))
    full, digits = "padded-dense-12", 2 if "name" in record["device"] else 1
    lines = [
        f"| workload | student, ms | {same}, ms | {full}, ms | speedup over {full} | realized fraction against {same} |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for workload in workloads:
        student = rows[workload, "student"]
        times = [f"{rows[workload, name]['p50_ms']:.{digits}f}" for name in ("student", same, full)]
        speedup = quoted(student["vs"][full])
        lines.append(
            f"| {workload} | {' | '.join(times)} | {speedup} | {student['vs'][same]['realized_fraction']:.2f} |"
        )
    lines += [
        "",
        f"{conditions(record)} Realized fraction = speedup / FLOPs reduction; *packed-dense* is the same "
        "graph with all tokens kept, *padded-dense-12* is BERT at 12 layers exported as usual.",
    ]
    return "\n".join(lines)


def render_skewed(record: dict[str, Any]) -> str:
    """Return the ways to run skewed batches: each against the student's whole batch."""
    rows, workloads = by_name(record)
    skewed = [w for w in workloads if (w, SPLIT) in rows]
    if not skewed:
        raise KeyError(SPLIT)
    names = [name for workload, name in rows if workload == skewed[0]]
    lines = [
        f"| contender | {' | '.join(f'{w}, ms | times the student | realized fraction against it' for w in skewed)} |",
        f"| --- | {'---: | ---: | ---: | ' * len(skewed)}",
    ]
    for name in names:
        cells = []
        for w in skewed:
            versus = rows[w, "student"]["vs"].get(name)
            ratio = f"{versus['speedup']:.2f} ± {versus['margin']:.2f}" if versus else ""
            realized = f"{versus['realized_fraction']:.2f}" if versus and "student" not in name else ""
            cells += [f"{rows[w, name]['p50_ms']:.0f}", ratio, realized]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", conditions(record)])


def render_peers(record: dict[str, Any]) -> str:
    """Return the times of all contenders, with the fastest fp32 peer of each workload in bold."""
    rows, workloads = by_name(record)
    everywhere = [name for name in dict.fromkeys(n for _, n in rows) if all((w, name) in rows for w in workloads)]
    peers = [name for name in everywhere if "student" not in name]
    lines = [
        f"| contender | precision | {' | '.join(f'{w}, ms' for w in workloads)} |",
        f"| --- | --- | {'---: | ' * len(workloads)}",
    ]
    dense = [name for name in peers if name.endswith("dense-12") and not name.startswith("packed")]
    best = {
        w: min((n for n in dense if rows[w, n]["precision"] == "fp32"), key=lambda n: rows[w, n]["p50_ms"])
        for w in workloads
    }
    for name in ("student", PRECOMPUTED, "student-openvino", *peers):
        if (workloads[0], name) in rows:
            times = {w: f"{rows[w, name]['p50_ms']:.1f}" for w in workloads}
            cells = [f"**{ms}**" if best[w] == name else ms for w, ms in times.items()]
            lines.append(f"| {name} | {rows[workloads[0], name]['precision']} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", f"Bold: the fastest fp32 peer of 12 layers. {conditions(record)}"])


def render_ahead(record: dict[str, Any]) -> str:
    """Return how much faster both forms of the student are than each contender, with margins."""
    rows, workloads = by_name(record)
    names = [name for name in rows[workloads[0], "student"]["vs"] if not name.startswith("packed-dense-12")]
    lines = [
        f"| faster than | precision | {' | '.join(workloads)} |",
        f"| --- | --- | {'---: | ' * len(workloads)}",
    ]
    for name in names:
        pairs = [[quoted(rows[w, who]["vs"][name]) or "-" for who in ("student", PRECOMPUTED)] for w in workloads]
        cells = " | ".join(" / ".join(pair) for pair in pairs)
        lines.append(f"| {name} | {rows[workloads[0], name]['precision']} | {cells} |")
    told = f"In each cell: `student` / `{PRECOMPUTED}`; - where the margin is above {MARGIN:.0%}."
    return "\n".join([*lines, "", f"{told} {conditions(record)}"])


def render_profile(record: dict[str, Any]) -> str:
    """Return where the student's time goes, and what bounds it."""
    lines = [
        "| workload | first batch, ms | accounted for | matrix products | largest others | their GFLOP/s | reading all weights once, ms "
        "| realized fraction it leaves | measured |",
        "| --- | ---: | ---: | ---: | --- | ---: | ---: | ---: | ---: |",
    ]
    rows, _ = by_name(record)
    for profile in record["profiles"]:
        others = [f"{op} {share:.1%}" for op, share in profile["shares"].items() if op not in PRODUCTS]
        flops = sum(p["gflops"] * p["ms"] for p in profile["products"]) / sum(p["ms"] for p in profile["products"])
        lines.append(
            f"| {profile['workload']} | {profile['run_ms']:.1f} | {profile['accounted']:.1%} | {profile['product_share']:.1%} | "
            f"{', '.join(others[:4])} | {flops:.0f} | {profile['weights_ms']:.1f} | {' | '.join(fractions(rows, profile))} |"
        )
    peaks = record["peaks"]
    runtime = peaks.get("runtime", "PyTorch")  # whose product was timed where records do not say it
    reached = f"{runtime} reached {peaks['gflops']:.0f} GFLOP/s in a large matrix product"
    more = f"{reached}. The machine reads {peaks['gigabytes_per_s']:.0f} GB/s."
    more += " A workload of several batches is profiled on its first one alone; the last column is of all."
    return "\n".join([*lines, "", more])


def fractions(rows: Rows, profile: dict[str, Any]) -> tuple[str, str]:
    """Return the realized fraction against packed dense: if both first read all weights and then computed; and as measured."""
    student, weights_ms = rows[profile["workload"], "student"], profile["weights_ms"]
    name = next(name for name in student["vs"] if name.startswith("packed"))
    dense_ms, ratio = rows[profile["workload"], name]["p50_ms"], student["vs"][name]["flops_ratio"]
    bound = render_systems.if_weights_are_read_first(dense_ms, ratio, weights_ms, weights_ms)
    return f"{bound:.2f}", f"{student['vs'][name]['realized_fraction']:.2f}"


def render_sweeps(record: dict[str, Any]) -> str:
    """Return speedup over packed dense by retention."""
    sweeps = record["sweeps"]
    retention = sweeps[0]["retention"]
    lines = [
        f"| workload | {' | '.join(f'{r:.0%}' for r in retention)} | break-even |",
        f"| --- | {'---: | ' * (len(retention) + 1)}",
    ]
    for sweep in sweeps:
        cells = [f"{point['vs'][sweep['baseline']]['speedup']:.2f}x" for point in sweep["points"]]
        even = "none" if sweep["break_even"] is None else f"{sweep['break_even']:.0%}"
        lines.append(f"| {sweep['workload']} | {' | '.join(cells)} | {even} |")
    return "\n".join(["![speedup against retention](speedup-retention.svg)", "", *lines])


def render_arrivals(rows: list[dict[str, Any]], stream: str) -> str:
    """Return latency under load, a line per load."""
    rows = [row for row in rows if row["stream"] == stream]
    if not rows:
        raise KeyError(stream)
    capacity, first = rows[0]["capacity_per_s"], rows[0]
    loads = {row["load"]: row["requests_per_s"] for row in rows}
    lines = [f"| requests/s | {' | '.join(capacity)} |", f"| ---: | {'---: | ' * len(capacity)}"]
    for load, rate in loads.items():
        here = {row["contender"]: f"{row['p50_ms']:.0f} / {row['p99_ms']:.0f}" for row in rows if row["load"] == load}
        lines.append(f"| {rate:.1f} | {' | '.join(here.get(name, 'overloaded') for name in capacity)} |")
    lines.append(f"| most it serves, requests/s | {' | '.join(f'{value:.3g}' for value in capacity.values())} |")
    told = (
        f"p50 / p99 in ms from arrival to answer; {first['requests']} texts of {first['tokens']:.0f} tokens in the mean, batches of at "
        f"most {first['budget_tokens']:,} tokens, retention {first['retention']}, {first['device']['model']}, "
        f"{first['device']['cores']} cores. `python benchmarks/arrivals.py --stream {stream}`."
    )
    return "\n".join([f"![p99 under load](arrivals-{stream}.svg)", "", *lines, "", told])


def plots() -> dict[str, str]:
    """Return the plots of the documents: path to SVG."""
    drawn = render_systems.plots(RECORDS)
    if PEERS.exists():
        sweeps = json.loads(PEERS.read_text(encoding="utf-8"))["sweeps"]
        drawing, names = speedup_by_retention(sweeps)
        drawn["docs/speedup-retention.svg"] = drawing.file("speedup against retention", names)
    if ARRIVALS.exists():
        rows = [json.loads(line) for line in ARRIVALS.read_text(encoding="utf-8").splitlines()]
        for stream in dict.fromkeys(row["stream"] for row in rows):
            mine = [row for row in rows if row["stream"] == stream]
            lines = {
                name: [(row["requests_per_s"], row["p99_ms"]) for row in mine if row["contender"] == name]
                for name in mine[0]["capacity_per_s"]
            }
            rates, times = [row["requests_per_s"] for row in mine], [row["p99_ms"] for row in mine]
            drawing = Plot(
                log_scale(min(rates) / 1.2, max(rates) * 1.2, X_BEGIN, X_END),
                log_scale(min(times) / 1.5, max(times) * 1.5, Y_END, 10),
            )
            drawing.axis_x([(x, f"{x:g}") for x in dict.fromkeys(rates)], "requests per second; upwards: p99, ms")
            drawing.axis_y([(y, f"{y:g}") for y in decades(min(times) / 1.5, max(times) * 1.5)])
            drawing.curves(lines, "{name}: {x:g}, {y:g}")
            drawn[f"docs/arrivals-{stream}.svg"] = drawing.file("p99 under load", list(lines))
    return drawn


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


def render_embedding(record: dict[str, Any]) -> str:
    """Return a record of `embedding.py`: texts per second of all contenders, by stream and by who sorts."""
    rows = {(row["stream"], row["how"], row["contender"]): row for row in record["results"]}
    streams = list(dict.fromkeys((stream, how) for stream, how, _ in rows))
    lines = [
        f"| contender | {' | '.join(f'{stream}, {how}' for stream, how in streams)} |",
        f"| --- | {'---: | ' * len(streams)}",
    ]
    for name in dict.fromkeys(contender for *_, contender in rows):
        cells = []
        for key in streams:
            row = rows[*key, name]
            slower = "" if row["margin"] == 0 else f" ({row['times_ours']:.2f}x ± {row['margin']:.2f})"
            cells.append(f"{per_second(row['texts_per_s'])}{slower}")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    device, versions = record["device"], record["versions"]
    names = ("onnxruntime", "sentence-transformers", "fastembed", "optimum-onnx", "optimum-intel")
    told = ", ".join(f"{name} {versions[name]}" for name in names if name in versions)
    more = f"Texts per second; in brackets, how many times as long it takes. {device['model']}, {device['cores']} cores, {told}."
    return "\n".join([*lines, "", more])


WHOLE_FILES = {
    "precision-speed.json": render_speed,
    "precision-fidelity.json": render_fidelity,
    "embedding.json": render_embedding,
    "end-to-end.json": render_end_to_end,
    "rag.json": render_rag,
    "triton.json": render_serving.render_triton,
    "distributed.json": render_serving.render_distributed,
    "modelled-bounds.json": render_gpu.render_bounds,
    "emulated.json": render_gpu.render_emulated,
}
PARTS = {
    "peers": render_peers,
    "ahead": render_ahead,
    "profile": render_profile,
    "attention": render_gpu.render_attention,
    "skewed": render_skewed,
    "sweeps": render_sweeps,
}


def render_part(path: Path, part: str) -> str:
    """Return a record, or a part of it, as markdown."""
    if path.name.startswith("systems-"):
        return render_systems.render_systems(path, part)
    if kind_of(path):
        read(path)
    text = in_todays_names(path.read_text(encoding="utf-8"))
    if path == ARRIVALS:
        return render_arrivals([json.loads(line) for line in text.splitlines()], part)
    if path.suffix == ".jsonl":
        return render_students({run["name"]: run for run in map(json.loads, text.splitlines())}, part)
    return (PARTS[part] if part else WHOLE_FILES.get(path.name, render))(json.loads(text))


def fill(document: str) -> str:
    """Return a document with every marked place rendered anew."""

    def replace(match: re.Match[str]) -> str:
        name, _, part = match[1].partition("#")
        try:
            figures = render_part(ROOT / name, part)
        except FileNotFoundError:
            figures = "Not run yet."
        except KeyError as missing:
            figures = f"Not run yet ({missing.args[0]})."
        return f"<!-- figures: {match[1]} -->\n{figures}\n<!-- end of figures -->"

    return re.sub(r"<!-- figures: (\S+) -->\n.*?<!-- end of figures -->", replace, document, flags=re.DOTALL)


if __name__ == "__main__":
    for name in DOCUMENTS:
        path = ROOT / name
        path.write_text(fill(path.read_text(encoding="utf-8")), encoding="utf-8")
    for name in render_options.DOCUMENTS:
        path = ROOT / name
        path.write_text(render_options.fill(path.read_text(encoding="utf-8")), encoding="utf-8")
    for name, text in (plots() | render_gpu.digests(RECORDS)).items():
        (ROOT / name).write_text(text, encoding="utf-8")
