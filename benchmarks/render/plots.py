"""Plots of the records of `adtp-bench` and `arrivals.py`; those of the comparison of pruning systems are in `pruning.py`."""

from __future__ import annotations

from adtp_export.report.plot import X_BEGIN, X_END, Y_END, Plot, decades, log_scale, speedup_by_retention
from benchmarks.harness.records import RECORDS, read_document, read_lines
from benchmarks.render import equal_time, pruning


def plots() -> dict[str, str]:
    """Return the plots of the documents: path to SVG."""
    drawn = pruning.plots(RECORDS) | equal_time.plots(RECORDS)
    if record := read_document(RECORDS / "cpu-peers.json"):
        drawing, names = speedup_by_retention(record["sweeps"])
        drawn["docs/speedup-retention.svg"] = drawing.file("speedup against retention", names)
    rows = read_lines(RECORDS / "arrivals.jsonl")
    for stream in dict.fromkeys(row["stream"] for row in rows):
        mine = [row for row in rows if row["stream"] == stream]
        curves = {
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
        drawing.curves(curves, "{name}: {x:g}, {y:g}")
        drawn[f"docs/arrivals-{stream}.svg"] = drawing.file("p99 under load", list(curves))
    return drawn
