"""Render the records of GPUs, real, emulated and modelled; `benchmarks.render` puts them into the documents."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.render.tables import table

EMULATED = "emulated.json"
SUMS = {"lse": "the log-sum-exps before it", "received": "received attention"}
"""Kinds of kernels by the beginning of a variant's name; the others compute attention."""


def render_attention(record: dict[str, Any]) -> str:
    """Return a record of `attention_kernel.py`: times of the kernel, and how much faster it is than what PyTorch has."""
    rows = {
        tuple(row[key] for key in ("workload", "dtype", "head_size", "contender")): row for row in record["results"]
    }
    kinds = [(dtype, size) for dtype in ("fp16", "fp32") for size in (32, 64, 128)]
    lines = [f"| workload | {' | '.join(f'{dtype}, {size}' for dtype, size in kinds)} |", "| --- |" + " ---: |" * 6]
    for workload in dict.fromkeys(row["workload"] for row in record["results"]):
        cells = []
        for dtype, size in kinds:
            peer, ours = ("flash-varlen" if dtype == "fp16" else "padded-sdpa"), rows[workload, dtype, size, "kernel"]
            faster = rows[workload, dtype, size, peer]["device_us"] / ours["device_us"]
            cells.append(f"{ours['device_us']:.1f} ({faster:.1f}x)")
        lines.append(f"| {workload} | {' | '.join(cells)} |")
    device, versions = record["device"], record["versions"]
    told = f"{device['gpu']}, driver {device['driver_and_clocks'].split(',')[0]}, PyTorch {versions['torch']}"
    return "\n".join([*lines, "", f"`{record['command']}`: medians, {told}."])


def render_bounds(record: dict[str, Any]) -> str:
    """Return a record of `lower_bounds.py`: least times of the kernel, and what they were computed from."""
    rows = {(row["workload"], row["gpu"]): row for row in record["results"]}
    gpus = list(record["rates"])
    lines = [f"| workload | {' | '.join(gpus)} |", "| --- |" + " ---: |" * len(gpus)]
    for workload in dict.fromkeys(row["workload"] for row in record["results"]):
        times = [f"{rows[workload, gpu]['least_us']:.1f}" for gpu in gpus]
        lines.append(f"| {workload} | {' | '.join(times)} |")
    facts = {
        "processors": "processors",
        "ghz": "GHz",
        "tensor_flops": "tensor FLOPs a clock and processor",
        "gb_per_s": "GB/s",
        "l2_mb": "cache, MB",
    }
    for key, name in facts.items():
        values = [f"{record['rates'][gpu][key]:g}" for gpu in gpus]
        lines.append(f"| *{name}* | {' | '.join(values)} |")
    told = f"{record['dtype']}, head size {record['head_size']}, width {record['hidden']}"
    return "\n".join([*lines, "", f"`{record['command']}`: {record['label']}. Microseconds, {told}."])


def render_emulated(record: dict[str, Any]) -> str:
    """Return what a record of `emulate.py` saw: how much was executed, how wrong it was, what mistakes it would have noticed."""
    variants = record["binaries"]
    rows = [row for codes in variants.values() for row in codes.values()]
    launches = sum(row["launches"] for row in rows)
    right = sum(row["launches"] for row in rows if row["worst_share_of_allowed"] <= 1)
    worst: dict[str, float] = {}
    for name, codes in variants.items():
        kind, _, _ = name.partition("-")
        of = SUMS.get(kind, f"attention in {kind}")
        worst[of] = max(worst.get(of, 0), *(row["worst_share_of_allowed"] for row in codes.values()))
    compiled = [(row, codes["ptx"]) for codes in variants.values() for code, row in codes.items() if code != "ptx"]
    same = sum(row["outputs_sha256"] == ptx["outputs_sha256"] for row, ptx in compiled)
    mutants = sum((Counter(kind) for kind in record["mutants"]["kinds"].values()), Counter[str]())
    cells = {
        "binaries": f"{len(compiled) + len(variants)}: {len(variants)} variants, each as PTX and as machine code",
        "launches within what rounding allows": f"{right:,} of {launches:,}",
        **{f"worst error of {of}, as a share of the allowed one": f"{share:.2f}" for of, share in worst.items()},
        "machine code that gives the very bits of its PTX": f"{same} of {len(compiled)} files",
        "one-instruction changes of PTX that were noticed": f"{mutants.total() - mutants['survived']} of {mutants.total()}",
    }
    lines = ["| what | result |", "| --- | --- |", *(f"| {what} | {result} |" for what, result in cells.items())]
    return "\n".join([*lines, "", f"`{record['command']}`: an emulator, no GPU."])


