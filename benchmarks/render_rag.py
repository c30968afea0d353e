"""Render the record of `rag.py`."""

from __future__ import annotations

from typing import Any


def render_rag(record: dict[str, Any]) -> str:
    """Return, of each client and model, the smallest cosine to `load` over short and over long texts."""
    models = list(dict.fromkeys(row["model"] for row in record["results"]))
    lines = [
        f"| client | version | {' | '.join(f'{model}, {kind} texts' for model in models for kind in record['texts'])} |",
        f"| --- | --- | {' | '.join(['---:'] * len(models) * len(record['texts']))} |",
    ]
    rows = {(row["client"], row["model"]): row for row in record["results"]}
    for client in dict.fromkeys(row["client"] for row in record["results"]):
        version = ", ".join(f"{name} {number}" for name, number in rows[client, models[0]]["versions"].items())
        cells = [f"{rows[client, model][kind]:.4f}" for model in models for kind in record["texts"]]
        lines.append(f"| {client} | {version} | {' | '.join(cells)} |")
    counts = " and ".join(f"{count} {kind}" for kind, count in record["texts"].items())
    told = f"The smallest cosine to `load`, over {counts} texts. Long ones are more than the model reads."
    return "\n".join([*lines, "", f"{told} ONNX Runtime {record['versions']['onnxruntime']}."])
