"""Render records of `benchmarks/gpu/run.sh table` and `probes`."""

from __future__ import annotations

from typing import Any

from benchmarks.gpu.peers import DENSE, STUDENT
from benchmarks.render.tables import table


def render_table(record: dict[str, Any]) -> str:
    """Return ms of all contenders on all workloads, and why some have none."""
    there = {row["contender"] for cell in record["cells"] for row in cell["rows"]}
    names = [name for name in record["contenders"] if name in there]
    lines = []
    for cell in record["cells"]:
        times = {row["contender"]: row["p50_ms"] for row in cell["rows"]}
        least = min(times.values(), default=None)
        cells = (
            f"**{times[n]:.3f}**" if times.get(n) == least else f"{times[n]:.3f}" if n in times else "-" for n in names
        )
        lines.append([*place(cell), *cells])
    told = [f"- {name}: {record['contenders'][name]}." for name in names]
    return "\n".join(
        [
            table([*PLACE, *names], lines, texts=3),
            "",
            *told,
            *left_out(record),
            "",
            ends(record, "Medians, ms; the least in bold."),
        ]
    )


PLACE = ("width", "layers", "workload")


def place(cell: dict[str, Any]) -> tuple[str, str, str]:
    return cell["shape"], str(cell["layers"]), cell["workload"]


def left_out(record: dict[str, Any]) -> list[str]:
    """Say once why contenders are left out, and of which workloads."""
    places: dict[tuple[str, str], list[str]] = {}
    for cell in record["cells"]:
        for name, why in cell["left_out"].items():
            places.setdefault((name, why), []).append(" ".join(place(cell)))
    every = len(record["cells"])
    return [
        f"- {name} is left out of {'all' if len(cells) == every else ', '.join(cells)}: {why}"
        for (name, why), cells in places.items()
    ]


def render_realized(record: dict[str, Any]) -> str:
    """Return the student beside packed dense BERT in the same runner: what became of the FLOPs that it saves."""
    lines = []
    for cell in record["cells"]:
        rows = {row["contender"]: row for row in cell["rows"]}
        if not {STUDENT, DENSE} <= set(rows):
            continue
        dense, flops = rows[DENSE], cell["flops_ratio"]
        faster = f"{dense['student_speedup']:.2f}x ± {dense['margin']:.2f}"
        times = (f"{rows[name]['p50_ms']:.3f}" for name in (STUDENT, DENSE))
        lines.append([*place(cell), *times, faster, f"{flops:.2f}x", f"{dense['student_speedup'] / flops:.2f}"])
    heads = [*PLACE, "student, ms", "packed dense, ms", "speedup", "FLOPs saved", "realized fraction"]
    return f"{table(heads, lines, texts=3)}\n\n{ends(record, 'Both in the same runner.')}"


def ends(record: dict[str, Any], what: str) -> str:
    device, versions = record["device"], record["versions"]
    return (
        f"`{record['command']}`: {what} {record.get('precision', record.get('dtype'))}, {device['name']}, driver "
        f"{device['driver_version']}, PyTorch {versions.get('torch', 'none')}."
    )


def render_launches(record: dict[str, Any]) -> str:
    """Return what launches and waits cost."""
    names = {
        "empty_kernel_us": "a kernel that does nothing, in a CUDA graph",
        "graph_launch_and_wait_us": "launching a graph, and waiting for it",
        "kernel_and_mapped_word_us": "a kernel, and reading the word that it writes",
        "kernel_and_wait_us": "a kernel, and waiting for its stream",
    }
    if not record["launches"]:
        return f"Not run: {record['failures']['launches']}"
    rows = [[what, f"{record['launches'][name]:.2f}"] for name, what in names.items()]
    return f"{table(['what', 'us'], rows)}\n\n{ends(record, 'Medians.')}"


def render_products(record: dict[str, Any]) -> str:
    """Return the products of a layer: the fastest of our ways beside PyTorch's."""
    rows = []
    for product in record["products"]:
        best = min(product["ours"], key=lambda way: way["us"])
        how = best["variant"] + (f", {best['parts']} parts" if best["parts"] > 1 else "")
        times = (f"{product['torch_us']:.1f}", f"{best['us']:.1f}", f"{product['torch_us'] / best['us']:.2f}")
        rows.append([product["shape"], product["product"], str(product["rows"]), how, *times])
    heads = ["width", "product", "rows", "our fastest", "PyTorch, us", "ours, us", "PyTorch / ours"]
    return f"{table(heads, rows, texts=4)}\n\n{ends(record, 'Each in a CUDA graph of its own.')}"
