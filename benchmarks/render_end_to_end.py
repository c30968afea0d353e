"""Render the record of `end_to_end.py`."""

from __future__ import annotations

from typing import Any

from answering import OURS


def per_second(value: float) -> str:
    """Return a rate with three digits, or whole."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def render_end_to_end(record: dict[str, Any]) -> str:
    """Return, of each stream and contender, its rates, its single requests, and how many times as long it takes as `load`."""
    lines = [
        "| stream | contender | batch | texts/s | texts per CPU second | single texts, p50 / p99 in ms | times as long, text to answer "
        "| times as long, model alone | left |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in record["results"]:
        ratios = [
            "" if row["contender"] == OURS else f"{row[name]:.{digits}f} ± {row[f'{name}_margin']:.{digits}f}"
            for name, digits in (("times_ours", 2), ("model_times_ours", 2), ("left", 3))
        ]
        rates = " | ".join(per_second(row[name]) for name in ("texts_per_s", "texts_per_cpu_s"))
        lines.append(
            f"| {row['stream']} | {row['contender']} | {row['batch']} | {rates} | "
            f"{row['p50_ms']:.1f} / {row['p99_ms']:.1f} | {' | '.join(ratios)} |"
        )
    least = min((row for row in record["results"] if row["contender"] != OURS), key=lambda row: row["left"])
    device, versions, student = record["device"], record["versions"], record["student"]
    names = ("onnxruntime", "openvino", "ctranslate2", "transformers", "torch")
    told = ", ".join(f"{name} {versions[name]}" for name in names if name in versions)
    counts = " and ".join(f"{count} texts of {stream}" for stream, count in record["texts"].items())
    requests = dict.fromkeys(f"{row['requests']} of {row['stream']}" for row in record["results"])
    lines += [
        "",
        f"`load` takes `{student['target']}`. Medians of {record['rounds']} rounds over {counts}; single texts: {' and '.join(requests)}. "
        f"The least that is left is {least['left']:.3f}, of the speedup over {least['contender']} on {least['stream']}. "
        f"{device['model']}, {device['cores']} cores, {told}; optimum-onnx {record['optimum'].get('optimum-onnx', 'not installed')} with "
        f"transformers {record['optimum'].get('transformers', 'not installed')}.",
    ]
    lines += [f"Not measured: {name} ({why})." for name, why in record["left_out"].items()]
    return "\n".join(lines)
