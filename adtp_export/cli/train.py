"""`adtp-train`: a pretrained encoder and labelled text become a student that `adtp-export` takes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import needs_extras, typed
from ..pipeline.train.options import RunOptions
from ..pipeline.train.train import train
from ..training.settings import TrainOptions
from .console import Console, make_table, print_json, run_command, table_console
from .parsing import Parser, parser_of, read


def make_parser() -> Parser:
    return parser_of(
        RunOptions,
        TrainOptions,
        prog="adtp-train",
        description="Train a student that drops tokens, or has fewer layers. First fine-tune a teacher. Then ask it for its answers, "
        "and attribute them to tokens if the method learns from that. Finally, distil a student that keeps the tokens that matter.",
        epilog="The output directory becomes a checkpoint for adtp-export. It also holds results.json and the teacher. Several GPUs: "
        "torchrun --nproc-per-node N -m adtp_export.cli.train ...",
        json="the results record",
    )


def main() -> None:
    run_command("adtp-train", lambda: command(*read(make_parser())))


@needs_extras("adtp-train", "train")
def command(as_json: bool, options: Mapping[str, Any]) -> int:
    console = Console()
    record = train(**options, steps=console)
    from accelerate import PartialState

    if not PartialState().is_main_process:
        return 0
    if as_json:
        print_json(record)
    else:
        _summarize(record, options["out"], console)
    return 0


def _summarize(record: dict[str, Any], out: Path, console: Console) -> None:
    student, teacher = record["student"], record["teacher"]
    rows = f"{record['rows']['test']} {_judged_on(record)} rows"
    table = make_table("", "teacher", "student", title=f"{rows}, {student['tokens']:.1f} tokens on average")
    for name, value in teacher.items():
        table.add_row(name, f"{value:.4f}", _told(student.get(name), 4))
    for site, kept in student["retention"].items():
        table.add_row(f"tokens left after {site}", "100%", f"{kept:.1%}")
    for site, shares in student["ratios"].items():
        told = ", ".join(f"{float(ratio):.3g}: {share:.0%}" for ratio, share in shares.items())
        table.add_row(f"ratios chosen at {site}, share of texts", "", told)
    padded = record["settings"]["max_tokens"]
    against = (
        ("dense, padded to " + str(padded), "padded"),
        ("dense, packed", "packed"),
        ("the packed teacher", "teacher"),
    )
    for told, name in against:
        table.add_row(f"FLOPs against {told}", "", f"1 / {student['flops_reduction'][name]:.2f}")
    for name, ranks in student["saliency"].items():
        table.add_row(f"saliency against attribution ({name}), Spearman", "", _told(ranks["spearman"], 3))
    table_console().print(table)
    console.print(f"Wrote {out}; next: adtp-export {typed(out)}")


def _judged_on(record: dict[str, Any]) -> str:
    """Say which rows the figures are of, and where they are better than those of unseen rows would be."""
    return "dev (they also chose the checkpoint)" if record["judged_on"] == "dev" else "test"


def _told(value: float | None, digits: int) -> str:
    """Return a figure as text; "-" where there is none."""
    return "-" if value is None else f"{value:.{digits}f}"


if __name__ == "__main__":
    main()
