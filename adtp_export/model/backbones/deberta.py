"""DeBERTa-v2 and v3, which transformers calls deberta-v2: BERT's layers, with disentangled attention.

Source: He et al., DeBERTa (ICLR 2021) and DeBERTaV3 (ICLR 2023); module names are those of transformers'
`DebertaV2ForSequenceClassification`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.models.deberta_v2.modeling_deberta_v2 import make_log_bucket_position, scaled_size_sqrt

from ...errors import InputError, check_int, quoted
from ..flops import DISTANCES
from ..positions import Buckets, DistanceProducts
from ..predictions import Predictions
from .base import AttentionParts, Backbone
from .bert import Bert

TO_KEYS, TO_QUERIES = "c2p", "p2c"
"""Terms of a score: the query with the distance, and the key with it."""
FARTHEST = 2**20
"""Distances between tokens are below it."""


class Deberta(Bert):
    """Tables of distances are made of each layer's weights: constants of an exported model."""

    least: ClassVar[Mapping[str, int]] = {**Backbone.least, "type_vocab_size": 0}

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self._distances: list[DistanceProducts | None] = [None] * self.num_layers
        if not terms(self.config):
            return
        encoder = self.encoder.encoder
        buckets = Buckets(buckets_of(*sizes(self.config)))
        for i, layer in enumerate(encoder.layer):
            inner = layer.attention.self
            shared = inner.share_att_key
            keys = (inner.key_proj if shared else inner.pos_key_proj) if TO_KEYS in terms(self.config) else None
            queries = (
                (inner.query_proj if shared else inner.pos_query_proj) if TO_QUERIES in terms(self.config) else None
            )
            self._distances[i] = DistanceProducts(
                RelativeEmbeddings(encoder), keys, queries, inner.num_attention_heads, buckets, inner.pos_dropout
            )

    @classmethod
    def check(cls, config: Any) -> None:
        super().check(config)
        width = config.hidden_size
        if (kernel := getattr(config, "conv_kernel_size", 0)) > 0:
            raise InputError(
                f"conv_kernel_size: got {quoted(kernel)}, a convolution beside the first layer; accepted are models without one, such as "
                "DeBERTa-v3's"
            )
        check_int("embedding_size", getattr(config, "embedding_size", width), 1)
        own = {
            "attention_head_size": width // config.num_attention_heads,
            "pooler_hidden_size": width,
        }
        for name, accepted in own.items():
            if (given := getattr(config, name, accepted)) != accepted:
                raise InputError(
                    f"{name}: got {quoted(given)}; accepted is {accepted}, which hidden_size {width} and num_attention_heads "
                    f"{config.num_attention_heads} give"
                )
        if not terms(config):
            return
        buckets, farthest = sizes(config)
        if buckets > 0 and not 1 < buckets // 2 < farthest - 1:
            raise InputError(
                f"position_buckets: got {buckets}, with distances up to {farthest}; accepted are 4 or more whose half is less than "
                "max_relative_positions - 1, or -1 for no buckets"
            )

    @classmethod
    def fields(cls, config: Any) -> dict[str, Any]:
        buckets, farthest = sizes(config)
        columns = 2 * (buckets if buckets > 0 else farthest) * len(terms(config))
        return {**super().fields(config), **({DISTANCES: columns} if columns else {})}

    @classmethod
    def stored(cls, weights: dict[str, Tensor], config: Any) -> dict[str, Tensor]:
        """Leave out positions that pretraining left in a file; transformers passes over them, too."""
        if not getattr(config, "position_biased_input", True):
            for name in [name for name in weights if name.endswith("embeddings.position_embeddings.weight")]:
                del weights[name]
        return weights

    @classmethod
    def precompute_obstacle(cls, config: Any) -> str | None:
        narrow, wide = getattr(config, "embedding_size", config.hidden_size), config.hidden_size
        return None if narrow == wide else f"embeddings of {narrow} are projected to {wide} before the first layer"

    @property
    def embeddings(self) -> nn.Module:
        return Embeddings(self.encoder.embeddings)

    def attention(self, i: int) -> AttentionParts:
        layer = self.encoder.encoder.layer[i].attention
        inner = layer.self
        return AttentionParts(
            projections=(inner.query_proj, inner.key_proj, inner.value_proj),
            heads=inner.num_attention_heads,
            scale=scale(self.config),
            dropout=inner.dropout,
            output=layer.output,
            dense=layer.output.dense,
            distances=self._distances[i],
        )

    set_heads = Backbone.set_heads  # which refuses that

    @property
    def classifier(self) -> nn.Module:
        return PooledClassifier(self.model)

    @property
    def predictions(self) -> Predictions:
        if not getattr(self.config, "legacy", True):
            raise InputError(
                "legacy: got false; accepted are masked-language heads with a product of their own: legacy is true"
            )
        return super().predictions


