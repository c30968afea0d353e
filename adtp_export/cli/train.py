"""`adtp-train`: a pretrained encoder and labelled text become an AD-TP student that `adtp-export` takes."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import __version__
from ..errors import InputError, MissingDependencyError, option
from ..training.settings import Settings, as_yaml, convert, field_type, read_settings
from .console import Console, print_json, rich_console, run_command
from .job import processor, versions

if TYPE_CHECKING:
    from accelerate import PartialState

    from ..training.evaluate import Judgement

SETTINGS, RESULTS, WORK, TEACHER = "train.yaml", "results.json", "work", "teacher"
MAX_TOKENS = 128
GROUPS = {
    "data": "data",
    "models": "models",
    "retainer": "retainer",
    "loss": "loss, (1 - alpha) L_CE + alpha L_logit + beta L_IG + gamma (L_ARP + L_TSP)",
    "schedule": "schedule",
}


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="adtp-train",
        description="Train a student whose retainers drop tokens: fine-tune a teacher, attribute its answers to tokens by "
        "integrated gradients, and distil a student that keeps the tokens that matter.",
        epilog="OUT becomes a checkpoint for adtp-export, with results.json and the teacher beside it. Several GPUs: "
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
    for field in dataclasses.fields(Settings):
        kind = field_type(field.name)
        default = "" if field.default in (None, "") else f" (default: {field.default})"
        groups[field.metadata["group"]].add_argument(
            option(field.name),
            metavar={int: "N", float: "X", str: "TEXT"}[kind],
            help=field.metadata["help"] + default,
        )
    return parser


def main() -> None:
    options = make_parser().parse_args()
    run_command("adtp-train", lambda: command(options))


def command(options: argparse.Namespace) -> int:
    console = Console()
    with console.step("import_s", "importing PyTorch and transformers"):
        try:
            import accelerate
            import scipy  # noqa: F401
            import torch

            from ..training import stages  # noqa: F401
        except ImportError as error:
            raise MissingDependencyError(
                f"adtp-train needs more packages: pip install 'adtp-export[train]' ({error})"
            ) from error
    processes = accelerate.PartialState(cpu=not torch.cuda.is_available())
    settings = _settings(options)
    if not processes.is_main_process:
        console = Console(silent=True)
    record = train(settings, options, console, processes)
    if not processes.is_main_process:
        return 0
    if options.json:
        print_json(record)
    else:
        _summarize(record, options.out, console)
    return 0


def _settings(options: argparse.Namespace) -> Settings:
    """Put settings together, and see that OUT is in a state to train in.

    Raises:
        InputError: OUT has a run already, or none to resume.
    """
    out: Path = options.out
    given = read_settings(options.config) if options.config else {}
    given |= {
        field.name: convert(field.name, value, option(field.name))
        for field in dataclasses.fields(Settings)
        if (value := getattr(options, field.name)) is not None
    }
    stored = out / SETTINGS
    if options.resume:
        if not stored.is_file():
            raise InputError(f"--resume: {out} holds no run of adtp-train; leave --resume out to start one")
        if (out / RESULTS).is_file():
            raise InputError(f"--resume: the run in {out} is finished; give another --out, or --force to start anew")
        kept = read_settings(stored)
        if changed := [name for name, value in given.items() if value is not None and kept.get(name) != value]:
            raise InputError(
                f"--resume: the run in {out} was begun with other settings ({', '.join(changed)}); "
                "leave them out, or use --force to start anew"
            )
        return Settings(**kept)
    settings = Settings(**given)
    if (settings.base is None) == (settings.teacher is None):
        raise InputError(
            "models: give either --base MODEL to fine-tune a teacher from, or --teacher MODEL that knows the task"
        )
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        if not options.force:
            hint = "--resume to go on, " if stored.is_file() and not (out / RESULTS).is_file() else ""
            raise InputError(f"--out: {out} exists; use {hint}--force to start anew, or give another directory")
        if not stored.is_file():
            raise InputError(
                f"--out: {out} is no run of adtp-train, so --force does not remove it; give another directory"
            )
        needed = (settings.train, settings.dev, settings.test, settings.base, settings.teacher)
        for path in (Path(name).resolve() for name in needed if name is not None):
            if path.is_relative_to(out.resolve()):
                raise InputError(f"--force would remove {path}, which this run needs; give another --out")
    return settings


def train(settings: Settings, options: argparse.Namespace, console: Console, processes: PartialState) -> dict[str, Any]:
    """Run both stages and write the student, its teacher and the record to `out`; return the record.

    Of several processes the first one writes and speaks; all train.

    Raises:
        AdtpError: bad data, settings or models; what was trained so far stays in `out` for --resume.
    """
    from torch import nn

    from ..model.flops import Shape
    from ..training import data, stages
    from ..training.evaluate import judge, judge_teacher

    out: Path = options.out
    with console.step("data_s", "reading the data") as progress:
        tables = data.load_tables(settings)
        labels = data.Labels.of(tables["train"], settings.task)
        tables["train"] = tables["train"].sample(settings.train_rows)
        source = settings.teacher or settings.base
        assert source is not None
        encoder, tokenizer = stages.load_config(source), stages.load_tokenizer(source)
        if settings.teacher is not None:
            labels = stages.labels_of_teacher(source, encoder, labels)
        longest = encoder.max_position_embeddings
        max_tokens = settings.max_tokens or min(MAX_TOKENS, longest)
        if max_tokens > longest:
            raise InputError(f"--max-tokens: got {max_tokens}; the model takes up to {longest}")
        settings = dataclasses.replace(settings, max_tokens=max_tokens)
        stages.student_config(encoder, settings)
        parts = {}
        for split, table in tables.items():
            parts[split] = data.Examples.make(table, labels, tokenizer, encoder, max_tokens)
            progress(len(parts), len(tables))
    given = stages.load_classifier(settings.teacher, labels, tuned=True) if settings.teacher else None
    first = processes.is_main_process
    processes.wait_for_everyone()  # until each has read what it needs
    if first:
        if options.force:
            shutil.rmtree(out, ignore_errors=True)
        out.mkdir(parents=True, exist_ok=True)
        (out / SETTINGS).write_text(as_yaml(settings), encoding="utf-8")
    processes.wait_for_everyone()
    work, sizes = out / WORK, ", ".join(f"{len(table)} {split}" for split, table in tables.items())
    console.note(f"{sizes} rows; {'regression' if labels.regression else f'{len(labels.names)} classes'}")

    teacher_dir = out / TEACHER
    if given is not None:
        teacher = given
    elif (teacher_dir / "config.json").is_file():
        teacher = stages.load_classifier(str(teacher_dir), labels, tuned=True)
    else:
        with console.step("teacher_s", f"fine-tuning {Path(source).name}") as progress:
            teacher = stages.train_teacher(source, parts, labels, settings, work / TEACHER, progress, console.note)
            if first:
                stages.save_model(teacher, tokenizer, work / "teacher-done")
                (work / "teacher-done").rename(teacher_dir)
            processes.wait_for_everyone()
    nn.Module.to(teacher.eval().requires_grad_(False), processes.device)
    with console.step("teacher_judged_s", "judging the teacher"):
        teacher_figures = judge_teacher(teacher, parts["test"])
    cache = options.cache or work / "attribution"
    for split in parts:
        told = f"attributing the teacher's answers, {split} rows"
        with (
            console.step(f"attribution_{split}_s", told) as progress,
            processes.main_process_first(),
        ):
            parts[split] = stages.explained(teacher, parts[split], settings, cache, progress)
    with console.step("student_s", "distilling the student") as progress:
        model = stages.train_student(teacher, parts, settings, work / "student", progress, console.note)
    with console.step("judged_s", "judging the student"):
        stages.set_seed(settings.seed)  # for tokens drawn at random
        judgement = judge(model, parts["test"], explained=True)
    config = model.student.config
    shape = Shape.of(config.to_dict())
    record = {
        "schema": 1,
        "task": "regression" if labels.regression else "classification",
        "rows": {split: len(table) for split, table in tables.items()},
        "sources": {split: table.source for split, table in tables.items()},
        "teacher": teacher_figures,
        "student": _figures(judgement, shape, settings, max_tokens, model.share.tolist()),
        "settings": dataclasses.asdict(settings),
        "durations_s": console.durations_s,
        "resumed": options.resume,  # then the durations are those of the last part
        "device": _device(),
        "versions": versions(),
    }
    if not first:
        return record
    stages.save_model(model.student.cpu(), tokenizer, out)
    (out / RESULTS).write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    shutil.rmtree(work, ignore_errors=True)
    return record


def _figures(judgement: Judgement, shape: Any, settings: Settings, padded: int, shares: list[float]) -> dict[str, Any]:
    return {
        **judgement.quality,
        "tokens": float(judgement.alive[0].mean()),
        "retention": dict(zip(settings.sites, judgement.retention)),
        "flops_reduction": judgement.flops_reduction(shape, settings.sites, padded),
        "saliency": judgement.ranks,
        "share_of_attribution": dict(zip(settings.sites, shares)),
    }


def _device() -> str:
    import torch

    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"{processor()}, {torch.get_num_threads()} threads of {os.cpu_count()} cores"


def _summarize(record: dict[str, Any], out: Path, console: Console) -> None:
    from rich.table import Table

    student, teacher = record["student"], record["teacher"]
    table = Table(
        "", "teacher", "student", title=f"{record['rows']['test']} rows, {student['tokens']:.1f} tokens on average"
    )
    for name, value in teacher.items():
        table.add_row(name, f"{value:.4f}", f"{student[name]:.4f}")
    for site, kept in student["retention"].items():
        table.add_row(f"tokens left after {site}", "100%", f"{kept:.1%}")
    padded = record["settings"]["max_tokens"]
    for name, told in (("padded", f"padded to {padded}"), ("packed", "packed")):
        table.add_row(f"FLOPs against dense, {told}", "", f"1 / {student['flops_reduction'][name]:.2f}")
    for name, ranks in student["saliency"].items():
        table.add_row(f"saliency against attribution ({name}), Spearman", "", f"{ranks['spearman']:.3f}")
    rich_console().print(table)
    console.print(f"Wrote {out}; next: adtp-export {out}")


if __name__ == "__main__":
    main()
