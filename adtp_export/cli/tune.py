"""`adtp-tune`: from a fine-tuned model to the fastest student of it that is good enough."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import needs_extras, printable, typed
from ..pipeline.tune.options import TuneOptions
from ..pipeline.tune.tune import tune
from ..report.tuned import COLUMNS, cells
from .console import Console, make_table, print_json, run_command, table_console
from .parsing import Parser, parser_of, read

NOTHING_FOUND = 1


def make_parser() -> Parser:
    return parser_of(
        TuneOptions,
        prog="adtp-tune",
        description="Find the fastest student of a model that loses no more than it may. Fewer layers, fewer tokens, both, and INT8 are "
        "timed untrained, raced, exported, verified and timed again. What is chosen is confirmed on rows that nothing was chosen on.",
        epilog="The output directory gets export/, student/, trials.jsonl and tune.html. Another goal for the same directory is met "
        "without training. The exit code is 1 where nothing meets the goal.",
        json="the results record",
    )


def main() -> None:
    run_command("adtp-tune", lambda: command(*read(make_parser())))


@needs_extras("adtp-tune", "train")
def command(as_json: bool, options: Mapping[str, Any]) -> int:
    console = Console()
    record = tune(**options, steps=console)
    if as_json:
        print_json(record)
    elif "verdict" not in record:
        _show_plan(record)
    else:
        _show(record, options["out"], console)
    return 0 if record.get("published", True) else NOTHING_FOUND


def _show_plan(record: Mapping[str, Any]) -> None:
    from rich.markup import escape

    plan = record["plan"]
    title = f"What would be tried, on {escape(printable(record['workload']))}"
    table = make_table("speedup", "students", title=title)
    for precision, speedup in record["dense"].items():
        table.add_row(f"{speedup:.2f}x", f"the model itself in {precision}")
    for level in plan["levels"]:
        table.add_row(f"{level['speedup']:.2f}x", "\n".join(level["told"]))
    screen = table_console()
    screen.print(table)
    rungs = ", ".join(f"{rows:,}" for rows in plan["rungs"])
    refined = f"; steps of bisection on {plan['refined']:,}" if plan["refined"] else ""
    if rungs:
        screen.print(f"Students of each speed race on {rungs} rows, and a third of them go on each time{refined}.")
    else:
        screen.print("There is no student to train.")
    phases = ", ".join(f"{name} {seconds / 60:.1f}" for name, seconds in plan["seconds"].items())
    screen.print(f"Minutes, about: {phases}.")
    screen.print(f"Rows: {record['shows']}.")


def _show(record: Mapping[str, Any], out: Any, console: Console) -> None:
    from rich.markup import escape

    title = f"{record['rows']['test']} rows to confirm on; speedups on {escape(printable(record['workload']))}"
    table = make_table(*COLUMNS, right=COLUMNS[1:], title=title)
    for each in record["candidates"]:
        table.add_row(*cells(each))
    if record["candidates"]:
        table_console().print(table)
    best = record["chosen"]
    if best is not None:
        found = best["confirmed"]
        console.print(
            f"{record['verdict']}: {best['told']}, {best['precision']}: {best['speedup']:.2f}x, {found['drop']:.2f} points lost (bound "
            f"{found['bound']:.2f})"
        )
    if record["goal"]["max_drop"] is not None:
        _print_others(record, console)
    if record["published"]:
        console.print(f"Wrote {out}/export. What was tried: {out}/tune.html")
        console.print(f"next: adtp-run {typed(Path(out, 'export'))} --target {best['target']} --file FILE")
    else:
        earlier = f" An earlier choice stays in {out}/export." if Path(out, "export").exists() else ""
        tried = f" What was tried: {out}/tune.html" if record["candidates"] else ""
        console.print(f"Nothing meets the goal, and nothing was published.{earlier}{tried}")


def _print_others(record: Mapping[str, Any], console: Console) -> None:
    """Name what --strict would have chosen, or what it kept from being chosen."""
    best, fastest = record["chosen"], sorted(record["candidates"], key=lambda each: -each["speedup"])
    proven, likely = ([each for each in fastest if each["meets"] == sure] for sure in ("proven", "likely"))
    if record["verdict"] == "likely":
        others, begin = proven[:1], "The fastest that is proven, for --strict"
    elif record["published"]:
        others = [each for each in likely if each["speedup"] > best["speedup"]]
        begin = "Faster and likely, but not proven on so few rows"
    else:
        others, begin = likely[:1], "Likely, and published without --strict"
    if others:
        told = ", ".join(f"{each['told']}, {each['precision']} ({each['speedup']:.2f}x)" for each in others)
        console.print(f"{begin}: {told}")


if __name__ == "__main__":
    main()
