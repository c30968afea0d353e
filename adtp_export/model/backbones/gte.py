"""GTE, NomicBERT and jina-embeddings-v3: BERT's layers with rotary positions, in the first two with gated feed-forwards.

Source: Zhang et al., mGTE (EMNLP 2024); Nussbaum et al., Nomic Embed (arXiv 2402.01613); Sturua et al., jina-embeddings-v3 (arXiv
2409.10173). Module names are those of transformers' `GteForSequenceClassification`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor, nn

from ...errors import InputError, check_int
from ..flops import HEAD_DIM
from ..predictions import Predictions
from .base import AttentionParts, Backbone, FeedForwardParts, GatedPair
from .bert import PooledClassifier
from .distilbert import ResidualOutput
from .llama import FollowedDropout, check_rotations, on_cpu, rotary
from .roberta import TwoLayerClassifier, of_language_head

QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")


class Gte(Backbone):
    """`type_vocab_size: 0` is a model without token types."""

    gated = True
    least: ClassVar[Mapping[str, int]] = {**Backbone.least, "type_vocab_size": 0}
    since = (5, 18)
    position_types = ("absolute", "rope", "rotary")
    """transformers does not read the field, and keeps what a model's older configuration said."""
    renamed: ClassVar[Mapping[str, str]] = {
        "new.": "gte.",
        "encoder.layer.": "layers.",
        "attention.o_proj": "self_attn.o_proj",
        "attn_ln": "post_attention_layernorm",
        "mlp_ln": "post_mlp_layernorm",
        "lm_head.norm": "lm_head.layer_norm",
    }
    """Parts of names in files, and what transformers' modules have in their places."""
    joined: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "attention.qkv_proj": QKV,
        "mlp.up_gate_proj": ("mlp.up_proj", "mlp.gate_proj"),
    }
    """Modules that are one in files, and the modules that their rows belong to."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        own, config = self.model.base_model, self.config
        self._rotary = rotary(on_cpu(own.rotary_emb, config), self.max_tokens(config))
        self._embeddings = Embeddings(own.embeddings)
        self._outputs = [
            (
                ResidualOutput(x.self_attn.o_proj, x.post_attention_layernorm, x.post_attention_dropout),
                ResidualOutput(self._feed_forward(x.mlp)[1], x.post_mlp_layernorm, x.post_mlp_dropout),
            )
            for x in own.layers
        ]
        self._intermediates = [self._intermediate(x.mlp) for x in own.layers]
        self._dropouts = [FollowedDropout(config.attention_probs_dropout_prob, x.self_attn) for x in own.layers]

    def _feed_forward(self, mlp: Any) -> tuple[nn.Linear | tuple[nn.Linear, nn.Linear], nn.Linear]:
        """Return the Linear modules of a feed-forward: those before the activation, and the one behind it."""
        return (mlp.gate_proj, mlp.up_proj), mlp.down_proj

    def _intermediate(self, mlp: Any) -> nn.Module:
        return GatedPair(mlp.gate_proj, mlp.up_proj, mlp.act_fn, getattr(mlp, "dropout", None))

    @classmethod
    def stored(cls, weights: dict[str, Tensor], config: Any) -> dict[str, Tensor]:
        for old in list(weights):
            name = old
            for before, after in cls.renamed.items():
                name = name.replace(before, after)
            place = next((place for place in cls.joined if place in name), None)
            names = [name] if place is None else [name.replace(place, part) for part in cls.joined[place]]
            if names == [old] or any(each in weights for each in names) or not weights[old].ndim:
                continue
            weights |= zip(names, weights.pop(old).chunk(len(names)))
        return weights

    @classmethod
    def check(cls, config: Any) -> None:
        if (size := getattr(config, HEAD_DIM, None)) is not None:
            check_int(HEAD_DIM, size, 1)
        super().check(config)
        if (size := size or config.hidden_size // config.num_attention_heads) % 2:
            raise InputError(
                f"{HEAD_DIM}: got {size}; positions turn pairs of coordinates, so heads of an even size are accepted"
            )
        check_rotations([config.rope_parameters or {}])

    @property
    def embeddings(self) -> nn.Module:
        return self._embeddings

    def attention(self, i: int) -> AttentionParts:
        own = self.model.base_model.layers[i].self_attn
        return AttentionParts(
            projections=(own.q_proj, own.k_proj, own.v_proj),
            heads=self.config.num_attention_heads,
            scale=float(own.scaling),
            dropout=self._dropouts[i],
            output=self._outputs[i][0],
            dense=own.o_proj,
            rotate=self._rotary,
        )

    def feed_forward(self, i: int) -> FeedForwardParts:
        intermediate_dense, output_dense = self._feed_forward(self.model.base_model.layers[i].mlp)
        return FeedForwardParts(
            intermediate=self._intermediates[i],
            output=self._outputs[i][1],
            intermediate_dense=intermediate_dense,
            output_dense=output_dense,
        )

    @property
    def classifier(self) -> nn.Module:
        return PooledClassifier(self.model, self.model.base_model.pooler)

    @property
    def predictions(self) -> Predictions:
        return of_language_head(self.model.lm_head)


class NomicBert(Gte):
    """No biases."""

    least = Backbone.least
    since = (5, 5)
    renamed = {
        "encoder.layers.": "layers.",
        "emb_ln": "embeddings.LayerNorm",
        "attn.out_proj": "self_attn.o_proj",
        "mlp.fc11": "mlp.up_proj",
        "mlp.fc12": "mlp.gate_proj",
        "mlp.fc2": "mlp.down_proj",
        "norm1": "post_attention_layernorm",
        "norm2": "post_mlp_layernorm",
    }
    joined = {"attn.Wqkv": QKV}

    @property
    def predictions(self) -> Predictions:
        own = self.model.cls.predictions
        return Predictions(own.transform, own.decoder)


class JinaV3(Gte):
    """Its adapters are directories of their own, as PEFT writes them; they have to be merged."""

    gated = False
    least = Backbone.least
    since = (5, 4)
    renamed = {
        "encoder.layers.": "layers.",
        "emb_ln": "embeddings.LayerNorm",
        "mixer.out_proj": "self_attn.o_proj",
        "norm1": "post_attention_layernorm",
        "norm2": "post_mlp_layernorm",
    }
    joined = {"mixer.Wqkv": QKV}

    def _feed_forward(self, mlp: Any) -> tuple[nn.Linear | tuple[nn.Linear, nn.Linear], nn.Linear]:
        return mlp.fc1, mlp.fc2

    def _intermediate(self, mlp: Any) -> nn.Module:
        return nn.Sequential(OrderedDict(dense=mlp.fc1, activation=mlp.activation_fn))

    @property
    def classifier(self) -> nn.Module:
        return TwoLayerClassifier(self.model.classifier)


class Embeddings(nn.Module):
    """Sum of word and type rows, where there are types, normalized. Positions are not read."""

    def __init__(self, own: Any) -> None:
        super().__init__()
        self.word_embeddings = own.word_embeddings
        self.token_type_embeddings = own.token_type_embeddings
        self.LayerNorm = own.LayerNorm
        self.dropout = own.dropout

    def forward(self, ids: Tensor, types: Tensor, positions: Tensor) -> Tensor:
        x = self.word_embeddings(ids)
        if self.token_type_embeddings is not None:
            x = x + self.token_type_embeddings(types)
        result: Tensor = self.dropout(self.LayerNorm(x))
        return result
