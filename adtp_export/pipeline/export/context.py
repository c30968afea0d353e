"""What the steps of an export share: where they work and on what, files that were written, and what each step found out."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...artifacts.directory import writing
from ...artifacts.records import Note, ShapeRange, Target
from ...data.windows import Windows
from ...io import with_weights
from ..progress import Steps

if TYPE_CHECKING:
    from ...model.checkpoint import Checkpoint
    from ...runtimes import Engine
    from ...verify.oracle import OracleRun
    from .file_plan import ModelFile

LARGE_BYTES = 2**30
"""Files above this are open one at a time, with their debug form at most."""


@dataclass(frozen=True, kw_only=True)
class ExportContext:
    """Where an export works and on what: the checkpoint, the directory that becomes OUT, and ranges of "batch" and "seq".

    windows: how contexts are read; `load` reads them alike. out: OUT, for messages. engines: those that were verified and will be timed,
    by target.
    """

    checkpoint: Checkpoint
    work: Path
    profile: Mapping[str, ShapeRange]
    steps: Steps
    windows: Windows = field(default_factory=Windows)
    out: Path | None = None
    engines: dict[str, Engine] = field(default_factory=dict)

    @contextlib.contextmanager
    def writing(self, name: str = "") -> Iterator[Path]:
        """Yield where to write a file of OUT; say clearly what the file system refuses, while it is written and not longer.

        Raises:
            InputError: of the context: OUT cannot be written.
        """
        with writing(self.out or self.work):
            file = self.work / name
            file.parent.mkdir(exist_ok=True)
            yield file


@dataclass(frozen=True, kw_only=True)
class WrittenFile:
    """An ONNX file of an export at its path. oracle: what it is compared with; None without verification. details: for the manifest."""

    file: ModelFile
    path: Path
    oracle: OracleRun | None = None
    details: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_large(self) -> bool:
        """Whether memory is short for more sessions than those that are compared."""
        return stored_bytes(self.path) > LARGE_BYTES


def stored_bytes(file: Path) -> int:
    """Size of a model with its weights, wherever they are."""
    return sum(path.stat().st_size for path in with_weights(file))


@dataclass(frozen=True)
class StepResult:
    """What a step found out: targets by name, and notes for the user."""

    targets: Mapping[str, Target] = field(default_factory=dict)
    notes: tuple[Note, ...] = ()

    def __add__(self, other: StepResult) -> StepResult:
        """Join two; later targets replace earlier ones of the same name, and a note is told once."""
        return StepResult({**self.targets, **other.targets}, tuple(dict.fromkeys((*self.notes, *other.notes))))
