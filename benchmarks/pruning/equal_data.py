"""The data sets of the comparison at equal time: what is read of them, where tokens are cut, and how students learn."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from adtp_export.contract import HEAD_SEQUENCE, HEAD_SPANS, HEAD_TOKENS
from adtp_export.data.overlaps import overlapping
from adtp_export.training.data import Examples
from adtp_export.training.objectives.tokens import NO_LABEL, TaggedExamples
from benchmarks.pruning.splits import FOLDS

FULL = 6
"""Layers of the teacher."""
TAGGED = "ewt-pos"
ASKED = tuple(f"subjqa-{fold}" for fold in range(FOLDS))
"""Questions about reviews; each fold has a teacher of its own."""
HEAD = {"sst2": HEAD_SEQUENCE, "20news": HEAD_SEQUENCE, TAGGED: HEAD_TOKENS} | dict.fromkeys(ASKED, HEAD_SPANS)
SUFFIX = {"sst2": ".tsv"} | dict.fromkeys(("20news", TAGGED, *ASKED), ".jsonl")
MAX_TOKENS = {"sst2": 64, "20news": 512, TAGGED: 256} | dict.fromkeys(ASKED, 384)
SITE = {"sst2": "0.ffn", "20news": "0.ffn"} | dict.fromkeys((TAGGED, *ASKED), "2.attention")
"""Where students cut. Behind three whole layers, at 3.attention, no tagger would be as fast as one of three layers."""
AT = {"20news": (3, 2), "sst2": (4, 3, 2), TAGGED: (4, 3)}
"""Numbers of layers whose time others are given. One row each of the plan has SCHEDULE, and one text at a time."""


@dataclass(frozen=True, kw_only=True)
class Data:
    """How a teacher and its students learn, and those with AD-TP's cut besides; how many of the rows of dev and test are read, from the
    first on."""

    teacher: dict[str, Any]
    student: dict[str, Any]
    cut: dict[str, Any] = field(default_factory=dict)
    rows: dict[str, int] = field(default_factory=dict)


SIZES = {
    "plan": {
        "20news": Data(
            teacher={"train_rows": 4000, "teacher_epochs": 3, "teacher_learning_rate": 2e-4, "batch_size": 16},
            student={"train_rows": 2000, "epochs": 3, "batch_size": 16, "learning_rate": 1e-4, "evaluations": 6},
            rows={"dev": 300},
        ),
        "sst2": Data(
            teacher={"train_rows": 20000, "teacher_epochs": 1, "teacher_learning_rate": 1e-4},
            student={"train_rows": 8000, "epochs": 2, "learning_rate": 1e-4},
        ),
        TAGGED: Data(
            teacher={"teacher_epochs": 3, "teacher_learning_rate": 2e-4},
            student={"train_rows": 8000, "epochs": 2, "learning_rate": 1e-4},
        ),
        **dict.fromkeys(
            ASKED,
            Data(
                teacher={"teacher_epochs": 3, "teacher_learning_rate": 1e-4, "batch_size": 16},
                student={"epochs": 2, "batch_size": 16, "learning_rate": 1e-4},
                cut={"cut_warmup": 0.333},
            ),
        ),
    },
    "small": {
        "20news": Data(
            teacher={"train_rows": 1600, "teacher_epochs": 2, "teacher_learning_rate": 2e-4, "batch_size": 16},
            student={"train_rows": 640, "epochs": 1, "batch_size": 8, "learning_rate": 1e-4, "evaluations": 2},
            rows={"dev": 100, "test": 800},
        ),
        "sst2": Data(
            teacher={"train_rows": 6000, "teacher_epochs": 1, "teacher_learning_rate": 1e-4},
            student={"train_rows": 2000, "epochs": 1, "batch_size": 16, "learning_rate": 1e-4, "evaluations": 2},
            rows={"dev": 300},
        ),
        TAGGED: Data(
            teacher={"train_rows": 4000, "teacher_epochs": 1, "teacher_learning_rate": 2e-4},
            student={"train_rows": 2000, "epochs": 1, "batch_size": 16, "learning_rate": 1e-4, "evaluations": 2},
            rows={"dev": 300},
        ),
    },
}
"""The first is that of the plan."""


def answered(answers: Iterable[Tensor], examples: Examples) -> list[int]:
    """Return the class of each row, or of each word where words are tagged.

    Args:
        answers: logits of each row, ``(classes,)`` or ``(n, classes)``.
    """
    if isinstance(examples, TaggedExamples):
        pairs = zip(answers, examples.labels, strict=True)
        return [tag for answer, row in pairs for tag in _of_words(answer.argmax(1).tolist(), row)]
    return [int(answer.argmax()) for answer in answers]


def labelled(texts: Sequence[Any], examples: Examples) -> tuple[list[int], list[int]]:
    """Return what `answered` should be, and in which group of overlapping texts each answer is."""
    if not isinstance(examples, TaggedExamples):
        return list(examples.labels), overlapping(texts)
    groups = overlapping([" ".join(words) for words in texts])
    pairs = [(tag, group) for group, row in zip(groups, examples.labels, strict=True) for tag in _of_words(row, row)]
    return [tag for tag, _ in pairs], [group for _, group in pairs]


def _of_words(values: Sequence[int], row: Sequence[int]) -> list[int]:
    return [value for value, label in zip(values, row, strict=True) if label != NO_LABEL]
