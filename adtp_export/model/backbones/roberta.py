"""RoBERTa, XLM-RoBERTa, CamemBERT: BERT's layers, positions that begin after the padding id, and a classifier of two layers.

Source: Liu et al., RoBERTa (arXiv 1907.11692); Conneau et al., XLM-R (ACL 2020); Martin et al., CamemBERT (ACL 2020). Module names
are those of transformers' `RobertaForSequenceClassification`, which the others share.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import InputError
from ..predictions import Predictions
from .bert import Bert


class Roberta(Bert):
    """Positions are counted from `pad_token_id` + 1 on."""

    @classmethod
    def first_position(cls, config: Any) -> int:
        """Padding is on the right, so places in a text are what transformers counts, from this one on.

        It counts ids other than the padding's. A padding token typed inside a text would shift its count, and not this one.
        """
        return int(config.pad_token_id) + 1

    @classmethod
    def max_tokens(cls, config: Any) -> int:
        return int(config.max_position_embeddings) - cls.first_position(config)

    @classmethod
    def check(cls, config: Any) -> None:
        super().check(config)
        if config.pad_token_id is None:
            raise InputError("pad_token_id: got none; positions are counted from it, so a RoBERTa needs one")
        if cls.max_tokens(config) < cls.least["max_position_embeddings"]:
            raise InputError(
                f"max_position_embeddings: got {config.max_position_embeddings}; the first {cls.first_position(config)} "
                "are not used, so there is no room for a text"
            )

    @property
    def classifier(self) -> nn.Module:
        return TwoLayerClassifier(self.model.classifier)

    @property
    def predictions(self) -> Predictions:
        return of_language_head(self.model.lm_head)


def of_language_head(own: Any) -> Predictions:
    """Describe a masked-language head of RoBERTa's form: dense, GELU, norm, decoder."""
    return Predictions(nn.Sequential(own.dense, nn.GELU(), own.layer_norm), own.decoder)


class TwoLayerClassifier(nn.Module):
    """Dense, activation, projection, with dropout before both, on first states alone."""

    def __init__(self, own: Any, activation: Callable[[Tensor], Tensor] = torch.tanh) -> None:
        super().__init__()
        self.activation = activation
        self.dropout = own.dropout
        self.dense = own.dense
        self.out_proj = own.out_proj

    def forward(self, first: Tensor) -> Tensor:
        hidden = self.activation(self.dense(self.dropout(first)))
        result: Tensor = self.out_proj(self.dropout(hidden))
        return result
