"""What the steps of an export share: a frozen context, the ONNX files they make, and what each step found out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...artifacts.directory import writing
from ...artifacts.records import Note, ShapeRange, Target
from ...contract import PLAIN, layout_path
from ..progress import Steps

if TYPE_CHECKING:
    from ...data.rows import TokenizedRows
    from ...data.tokenize import Batch, TokenizedText
    from ...data.windows import Windows
    from ...model.checkpoint import Checkpoint
    from ...verify.oracle import OracleRun


@dataclass(frozen=True, kw_only=True)
class ExportContext:
    """Where an export works and on what: the checkpoint, the directory that becomes OUT and its layout, ranges of "batch" and "seq",
    and the model card that is replaced. out: OUT, for messages."""

    checkpoint: Checkpoint
    work: Path
    profile: Mapping[str, ShapeRange]
    steps: Steps
    layout: str = PLAIN
    replaced_card: Path | None = None
    out: Path | None = None

    def writing(self) -> AbstractContextManager[None]:
        """Say clearly what the file system refuses, for the time in which something is written, and not longer.

        Raises:
            InputError: of the context: OUT cannot be written.
        """
        return writing(self.out or self.work)

    def place(self, name: str) -> Path:
        """Return where to write an ONNX file."""
        file = self.work / layout_path(name, self.layout)
        with self.writing():
            file.parent.mkdir(exist_ok=True)
        return file

    def name(self, file: Path) -> str:
        """Return a file's place in OUT."""
        return file.relative_to(self.work).as_posix()

    @property
    def windows(self) -> Windows:
        """How contexts are read; `load` reads them alike."""
        return self.checkpoint.student.windows.within(self.profile["seq"].max)

    def tokenize(self, texts: Sequence[Any]) -> TokenizedRows:
        """Tokenize rows that `rows.read` gave, as long as its engines would take them."""
        from ...data.rows import tokenize

        head, tokenizer = self.checkpoint.student.config.head, self.checkpoint.tokenizer
        return tokenize(head, tokenizer, texts, self.profile["seq"].max, self.windows)

    def batches(self, rows: Sequence[TokenizedText]) -> list[Batch]:
        """Divide tokenized texts into batches that its engines would take."""
        from ...verify import samples

        student = self.checkpoint.student
        return samples.make_batches(rows, student.input_names, student.pad_id, self.profile["batch"].max)


@dataclass(frozen=True, kw_only=True)
class ModelFile:
    """One ONNX file of an export.

    precision: of "fp32" to "fp8". made_for: "" for all runtimes, else "ort-cpu", "trt" or "rtx". form: as of a `TargetSpec`. oracle:
    what it is compared with; None without verification. wider: of a file of fixed sizes, the one for texts that do not fit. details: of
    it in the manifest. points: of accuracy that it may lose; None where no loss is judged.
    """

    file: Path
    precision: str
    made_for: str = ""
    form: str = ""
    oracle: OracleRun | None = None
    details: Mapping[str, Any] = field(default_factory=dict)
    points: float | None = None
    wider: ModelFile | None = None


@dataclass(frozen=True)
class StepResult:
    """What a step found out: targets by name, and notes for the user."""

    targets: Mapping[str, Target] = field(default_factory=dict)
    notes: tuple[Note, ...] = ()

    def __add__(self, other: StepResult) -> StepResult:
        """Join two; later targets replace earlier ones of the same name, and a note is told once."""
        return StepResult({**self.targets, **other.targets}, tuple(dict.fromkeys((*self.notes, *other.notes))))
