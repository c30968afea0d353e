"""Llama, and what the families share that follow it: norms before the sublayers, rotary positions, grouped queries, gated feed-forwards.

Source: Touvron et al., LLaMA (arXiv 2302.13971); module names are those of transformers' `LlamaForSequenceClassification`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from ...errors import InputError, check_int, quoted
from ..flops import HEAD_DIM, KV_HEADS
from ..positions import Rotary
from .base import AttentionParts, Backbone, FeedForwardParts, GatedPair, Residual, RmsNorm

ROTATIONS = ("default", "linear", "llama3", "yarn")
"""Kinds of rotary frequencies that are constants. "dynamic" and "longrope" depend on the longest text of a batch."""
CAUSAL_FIELD, CAUSAL_SINCE = "is_causal", (5, 2)
"""A field that makes any of these models bidirectional, and the first transformers that reads it."""
VERSION = tuple(int(part) for part in transformers.__version__.split(".")[:2] if part.isdigit())


class Llama(Backbone):
    """Without the last product, from which a model of this family generates text, it is an encoder."""

    own_names = {"layer_norm_eps": "rms_norm_eps"}
    fixed = {"type_vocab_size": 1}
    gated = True
    generates = True

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        own, config = self.model.base_model, self.config
        with torch.device("cpu"):  # the model may be on the meta device, where numbers are not known
            turning = type(own.rotary_emb)(config=config)
        self._rotary = Rotary(turning.inv_freq, self.max_tokens(config), float(turning.attention_scaling))
        self._embeddings, self._finish = Embeddings(own.embed_tokens), self._norm(own.norm)
        self._befores = [(self._norm(x.input_layernorm), self._norm(x.post_attention_layernorm)) for x in own.layers]
        self._norms = [self._head_norms(layer.self_attn) for layer in own.layers]
        self._outputs = [(Residual(x.self_attn.o_proj), Residual(x.mlp.down_proj)) for x in own.layers]
        self._intermediates = [GatedPair(x.mlp.gate_proj, x.mlp.up_proj, x.mlp.act_fn) for x in own.layers]
        self._dropout = nn.Dropout(config.attention_dropout)

    def _norm(self, own: nn.Module) -> RmsNorm:
        return RmsNorm(own, self.config.rms_norm_eps)

    def _head_norms(self, attention: Any) -> tuple[nn.Module, nn.Module] | None:
        """Return the norms of each head's queries and keys."""
        return None

    @classmethod
    def readable(cls, stored: Mapping[str, Any]) -> dict[str, Any]:
        """Turn `rope_parameters` of transformers 5 into what transformers 4 reads; transformers 5 reads both."""
        fields = dict(stored)
        if VERSION < (5,) and isinstance(parameters := fields.get("rope_parameters"), Mapping):
            fields["rope_theta"] = parameters.get("rope_theta", 10_000.0)
            scaled = parameters.get("rope_type", "default") != "default"
            fields["rope_scaling"] = dict(parameters) if scaled else None
        return fields

    @classmethod
    def causal(cls, config: Any) -> bool:
        return getattr(config, CAUSAL_FIELD, True) is not False

    @classmethod
    def sliding(cls, config: Any) -> list[int]:
        """Return the window of each layer as the configuration counts it, 0 without one."""
        return []

    @classmethod
    def windows(cls, config: Any) -> list[int]:
        """A causal window counts the token itself; a bidirectional one reaches as far on both sides."""
        sizes = cls.sliding(config)
        for size in filter(None, sizes):
            check_int("sliding_window", size, 2)
        return [size - cls.causal(config) if size else 0 for size in sizes] if any(sizes) else []

    @classmethod
    def check(cls, config: Any) -> None:
        for name, field in ((KV_HEADS, getattr(config, KV_HEADS, None)), (HEAD_DIM, getattr(config, HEAD_DIM, None))):
            if field is not None:
                check_int(name, field, 1)
        super().check(config)
        fields = cls.fields(config)
        heads, groups = config.num_attention_heads, fields.get(KV_HEADS) or config.num_attention_heads
        if heads % groups:
            raise InputError(f"{KV_HEADS} must divide num_attention_heads, got {groups} and {heads}")
        if (fields.get(HEAD_DIM) or config.hidden_size // heads) % 2:
            raise InputError(
                f"{HEAD_DIM}: got {fields.get(HEAD_DIM) or config.hidden_size // heads}; positions turn pairs of coordinates, so heads "
                "of an even size are accepted"
            )
        if (kind := rotation(config)) not in ROTATIONS:
            why = " (it depends on the longest text of a batch)" if kind in ("dynamic", "longrope") else ""
            raise InputError(
                f"rope_parameters: got the rope_type {quoted(kind)}{why}; accepted are {', '.join(ROTATIONS)}"
            )
        if getattr(config, CAUSAL_FIELD, True) is False and VERSION < CAUSAL_SINCE:
            raise InputError(
                f"{CAUSAL_FIELD}: got false, which transformers {transformers.__version__} does not read; type: pip install "
                "'transformers>=5.2'"
            )
        cls.windows(config)

    @classmethod
    def precompute_obstacle(cls, config: Any) -> str | None:
        return "its embeddings are not normalized before the first layer"

    @property
    def embeddings(self) -> nn.Module:
        return self._embeddings

    def attention(self, i: int) -> AttentionParts:
        own, config = self.model.base_model.layers[i].self_attn, self.config
        windows, causal = self.windows(config), self.causal(config)
        reach = windows[i] if windows and windows[i] else -1
        return AttentionParts(
            before=self._befores[i][0],
            projections=(own.q_proj, own.k_proj, own.v_proj),
            heads=config.num_attention_heads,
            kv_heads=getattr(config, KV_HEADS, None) or 0,
            scale=float(own.scaling),
            dropout=self._dropout,
            output=self._outputs[i][0],
            dense=own.o_proj,
            rotate=self._rotary,
            norms=self._norms[i],
            causal=causal,
            window=(reach, reach),
        )

    def feed_forward(self, i: int) -> FeedForwardParts:
        own = self.model.base_model.layers[i].mlp
        return FeedForwardParts(
            before=self._befores[i][1],
            intermediate=self._intermediates[i],
            output=self._outputs[i][1],
            intermediate_dense=(own.gate_proj, own.up_proj),
            output_dense=own.down_proj,
        )

    @property
    def finish(self) -> nn.Module:
        return self._finish

    @property
    def classifier_pooling(self) -> str:
        return "last"

    @property
    def classifier(self) -> nn.Module:
        score: nn.Module = self.model.score
        return score

    @property
    def token_classifier(self) -> nn.Module:
        return nn.Sequential(self.model.dropout, self.model.score)


def rotation(config: Any) -> str:
    """Return the kind of rotary frequencies."""
    stored = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    return str(stored.get("rope_type", stored.get("type", "default")))


class Embeddings(nn.Module):
    """Word rows. Types and positions are not read."""

    def __init__(self, own: nn.Embedding) -> None:
        super().__init__()
        self.word_embeddings = own

    def forward(self, ids: Tensor, types: Tensor, positions: Tensor) -> Tensor:
        result: Tensor = self.word_embeddings(ids)
        return result
