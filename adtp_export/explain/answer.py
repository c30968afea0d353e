"""What is explained of an answer, head by head: the number whose gradients are taken, and the tokens that the answer is read off."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ..contract import (
    END_LOGITS,
    HEAD_EMBEDDING,
    HEAD_HYBRID,
    HEAD_SEQUENCE,
    HEAD_SPANS,
    HEAD_SPARSE,
    HEAD_TOKENS,
    HEAD_VECTORS,
    START_LOGITS,
)
from ..inference.answers.sequence import MULTI_LABEL, REGRESSION
from ..inference.answers.spans import told
from ..model.encoder import PrunedEncoder
from ..model.heads import pooled
from ..model.heads.embedding import PrunedEncoderForEmbedding, finished
from ..model.heads.sparse import PrunedEncoderForSparse
from ..model.heads.vectors import PrunedEncoderForVectors
from ..model.predictions import MAX
from .gradients import answer_score


class Explained(NamedTuple):
    """score: of what transformers' own forward gives for the text, F ``(1,)``. ends: tokens that the answer is read off."""

    score: Callable[[Any], Tensor]
    ends: Sequence[int]


def explained(student: PrunedEncoder, said: Any, asked: np.ndarray) -> Explained:
    """Say what is to be explained of the student's own answer to one text.

    Args:
        said: the student's output for a batch of one text of n tokens, without padding.
        asked: ``(n,) bool``, tokens that may answer: of a question the context, of tags those that are no special token.
    """
    return _EXPLAINED[student.config.head](student, said, asked)


def _class(student: PrunedEncoder, said: Any, asked: np.ndarray) -> Explained:
    """Log odds of the class against all others; the sum over all labels where several may hold; numbers as they are, summed."""
    one = [0] if student.reads_first else [len(asked) - 1]
    ends = one if student.reads_first or student.reads_last else range(len(asked))
    if student.config.problem_type == MULTI_LABEL:
        signs = said.logits.sign()
        return Explained(lambda output: (output.logits * signs).sum(1), ends)
    if student.config.problem_type == REGRESSION:
        return Explained(lambda output: output.logits.sum(1), ends)
    classes = said.logits.argmax(1)
    return Explained(lambda output: answer_score(output.logits, classes), ends)


def _tags(student: PrunedEncoder, said: Any, asked: np.ndarray) -> Explained:
    """Sum of the log odds of all tags."""
    places = np.flatnonzero(asked) if asked.any() else np.arange(len(asked))
    tags = said.logits[0, places].argmax(1)
    return Explained(lambda output: answer_score(output.logits[0, places], tags).sum(0, keepdim=True), places.tolist())


def _span(student: PrunedEncoder, said: Any, asked: np.ndarray) -> Explained:
    """Log odds of the best span's start and of its end, each against all other tokens; of the first token where there is none."""
    first, last = (said[name][0].numpy() for name in (START_LOGITS, END_LOGITS))
    start, end = told(first, last, asked, student.windows.max_answer_tokens) or (0, 0)
    places = ((START_LOGITS, start), (END_LOGITS, end))
    return Explained(
        lambda output: torch.stack([answer_score(output[name], torch.tensor([i])) for name, i in places]).sum(0),
        sorted({start, end}),
    )


def _vector(student: PrunedEncoder, said: Any, asked: np.ndarray) -> Explained:
    """How far the vector, before normalization, goes in its own direction; its cosine with itself would have no gradient."""
    assert isinstance(student, PrunedEncoderForEmbedding)
    pooling, projections = student.settings.pooling, student.projections
    live = torch.ones(1, len(asked), dtype=torch.bool)
    direction = nn.functional.normalize(said.sentence_embedding, dim=1)

    def score(output: Any) -> Tensor:
        vector = finished(pooled(output.last_hidden_state, live, pooling), projections, normalize=False)
        return (vector * direction).sum(1)

    ends = {"first": [0], "last": [len(asked) - 1]}.get(pooling, range(len(asked)))
    return Explained(score, ends)


def _token_vectors(student: PrunedEncoder, said: Any, asked: np.ndarray) -> Explained:
    """How far the vectors, before normalization, go in their own directions, in sum."""
    assert isinstance(student, PrunedEncoderForVectors)
    direction = said.token_embeddings[0]
    places = torch.nonzero(direction.any(1)).flatten().tolist()

    def score(output: Any) -> Tensor:
        vectors = finished(output.last_hidden_state[0], student.projections, normalize=False)
        return (vectors * direction).sum().reshape(1)

    return Explained(score, places)


def _weights(student: PrunedEncoder, said: Any, asked: np.ndarray) -> Explained:
    """How far the sparse vector goes in its own direction."""
    assert isinstance(student, PrunedEncoderForSparse)
    settings, direction = student.settings, nn.functional.normalize(said.sparse_embedding, dim=1)

    def score(output: Any) -> Tensor:
        weights = settings.activate(output.logits)
        return ((weights.amax(1) if settings.pooling == MAX else weights.sum(1)) * direction).sum(1)

    return Explained(score, range(len(asked)))


_EXPLAINED: dict[str, Callable[[PrunedEncoder, Any, np.ndarray], Explained]] = {
    HEAD_SEQUENCE: _class,
    HEAD_TOKENS: _tags,
    HEAD_SPANS: _span,
    HEAD_EMBEDDING: _vector,
    HEAD_SPARSE: _weights,
    HEAD_VECTORS: _token_vectors,
    HEAD_HYBRID: _vector,
}
