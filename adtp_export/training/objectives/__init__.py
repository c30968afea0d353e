"""What a head is trained for, one file per head: its rows, its losses, what is attributed, and how answers are judged.

An *answer* is one tensor per row: ``(C,)`` logits of a text, ``(n, C)`` of its n tokens, ``(n, 2)`` of start and end, or a vector
``(D,)``. In a batch it has the batch dimension in front, and S tokens.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, cast

import numpy as np
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedTokenizerFast

from ...contract import HEAD_EMBEDDING, HEAD_SEQUENCE, HEAD_SPANS, HEAD_TOKENS
from ...data.windows import Windows
from ...model.packed import PackedStudent
from ...model.sequences import at_least_fp32
from ..data import Examples, Labels, Table
from ..settings import TrainOptions

Batch = Mapping[str, Tensor]

TABLE = {
    HEAD_SEQUENCE: ("sequence", "SequenceObjective"),
    HEAD_TOKENS: ("tokens", "TokensObjective"),
    HEAD_SPANS: ("spans", "SpansObjective"),
    HEAD_EMBEDDING: ("embedding", "EmbeddingObjective"),
}
"""Head -> module and class."""


class Reader(NamedTuple):
    """What turns texts into rows of ids. config: of the encoder that reads them. windows: of the contexts of questions. prompt:
    what is put before texts that become vectors."""

    tokenizer: PreTrainedTokenizerFast
    config: PretrainedConfig
    windows: Windows
    prompt: str = ""

    @property
    def max_tokens(self) -> int:
        """Longer texts are cut there."""
        return self.windows.max_tokens


class Objective(ABC):
    """What training asks of a head; it has no state."""

    head: ClassVar[str]
    labelled: ClassVar[bool] = True
    """Whether there is a loss against labels, L_CE; else L_logit has its weight, too."""

    @abstractmethod
    def read(self, path: Path, settings: TrainOptions) -> Table:
        """Read a file.

        Raises:
            InputError: it cannot be read, or its rows are of another kind.
        """

    @abstractmethod
    def labels(self, table: Table, settings: TrainOptions) -> Labels:
        """Say what the answers are, by the training rows.

        Raises:
            InputError: there are fewer than two.
        """

    @abstractmethod
    def examples(self, table: Table, labels: Labels, reader: Reader) -> Examples:
        """Tokenize a table.

        Raises:
            InputError: rows that cannot be learned from, or ids that the model does not know.
        """

    @abstractmethod
    def kind(self, labels: Labels) -> str:
        """Name the task, as ``--task`` does."""

    def fields(self, labels: Labels) -> dict[str, Any]:
        """Fields of the configuration of a model that is to learn these labels."""
        return {"id2label": (names := dict(enumerate(labels.names))), "label2id": {n: i for i, n in names.items()}}

    def prepare(self, packed: PackedStudent) -> PackedStudent:
        """Have the packed student answer as `ask` does."""
        return packed

    def answer(self, outputs: tuple[Tensor, ...]) -> Tensor:
        """Make the answer of the head's outputs (`contract.OUTPUTS`), in fp32 at least: the first, unless a head says otherwise."""
        return at_least_fp32(outputs[0])

    def ask(self, model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
        """Return a teacher's answer to a batch: its logits, unless a head says otherwise."""
        logits: Tensor = model(**inputs).logits
        return logits

    @abstractmethod
    def label_loss(self, answer: Tensor, batch: Batch) -> Tensor | None:
        """L_CE; None without labels."""

    @abstractmethod
    def logit_loss(self, answer: Tensor, teacher: Tensor, batch: Batch, temperature: float) -> Tensor:
        """L_logit: how far the student's answer is from the teacher's."""

    @abstractmethod
    def score(self, answer: Tensor, whole: Tensor, batch: Batch) -> Tensor:
        """Return F, ``(B,)``: the scalar whose gradients are integrated.

        Args:
            whole: the answer that is explained. It says which classes, or which direction.
        """

    def explained_labels(self, examples: Examples) -> bytes:
        """What F depends on beside the text; it is part of the name under which attribution is kept."""
        return b""

    @abstractmethod
    def quality(self, answers: Sequence[Tensor], examples: Examples) -> dict[str, float]:
        """Judge answers of all examples, in their order."""

    @abstractmethod
    def row_scores(self, answers: Sequence[Tensor], examples: Examples) -> np.ndarray:
        """Return a score of each row of the table, 1 where it is right and 0 where it is wrong: what means and margins are made of.

        Args:
            answers: of all examples, in their order.
        """

    @abstractmethod
    def main_score(self, figures: Mapping[str, float]) -> float:
        """The one figure that a best checkpoint is chosen by."""

    def classes_in_another_order(
        self, answers: Sequence[Tensor], examples: Examples, names: Sequence[str]
    ) -> dict[str, str] | None:
        """Return what a model's classes must be called, by number, where its answers are right but for their order; None where not."""
        return None

    def one_answer(self, answers: Sequence[Tensor], examples: Examples, names: Sequence[str]) -> str | None:
        """Say which answer a model gives nearly always, more often than it is true; None where there is none."""
        return None


def for_head(head: str) -> Objective:
    """Return the objective of a head, a key of `TABLE`."""
    module, name = TABLE[head]
    return cast(Objective, getattr(importlib.import_module(f".{module}", __package__), name)())
