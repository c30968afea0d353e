"""Where an answer begins and ends: questions about contexts, in windows of a context that is too long for one row."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ...contract import ATTENTION_MASK, END_LOGITS, HEAD_SPANS, START_LOGITS
from ...data.labelled import ANSWERS, CONTEXT, QUESTION, Question, read_questions
from ...data.windows import TextWithOffsets, encode_windows
from ...errors import InputError, quoted
from ...explain.gradients import answer_score
from ...inference.answers import spans
from ...options import flag_name
from ..data import Examples, Labels, Table, known_inputs
from ..losses import logit_loss
from ..settings import TrainOptions
from . import Batch, Objective, Reader

FAR = -1e4
"""Logit of what cannot be answered: its probability is 0 in every precision, and its gradient is defined."""


@dataclass(kw_only=True)
class QuestionExamples(Examples):
    """Windows of contexts.

    labels: first and last token of the answer, both 0, for [CLS], where the window does not hold one. placed: of each window. questions:
    of the table; owners: per window the number of its question. longest: tokens of an answer, at most.
    """

    placed: list[TextWithOffsets]
    questions: Sequence[Question]
    owners: Sequence[int]
    longest: int

    def some(self, numbers: Sequence[int]) -> QuestionExamples:
        """Return the windows of these numbers, and their questions alone."""
        owners = [self.owners[i] for i in numbers]
        place = {owner: number for number, owner in enumerate(dict.fromkeys(owners))}
        return dataclasses.replace(
            cast(QuestionExamples, super().some(numbers)),
            placed=[self.placed[i] for i in numbers],
            questions=[self.questions[owner] for owner in place],
            owners=[place[owner] for owner in owners],
        )

    def collate_labels(self, numbers: Sequence[int]) -> dict[str, Tensor]:
        """``start_positions`` and ``end_positions``, ``(B,) int64``."""
        start, end = torch.tensor([self.labels[i] for i in numbers]).unbind(1)
        return {"start_positions": start, "end_positions": end}


class SpansObjective(Objective):
    """Extractive question answering as SQuAD v2 has it."""

    head = HEAD_SPANS

    def read(self, path: Path, settings: TrainOptions) -> Table:
        for name in ("text_column", "label_column"):
            if (given := getattr(settings, name)) != getattr(TrainOptions, name):
                columns = f"{QUESTION}, {CONTEXT} and {ANSWERS}"
                raise InputError(
                    f"{flag_name(name)}: got {quoted(given)}; questions are read from the columns {columns}. Leave it out"
                )
        questions = list(read_questions(path))
        return Table(path.name, questions, [question.answers for question in questions])

    def labels(self, table: Table, settings: TrainOptions) -> Labels:
        if not any(table.labels):
            raise InputError(f"{table.source}: no question has an answer; accepted are rows of which some have one")
        return Labels(())

    def fields(self, labels: Labels) -> dict[str, Any]:
        return {"num_labels": 2}

    def examples(self, table: Table, labels: Labels, reader: Reader) -> Examples:
        pairs = [(question.question, question.context) for question in table.texts]
        windows = encode_windows(reader.tokenizer.backend_tokenizer, pairs, reader.windows)
        owners = [number for number, own in enumerate(windows) for _ in own]
        placed = [window for own in windows for window in own]
        encoded = [window.row for window in placed]
        return QuestionExamples(
            encoded=encoded,
            labels=[_position(table.texts[owner], in_context(window)) for owner, window in zip(owners, placed)],
            pad_id=int(reader.tokenizer.pad_token_id or 0),
            inputs=known_inputs(encoded, reader.config, table.source),
            placed=placed,
            questions=table.texts,
            owners=owners,
            longest=reader.windows.max_answer_tokens,
        )

    def kind(self, labels: Labels) -> str:
        return "spans"

    def answer(self, outputs: tuple[Tensor, ...]) -> Tensor:
        return super().answer((torch.stack(outputs, -1),))

    def ask(self, model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
        found = model(**inputs)
        return torch.stack([found[START_LOGITS], found[END_LOGITS]], -1)

    def label_loss(self, answer: Tensor, batch: Batch) -> Tensor:
        sides = zip(_sides(answer, batch), _gold(batch))
        return torch.stack([cross_entropy(side, gold) for side, gold in sides]).mean()

    def logit_loss(self, answer: Tensor, teacher: Tensor, batch: Batch, temperature: float) -> Tensor:
        """Over the positions of a row, mean of start and end."""
        sides = zip(_sides(answer, batch), _sides(teacher, batch))
        return torch.stack([logit_loss(own, theirs, temperature) for own, theirs in sides]).mean()

    def score(self, answer: Tensor, whole: Tensor, batch: Batch) -> Tensor:
        """Return the log odds of the true start and the true end against all other positions; without an answer those of [CLS].

        The true ones, and not those that are answered: a wrong span would have the tokens kept that led there.
        """
        return sum(
            (answer_score(side, gold) for side, gold in zip(_sides(answer, batch), _gold(batch))), answer.new_zeros(())
        )

    def explained_labels(self, examples: Examples) -> bytes:
        return str(list(examples.labels)).encode()

    def quality(self, answers: Sequence[Tensor], examples: Examples) -> dict[str, float]:
        assert isinstance(examples, QuestionExamples)
        return spans.quality(decode(answers, examples), [question.answers for question in examples.questions])

    def row_scores(self, answers: Sequence[Tensor], examples: Examples) -> np.ndarray:
        """F1 of each question's answer."""
        assert isinstance(examples, QuestionExamples)
        found = decode(answers, examples)
        return np.array([spans.exact_and_f1(own, asked.answers)[1] for own, asked in zip(found, examples.questions)])

    def main_score(self, figures: Mapping[str, float]) -> float:
        return figures["f1"]


