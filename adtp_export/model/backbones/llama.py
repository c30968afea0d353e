"""Llama, and what the families share that follow it: norms before the sublayers, rotary positions, grouped queries, gated feed-forwards.

Source: Touvron et al., LLaMA (arXiv 2302.13971); module names are those of transformers' `LlamaForSequenceClassification`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from ...errors import InputError, check_int, quoted
from ..flops import HEAD_DIM, KV_HEADS
from ..positions import Rotary
from .base import CAUSAL_FIELD, VERSION, AttentionParts, Backbone, FeedForwardParts, GatedPair, Residual, RmsNorm

ROTATIONS = ("default", "linear", "llama3", "yarn")
"""Kinds of rotary frequencies that are constants. "dynamic" and "longrope" depend on the longest text of a batch."""
CAUSAL_SINCE = (5, 2)
"""The first transformers that reads `CAUSAL_FIELD`."""


class Llama(Backbone):
    """Without the last product, from which a model of this family generates text, it is an encoder."""

    own_names = {"layer_norm_eps": "rms_norm_eps"}
    fixed = {"type_vocab_size": 1}
    gated = True
    generates = True

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        own = self.model.base_model
        self._rotary = self._rotations(on_cpu(own.rotary_emb, self.config))
        self._embeddings, self._finish = Embeddings(own.embed_tokens), self._norm(own.norm)
        self._befores, self._outputs = [], []
        for layer in own.layers:
            before, after, before_ffn, after_ffn = self._norms_of(layer)
            self._befores.append((before, before_ffn))
            dense = (layer.self_attn.o_proj, layer.mlp.down_proj)
            self._outputs.append((Residual(dense[0], norm=after), Residual(dense[1], norm=after_ffn)))
        self._norms = [self._head_norms(layer.self_attn) for layer in own.layers]
        self._intermediates = [GatedPair(x.mlp.gate_proj, x.mlp.up_proj, x.mlp.act_fn) for x in own.layers]
        self._dropouts = [FollowedDropout(self.config.attention_dropout, layer.self_attn) for layer in own.layers]

    def _rotations(self, turning: Any) -> list[Rotary]:
        """Return what turns queries and keys of each layer, after transformers' own module."""
        return [rotary(turning, self.max_tokens(self.config))] * self.num_layers

    def _norm(self, own: nn.Module) -> nn.Module:
        return RmsNorm(own, self.config.rms_norm_eps)

    def _norms_of(self, layer: Any) -> tuple[nn.Module, nn.Module | None, nn.Module, nn.Module | None]:
        """Return the norms before and after attention, and before and after the feed-forward."""
        return self._norm(layer.input_layernorm), None, self._norm(layer.post_attention_layernorm), None

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
        return [size - cls.counts_itself(config) if size else 0 for size in sizes] if any(sizes) else []

    @classmethod
    def counts_itself(cls, config: Any) -> bool:
        """Whether a window counts the token itself."""
        return cls.causal(config)

    @classmethod
    def rotations(cls, config: Any) -> list[Mapping[str, Any]]:
        """Return the parameters of rotary frequencies, of each kind of layers."""
        return [getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}]

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
        check_rotations(cls.rotations(config))
        if not isinstance(said := getattr(config, CAUSAL_FIELD, True), bool):
            raise InputError(f"{CAUSAL_FIELD}: got {quoted(said)}; accepted are true and false")
        if not said and VERSION < CAUSAL_SINCE:
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
            dropout=self._dropouts[i],
            output=self._outputs[i][0],
            dense=own.o_proj,
            rotate=self._rotary[i],
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


def on_cpu(turning: nn.Module, config: Any) -> Any:
    """Return transformers' module of rotary frequencies once more: a model may be on the meta device, where numbers are not known."""
    with torch.device("cpu"):
        return type(turning)(config=config)


def rotary(turning: Any, length: int, prefix: str = "") -> Rotary:
    """Return what turns as transformers' module does; prefix: of its buffers' names."""
    return Rotary(getattr(turning, f"{prefix}inv_freq"), length, float(getattr(turning, f"{prefix}attention_scaling")))


def check_rotations(rotations: Iterable[Mapping[str, Any]]) -> None:
    """Raises InputError for rotary frequencies that are no constants, or that turn a part of a head alone."""
    for parameters in rotations:
        if (kind := parameters.get("rope_type", parameters.get("type", "default"))) not in ROTATIONS:
            why = " (it depends on the longest text of a batch)" if kind in ("dynamic", "longrope") else ""
            raise InputError(
                f"rope_parameters: got the rope_type {quoted(kind)}{why}; accepted are {', '.join(ROTATIONS)}"
            )
        if (share := parameters.get("partial_rotary_factor", 1)) != 1:
            raise InputError(f"rope_parameters: got the partial_rotary_factor {quoted(share)}; accepted is 1")


class FollowedDropout(nn.Module):
    """Dropout of attention probabilities, for which transformers has no module: on while another one, the leader, trains.

    A rate of None is 0.
    """

    def __init__(self, rate: float | None, leader: nn.Module) -> None:
        super().__init__()
        self.rate, self.leader = rate or 0.0, leader

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x, self.rate, self.leader.training)


class Embeddings(nn.Module):
    """Word rows. Types and positions are not read."""

    def __init__(self, own: nn.Embedding) -> None:
        super().__init__()
        self.word_embeddings = own

    def forward(self, ids: Tensor, types: Tensor, positions: Tensor) -> Tensor:
        result: Tensor = self.word_embeddings(ids)
        return result
