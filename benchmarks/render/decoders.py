"""Render the records of `benchmarks/cpu/decoders.py`, `decoder_cuts.py`, `prefill.py`, `long_texts.py` and `flow.py`."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.cpu.contenders import OURS
from benchmarks.render.tables import per_second, place, quoted, table

NAMES = ("sentence-transformers", "transformers", "optimum-intel", "openvino", "onnxruntime")


def render_vectors(record: dict[str, Any]) -> str:
    """Return texts per second of all contenders, by how texts come, and their memory."""
    rows = {(row["how"], row["contender"]): row for row in record["results"]}
    ways = list(dict.fromkeys(how for how, _ in rows))
    lines = []
    for name in dict.fromkeys(contender for _, contender in rows):
        cells, most = [name], 0
        for how in ways:
            row = rows.get((how, name))
            most = max(most, row["most_mb"] if row else 0)
            slower = "" if name == OURS or not row else f" ({row['times_ours']:.1f}x)"
            cells.append(f"{per_second(row['texts_per_s'])}{slower}" if row else "")
        lines.append([*cells, f"{most:,}"])
    versions = record["versions"]
    rounds = ", ".join(f"{how} {max(row['rounds'] for (kind, _), row in rows.items() if kind == how)}" for how in ways)
    told = ", ".join(f"{name} {versions[name]}" for name in NAMES if name in versions)
    peak = record.get("export_most_mb")
    exporting = f" The export took {peak:,} MB of memory at its peak." if peak else ""
    more = (
        f"Texts per second; in brackets, how many times as long it takes. {record['layers']} layers, {record['texts']} texts; "
        f"rounds: {rounds}.{exporting} `python -m benchmarks.cpu.decoders`; {place(record)}, {told}."
    )
    return f"{table(['contender', *ways, 'most memory, MB'], lines)}\n\n{more}"


def render_cuts(record: dict[str, Any]) -> str:
    """Return what cuts save of FLOPs and of time."""
    lines = []
    for row in record["results"]:
        for versus in row["vs"].values():
            cells = [row["workload"], row["contender"].removeprefix("student-"), quoted(versus)]
            lines.append([*cells, f"{versus['flops_ratio']:.2f}x", f"{versus['realized_fraction']:.2f}"])
    heads = ["batch", "tokens stay by", "speedup over packed dense", "FLOPs ratio", "realized fraction"]
    told = (
        f"{record['layers']} layers, cut at `{record['site']}`, {record['keep']:.0%} of the tokens stay, {record['engine']}. "
        f"`python -m benchmarks.cpu.decoder_cuts`; {place(record)}."
    )
    return f"{table(heads, lines, texts=2)}\n\n{told}"


def render_long_texts(record: dict[str, Any]) -> str:
    """Return what memory long texts add, and how long a batch with one of them takes beside its parts."""
    lengths = list(record["results"][0]["added_mb"])
    lines = []
    for row in record["results"]:
        shares = row["of_the_sum"]
        quoted_share = f"{statistics.median(shares):.2f} ({min(shares):.2f} to {max(shares):.2f})"
        lines.append([row["model"], *(f"{row['added_mb'][length]:,}" for length in lengths), quoted_share])
    heads = [
        "model",
        *(f"{int(length):,} tokens, MB" for length in lengths),
        "one long and 31 short texts, times both apart",
    ]
    told = (
        f"{record['layers']} layers, {record['engine']}; median of {len(record['results'][0]['of_the_sum'])} rounds, and their range. "
        f"`python -m benchmarks.cpu.long_texts`; {place(record)}."
    )
    return f"{table(heads, lines)}\n\n{told}"


def render_prefill(record: dict[str, Any]) -> str:
    """Return what becomes of the FLOPs that image tokens save, to the first token of the answer."""
    lines = []
    for row in record["results"]:
        medians, cache = row["median_s"], row["cache_bytes"]
        lines.append([
            row["shape"],
            *(f"{1000 * medians[name]:,.0f}" for name in ("transformers", "dense", "pruned")),
            f"{row['speedup']:.2f}x",
            f"{row['flops']['dense'] / row['flops']['pruned']:.2f}x",
            f"{row['realized_fraction']:.2f}",
            f"{row['choice_share']:.1%}",
            f"{cache['dense'] / 1e6:.1f} to {cache['pruned'] / 1e6:.1f}",
        ])  # fmt: skip
    heads = [
        "shape",
        "transformers, ms",
        "packed dense, ms",
        "pruned, ms",
        "speedup",
        "FLOPs ratio",
        "realized fraction",
    ]
    told = (
        f"Medians of {len(record['results'][0]['rounds_s']['dense'])} rounds in turns; {record['text_tokens']} tokens of text beside "
        f"those of the picture. `python -m benchmarks.cpu.prefill`; {place(record)}."
    )
    return f"{table([*heads, 'choices, of the time', 'cache, MB'], lines)}\n\n{told}"


def render_flow(record: dict[str, Any]) -> str:
    """Return what the exact flow takes by length, and what smaller graphs take and miss: of the longest prompt, and of a student's."""
    rows = record["results"]
    longest = max(row["tokens"] for row in rows)
    times = [
        [
            f"{row['tokens']:,}",
            str(row["layers"]),
            *_solving(row),
            f"{row['prepare_s']:.2f}",
            f"{_whole_prompt(row):,.1f}",
        ]
        for row in rows
        if row["how"] == "exact"
    ]
    both = ["edges", "ms for a token", "ms for a token, all edges at once"]
    heads = ["graph", *both, "absolute error, mean", "relative error, mean", "same of the ten largest"]
    parts = [
        table(["tokens", "layers", *both, "attention, s", "whole prompt, s"], times),
        f"Smaller graphs of the prompt of {longest:,} tokens:",
        table(heads, (_missed(row) for row in rows if row["tokens"] == longest and row["how"] != "exact")),
    ]
    if trained := record.get("student"):
        parts += [
            f"A trained classifier; means of {record['prompts']} prompts of {trained[0]['tokens']:.0f} tokens on average:",
            table(heads, map(_missed, trained)),
        ]
    told = (
        f"{record['sources']} tokens of each prompt of the random model are drawn; errors and the ten largest are among these. The whole "
        f"prompt: attention and all tokens, from the means. `python -m benchmarks.cpu.flow --student WORK`; {place(record)}."
    )
    return "\n\n".join([*parts, told])


def _whole_prompt(row: dict[str, Any]) -> float:
    return float(row["prepare_s"] + row["tokens"] * row["token_s"])


def _solving(row: dict[str, Any]) -> list[str]:
    once = "" if row["once_s"] is None else f"{1000 * row['once_s']:,.1f}"
    return [f"{row['edges']:,.0f}", f"{1000 * row['token_s']:,.1f}", once]


def _missed(row: dict[str, Any]) -> list[str]:
    made = {"exact": "exact", "edges": f"edges from {row['much']:g} on", "layers": f"{row['left']:.0f} layers"}[
        row["how"]
    ]
    missed = [f"{row['absolute']:.4f}", f"{row['relative']:.1%}", f"{row['agree']:.1f}"]
    return [f"{row['layers']:.0f} layers: {made}", *_solving(row), *missed]
