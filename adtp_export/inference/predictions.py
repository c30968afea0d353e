"""What `load` answers with: a record for each text, by head."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from .answers.masked import Filling
from .answers.spans import Part
from .answers.tokens import Tagged


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How a text was read.

    truncated: it was longer than the model reads. tokens and kept: on request, the tokens and whether each stayed to the end.
    dropped_at: the site that dropped each token, None for those that stayed.
    """

    truncated: bool
    tokens: list[str] | None = None
    kept: list[bool] | None = None
    dropped_at: list[str | None] | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the fields that are known; the answer comes first."""
        known = {name: value for name, value in asdict(self).items() if value is not None}
        reading = {f.name for f in fields(Reading)}
        return {name: known[name] for name in sorted(known, key=lambda name: name in reading)}


@dataclass(frozen=True, kw_only=True)
class Prediction(Reading):
    """A text's class. label: the best label (None for regression). score: its probability, or the value in regression. scores: every
    label's.
    """

    label: str | None
    score: float
    scores: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class TaggedText(Reading):
    """What was found in a text, in order."""

    entities: list[Tagged]


@dataclass(frozen=True, kw_only=True)
class MaskPrediction(Reading):
    """What may stand in place of each masked token of a text, in order: tokens, best first."""

    masks: list[list[Filling]]


@dataclass(frozen=True, kw_only=True)
class SpanPrediction(Reading):
    """What a context answers to a question.

    answer: characters `start` up to `end` of the context; "" where it does not answer. score: its probability. no_answer: the
    probability that the context does not answer. answers: the best ones, this one first. Tokens and what was kept are those of the
    window that the answer stands in.
    """

    answer: str
    start: int
    end: int
    score: float
    no_answer: float
    answers: list[Part]


@dataclass(frozen=True, kw_only=True)
class ZeroShotPrediction(Reading):
    """What a text is, of the labels that the caller gave. labels: best first. scores: their probabilities."""

    labels: list[str]
    scores: list[float]


@dataclass(frozen=True)
class Ranked:
    """A document, its place in the list that was given, and its score."""

    index: int
    score: float
    text: str
