"""`adtp-train`: a pretrained encoder and labelled text become a student that `adtp-export` takes."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

from ..contract import __version__
from ..errors import flag_name, needs_extras
from ..pipeline.train.train import train
from ..training.settings import TrainOptions, field_type
from .console import Console, Parser, print_json, rich_console, run_command

GROUPS = {
    "data": "data",
    "models": "models",
    "retainer": "retainer",
    "loss": "loss, (1 - alpha) L_CE + alpha L_logit; with adtp + beta L_IG + gamma (L_ARP + L_TSP)",
    "schedule": "schedule",
}


def make_parser() -> Parser:
    parser = Parser(
        prog="adtp-train",
        description="Train a student that drops tokens. First fine-tune a teacher. Then ask it for its answers, and attribute them to "
        "tokens where the method learns from that. Last distil a student that keeps the tokens that matter.",
        epilog="OUT becomes a checkpoint for adtp-export. It also holds results.json and the teacher. Several GPUs: "
        "torchrun --nproc-per-node N -m adtp_export.cli.train ...",
    )
    parser.add_argument("--out", metavar="DIR", type=Path, required=True, help="where the student goes")
    parser.add_argument("--config", metavar="YAML", type=Path, help="settings from a file; options given here win")
    again = parser.add_mutually_exclusive_group()
    again.add_argument("--resume", action="store_true", help="go on with an interrupted run in OUT, with its settings")
    again.add_argument("--force", action="store_true", help="start anew where OUT exists")
    parser.add_argument(
        "--cache",
        metavar="DIR",
        type=Path,
        help="keep the teacher's attribution there, for other runs with that teacher",
    )
    parser.add_argument("--json", action="store_true", help="print the results record on stdout")
    parser.add_argument("--version", action="version", version=f"adtp-train {__version__}")
    groups = {name: parser.add_argument_group(title) for name, title in GROUPS.items()}
    for field in dataclasses.fields(TrainOptions):
        kind = field_type(field.name)
        default = "" if field.default in (None, "") else f" (default: {field.default})"
        groups[field.metadata["group"]].add_argument(
            flag_name(field.name),
            metavar={int: "N", float: "X", str: "TEXT"}[kind],
            help=field.metadata["help"] + default,
        )
    return parser


def main() -> None:
    options = make_parser().parse_args()
    run_command("adtp-train", lambda: command(options))


@needs_extras("adtp-train", "train")
def command(options: argparse.Namespace) -> int:
    names = (field.name for field in dataclasses.fields(TrainOptions))
    given = {name: value for name in names if (value := getattr(options, name)) is not None}
    console = Console()
    record = train(
        options.out,
        config=options.config,
        resume=options.resume,
        force=options.force,
        cache=options.cache,
        steps=console,
        **given,
    )
    from accelerate import PartialState

    if not PartialState().is_main_process:
        return 0
    if options.json:
        print_json(record)
    else:
        _summarize(record, options.out, console)
    return 0


def _summarize(record: dict[str, Any], out: Path, console: Console) -> None:
    from rich.table import Table

    student, teacher = record["student"], record["teacher"]
    rows = f"{record['rows']['test']} {_judged_on(record)} rows"
    table = Table("", "teacher", "student", title=f"{rows}, {student['tokens']:.1f} tokens on average")
    for name, value in teacher.items():
        table.add_row(name, f"{value:.4f}", _told(student.get(name), 4))
    for site, kept in student["retention"].items():
        table.add_row(f"tokens left after {site}", "100%", f"{kept:.1%}")
    padded = record["settings"]["max_tokens"]
    for name, told in (("padded", f"padded to {padded}"), ("packed", "packed")):
        table.add_row(f"FLOPs against dense, {told}", "", f"1 / {student['flops_reduction'][name]:.2f}")
    for name, ranks in student["saliency"].items():
        table.add_row(f"saliency against attribution ({name}), Spearman", "", _told(ranks["spearman"], 3))
    rich_console().print(table)
    console.print(f"Wrote {out}; next: adtp-export {out}")


def _judged_on(record: dict[str, Any]) -> str:
    """Say which rows the figures are of, and where they are better than those of unseen rows would be."""
    return "dev (they also chose the checkpoint)" if record["judged_on"] == "dev" else "test"


def _told(value: float | None, digits: int) -> str:
    """Write a figure; "-" where there is none."""
    return "-" if value is None else f"{value:.{digits}f}"


if __name__ == "__main__":
    main()
