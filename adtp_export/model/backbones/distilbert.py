"""DistilBERT: BERT's layers under other names, without token types and pooler.

Source: Sanh et al., DistilBERT (arXiv 1910.01108); module names are those of transformers' `DistilBertForSequenceClassification`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..predictions import Predictions
from .base import AttentionParts, Backbone, FeedForwardParts


class DistilBert(Backbone):
    """transformers has no modules for what ends a sublayer, so these are made here of its parts, once for each layer."""

    own_names = {
        "hidden_size": "dim",
        "num_attention_heads": "n_heads",
        "num_hidden_layers": "n_layers",
        "intermediate_size": "hidden_dim",
        "hidden_act": "activation",
    }
    fixed = {"type_vocab_size": 1, "layer_norm_eps": 1e-12}

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        layers = self.model.base_model.transformer.layer
        self._outputs = [ResidualOutput(layer.attention.out_lin, layer.sa_layer_norm) for layer in layers]
        self._intermediates = [Intermediate(layer.ffn) for layer in layers]
        self._ffn_outputs = [
            ResidualOutput(layer.ffn.lin2, layer.output_layer_norm, layer.ffn.dropout) for layer in layers
        ]

    @property
    def embeddings(self) -> nn.Module:
        return Embeddings(self.model.base_model.embeddings)

    def attention(self, i: int) -> AttentionParts:
        inner = self.model.base_model.transformer.layer[i].attention
        return AttentionParts(
            projections=(inner.q_lin, inner.k_lin, inner.v_lin),
            heads=inner.n_heads,
            scale=float(inner.attention_head_size**-0.5),
            dropout=inner.dropout,
            output=self._outputs[i],
            dense=inner.out_lin,
        )

    def set_heads(self, i: int, heads: int, width: int) -> None:
        inner = self.model.base_model.transformer.layer[i].attention
        inner.n_heads, inner.dim = heads, width

    def feed_forward(self, i: int) -> FeedForwardParts:
        inner = self.model.base_model.transformer.layer[i].ffn
        return FeedForwardParts(
            intermediate=self._intermediates[i],
            output=self._ffn_outputs[i],
            intermediate_dense=inner.lin1,
            output_dense=inner.lin2,
        )

    @property
    def classifier(self) -> nn.Module:
        return FirstTokenClassifier(self.model)

    @property
    def predictions(self) -> Predictions:
        own = self.model
        return Predictions(
            nn.Sequential(own.vocab_transform, own.activation, own.vocab_layer_norm), own.vocab_projector
        )

    @property
    def span_classifier(self) -> nn.Module:
        return nn.Sequential(self.model.dropout, self.model.qa_outputs)


class Embeddings(nn.Module):
    """Sum of word and position rows, normalized: transformers' modules, without its batch dimension. Types are not read."""

    def __init__(self, own: Any) -> None:
        super().__init__()
        self.word_embeddings = own.word_embeddings
        self.position_embeddings = own.position_embeddings
        self.LayerNorm = own.LayerNorm
        self.dropout = own.dropout

    def forward(self, ids: Tensor, types: Tensor, positions: Tensor) -> Tensor:
        x = self.word_embeddings(ids) + self.position_embeddings(positions)
        result: Tensor = self.dropout(self.LayerNorm(x))
        return result


class ResidualOutput(nn.Module):
    """Projection, residual and norm, which end a sublayer."""

    def __init__(self, dense: nn.Linear, norm: nn.LayerNorm, dropout: nn.Module | None = None) -> None:
        super().__init__()
        self.dense = dense
        self.LayerNorm = norm
        self.dropout = dropout or nn.Identity()

    def forward(self, inner: Tensor, x: Tensor) -> Tensor:
        result: Tensor = self.LayerNorm(self.dropout(self.dense(inner)) + x)
        return result


class Intermediate(nn.Module):
    """The first half of a feed-forward."""

    def __init__(self, own: Any) -> None:
        super().__init__()
        self.dense = own.lin1
        self.activation = own.activation

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.activation(self.dense(x))
        return result


class FirstTokenClassifier(nn.Module):
    """Dense, ReLU, dropout and projection, on first states alone."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.pre_classifier = model.pre_classifier
        self.dropout = model.dropout
        self.classifier = model.classifier

    def forward(self, first: Tensor) -> Tensor:
        result: Tensor = self.classifier(self.dropout(torch.relu(self.pre_classifier(first))))
        return result
