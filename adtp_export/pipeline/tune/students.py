"""Students of a run: their record, their weights, and what each does on dev, on the disk, whole or not at all."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedModel, TokenizersBackend

from ...errors import InputError
from ...io import flush, flush_alone, written_whole
from ...training.checkpoints import broken_seal, reason, seal
from ...training.models import save_model
from .directory import TOLD, TRIALS
from .shapes import Arm

RECORD = "trials.jsonl"
WEIGHTS = "model.safetensors"


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A student. start: the name of the trial whose weights it began with, "" for the teacher's. loss: per row against the teacher's
    answers, infinite where training diverged, of which no weights are kept; drop: points below the teacher, both means over dev. rows: that
    it was trained on, counted in each epoch."""

    name: str
    arm: Arm
    rows: int
    start: str
    loss: float
    drop: float

    @property
    def diverged(self) -> bool:
        return not math.isfinite(self.loss)

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {"loss": None if self.diverged else self.loss}

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Trial:
        loss = math.inf if row["loss"] is None else row["loss"]
        return cls(**{**row, "arm": Arm(**row["arm"]), "loss": loss})


@dataclass(frozen=True)
class Told:
    """What a student does on dev. loss ``(examples,)``: of each row against the teacher's answer. score ``(rows,)``: of each table row."""

    loss: np.ndarray
    score: np.ndarray


class Students:
    """The students of a run: their record, the weights of those that may be chosen, and what each does on dev.

    Args:
        out: directory of the run.
        work: its folder for what only the run needs.
        rows: of the dev table, that students are judged on.
    """

    def __init__(self, out: Path, work: Path, rows: int) -> None:
        self.out, self.work, self.rows = out, work, rows
        self.done = self._read()

    def _read(self) -> dict[str, Trial]:
        """Read the record; a line that a kill cut off is no trial, and goes.

        Raises:
            InputError: the record is damaged, or what a student does on dev is not there any more.
        """
        path = self.out / RECORD
        text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""  # what is none is no JSON
        lines = text.splitlines(keepends=True)
        whole = [line for line in lines if line.endswith("\n")]
        if len(whole) < len(lines):
            with written_whole(path) as partial:
                partial.write_text("".join(whole), encoding="utf-8")
        trials = [self._parsed(number, line) for number, line in enumerate(whole, start=1) if line.strip()]
        gone = [trial.name for trial in trials if not (self.place(trial) / TOLD).is_file()]
        if gone:
            raise InputError(
                f"--out: {self.work / TRIALS} has no {gone[0]} any more, so nothing can be chosen there; give another --out"
            )
        return {trial.name: trial for trial in trials}

    def _parsed(self, number: int, line: str) -> Trial:
        try:
            return Trial.of(json.loads(line))
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(
                f"--out: {self.out / RECORD}, line {number}: it is damaged ({reason(error)}); mend the line, or give another --out"
            ) from error

    def check_complete(self) -> None:
        """See that the record of a finished run names every student that lies there.

        Raises:
            InputError: it does not.
        """
        folder = self.work / TRIALS
        there = {place.parent.name for place in folder.glob(f"*/{TOLD}") if place.parent.suffix != ".partial"}
        if not self.done or there - self.done.keys():
            raise InputError(
                f"--out: {self.out / RECORD} does not name all students of the run that lie in {folder}; put the file back as it was, or "
                "give another --out"
            )

    def keep(self, name: str, told: Told, student: PreTrainedModel | None, tokenizer: TokenizersBackend) -> None:
        """Write a student, where there is one, and what it does, whole or not at all."""
        folder = self.work / TRIALS
        partial = folder / f"{name}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        if student is not None:
            save_model(student, tokenizer, partial)
        np.savez(partial / TOLD, loss=told.loss, score=told.score)
        seal(partial)
        flush(partial)
        shutil.rmtree(folder / name, ignore_errors=True)
        partial.rename(folder / name)
        flush_alone(folder)

    def record(self, trial: Trial) -> None:
        """Add a trial whose student is kept to the record."""
        with (self.out / RECORD).open("a", encoding="utf-8") as record:
            record.write(json.dumps(trial.to_json()) + "\n")
        flush(self.out / RECORD)
        self.done[trial.name] = trial

    def place(self, trial: Trial) -> Path:
        """Return where a student lies."""
        return self.work / TRIALS / trial.name

    def sound(self, trial: Trial) -> Path:
        """Return where a student lies, all of whose files are as they were written.

        Raises:
            InputError: one is not.
        """
        place = self.place(trial)
        if told := broken_seal(place):
            raise InputError(f"--out: {place} is damaged ({told}), so that student cannot be used; give another --out")
        return place

    def told(self, trial: Trial) -> Told:
        """Raises InputError where it is damaged, or told of other rows: an earlier version parted them otherwise."""
        path = self.place(trial) / TOLD
        try:
            with np.load(path) as stored:
                told = Told(stored["loss"], stored["score"])
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            raise InputError(
                f"--out: {path} is damaged ({reason(error)}), so nothing can be chosen there; give another --out"
            ) from error
        if len(told.score) != self.rows:
            raise InputError(
                f"--out: {self.out} has a run of an earlier version, which chose on other rows; give another --out"
            )
        return told

    def forget(self, trial: Trial) -> None:
        """Remove the weights of a student that will not be chosen."""
        (self.place(trial) / WEIGHTS).unlink(missing_ok=True)
        seal(self.place(trial))

    def can_be_chosen(self) -> list[Trial]:
        """Return the trials whose weights are there."""
        return [trial for trial in self.done.values() if (self.place(trial) / WEIGHTS).is_file()]
