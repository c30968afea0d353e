"""ModernBERT: norms before the sublayers, rotary positions, gated feed-forwards, and layers that see a window of the text.

Source: Warner et al., ModernBERT (arXiv 2412.13663); module names are those of transformers' `ModernBertForSequenceClassification`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import transformers
from torch import Tensor, nn

from ...errors import InputError, check_int, quoted
from ..positions import Rotary, frequencies
from ..predictions import Predictions
from .base import AttentionParts, Backbone, FeedForwardParts, Residual

GLOBAL, LOCAL = "full_attention", "sliding_attention"
"""Kinds of layers, as transformers 5 calls them."""
PERIOD, THETAS = "global_attn_every_n_layers", {GLOBAL: "global_rope_theta", LOCAL: "local_rope_theta"}
"""What transformers 4 has in place of `layer_types` and `rope_parameters`."""
TRANSFORMERS_4 = int(transformers.__version__.partition(".")[0]) < 5


class ModernBert(Backbone):
    """transformers 4 and 5 differ in the fields that say which layers are local, and by which angles positions turn."""

    own_names = {"hidden_act": "hidden_activation", "layer_norm_eps": "norm_eps"}
    fixed = {"type_vocab_size": 1}
    gated = True

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        config, layers = self.config, self.model.base_model.layers
        head_size = config.hidden_size // config.num_attention_heads
        self._kinds = layer_kinds(config)
        self._rotary = {
            kind: Rotary(frequencies(theta(config, kind), head_size), self.max_tokens(config), rounds=True)
            for kind in sorted(set(self._kinds))
        }
        self._outputs = [Residual(layer.attn.Wo, layer.attn.out_drop) for layer in layers]
        self._intermediates = [GatedIntermediate(layer.mlp) for layer in layers]
        self._ffn_outputs = [Residual(layer.mlp.Wo) for layer in layers]

    @classmethod
    def readable(cls, stored: Mapping[str, Any]) -> dict[str, Any]:
        """Add what transformers 4 knows to what transformers 5 writes. transformers 5 reads both."""
        fields = dict(stored)
        if isinstance(kinds := stored.get("layer_types"), list):
            fields.pop(PERIOD, None)
            fields |= {PERIOD: every} if (every := period(kinds)) else {}
        if isinstance(parameters := stored.get("rope_parameters"), Mapping):
            for kind, name in THETAS.items():
                if isinstance(own := parameters.get(kind), Mapping) and "rope_theta" in own:
                    fields[name] = own["rope_theta"]
        return fields

    @classmethod
    def windows(cls, config: Any) -> list[int]:
        check_int("local_attention", config.local_attention, 2)
        return [config.local_attention // 2 if kind == LOCAL else 0 for kind in layer_kinds(config)]

    @classmethod
    def check(cls, config: Any) -> None:
        super().check(config)
        if config.hidden_size // config.num_attention_heads % 2:
            raise InputError(
                f"num_attention_heads: got {config.num_attention_heads} for a hidden_size of {config.hidden_size}; positions turn "
                "pairs of coordinates, so heads of an even size are accepted"
            )
        if config.classifier_pooling not in ("cls", "mean"):
            raise InputError(
                f"classifier_pooling: got {quoted(config.classifier_pooling)}; accepted are 'cls' and 'mean'"
            )
        if TRANSFORMERS_4 and getattr(config, "layer_types", None) is not None:
            cls._check_older(config)
        for kind in set(layer_kinds(config)):
            if (form := rotation(config, kind).get("rope_type", "default")) != "default":
                raise InputError(f"rope_parameters: got the rope_type {quoted(form)}; accepted is 'default'")

    @classmethod
    def _check_older(cls, config: Any) -> None:
        """Raises InputError where transformers 4 would make another model of fields that transformers 5 wrote."""
        kinds, every = layer_kinds(config), config.global_attn_every_n_layers
        if kinds != [LOCAL if i % every else GLOBAL for i in range(len(kinds))] or any(
            theta(config, kind) != getattr(config, THETAS[kind]) for kind in set(kinds)
        ):
            raise InputError(
                f"layer_types, rope_parameters: got {quoted(kinds)}; transformers 4 reads {PERIOD} and {', '.join(THETAS.values())}, which "
                "say something else; type: pip install 'transformers>=5'"
            )

    @property
    def embeddings(self) -> nn.Module:
        return Embeddings(self.model.base_model.embeddings)

    def attention(self, i: int) -> AttentionParts:
        layer, kind = self.model.base_model.layers[i], self._kinds[i]
        return AttentionParts(
            before=layer.attn_norm,
            projections=(layer.attn.Wqkv,),
            heads=self.config.num_attention_heads,
            scale=float(layer.attn.head_dim**-0.5),
            dropout=layer.attn.out_drop,  # of probabilities, too: transformers has one rate for both
            output=self._outputs[i],
            dense=layer.attn.Wo,
            rotate=self._rotary[kind],
            window=(self.config.local_attention // 2,) * 2 if kind == LOCAL else (-1, -1),
        )

    def feed_forward(self, i: int) -> FeedForwardParts:
        layer = self.model.base_model.layers[i]
        return FeedForwardParts(
            before=layer.mlp_norm,
            intermediate=self._intermediates[i],
            output=self._ffn_outputs[i],
            intermediate_dense=layer.mlp.Wi,
            output_dense=layer.mlp.Wo,
        )

    @property
    def finish(self) -> nn.Module:
        final: nn.Module = self.model.base_model.final_norm
        return final

    @property
    def classifier_pooling(self) -> str:
        return "mean" if self.config.classifier_pooling == "mean" else "first"

    @property
    def classifier(self) -> nn.Module:
        return nn.Sequential(self.model.head, self.model.drop, self.model.classifier)

    @property
    def token_classifier(self) -> nn.Module:
        return self.classifier

    @property
    def span_classifier(self) -> nn.Module:
        return self.classifier

    @property
    def predictions(self) -> Predictions:
        return Predictions(self.model.head, self.model.decoder)


def layer_kinds(config: Any) -> list[str]:
    """Return `GLOBAL` or `LOCAL` for each layer.

    Raises:
        InputError: `layer_types` names others, or not as many as there are layers.
    """
    layers = config.num_hidden_layers
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        every = config.global_attn_every_n_layers
        check_int("global_attn_every_n_layers", every, 1)
        return [LOCAL if i % every else GLOBAL for i in range(layers)]
    if len(kinds) != layers or not {GLOBAL, LOCAL}.issuperset(kinds):
        raise InputError(f"layer_types: got {quoted(kinds)}; accepted are {layers} of '{GLOBAL}' and '{LOCAL}'")
    return list(kinds)


def period(kinds: Sequence[str]) -> int | None:
    """Return n where every n-th layer from the first on is `GLOBAL`, and the others are `LOCAL`; None where there is no such n."""
    everies = range(1, len(kinds) + 1)
    return next((n for n in everies if all((kind == GLOBAL) == (i % n == 0) for i, kind in enumerate(kinds))), None)


def rotation(config: Any, kind: str) -> dict[str, Any]:
    """Return the rotary parameters of a kind of layers: `rope_theta`, and what else there is."""
    if parameters := getattr(config, "rope_parameters", None):
        return dict(parameters[kind])
    local = config.local_rope_theta if kind == LOCAL else None
    return {**(getattr(config, "rope_scaling", None) or {}), "rope_theta": local or config.global_rope_theta}


def theta(config: Any, kind: str) -> float:
    """Return the base of the rotary frequencies of a kind of layers."""
    return float(rotation(config, kind)["rope_theta"])


class Embeddings(nn.Module):
    """Word rows, normalized. Types and positions are not read."""

    def __init__(self, own: Any) -> None:
        super().__init__()
        self.word_embeddings = own.tok_embeddings
        self.LayerNorm = own.norm
        self.dropout = own.drop

    def forward(self, ids: Tensor, types: Tensor, positions: Tensor) -> Tensor:
        result: Tensor = self.dropout(self.LayerNorm(self.word_embeddings(ids)))
        return result


class GatedIntermediate(nn.Module):
    """The first half of a gated feed-forward: one projection to values, which are activated, and to their gates."""

    def __init__(self, own: Any) -> None:
        super().__init__()
        self.dense = own.Wi
        self.activation = own.act
        self.dropout = own.drop

    def forward(self, x: Tensor) -> Tensor:
        values, gates = self.dense(x).chunk(2, dim=-1)
        result: Tensor = self.dropout(self.activation(values) * gates)
        return result
