"""One vector per text: the student learns the vectors of its teacher, from texts alone or from pairs with scores to judge it by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity

from ...contract import ATTENTION_MASK, HEAD_EMBEDDING, INPUT_IDS, TOKEN_TYPE_IDS
from ...data.readers import read_rows
from ...data.rows import ONE_TEXT
from ...data.tokenize import encode
from ...errors import InputError
from ...inference.answers.sequence import spearman
from ...model.heads.embedding import PackedEmbedding, PrunedEncoderForEmbedding, finished, pooled
from ...model.packed import PackedStudent
from ..data import Examples, Labels, Table, known_inputs
from ..settings import TrainOptions
from . import Batch, Objective, Reader

MIN_TEXTS = 3
MAX_COMPARED = 1000
"""Texts of which all pairs are compared where there are no scores."""


@dataclass(kw_only=True)
class TextExamples(Examples):
    """Texts. labels: the scores of pairs, which are the rows 2i and 2i + 1; empty where there are none. Training reads none."""

    def collate_labels(self, numbers: Sequence[int]) -> dict[str, Tensor]:
        return {}


class EmbeddingObjective(Objective):
    """Distillation of vectors; their length is left free, because they are compared by their cosine.

    The squared error of vectors would ask for their length, too. It says the same where they have length 1.
    """

    head = HEAD_EMBEDDING
    labelled = False

    def read(self, path: Path, settings: TrainOptions) -> Table:
        texts = [text for text, _ in read_rows(path, settings.text_column)]
        if isinstance(texts[0], str):
            elsewhere = settings.dev or settings.test  # which may have pairs
            if settings.label_column != TrainOptions.label_column and not elsewhere:
                raise InputError(ONE_TEXT)
            return Table(path.name, texts, [0.0] * len(texts))
        return Table(
            path.name, texts, [label for _, label in read_rows(path, settings.text_column, settings.label_column)]
        )

    def labels(self, table: Table, settings: TrainOptions) -> Labels:
        return Labels(())

    def examples(self, table: Table, labels: Labels, reader: Reader) -> Examples:
        paired = not isinstance(table.texts[0], str)
        if len(table) < MIN_TEXTS:
            raise InputError(f"{table.source}: {len(table)} rows; a correlation takes at least {MIN_TEXTS}")
        texts = [text for pair in table.texts for text in pair] if paired else table.texts
        prompted = [reader.prompt + text for text in texts]
        encoded = encode(reader.tokenizer.backend_tokenizer, prompted, reader.max_tokens)
        inputs = known_inputs(encoded, reader.config, table.source)
        scores = labels.encode(table) if paired else []
        return TextExamples(
            encoded=encoded, labels=scores, pad_id=int(reader.tokenizer.pad_token_id or 0), inputs=inputs
        )

    def kind(self, labels: Labels) -> str:
        return "embedding"

    def prepare(self, packed: PackedStudent) -> PackedStudent:
        """Leave normalization out: `score` needs the vector's length, and nothing else here looks at it."""
        assert isinstance(packed.head, PackedEmbedding)
        packed.head.settings = packed.head.settings._replace(normalize=False)
        return packed

    def ask(self, model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
        assert isinstance(model, PrunedEncoderForEmbedding)
        states, kept, _ = model.encode(inputs[INPUT_IDS], inputs[ATTENTION_MASK], inputs.get(TOKEN_TYPE_IDS))
        return finished(pooled(states, kept >= 0, model.settings.pooling), model.projections, normalize=False)

    def label_loss(self, answer: Tensor, batch: Batch) -> Tensor | None:
        return None

    def logit_loss(self, answer: Tensor, teacher: Tensor, batch: Batch, temperature: float) -> Tensor:
        """One minus the cosine to the teacher's vector, between 0 and 2."""
        return (1 - cosine_similarity(answer, teacher)).mean()

    def score(self, answer: Tensor, whole: Tensor, batch: Batch) -> Tensor:
        """Return how far the vector, before normalization, goes in the direction of the one that is explained.

        The cosine itself would not do: where a vector is explained by itself it is 1 and its gradient is zero.
        """
        return (answer * nn.functional.normalize(whole.detach(), dim=1)).sum(1)

    def quality(self, answers: Sequence[Tensor], examples: Examples) -> dict[str, float]:
        """Return "spearman", of the cosines of pairs with their scores, or of all pairs with the teacher's cosines; and "cosine",
        the mean to the teacher's own vectors. A teacher that is judged is compared with itself.
        """
        vectors = torch.stack(list(answers))
        known = examples.teacher_logits
        theirs = vectors if known is None else torch.stack(list(known))
        mean = cosine_similarity(vectors, theirs).mean().item()
        if examples.labels:
            cosines, truth = cosine_similarity(vectors[::2], vectors[1::2]), np.asarray(examples.labels)
        else:
            chosen = slice(None, None, -(-len(vectors) // MAX_COMPARED))
            cosines, truth = _cosines(vectors[chosen]), _cosines(theirs[chosen]).numpy()
        return {"spearman": spearman(cosines.numpy(), truth), "cosine": mean}

    def row_scores(self, answers: Sequence[Tensor], examples: Examples) -> np.ndarray:
        """The cosine of each text's vector to its teacher's."""
        assert examples.teacher_logits is not None
        theirs = torch.stack(list(examples.teacher_logits))
        return cosine_similarity(torch.stack(list(answers)), theirs).double().numpy()

    def main_score(self, figures: Mapping[str, float]) -> float:
        return figures["spearman"]


def _cosines(vectors: Tensor) -> Tensor:
    """Cosines of all pairs of vectors ``(n, D)``, each pair once."""
    unit = nn.functional.normalize(vectors.double(), dim=1)
    first, second = torch.triu_indices(len(unit), len(unit), 1)
    return (unit @ unit.T)[first, second]
