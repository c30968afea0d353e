"""EuroBERT: Llama's layers, in which all tokens see each other, and classifiers of an encoder.

Source: Boizard et al., EuroBERT (arXiv 2503.05500); module names are those of transformers' `EuroBertForSequenceClassification`.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from ...errors import InputError, quoted
from ..predictions import Predictions
from .base import CAUSAL_FIELD
from .llama import Llama

POOLINGS = {"bos": "first", "mean": "mean", "late": "mean"}
"""What the configuration calls them; "late" classifies every token but for the last product, and takes the mean of that."""


class EuroBert(Llama):
    """Its classifiers read the first token, or the mean."""

    since = (5, 3)

    @classmethod
    def causal(cls, config: Any) -> bool:
        return False

    @classmethod
    def check(cls, config: Any) -> None:
        super().check(config)
        if getattr(config, CAUSAL_FIELD, False):
            raise InputError(f"{CAUSAL_FIELD}: got true; accepted are encoders, in which all tokens see each other")
        if config.classifier_pooling not in POOLINGS:
            raise InputError(
                f"classifier_pooling: got {quoted(config.classifier_pooling)}; accepted are {', '.join(POOLINGS)}"
            )

    @property
    def classifier_pooling(self) -> str:
        return POOLINGS[self.config.classifier_pooling]

    @property
    def before_pooling(self) -> nn.Module:
        late = self.config.classifier_pooling == "late"
        return nn.Sequential(self.model.dense, self.model.activation) if late else nn.Identity()

    @property
    def classifier(self) -> nn.Module:
        model = self.model
        late = self.config.classifier_pooling == "late"
        return model.classifier if late else nn.Sequential(model.dense, model.activation, model.classifier)

    @property
    def token_classifier(self) -> nn.Module:
        classifier: nn.Module = self.model.classifier
        return classifier

    @property
    def predictions(self) -> Predictions:
        return Predictions(nn.Identity(), self.model.lm_head)
