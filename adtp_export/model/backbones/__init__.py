"""Encoders, one per file: where a family of transformers keeps its projections, and what surrounds them.

A backbone describes transformers' own modules and implements none of them anew, so weights keep transformers' names.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import nn

from ...contract import ATTENTION_MASK, ATTENTION_OUTPUT, INPUT_IDS, INTERMEDIATE, OUTPUT, QKV, TOKEN_TYPE_IDS
from ...errors import InputError, at_least, shown


@dataclass(frozen=True, kw_only=True)
class AttentionParts:
    """One attention sublayer.

    before: what the states go through first (pre-norm). projections: query, key and value, Linear, or one Linear for the three.
    heads: N. scale: of ``q @ k.T``. dropout: of attention probabilities. output: module that takes ``(context, x)``, with x the
    states before `before`, and gives the states after projection, residual and norm; dense: its Linear.
    """

    before: nn.Module = field(default_factory=nn.Identity)
    projections: tuple[nn.Linear, ...]
    heads: int
    scale: float
    dropout: nn.Module
    output: nn.Module
    dense: nn.Linear


@dataclass(frozen=True, kw_only=True)
class FeedForwardParts:
    """One feed-forward sublayer: ``output(intermediate(before(x)), x)``, and the Linear inside each."""

    before: nn.Module = field(default_factory=nn.Identity)
    intermediate: nn.Module
    output: nn.Module
    intermediate_dense: nn.Linear
    output_dense: nn.Linear


class Backbone(ABC):
    """One transformers model with a head, described.

    Args:
        model: such as `BertForSequenceClassification`; nothing of it is copied or changed.
    """

    model_type: ClassVar[str]
    least: ClassVar[Mapping[str, int]] = {
        "hidden_size": 1,
        "intermediate_size": 1,
        "num_attention_heads": 1,
        "num_hidden_layers": 1,
        "vocab_size": 1,
        "type_vocab_size": 1,
        "max_position_embeddings": 4,  # [CLS], [SEP] twice, and a token
    }
    """Integer fields of the configuration, and the least that each may be."""

    def __init__(self, model: nn.Module) -> None:
        self.model: Any = model  # torch types what is inside as Tensor | Module
        self.config: Any = model.config

    @classmethod
    def max_tokens(cls, config: Any) -> int:
        """Longest text that a model of this configuration reads."""
        return int(config.max_position_embeddings)

    @classmethod
    def check(cls, config: Any) -> None:
        """Raises InputError for fields that the packed form cannot serve."""
        for name, least in cls.least.items():
            at_least(name, getattr(config, name), least)
        if config.pad_token_id is not None and not 0 <= config.pad_token_id < config.vocab_size:
            raise InputError(f"pad_token_id must be an id of the vocabulary, got {shown(config.pad_token_id)}")
        if not config.layer_norm_eps >= 0:
            raise InputError(f"layer_norm_eps must not be negative, got {shown(config.layer_norm_eps)}")
        if config.hidden_size % config.num_attention_heads:
            raise InputError(
                f"num_attention_heads must divide hidden_size, got {config.num_attention_heads} and {config.hidden_size}"
            )
        if (kind := getattr(config, "position_embedding_type", "absolute")) != "absolute":
            raise InputError(f"position_embedding_type: got {shown(kind)}; accepted is 'absolute'")
        for name in ("is_decoder", "add_cross_attention"):
            if getattr(config, name, False):
                raise InputError(f"{name}: got true; accepted are encoders, in which all tokens see each other")

    @property
    def num_layers(self) -> int:
        return int(self.config.num_hidden_layers)

    @property
    @abstractmethod
    def embeddings(self) -> nn.Module:
        """A module that takes ``ids, types, positions`` of one shape, int64, and gives the states before layer 0.

        Positions count from 0 in each text.
        """

    @abstractmethod
    def attention(self, i: int) -> AttentionParts: ...

    @abstractmethod
    def feed_forward(self, i: int) -> FeedForwardParts: ...

    @property
    @abstractmethod
    def classifier(self) -> nn.Module:
        """A module that takes the first states ``(B, H)`` and gives logits ``(B, num_labels)``: the head "sequence"."""

    @property
    def token_classifier(self) -> nn.Module:
        """A module that takes states ``(T, H)`` and gives logits ``(T, num_labels)``: the head "tokens"."""
        return nn.Sequential(self.model.dropout, self.model.classifier)

    @property
    def span_classifier(self) -> nn.Module:
        """A module that takes states ``(T, H)`` and gives the logits ``(T, 2)`` of start and end: the head "spans"."""
        head: nn.Module = self.model.qa_outputs
        return head

    def products(self, i: int) -> dict[str, tuple[nn.Linear, ...]]:
        """Return the Linear modules of layer i by the place they have in the graph (`contract.PRODUCTS`)."""
        attention, ffn = self.attention(i), self.feed_forward(i)
        return {
            QKV: attention.projections,
            ATTENTION_OUTPUT: (attention.dense,),
            INTERMEDIATE: (ffn.intermediate_dense,),
            OUTPUT: (ffn.output_dense,),
        }


def input_names(config: Any) -> tuple[str, ...]:
    """Names of the inputs of a model, in order; token types only where the model tells them apart."""
    return (INPUT_IDS, ATTENTION_MASK, *([TOKEN_TYPE_IDS] if config.type_vocab_size > 1 else []))
