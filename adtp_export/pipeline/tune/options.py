"""What `tune` is asked for: options, and whether they contradict one another."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ...errors import InputError, quoted
from ...options import COUNT, POSITIVE, Options, PathLike, Range, about, at_least, listed, option
from ...training.settings import BF16, FULL_PRECISION
from ..progress import Steps

MAX_DROP = 1.0
FP32, INT8 = "fp32", "int8"
PRECISIONS = (FP32, INT8)
GOAL = ("max_drop", "speedup", "strict")
"""Options that a later call may change: it chooses anew among what is trained."""
TASKS = ("auto", "classification", "tags", "spans")


@dataclass(frozen=True, kw_only=True)
class TuneOptions(Options):
    """Options of `tune` and `adtp-tune`."""

    # An option is one paragraph, which a formatter would take apart.
    # fmt: off
    model: PathLike = field(kw_only=False, metadata=about(
        "fine-tuned model, a transformers directory: the teacher, and what losses and speedups are measured against", metavar="MODEL"))
    out: PathLike = field(kw_only=False, metadata=about(
        "directory for the chosen export and student, the trials and tune.html; a new or an empty one, or that of an earlier run",
        metavar="DIR", flag="--out"))
    resume: bool = option(False, "go on with an interrupted run: type the same command again, and add this")
    plan: bool = option(False, "print what would be tried, how long it takes and what the dev rows can show, and end")

    max_drop: float | None = option(None,
        f"points of quality that may be lost, on average over texts: find the fastest student within it (default: {MAX_DROP:g}, unless "
        "--speedup is given)", "goal", metavar="X", within=Range(0.01, 100, "from 0.01 to 100 points"))
    speedup: float | None = option(None,
        "how many times as fast as MODEL, exported in fp32: find the student that loses least",
        "goal", metavar="X", within=Range(1.01, 1000, "above 1"))
    strict: bool = option(False, "publish only what is proven: its bound of 95% is within the goal, not its measured value alone", "goal")

    train: PathLike = option(None, "labelled rows to train on, as adtp-train reads them", "data", metavar="FILE")
    dev: PathLike | None = option(None,
        "labelled rows to choose on, 60%, and to confirm the choice on, 40% (default: a fifth of the training rows, by groups of "
        "overlapping texts)", "data", metavar="FILE")
    text_column: str | None = option(None,
        "text column, or two separated by a comma for pairs (default: the usual names)", "data", metavar="C")
    label_column: str = option("label", "label column", "data", metavar="C")
    task: str = option("auto", "what the rows are for; auto reads it off their columns", "data", choices=TASKS)
    max_tokens: int | None = option(None, "length at which texts are truncated (default: 128, or what the model reads)",
        "data", within=at_least(4))

    workload: str | PathLike | None = option(None,
        "what speed is measured on: the first 128 texts of a file, in batches of 32 as they come, or a shape such as 8x128 or 1x64 "
        "(default: 128 dev rows, drawn by --seed, in batches of 32)", "search", metavar="FILE|BxS")
    precisions: str | Sequence[str] = option("fp32,int8",
        "precisions to export in: fp32, int8", "search", metavar="LIST", flag="--precision")
    hours: float = option(1.0, "about how long everything takes; how many rows students are trained on follows from it", "search",
        within=POSITIVE)
    epochs: float = option(3.0,
        "most epochs of the race; a student whose retention is refined sees up to as many rows again", "search", within=POSITIVE)
    batch_size: int = option(32, "rows per training step", "search", within=COUNT)
    learning_rate: float = option(1e-4, "peak learning rate of the students", "search", within=POSITIVE)
    mixed_precision: str = option(FULL_PRECISION, "as in adtp-train: bf16 trains faster where the GPU or processor supports it", "search",
        choices=(FULL_PRECISION, BF16))
    seed: int = option(0, "seed of initialisation, order of rows and dropout", "search", within=at_least(0))
    # fmt: on
    steps: Steps | None = None

    def check(self) -> None:
        if self.train is None:
            raise InputError("--train: got nothing; give a file with labelled rows")
        if self.max_drop is not None and self.speedup is not None:
            raise InputError("--max-drop and --speedup are two goals; give one of them")
        if self.plan and self.resume:
            raise InputError("--plan only prints, and --resume goes on with a run; give one of them")
        for name in self.formats or ("",):
            if name not in PRECISIONS:
                raise InputError(f"--precision: got {quoted(name)}; accepted are {', '.join(PRECISIONS)}")

    @property
    def formats(self) -> tuple[str, ...]:
        """The precisions that students are exported in."""
        return tuple(dict.fromkeys(listed(self.precisions)))

    @property
    def drop(self) -> float | None:
        """Points that may be lost; None where a speedup is the goal."""
        return None if self.speedup is not None else MAX_DROP if self.max_drop is None else self.max_drop

    def stored(self) -> dict[str, Any]:
        """Return what a record keeps: all but `out`, `plan`, `resume` and `steps`."""
        values = {known.name: getattr(self, known.name) for known in dataclasses.fields(self)}
        return {
            name: os.fspath(value) if isinstance(value, os.PathLike) else value
            for name, value in values.items()
            if name not in ("steps", "plan", "resume", "out")
        }
