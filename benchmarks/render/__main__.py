"""Render the committed records, and the options of the commands, into the documents that show them: `python -m benchmarks.render`.

A document marks the place with ``<!-- figures: PATH -->`` and ``<!-- end of figures -->``; a PATH that ends in ``#PART`` is a part of
that record. Plots are files beside the documents.
"""

from __future__ import annotations

import re
from pathlib import Path

from benchmarks.gpu.schemas import kind_of, read
from benchmarks.harness.records import RECORDS, ROOT, read_document, read_lines
from benchmarks.render import (
    cpu,
    decoders,
    equal_spans,
    equal_time,
    gpu,
    gpu_table,
    options,
    precision,
    predictions,
    pruning,
    serving,
)
from benchmarks.render.plots import plots
from benchmarks.render.students import render_causal, render_dropped, render_masking, render_students, render_tuned

PAGES = ("results", "latency", "gpu", "systems", "comparison", "quantization", "serving", "scale", "rag", "tuning")
DOCUMENTS = ("README.md", *(f"docs/{page}.md" for page in PAGES))

WHOLE_FILES = {
    "precision-speed.json": precision.render_speed,
    "precision-fidelity.json": precision.render_fidelity,
    "precision-vectors.json": precision.render_vectors,
    "revisions.json": precision.render_revisions,
    "mixed-stream.json": cpu.render_stream,
    "embedding.json": cpu.render_embedding,
    "decoders.json": decoders.render_vectors,
    "decoder-cuts.json": decoders.render_cuts,
    "prefill.json": decoders.render_prefill,
    "long-texts.json": decoders.render_long_texts,
    "causal.json": render_causal,
    "dropped.json": render_dropped,
    "flow.json": decoders.render_flow,
    "masking.json": render_masking,
    "tune.json": render_tuned,
    "tune-tags.json": render_tuned,
    "tune-spans.json": render_tuned,
    "end-to-end.json": cpu.render_end_to_end,
    "sparse-weights.json": cpu.render_sparse,
    "rag.json": serving.render_rag,
    "triton.json": serving.render_triton,
    "distributed.json": serving.render_distributed,
    "modelled-bounds.json": gpu.render_bounds,
    "emulated.json": gpu.render_emulated,
    "launches.json": gpu.render_launches,
}
PARTS = {
    "front": cpu.front,
    "peers": cpu.render_peers,
    "ahead": cpu.render_ahead,
    "profile": cpu.render_profile,
    "attention": gpu.render_attention,
    "skewed": cpu.render_skewed,
    "fit": gpu.render_fit,
    "planned": gpu.render_planned,
    "launches": gpu_table.render_launches,
    "products": gpu_table.render_products,
    "realized": gpu_table.render_realized,
    "table": gpu_table.render_table,
    "rewritten": gpu.render_rewritten,
    "sweeps": cpu.render_sweeps,
}


def render_part(path: Path, part: str) -> str:
    """Return a record, or a part of it, as markdown."""
    if path.name == "equal-time-spans.jsonl":
        return equal_spans.render_spans(path)
    if path.name.startswith("equal-time-"):
        scored = part == "predictions"
        return predictions.scored(path.parent) if scored else equal_time.render_equal_time(path, part)
    if path.name.startswith("systems-"):
        return pruning.render_systems(path, part)
    if not path.exists():
        raise FileNotFoundError(path)
    if kind_of(path):
        read(path)
    if path.name == "arrivals.jsonl":
        return cpu.render_arrivals(read_lines(path), part)
    if path.suffix == ".jsonl":
        return render_students({run["name"]: run for run in read_lines(path)}, part)
    return (PARTS[part] if part else WHOLE_FILES.get(path.name, cpu.render))(read_document(path))


def fill(text: str) -> str:
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

    return re.sub(r"<!-- figures: (\S+) -->\n.*?<!-- end of figures -->", replace, text, flags=re.DOTALL)


if __name__ == "__main__":
    for name in DOCUMENTS:
        path = ROOT / name
        path.write_text(fill(path.read_text(encoding="utf-8")), encoding="utf-8")
    for name in options.DOCUMENTS:
        path = ROOT / name
        path.write_text(options.fill(path.read_text(encoding="utf-8")), encoding="utf-8")
    for name, text in (plots() | gpu.digests(RECORDS)).items():
        (ROOT / name).write_text(text, encoding="utf-8")
