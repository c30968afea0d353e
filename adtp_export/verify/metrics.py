"""What the answers of each head are worth: compared with the oracle's answers, and with known labels.

An answer is looked at text by text: a row has the outputs for one text by name, those for each token without padding.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, TypeVar

import numpy as np

from ..contract import (
    END_LOGITS,
    HEAD_EMBEDDING,
    HEAD_HYBRID,
    HEAD_MASKED,
    HEAD_SEQUENCE,
    HEAD_SPANS,
    HEAD_SPARSE,
    HEAD_TOKENS,
    HEAD_VECTORS,
    LOGITS,
    MASK_LOGITS,
    OUTPUTS,
    SENTENCE_EMBEDDING,
    SEQUENCE,
    SPARSE_EMBEDDING,
    START_LOGITS,
    TOKEN_EMBEDDINGS,
)
from ..data.windows import TextWithOffsets, Windows
from ..inference.answers import embedding, masked, sequence, spans, tokens, vectors

AGREEMENT, SMALLEST_COSINE, SIMILARITY_KEPT = "agreement", "smallest_cosine", "similarity_kept"
"""Names of what `TaskMetric.agreement_with` says."""

Item = TypeVar("Item")
Outputs = Mapping[str, np.ndarray]
Measures = Mapping[str, float]


class TaskMetric(ABC):
    """Measures the answers of one head to some texts. Labels are known, or not."""

    head: ClassVar[str]
    reads: ClassVar[tuple[str, ...]] = (LOGITS,)
    """Outputs that an answer is made of."""

    @property
    def main(self) -> str:
        """The measure of `quality` that is meant by points lost."""
        return "accuracy"

    @abstractmethod
    def agreement_with(self, rows: Sequence[Outputs], expected: Sequence[Outputs]) -> dict[str, float]:
        """Compare answers with expected ones: the share that agrees (`AGREEMENT`), and what else there is to say."""

    @abstractmethod
    def quality(self, rows: Sequence[Outputs]) -> dict[str, float]:
        """Return the measures against known labels, as the head's module of `answers` names them; none without labels."""

    def points_lost(self, before: Measures, after: Measures, agreement: Measures) -> float:
        """Return percentage points lost of the main measure; where labels are not known, of answers that agree.

        Args:
            before, after: `quality` of the oracle and of what is judged.
            agreement: what `agreement_with` says of both.
        """
        agreeing = agreement.get(SIMILARITY_KEPT, agreement[AGREEMENT])
        return sequence.points_lost(before.get(self.main), after.get(self.main), agreeing)

    def owners_of(self, rows: int) -> np.ndarray:
        """Return the number of the text that each of so many rows belongs to, ``(rows,)``, from 0 on."""
        return np.arange(rows)

    @abstractmethod
    def part(self, stays: np.ndarray) -> TaskMetric:
        """Return the metric of some of the texts, ``stays (texts,) bool``."""

    def rows(self, outputs: Outputs, kept_site: np.ndarray) -> list[Outputs]:
        """Divide the outputs of a batch into rows; ``kept_site (B, S)`` is -1 for padding."""
        lengths = (kept_site >= 0).sum(1)
        per_token = {name: SEQUENCE in OUTPUTS[self.head][name] for name in self.reads}
        return [
            {name: outputs[name][i, :n] if per_token[name] else outputs[name][i] for name in self.reads}
            for i, n in enumerate(lengths)
        ]


@dataclass(frozen=True)
class SequenceMetric(TaskMetric):
    """problem_type: regression, too, where there is one output. labels ``(rows,)``: true classes, or numbers in regression."""

    head = HEAD_SEQUENCE
    problem_type: str | None
    labels: np.ndarray | None = None

    @property
    def main(self) -> str:
        return "spearman" if self.problem_type == sequence.REGRESSION else "accuracy"

    def part(self, stays: np.ndarray) -> SequenceMetric:
        return self if self.labels is None else replace(self, labels=self.labels[stays])

    def agreement_with(self, rows: Sequence[Outputs], expected: Sequence[Outputs]) -> dict[str, float]:
        values, wanted = _stacked(rows, LOGITS), _stacked(expected, LOGITS)
        same = {AGREEMENT: float(sequence.agreement(values, wanted, self.problem_type).mean())}
        if self.problem_type == sequence.REGRESSION:
            same[SIMILARITY_KEPT] = sequence.order_kept(values, wanted)
        return same

    def quality(self, rows: Sequence[Outputs]) -> dict[str, float]:
        return {} if self.labels is None else sequence.quality(_stacked(rows, LOGITS), self.labels)