def render_launches(record: dict[str, Any]) -> str:
    """Return a record of `launches.py`: launches, copies and waits of each kind of part."""

    def cell(counts: list[dict[str, Any]]) -> str:
        return " / ".join(str(sum(count[what] for count in counts)) for what in ("launches", "copies", "waits"))

    files, timed = record["files"], record["timed"]
    kinds = {
        "inputs and answers": "inputs and answers",
        "removing padding": "removing padding",
        "token offsets": "token offsets of packed attention",
        "cut": "cuts",
        "layer": "layers",
        "head": "head",
    }
    in_runner = {
        f"{next(iter(files))}, in the runner": record["runner"],
        "Qwen3 of 6 layers, in the runner": record["runner_decoder"],
        "the same with a cut": record["runner_decoder_student"],
    }
    files |= in_runner
    known = [part for parts in files.values() for part in parts]
    assert all(part.startswith(tuple(kinds)) for part in known), known
    rows = [
        [name, *(cell([count for part, count in parts.items() if part.startswith(kind)]) for parts in files.values())]
        for kind, name in kinds.items()
    ]
    rows.append(["*everything*", *(cell(list(parts.values())) for parts in files.values())])
    rows.append(
        [
            "*everything, as timed on the H100*",
            *(cell([*timed[name].values()]) for name in timed),
            *["-"] * len(in_runner),
        ]
    )
    told = f"ONNX Runtime {record['versions']['onnxruntime']}, {record['precision']}"
    return f"{table(['part', *files], rows)}\n\n`{record['command']}`: {record['label']}. Launches / copies / waits, {told}."


def render_fit(record: dict[str, Any]) -> str:
    """Return how near a record of `modelled_times.py` comes to what was measured."""
    rows = []
    for row in (*record["results"], *record["unseen"]):
        note = "cold, left out" if row["cold"] else ("not fitted" if row in record["unseen"] else "")
        times = (f"{row[name] / 1e3:.2f}" for name in ("measured_us", "modelled_us"))
        rows.append([row["workload"], row["contender"], note, *times, f"{100 * row['error']:+.0f}%"])
    costs = record["costs"]
    told = (
        f"{costs['fixed_us']:.0f} us a run, {costs['launch_us']:.1f} us a launch or copy, {costs['wait_us']:.0f} us a wait, "
        f"{costs['tflops']:.0f} TFLOP/s, and bytes at the data sheet's rate"
    )
    heads = ["workload", "contender", "note", "measured, ms", "modelled, ms", "error"]
    return f"{table(heads, rows, texts=3)}\n\n`{record['command']}`: {record['label']}. Fitted: {told}."


def render_rewritten(record: dict[str, Any]) -> str:
    """Return what a record of `modelled_times.py` says of the files that are written now, in ONNX Runtime."""
    names = list(dict.fromkeys(row["contender"] for row in record["rewritten"]))
    rows = {(row["workload"], row["contender"]): row for row in record["rewritten"]}
    lines = []
    for workload in dict.fromkeys(row["workload"] for row in record["rewritten"]):
        found = [rows[workload, name] for name in names]
        lines.append([workload, *(f"{row['timed_us'] / 1e3:.2f} -> {row['now_us'] / 1e3:.2f}" for row in found)])
    told = "ms on an H100, of the files that were timed and of those written now"
    return f"{table(['workload', *names], lines)}\n\n`{record['command']}`: **{record['label']}**, {told}."


def render_planned(record: dict[str, Any]) -> str:
    """Return what a record of `modelled_times.py` predicts of the planned runner."""
    gpus = list(record["runner"]["plans"])
    rows = {(row["gpu"], row["workload"]): row for row in record["predictions"]}
    lines = []
    for workload in dict.fromkeys(row["workload"] for row in record["predictions"]):
        found = [rows[gpu, workload] for gpu in gpus]
        cells = (f"{r['dense_us']} / {r['student_us']} ({r['realized_fraction']:.2f})" for r in found)
        lines.append([workload, *cells])
    told = f"**{record['label']}**. Microseconds: dense / student (realized fraction)."
    return f"{table(['workload', *gpus], lines)}\n\n`{record['command']}`: {told}"


def digests(records: Path) -> dict[str, str]:
    """Return what ships of the record of emulated kernels: path to the hashes of binaries that kept within what rounding allows."""
    path = records / EMULATED
    if not path.exists():
        return {}
    record = json.loads(path.read_text(encoding="utf-8"))
    rows = [row for codes in record["binaries"].values() for row in codes.values()]
    right = sorted(row["sha256"] for row in rows if row["launches"] and row["worst_share_of_allowed"] <= 1)
    return {
        "plugins/kernels/emulated.json": json.dumps({"command": record["command"], "sha256": right}, indent=1) + "\n"
    }
