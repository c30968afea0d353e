"""`adtp-import`: a checkpoint of another system becomes a student that transformers and `adtp-export` load."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ..contract import __version__
from .console import Console, Parser, print_json, print_path, run_command
from .reading import add_reading_options


def make_parser() -> Parser:
    parser = Parser(
        prog="adtp-import",
        description="Write a checkpoint of another token-pruning system, or any that adtp-export takes, as a PyTorch student of "
        "format 2: to evaluate it again, to finetune it, or to export it. Its weights are the same to the bit, "
        "and so are its answers in adtp-export.",
        epilog="Exit codes: 0 written; 2 bad input; 3 a dependency is missing; 70 a bug. On 2 and 3 nothing is written.",
    )
    parser.add_argument("model_dir", metavar="DIR", type=Path, help="checkpoint, as its own code saved it")
    parser.add_argument("out", metavar="OUT", type=Path, help="where the student goes")
    parser.add_argument("--force", action="store_true", help="replace a student at OUT")
    add_reading_options(parser)
    parser.add_argument("--json", action="store_true", help="print what was written on stdout")
    parser.add_argument("--version", action="version", version=f"adtp-import {__version__}")
    return parser


def main() -> None:
    options = make_parser().parse_args()
    run_command("adtp-import", lambda: command(options))


def command(options: argparse.Namespace) -> int:
    from ..pipeline.convert import import_checkpoint

    console = Console()
    given = {name: value for name, value in vars(options).items() if name != "json"}
    record = import_checkpoint(**given, steps=console)
    if options.json:
        print_json(record)
    else:
        _summarize(record, console)
        print_path(options.out)
    return 0


def _summarize(record: dict[str, Any], console: Console) -> None:
    sites = f"{record['method']} at {', '.join(record['sites'])}" if record["sites"] else "no token is dropped"
    console.print(f"{record['backbone']} with the head {record['head']}: {sites}")
    for note in record["notes"]:
        console.note(note)
    console.print(f"Wrote {record['out']}; next: adtp-export {record['out']}")
