"""`adtp-import`: a checkpoint of another system becomes a student that transformers and `adtp-export` load."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..errors import typed
from ..pipeline.convert import ImportOptions, import_checkpoint
from .console import Console, make_table, print_json, print_path, run_command
from .parsing import Parser, parser_of, read

if TYPE_CHECKING:
    from rich.table import Table


def make_parser() -> Parser:
    return parser_of(
        ImportOptions,
        prog="adtp-import",
        description="Write a checkpoint of another token-pruning system, or any that adtp-export takes, as a PyTorch student of "
        "format 2: to evaluate it again, to finetune it, or to export it. Its weights stay the same bit for bit, "
        "and so do its answers in adtp-export. Or choose the layers at which image tokens leave a vision-language model "
        "(--calibrate-images).",
        epilog="Exit codes: 0 written; 2 bad input; 3 a dependency is missing; 70 a bug. On 2 and 3 nothing is written.",
        json="what was written",
    )


def main() -> None:
    run_command("adtp-import", lambda: command(*read(make_parser())))


def command(as_json: bool, options: Mapping[str, Any]) -> int:
    console = Console()
    record = import_checkpoint(**options, steps=console)
    if as_json:
        print_json(record)
    else:
        _summarize(record, console)
        print_path(options["out"])
    return 0


def _summarize(record: dict[str, Any], console: Console) -> None:
    sites = f"{record['method']} at {', '.join(record['sites'])}" if record["sites"] else "no token is dropped"
    if "calibration" in record:
        console.print(_table(record))
    console.print(f"{record['backbone']} with the head {record['head']}: {sites}")
    for note in record["notes"]:
        console.note(note)
    console.print(f"Wrote {record['out']}; next: adtp-export {typed(record['out'])}")


def _table(record: Mapping[str, Any]) -> Table:
    """Show how much each layer changes image states, and where stages stand."""
    measured = record["calibration"]
    depths = {drop["layer"]: drop["depth"] for drop in measured["drops"]}
    stages = [stage["layer"] for stage in record["pruning"]["stages"]]
    table = make_table("layer", "cosine", "drop", "stage")
    for layer, cosine in enumerate(measured["cosines"]):
        depth, stands = depths.get(layer + 1), layer + 1 in stages
        told = f"{depth:.4f}" if depth else ""
        table.add_row(str(layer), f"{cosine:.4f}", told, f"before layer {layer + 1}" if stands else "")
    return table