def scale(config: Any) -> float:
    """Return the factor on the sum of all products of a score. transformers divides by a root in fp32, whatever the dtype."""
    factor = 1 + sum(kind in (config.pos_att_type or []) for kind in (TO_KEYS, TO_QUERIES))
    with torch.device("cpu"):  # transformers makes models without weights, and this is none
        return 1 / float(scaled_size_sqrt(torch.empty(config.hidden_size // config.num_attention_heads), factor))


def terms(config: Any) -> list[str]:
    """Name the products with distances that scores have."""
    kinds = config.pos_att_type or []
    return [kind for kind in (TO_KEYS, TO_QUERIES) if config.relative_attention and kind in kinds]


def sizes(config: Any) -> tuple[int, int]:
    """Return how many buckets there are, -1 where each distance has its own, and the farthest distance that is told from others."""
    farthest = getattr(config, "max_relative_positions", -1)
    buckets = getattr(config, "position_buckets", -1)
    return buckets, farthest if farthest >= 1 else config.max_position_embeddings


def buckets_of(buckets: int, farthest: int) -> Tensor:
    """Return the row of the relative embeddings for each distance from key to query, ``(2P-1,) int32``, as transformers computes it.

    From P - 1 on, rows are the same.
    """
    span = buckets if buckets > 0 else farthest
    reach = min(2 * span, FARTHEST)  # `farthest` is a number of any size, where there are buckets
    while True:
        with torch.device("cpu"):
            distances = torch.arange(-reach, reach + 1)
            numbers = make_log_bucket_position(distances, buckets, farthest).long() if buckets > 0 else distances
        rows = (numbers + span).clamp(0, 2 * span - 1)
        if (rows[0] == 0 and rows[-1] == 2 * span - 1) or reach >= FARTHEST:
            break
        reach *= 4
    ends = ((rows != rows[0]).nonzero()[0], len(rows) - 1 - (rows != rows[-1]).nonzero()[-1])
    cut = int(min(*ends)) - 1
    return rows[cut : len(rows) - cut].int()


class RelativeEmbeddings(nn.Module):
    """The embedding of each bucket, ``(R, H)``."""

    def __init__(self, encoder: Any) -> None:
        super().__init__()
        self.rel_embeddings = encoder.rel_embeddings
        self.LayerNorm = encoder.LayerNorm if "layer_norm" in encoder.norm_rel_ebd else nn.Identity()

    def forward(self) -> Tensor:
        result: Tensor = self.LayerNorm(self.rel_embeddings.weight)
        return result


class Embeddings(nn.Module):
    """Sum of word, position and type rows, as far as there are any, projected where they are not as wide as the layers, normalized."""

    def __init__(self, own: Any) -> None:
        super().__init__()
        self.word_embeddings = own.word_embeddings
        self.position_embeddings = own.position_embeddings
        self.token_type_embeddings = own.token_type_embeddings
        self.embed_proj = getattr(own, "embed_proj", None) or nn.Identity()
        self.LayerNorm = own.LayerNorm
        self.dropout = own.dropout

    def forward(self, ids: Tensor, types: Tensor, positions: Tensor) -> Tensor:
        x = self.word_embeddings(ids)
        if self.position_embeddings is not None:
            x = x + self.position_embeddings(positions)
        if self.token_type_embeddings is not None:
            x = x + self.token_type_embeddings(types)
        result: Tensor = self.dropout(self.LayerNorm(self.embed_proj(x)))
        return result


class PooledClassifier(nn.Module):
    """transformers' `ContextPooler`, dropout and classifier, on first states alone."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.before, self.dense = model.pooler.dropout, model.pooler.dense
        self.activation = ACT2FN[model.config.pooler_hidden_act]
        self.dropout = model.dropout
        self.classifier = model.classifier

    def forward(self, first: Tensor) -> Tensor:
        pooled = self.activation(self.dense(self.before(first)))
        result: Tensor = self.classifier(self.dropout(pooled))
        return result
