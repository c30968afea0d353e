"""Render the records of `benchmarks/cpu/precision.py`, what lower precisions gain on CPUs and what they cost, and of `revisions.py`."""

from __future__ import annotations

from typing import Any

from benchmarks.render.tables import place, quoted, table


def render_speed(record: dict[str, Any]) -> str:
    """Return a record of `precision.py speed` as one markdown table for each processor and shape."""
    return "\n\n".join(_speed_of_shape(shape, part) for shapes in record.values() for shape, part in shapes.items())


def _speed_of_shape(shape: str, part: dict[str, Any]) -> str:
    rows = {(row["workload"], row["precision"]): row for row in part["results"]}
    workloads, precisions = (list(dict.fromkeys(names)) for names in zip(*rows))
    lines = []
    for precision in precisions:
        timed = [rows[workload, precision] for workload in workloads]
        lines.append([precision, *(f"{row['p50_ms']:.1f}, {quoted(row)}" for row in timed)])
    device, versions, layers = part["device"], part["versions"], part["layers"]
    kind = "family {family}, model {model}".format(**device["hardware"])
    told = (
        f"{device['model']} ({kind}) with {', '.join(device['instructions'])}, ONNX Runtime {versions['onnxruntime']}"
    )
    peers = {"CTranslate2": "ctranslate2", "OpenVINO": "openvino", "llama.cpp": "llama.cpp"}
    timed_peers = [
        f"{name} {versions[key]}" for name, key in peers.items() if any(p.startswith(name) for p in precisions)
    ]
    depth = f"{layers['ours']} layers, and {layers['dense']} of {', '.join(timed_peers)}"
    more = f"ms, and times as fast as fp32 in the graph; medians of runs in turns. {depth}; {told}."
    return f"{table(['', *workloads], lines)}\n\n`python -m benchmarks.cpu.precision speed {shape}`: {more}"


def render_revisions(record: dict[str, Any]) -> str:
    """Return a record of `revisions.py`: how fast files of today are beside those of an earlier revision."""
    rows = {((row["model"], row["contender"]), row["workload"]): row for row in record["results"]}
    workloads = list(dict.fromkeys(workload for _, workload in rows))
    lines = []
    for model, name in dict.fromkeys(who for who, _ in rows):
        timed = [rows[(model, name), workload] for workload in workloads]
        lines.append(
            [model, name, *(f"{row['p50_ms']:.1f}, {row['speedup']:.2f}x ± {row['margin']:.2f}" for row in timed)]
        )
    kind = "family {family}, model {model}".format(**record["device"]["hardware"])
    told = (
        f"`python -m benchmarks.cpu.revisions {record['before'][:8]}`: ms, and times as fast as before; medians of runs in turns. "
        f"{record['layers']} layers, fp32; {place(record)} ({kind}), ONNX Runtime {record['versions']['onnxruntime']}."
    )
    return f"{table(['encoder', 'file', *workloads], lines, texts=2)}\n\n{told}"


def render_vectors(record: dict[str, Any]) -> str:
    """Return a record of `precision.py vectors`: how near to fp32's the vectors of each model are."""
    lines = []
    for name, model in record.items():
        for row in model["results"]:
            lines.append([name, row["precision"], f"{row['smallest']:.5f}", f"{row['mean']:.5f}"])
    first = next(iter(record.values()))
    told = (
        f"`python -m benchmarks.cpu.precision vectors OUT`: {first['texts']} texts, three sentences of SST-2 for each post of 20 "
        f"Newsgroups; no calibration. {place(first)}, ONNX Runtime {first['versions']['onnxruntime']}."
    )
    return f"{table(['model', 'precision', 'smallest cosine', 'mean'], lines, texts=2)}\n\n{told}"


def render_fidelity(record: dict[str, Any]) -> str:
    """Return a record of `precision.py fidelity` as a markdown table."""
    before = record["verification"]["accuracy"]
    lines = [
        [
            name,
            f"{target['prediction_agreement']:.2%}",
            f"{target['kept_token_agreement']:.2%}",
            f"{target['flips']:,}",
            f"{target['max_abs_logit_diff']:.1e}",
            f"{100 * (before - target['accuracy']):+.2f}",
        ]
        for name, target in record["targets"].items()
    ]
    heads = ["target", "same prediction", "same tokens kept", "rows with another token", "largest logit difference"]
    calibration = record["calibration"]
    told = f"{record['student']}, {record['verification']['rows']:,} rows of {calibration['text']}, calibrated on {calibration['rows']}"
    told += (
        f"; int8-linear has a range per token and needs no calibration. {place(record)}" if "device" in record else ""
    )
    more = f"`python -m benchmarks.cpu.precision fidelity STUDENT TEXT_FILE`: {told}."
    return f"{table([*heads, 'accuracy lost, points'], lines)}\n\n{more}"