class TaggedRow(NamedTuple):
    """Words of a text whose tags are known: the place of the first token of each, and its tag."""

    places: Sequence[int]
    tags: Sequence[str]


@dataclass(frozen=True)
class TokensMetric(TaskMetric):
    """names: of the model's tags, by number. labels: one row for each text. All live tokens are compared with the oracle's; with
    labels, the first token of each word."""

    head = HEAD_TOKENS
    names: Sequence[str]
    labels: Sequence[TaggedRow] | None = None

    @property
    def main(self) -> str:
        return "f1" if tokens.marks_entities(self.names) else "accuracy"

    def part(self, stays: np.ndarray) -> TokensMetric:
        return self if self.labels is None else replace(self, labels=_chosen(self.labels, stays))

    def agreement_with(self, rows: Sequence[Outputs], expected: Sequence[Outputs]) -> dict[str, float]:
        answered, wanted = (np.concatenate([row[LOGITS] for row in side]) for side in (rows, expected))
        return {AGREEMENT: float(tokens.agreement(answered, wanted).mean())}

    def quality(self, rows: Sequence[Outputs]) -> dict[str, float]:
        if self.labels is None:
            return {}
        answered = [
            [self.names[int(tag)] for tag in row[LOGITS][list(known.places)].argmax(1)]
            for row, known in zip(rows, self.labels, strict=True)
        ]
        return tokens.quality(answered, [known.tags for known in self.labels], self.names)


class AskedRow(NamedTuple):
    """The context of a question, and its true answers."""

    context: str
    answers: Sequence[str]


@dataclass(frozen=True)
class SpansMetric(TaskMetric):
    """longest: tokens of an answer, at most. windows: the tokens of each row; None where rows are single texts, in which any token may
    answer. owners: for each row the number of its question. labels: one row for each question.
    """

    head = HEAD_SPANS
    reads = (START_LOGITS, END_LOGITS)
    longest: int = Windows.max_answer_tokens
    windows: Sequence[TextWithOffsets] | None = None
    owners: Sequence[int] = ()
    labels: Sequence[AskedRow] | None = None

    @property
    def main(self) -> str:
        return "f1"

    def owners_of(self, rows: int) -> np.ndarray:
        return np.array(self.owners) if self.owners else np.arange(rows)

    def part(self, stays: np.ndarray) -> SpansMetric:
        if self.windows is None:
            return self
        owners = self.owners_of(len(self.windows))
        return replace(
            self,
            windows=_chosen(self.windows, stays[owners]),
            owners=(np.cumsum(stays) - 1)[owners[stays[owners]]].tolist(),
            labels=self.labels and _chosen(self.labels, stays),
        )

    def span(self, number: int, row: Outputs) -> tuple[int, int] | None:
        """Return the first and the last token of the best span of a row, by its number; None where there is none."""
        return spans.told(row[START_LOGITS], row[END_LOGITS], self.context(number, row), self.longest)

    def context(self, number: int, row: Outputs) -> np.ndarray:
        """Return the tokens ``(n,) bool`` of a row that an answer may have."""
        if self.windows is None:
            return np.ones(len(row[START_LOGITS]), bool)
        return np.array([side == 1 for side in self.windows[number].sides])

    def agreement_with(self, rows: Sequence[Outputs], expected: Sequence[Outputs]) -> dict[str, float]:
        same = [
            self.span(i, row) == self.span(i, wanted)
            for i, (row, wanted) in enumerate(zip(rows, expected, strict=True))
        ]
        return {AGREEMENT: float(np.mean(same))}

    def quality(self, rows: Sequence[Outputs]) -> dict[str, float]:
        """Judge what `load` would answer, where no answer is one if some questions have none."""
        if self.labels is None or self.windows is None:
            return {}
        parts: list[list[tuple[np.ndarray, TextWithOffsets]]] = [[] for _ in self.labels]
        for row, placed, owner in zip(rows, self.windows, self.owners, strict=True):
            parts[owner].append((np.stack([row[name] for name in self.reads], -1), placed))
        may_be_none = not all(known.answers for known in self.labels)
        found = [
            spans.answers(known.context, own, self.longest, may_be_none=may_be_none)
            for known, own in zip(self.labels, parts)
        ]
        return spans.quality([each.parts[0].text for each in found], [known.answers for known in self.labels])


