"""BERT, and what shares its modules: MiniLM, TinyBERT, BGE, E5 and GTE (those of `model_type` bert).

Source: Devlin et al., BERT (NAACL 2019); module names are those of transformers' `BertForSequenceClassification`.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ..predictions import Predictions
from .base import AttentionParts, Backbone, FeedForwardParts


class Bert(Backbone):
    """A relative changes `encoder`, `first_position` or `classifier`."""

    @property
    def encoder(self) -> Any:
        """The module that has `embeddings` and `encoder.layer`: inside a model with a head, or all of one without."""
        return self.model.base_model

    @property
    def embeddings(self) -> nn.Module:
        return Embeddings(self.encoder.embeddings, self.first_position(self.config))

    @classmethod
    def first_position(cls, config: Any) -> int:
        """Row of the position table that the first token of a text has."""
        return 0

    def attention(self, i: int) -> AttentionParts:
        layer = self.encoder.encoder.layer[i].attention
        inner = layer.self
        return AttentionParts(
            projections=(inner.query, inner.key, inner.value),
            heads=inner.num_attention_heads,
            scale=float(inner.attention_head_size**-0.5),
            dropout=inner.dropout,
            output=layer.output,
            dense=layer.output.dense,
        )

    def set_heads(self, i: int, heads: int, width: int) -> None:
        inner = self.encoder.encoder.layer[i].attention.self
        inner.num_attention_heads, inner.all_head_size = heads, width

    def feed_forward(self, i: int) -> FeedForwardParts:
        layer = self.encoder.encoder.layer[i]
        return FeedForwardParts(
            intermediate=layer.intermediate,
            output=layer.output,
            intermediate_dense=layer.intermediate.dense,
            output_dense=layer.output.dense,
        )

    @property
    def classifier(self) -> nn.Module:
        return PooledClassifier(self.model)

    @property
    def predictions(self) -> Predictions:
        own = self.model.cls.predictions
        return Predictions(own.transform, own.decoder)


class Embeddings(nn.Module):
    """Sum of word, type and position rows, normalized: transformers' modules, without its batch dimension."""

    def __init__(self, own: Any, first_position: int) -> None:
        super().__init__()
        self.word_embeddings = own.word_embeddings
        self.token_type_embeddings = own.token_type_embeddings
        self.position_embeddings = own.position_embeddings
        self.LayerNorm = own.LayerNorm
        self.dropout = own.dropout
        self.first_position = first_position

    def forward(self, ids: Tensor, types: Tensor, positions: Tensor) -> Tensor:
        if self.first_position:
            positions = positions + self.first_position
        x = self.word_embeddings(ids) + self.token_type_embeddings(types)
        result: Tensor = self.dropout(self.LayerNorm(x + self.position_embeddings(positions)))
        return result


class PooledClassifier(nn.Module):
    """Pooler, dropout and classifier, on first states alone."""

    def __init__(self, model: Any, pooler: nn.Module | None = None) -> None:
        super().__init__()
        self.pooler: Any = pooler or model.bert.pooler
        self.dropout = model.dropout
        self.classifier = model.classifier

    def forward(self, first: Tensor) -> Tensor:
        pooled = self.pooler.activation(self.pooler.dense(first))
        result: Tensor = self.classifier(self.dropout(pooled))
        return result
