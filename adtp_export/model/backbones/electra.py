"""ELECTRA's discriminator: BERT's layers, embeddings that may be narrower than the layers, and a classifier of two layers.

Source: Clark et al., ELECTRA (ICLR 2020); module names are those of transformers' `ElectraForSequenceClassification`. Its head does
not read the configuration's fields `summary_...`, which are of another head.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ...errors import check_int
from ..predictions import Predictions
from .bert import Bert
from .roberta import TwoLayerClassifier


class Electra(Bert):
    """Where `embedding_size` is not `hidden_size`, a projection follows the embeddings."""

    @classmethod
    def check(cls, config: Any) -> None:
        super().check(config)
        check_int("embedding_size", config.embedding_size, 1)

    @classmethod
    def precompute_obstacle(cls, config: Any) -> str | None:
        narrow, wide = config.embedding_size, config.hidden_size
        return None if narrow == wide else f"embeddings of {narrow} are projected to {wide} before the first layer"

    @property
    def embeddings(self) -> nn.Module:
        own = super().embeddings
        projection = getattr(self.encoder, "embeddings_project", None)
        return own if projection is None else ProjectedEmbeddings(own, projection)

    @property
    def classifier(self) -> nn.Module:
        return TwoLayerClassifier(self.model.classifier, nn.functional.gelu)

    @property
    def predictions(self) -> Predictions:
        return Predictions(self.model.generator_predictions, self.model.generator_lm_head)


class ProjectedEmbeddings(nn.Module):
    """Embeddings, projected to the width of the layers."""

    def __init__(self, own: nn.Module, projection: nn.Linear) -> None:
        super().__init__()
        self.own = own
        self.embeddings_project = projection

    def forward(self, ids: Tensor, types: Tensor, positions: Tensor) -> Tensor:
        result: Tensor = self.embeddings_project(self.own(ids, types, positions))
        return result