@dataclass(frozen=True)
class EmbeddingMetric(TaskMetric):
    """scores ``(pairs,)``: how alike people found pairs of texts; rows 0 and 1 are the first pair, and so on."""

    head = HEAD_EMBEDDING
    reads = (SENTENCE_EMBEDDING,)
    scores: np.ndarray | None = None

    @property
    def main(self) -> str:
        return "spearman"

    def owners_of(self, rows: int) -> np.ndarray:
        return np.arange(rows) if self.scores is None else np.arange(rows) // 2

    def part(self, stays: np.ndarray) -> EmbeddingMetric:
        return self if self.scores is None else replace(self, scores=self.scores[stays])

    def agreement_with(self, rows: Sequence[Outputs], expected: Sequence[Outputs]) -> dict[str, float]:
        vectors, oracle = (_stacked(side, self.reads[0]) for side in (rows, expected))
        return {
            AGREEMENT: float(embedding.agreement(vectors, oracle).mean()),
            SMALLEST_COSINE: float(embedding.nearness(vectors, oracle).min()),
            SIMILARITY_KEPT: embedding.similarity_kept(vectors, oracle),
        }

    def quality(self, rows: Sequence[Outputs]) -> dict[str, float]:
        if self.scores is None:
            return {}
        vectors = _stacked(rows[: 2 * len(self.scores)], self.reads[0])
        return embedding.quality(embedding.cosines(vectors[::2], vectors[1::2]), self.scores)


@dataclass(frozen=True)
class SparseMetric(EmbeddingMetric):
    """The same for sparse vectors."""

    head = HEAD_SPARSE
    reads = (SPARSE_EMBEDDING,)


class MaskedMetric(TaskMetric):
    """Logits of masked tokens. Nobody says which are right, so texts have no labels."""

    head = HEAD_MASKED
    reads = (MASK_LOGITS,)

    def part(self, stays: np.ndarray) -> MaskedMetric:
        return self

    def agreement_with(self, rows: Sequence[Outputs], expected: Sequence[Outputs]) -> dict[str, float]:
        same = [masked.agreement(row[MASK_LOGITS], own[MASK_LOGITS]) for row, own in zip(rows, expected, strict=True)]
        return {AGREEMENT: float(np.concatenate(same).mean())}

    def quality(self, rows: Sequence[Outputs]) -> dict[str, float]:
        return {}


class VectorsMetric(TaskMetric):
    """Vectors of tokens, text by text. Nobody says which are right, so texts have no labels."""

    head = HEAD_VECTORS
    reads = (TOKEN_EMBEDDINGS,)

    def part(self, stays: np.ndarray) -> VectorsMetric:
        return self

    def agreement_with(self, rows: Sequence[Outputs], expected: Sequence[Outputs]) -> dict[str, float]:
        found, oracle = ([row[TOKEN_EMBEDDINGS] for row in side] for side in (rows, expected))
        return {
            AGREEMENT: vectors.agreement(found, oracle),
            SMALLEST_COSINE: vectors.smallest_cosine(found, oracle),
            SIMILARITY_KEPT: vectors.similarity_kept(found, oracle),
        }

    def quality(self, rows: Sequence[Outputs]) -> dict[str, float]:
        return {}


@dataclass(frozen=True)
class HybridMetric(EmbeddingMetric):
    """The vector of a text is what is judged; the outputs for tokens are compared number by number, as all are."""

    head = HEAD_HYBRID


def default(head: str, problem_type: str | None, names: Mapping[Any, str]) -> TaskMetric:
    """Return a metric that knows no labels.

    Args:
        names: of classes or tags, by number.
    """
    if head == HEAD_TOKENS:
        return TokensMetric([names[number] for number in sorted(names)])
    metrics: dict[str, TaskMetric] = {
        HEAD_SEQUENCE: SequenceMetric(sequence.REGRESSION if len(names) == 1 else problem_type),
        HEAD_SPANS: SpansMetric(),
        HEAD_EMBEDDING: EmbeddingMetric(),
        HEAD_MASKED: MaskedMetric(),
        HEAD_SPARSE: SparseMetric(),
        HEAD_VECTORS: VectorsMetric(),
        HEAD_HYBRID: HybridMetric(),
    }
    return metrics[head]


def _chosen(items: Sequence[Item], stays: np.ndarray) -> list[Item]:
    return [item for item, stay in zip(items, stays, strict=True) if stay]


def _stacked(rows: Sequence[Outputs], name: str) -> np.ndarray:
    return np.stack([row[name] for row in rows])