def decode(answers: Sequence[Tensor], examples: QuestionExamples) -> list[str]:
    """Return the answer to each question, "" for none, of the logits ``(n, 2)`` of its windows, as `load` gives it.

    Where some questions have no answer, none is one, too. No threshold is tuned for that: it would have to travel with the exported file.
    """
    may_be_none = not all(question.answers for question in examples.questions)
    windows: list[list[tuple[np.ndarray, TextWithOffsets]]] = [[] for _ in examples.questions]
    for owner, answer, placed in zip(examples.owners, answers, examples.placed):
        windows[owner].append((answer.float().numpy(), placed))
    found = [
        spans.answers(question.context, own, examples.longest, may_be_none=may_be_none)
        for question, own in zip(examples.questions, windows)
    ]
    return [each.parts[0].text for each in found]


def in_context(placed: TextWithOffsets) -> list[tuple[int, int] | None]:
    """Return the characters of the context that each token stands for, None for the question and special tokens."""
    return [place if side == 1 else None for place, side in zip(placed.offsets, placed.sides)]


def tokens_of(begin: int, end: int, offsets: Sequence[tuple[int, int] | None]) -> tuple[int, int] | None:
    """Return the first and the last token of the characters from `begin` to `end`; None where the tokens do not hold them all."""
    held = [(i, place) for i, place in enumerate(offsets) if place is not None and place[0] < place[1]]
    if not held or held[0][1][0] > begin or held[-1][1][1] < end:
        return None
    inside = [i for i, place in held if place[1] > begin and place[0] < end]
    return (inside[0], inside[-1]) if inside else None


def _position(question: Question, offsets: list[tuple[int, int] | None]) -> tuple[int, int]:
    """Return the tokens of the first true answer in a window; (0, 0), which is [CLS], where it does not hold it."""
    if not question.answers:
        return 0, 0
    answer = question.answers[0]
    begin, end = (question.starts[0] + at for at in (len(answer) - len(answer.lstrip()), len(answer.rstrip())))
    return tokens_of(begin, end, offsets) or (0, 0)  # spaces around it may have no token


def _sides(answer: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """Logits of start and end, ``(B, S)`` each, `FAR` for padding."""
    dead = batch[ATTENTION_MASK] == 0
    start, end = answer.masked_fill(dead[:, :, None], FAR).unbind(-1)
    return start, end


def _gold(batch: Batch) -> tuple[Tensor, Tensor]:
    return batch["start_positions"], batch["end_positions"]
