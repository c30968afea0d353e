"""MPNet: BERT's layers under other names, and one bias of attention by distance for all of them. No token types, no pooler.

Source: Song et al., MPNet (NeurIPS 2020); module names are those of transformers' `MPNetForSequenceClassification`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ...errors import InputError
from ..positions import DistanceBias
from ..predictions import Predictions
from . import distilbert
from .base import AttentionParts, Backbone, FeedForwardParts
from .distilbert import ResidualOutput
from .roberta import TwoLayerClassifier, of_language_head

PADDING = 1
"""The id that transformers' MPNet takes for padding, whatever `pad_token_id` is."""
FIRST_POSITION = PADDING + 1
"""Row of the position table that the first token has."""
BUCKETS = 32
"""transformers reads so many of the bias table, whatever `relative_attention_num_buckets` is."""


class MPNet(Backbone):
    """transformers has no module for what ends attention, so one is made here of its parts for each layer."""

    fixed = {"type_vocab_size": 1}

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        encoder = self.model.base_model.encoder
        reach = self.max_tokens(self.config)
        with torch.device("cpu"):  # transformers makes models without weights, and this is none
            buckets = encoder.relative_position_bucket(torch.arange(1 - reach, reach), num_buckets=BUCKETS)
        self._bias = DistanceBias(encoder.relative_attention_bias, buckets)
        self._outputs = [
            ResidualOutput(layer.attention.attn.o, layer.attention.LayerNorm, layer.attention.dropout)
            for layer in encoder.layer
        ]

    @classmethod
    def first_position(cls, config: Any) -> int:
        return FIRST_POSITION

    @classmethod
    def max_tokens(cls, config: Any) -> int:
        return int(config.max_position_embeddings) - FIRST_POSITION

    @classmethod
    def check(cls, config: Any) -> None:
        super().check(config)
        if config.pad_token_id != PADDING:
            raise InputError(
                f"pad_token_id: got {config.pad_token_id}; accepted is {PADDING}, the id that transformers' MPNet takes for padding"
            )
        if cls.max_tokens(config) < cls.least["max_position_embeddings"]:
            raise InputError(
                f"max_position_embeddings: got {config.max_position_embeddings}; the first {FIRST_POSITION} are not used, so there "
                "is no room for a text"
            )
        if config.relative_attention_num_buckets < BUCKETS:
            raise InputError(
                f"relative_attention_num_buckets: got {config.relative_attention_num_buckets}; accepted are at least {BUCKETS}, "
                "which transformers reads"
            )

    @property
    def embeddings(self) -> nn.Module:
        return Embeddings(self.model.base_model.embeddings)

    def attention(self, i: int) -> AttentionParts:
        inner = self.model.base_model.encoder.layer[i].attention.attn
        return AttentionParts(
            projections=(inner.q, inner.k, inner.v),
            heads=inner.num_attention_heads,
            scale=float(inner.attention_head_size**-0.5),
            dropout=inner.dropout,
            output=self._outputs[i],
            dense=inner.o,
            bias=self._bias,
        )

    def feed_forward(self, i: int) -> FeedForwardParts:
        layer = self.model.base_model.encoder.layer[i]
        return FeedForwardParts(
            intermediate=layer.intermediate,
            output=layer.output,
            intermediate_dense=layer.intermediate.dense,
            output_dense=layer.output.dense,
        )

    @property
    def classifier(self) -> nn.Module:
        return TwoLayerClassifier(self.model.classifier)

    @property
    def predictions(self) -> Predictions:
        return of_language_head(self.model.lm_head)


class Embeddings(distilbert.Embeddings):
    """Sum of word and position rows, normalized."""

    def forward(self, ids: Tensor, types: Tensor, positions: Tensor) -> Tensor:
        return super().forward(ids, types, positions + FIRST_POSITION)
