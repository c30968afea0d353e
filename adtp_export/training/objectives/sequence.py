"""One answer per text: a class, or a number."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, mse_loss

from ...contract import HEAD_SEQUENCE
from ...data.tokenize import encode
from ...errors import InputError
from ...explain.gradients import answer_score
from ...inference.answers.sequence import quality
from ..data import Examples, Labels, Table, known_inputs, read_labelled
from ..losses import logit_loss
from ..settings import TrainOptions
from . import Batch, Objective, Reader

MIN_SCORES = 3
NEARLY_ALL = 0.95
"""Share of rows from which on one answer is worth a note."""
ROWS_OF_AN_ORDER, CLEARLY, DEVIATIONS = 50, 0.2, 4
"""Rows; the share of them that another order of classes has to make right; and standard deviations of that number, if two classes were
guessed."""


class SequenceObjective(Objective):
    """Classification and regression, as AD-TP has them."""

    head = HEAD_SEQUENCE

    def read(self, path: Path, settings: TrainOptions) -> Table:
        return read_labelled(path, settings)

    def labels(self, table: Table, settings: TrainOptions) -> Labels:
        return Labels.of(table, settings.task)

    def examples(self, table: Table, labels: Labels, reader: Reader) -> Examples:
        if labels.regression and len(table) < MIN_SCORES:
            raise InputError(f"{table.source}: {len(table)} rows; a correlation takes at least {MIN_SCORES}")
        encoded = encode(reader.tokenizer.backend_tokenizer, table.texts, reader.max_tokens)
        inputs = known_inputs(encoded, reader.config, table.source)
        pad_id = int(reader.tokenizer.pad_token_id or 0)
        return Examples(encoded=encoded, labels=labels.encode(table), pad_id=pad_id, inputs=inputs)

    def kind(self, labels: Labels) -> str:
        return "regression" if labels.regression else "classification"

    def fields(self, labels: Labels) -> dict[str, Any]:
        names = dict(enumerate(labels.names or ("score",)))
        problem = "regression" if labels.regression else "single_label_classification"
        return {"id2label": names, "label2id": {name: i for i, name in names.items()}, "problem_type": problem}

    def label_loss(self, answer: Tensor, batch: Batch) -> Tensor:
        labels = batch["labels"]
        if answer.shape[1] > 1:
            return cross_entropy(answer, labels)
        return mse_loss(answer[:, 0], labels.to(answer.dtype))

    def logit_loss(self, answer: Tensor, teacher: Tensor, batch: Batch, temperature: float) -> Tensor:
        return logit_loss(answer, teacher, temperature)

    def score(self, answer: Tensor, whole: Tensor, batch: Batch) -> Tensor:
        """Return the log odds of the class that is answered against all others, or the number."""
        return answer_score(answer, whole.argmax(1))

    def quality(self, answers: Sequence[Tensor], examples: Examples) -> dict[str, float]:
        return quality(torch.stack(list(answers)).numpy(), torch.tensor(examples.labels).numpy())

    def row_scores(self, answers: Sequence[Tensor], examples: Examples) -> np.ndarray:
        """1 where the class is right; in regression minus the absolute error."""
        logits, labels = torch.stack(list(answers)).numpy(), np.asarray(examples.labels)
        if logits.shape[1] > 1:
            return (logits.argmax(1) == labels).astype(np.float64)
        return -np.abs(logits[:, 0] - labels)

    def main_score(self, figures: Mapping[str, float]) -> float:
        return figures["accuracy"] if "accuracy" in figures else figures["spearman"]

    def classes_in_another_order(
        self, answers: Sequence[Tensor], examples: Examples, names: Sequence[str]
    ) -> dict[str, str] | None:
        return another_order(torch.stack(list(answers)).argmax(1).numpy(), np.asarray(examples.labels), names)

    def one_answer(self, answers: Sequence[Tensor], examples: Examples, names: Sequence[str]) -> str | None:
        return one_answer(torch.stack(list(answers)).numpy(), np.asarray(examples.labels), names)


def another_order(answered: np.ndarray, labels: np.ndarray, names: Sequence[str]) -> dict[str, str] | None:
    """Return what each class of a classifier must be called, by number, where that makes far more of its answers right; None where not.

    Args:
        answered, labels: ``(rows,)``, the classes that it answers, and the true ones. names: of the C classes; none in regression.
    """
    if not names or len(labels) < ROWS_OF_AN_ORDER:
        return None
    counts = np.zeros((len(names), len(names)), np.int64)
    np.add.at(counts, (labels, answered), 1)
    found = counts.argmax(1)  # what it answers for most rows of each true class
    if len(set(found.tolist())) < len(names):
        return None
    gained = int(counts[range(len(names)), found].sum() - counts.trace())
    if gained < max(CLEARLY * len(labels), DEVIATIONS * math.sqrt(len(labels))):
        return None
    return {str(number): names[true] for number, true in enumerate(found.argsort())}


def one_answer(logits: np.ndarray, labels: np.ndarray, names: Sequence[str]) -> str | None:
    """Say which class a classifier answers for nearly every row, more often than it is true; None where there is none.

    Args:
        logits: ``(rows, C)``. labels: ``(rows,)``, true classes, in any order. names: of the C classes; none in regression.
    """
    if not names:
        return None
    answered = logits.argmax(1)
    most = int(np.bincount(answered).argmax())
    share, true = float((answered == most).mean()), float((labels == most).mean())
    if share < NEARLY_ALL or share <= true:
        return None
    return f"{names[most]!r} for {share:.1%} of the rows; {true:.1%} of them have that label"
