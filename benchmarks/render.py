"""Render the committed records into the documents that show them: `python benchmarks/render.py`.

A document marks the place with ``<!-- figures: PATH -->`` and ``<!-- end of figures -->``.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
DOCUMENTS = ("README.md",)


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


def fill(document: str) -> str:
    """Return a document with every marked place rendered anew."""

    def replace(match: re.Match[str]) -> str:
        record = json.loads((ROOT / match[1]).read_text(encoding="utf-8"))
        return f"<!-- figures: {match[1]} -->\n{render(record)}\n<!-- end of figures -->"

    return re.sub(r"<!-- figures: (\S+) -->\n.*?\n<!-- end of figures -->", replace, document, flags=re.DOTALL)


if __name__ == "__main__":
    for name in DOCUMENTS:
        path = ROOT / name
        path.write_text(fill(path.read_text(encoding="utf-8")), encoding="utf-8")
