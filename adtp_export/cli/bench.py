"""`adtp-bench`: latency of an exported student against dense BERT of the same width."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import printable
from ..pipeline.bench.options import BenchOptions
from ..pipeline.progress import Steps
from .console import Console, has_rich, make_table, print_json, run_command, table_console
from .parsing import Parser, parser_of, read

COLUMNS = (
    "workload",
    "contender",
    "p50 ms",
    "p90 ms",
    "p99 ms",
    "GFLOPs",
    "speedup",
    "FLOPs ratio",
    "realized",
    "student's speedup over it",
)


def make_parser() -> Parser:
    return parser_of(
        BenchOptions,
        prog="adtp-bench",
        description="Time an exported student against dense BERT of the same width, in ONNX Runtime on this machine. Dense BERT "
        "runs padded and packed, at the student's depth and at 12 layers. Realized fraction = speedup / FLOPs reduction.",
        json="the records",
    )


def main() -> None:
    run_command("adtp-bench", lambda: command(*read(make_parser())))


def command(as_json: bool, options: Mapping[str, Any]) -> int:
    from ..pipeline.bench.bench import bench

    steps = Steps() if options.get("write") and not has_rich() else Console()
    document = bench(**options, steps=steps)
    if as_json:
        print_json(document)
    elif "load" in document:
        show_targets(document)
    else:
        show(document)
    return 0


def show_targets(document: Mapping[str, Any]) -> None:
    """Print what ``--write`` found: a line for each target, and what `load` takes now."""
    times: dict[str, list[str]] = {}
    for row in document["results"]:
        times.setdefault(row["contender"], []).append(f"{row['workload']} {row['p50_ms']:.2f}")
    for name, found in times.items():
        print(printable(f"{name}: median ms: {', '.join(found)}"))
    for line in left_out_lines(document):
        print(printable(line))
    for preference, choice in document["load"].items():
        print(printable(f"prefer={preference} takes {choice['target']}: {choice['reason']}"))


def show(document: Mapping[str, Any]) -> None:
    """Print tables of what `bench` found."""
    from rich.markup import escape

    screen, results, device = table_console(), document["results"], document["device"]
    students = {(row["workload"], row["contender"]): row for row in results if row["contender"].startswith("student")}
    same = nearest_baseline(list(next(iter(students.values()))["vs"]))
    title = escape(printable(f"{document['subject']}: retention {document['retention']}"))
    table = make_table(*COLUMNS, right={*COLUMNS} - {"workload", "contender"}, title=title)
    previous = None
    for row in results:
        if previous not in (None, row["workload"]):
            table.add_section()
        name = row["workload"] if row["workload"] != previous else ""
        # Attention operators are compared with themselves.
        like = "student-plugin" if row["contender"].startswith("plugin-") else "student"
        lead = _lead(students.get((row["workload"], like)), row["contender"])
        table.add_row(name, row["contender"], *_figures(row, same), lead)
        previous = row["workload"]
    screen.print(table)
    for line in left_out_lines(document):
        screen.print(escape(printable(line)))
    against = (
        f"speedup, FLOPs ratio and realized fraction are against {same}; --json has the other baselines. "
        if same
        else ""
    )
    screen.print(
        f"{against}ONNX Runtime {_onnxruntime(document['versions'])}, {device['model']}, {device['cores']} cores, "
        f"threads: {device['threads']}."
    )
    _show_profiles(document["profiles"], document["peaks"])
    for sweep in document["sweeps"]:
        screen.print(_sweep_line(sweep))


def _onnxruntime(versions: Mapping[str, str]) -> str:
    """Return the version of the package of ONNX Runtime that is installed, which may be that for GPUs, or one of a name of its own."""
    return next((version for name, version in versions.items() if name.startswith("onnxruntime")), "of unknown version")


def left_out_lines(document: Mapping[str, Any]) -> list[str]:
    """Say by workload what there was no time for."""
    by_workload: dict[str, list[str]] = {}
    for each in document["left_out"]:
        takes = "" if each["seconds"] is None else f" (takes {max(each['seconds'], 0.1):.1f} s)"
        by_workload.setdefault(each["workload"], []).append(f"{each['contender']}{takes}")
    lines = [f"{workload}: no time for {', '.join(names)}" for workload, names in by_workload.items()]
    return [*lines, "a larger --budget, or 0, times what is missing, too"] if lines else []


def nearest_baseline(names: Sequence[str]) -> str | None:
    """Return what a student is compared with first, of its baselines in the order of `bench`: dense BERT of its own depth, packed.

    A student without sites is that itself, so then it is the padded form. None: there was time for neither.
    """
    for kind in ("packed-dense-", "padded-dense-"):
        if found := [name for name in names if name.startswith(kind)]:
            return found[-1]
    return None


def _figures(row: Mapping[str, Any], baseline: str | None) -> list[str]:
    versus = row["vs"].get(baseline)
    ratios = [f"{versus[name]:.2f}" if versus else "" for name in ("speedup", "flops_ratio", "realized_fraction")]
    return [*(f"{row[name]:.2f}" for name in ("p50_ms", "p90_ms", "p99_ms")), f"{row['flops'] / 1e9:.2f}", *ratios]


def _lead(student: Mapping[str, Any] | None, contender: str) -> str:
    versus = student["vs"].get(contender) if student else None
    return f"{versus['speedup']:.2f}x" if versus else ""


def _show_profiles(profiles: Sequence[Mapping[str, Any]], peaks: Mapping[str, Any]) -> None:
    from ..benchmarking.profile import PRODUCTS

    title = "Where the student's time goes, on the first batch of each workload"
    accounted, products, weights = right = "accounted", "matrix products", "weights alone, ms"
    columns = "workload", accounted, products, "other operators, largest first", weights
    table = make_table(*columns, right=right, title=title)
    for profile in profiles:
        others = [f"{op} {share:.1%}" for op, share in profile["shares"].items() if op not in PRODUCTS]
        shares = f"{profile['accounted']:.1%}", f"{profile['product_share']:.1%}"
        table.add_row(profile["workload"], *shares, ", ".join(others[:5]), f"{profile['weights_ms']:.2f}")
    screen = table_console()
    screen.print(table)
    screen.print(
        f"This machine: {peaks['gflops']:.0f} GFLOP/s in a large fp32 matrix product of {peaks['runtime']}, "
        f"{peaks['gigabytes_per_s']:.0f} GB/s from memory. No run is faster than reading the weights once."
    )


def _sweep_line(sweep: Mapping[str, Any]) -> str:
    points = ", ".join(
        f"{ratio:g}: {point['vs'][sweep['baseline']]['speedup']:.2f}x"
        for ratio, point in zip(sweep["retention"], sweep["points"])
    )
    even = "none found" if sweep["break_even"] is None else f"{sweep['break_even']:.0%}"
    return (
        f"{sweep['workload']}, speedup over {sweep['baseline']} by retention: {points}; break-even: {even} (a student of this "
        "size and these sites, random weights)"
    )
