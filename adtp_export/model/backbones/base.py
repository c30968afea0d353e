"""What an encoder's file describes: its sublayers, its embeddings and its classifiers.

A backbone describes transformers' own modules and implements none of them anew, so weights keep transformers' names.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import transformers
from torch import Tensor, nn

from ...contract import ATTENTION_OUTPUT, INTERMEDIATE, OUTPUT, QKV
from ...errors import InputError, check_int, quoted
from ..flops import CAUSAL, GATED, HEAD_DIM, KV_HEADS, WINDOWS
from ..positions import DistanceBias, DistanceProducts, Rotary
from ..predictions import Predictions
from ..sequences import at_least_fp32
from ..structured import INTERMEDIATE_SIZES, PRUNED_HEADS, layer_sizes, pruned_heads, shrink


@dataclass(frozen=True, kw_only=True)
class AttentionParts:
    """One attention sublayer.

    before: what the states go through first (pre-norm). projections: query, key and value, Linear, or one Linear for the three.
    heads: N. scale: of ``q @ k.T``. dropout: of attention probabilities. output: module that takes ``(context, x)``, with x the
    states before `before`, and gives the states after projection, residual and norm; dense: its Linear.

    kv_heads: of keys and values, a divisor of N; 0: N. Head i of the queries reads head ``i * kv_heads // N`` of these. norms: of each
    head's queries and of its keys, before they are turned.

    Where positions matter: rotate turns queries and keys; bias is added to scores, by distance; distances: products, which are scaled
    as those of queries and keys; causal: no token sees later ones; window: how far back and how far ahead a token sees, -1 without a
    bound. A sublayer has a bias, distances or a window. only_query: some tokens query, and are never keys.
    """

    before: nn.Module = field(default_factory=nn.Identity)
    projections: tuple[nn.Linear, ...]
    heads: int
    kv_heads: int = 0
    scale: float
    dropout: nn.Module
    output: nn.Module
    dense: nn.Linear
    rotate: Rotary | None = None
    norms: tuple[nn.Module, nn.Module] | None = None
    bias: DistanceBias | None = None
    distances: DistanceProducts | None = None
    causal: bool = False
    window: tuple[int, int] = (-1, -1)
    only_query: bool = False

    @property
    def key_heads(self) -> int:
        """Heads of keys and values."""
        return self.kv_heads or self.heads

    @property
    def reach(self) -> tuple[int, int]:
        """How far back and how far ahead a token sees, -1 without a bound."""
        return self.window[0], 0 if self.causal else self.window[1]

    @property
    def positional(self) -> bool:
        """Whether scores depend on positions."""
        return self.bias is not None or self.distances is not None or self.reach != (-1, -1)

    @property
    def grouped(self) -> bool:
        """Whether this needs the operator for grouped queries, for reaches that differ, or for queries that are no keys."""
        return self.key_heads != self.heads or self.reach[0] != self.reach[1] or self.only_query

    def heads_of(self, joined: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Split joined projections into queries ``(..., N, D)``, keys and values ``(..., key_heads, D)``, normed and turned."""
        counts = [self.heads, self.key_heads, self.key_heads]
        q, k, v = joined.unflatten(-1, (sum(counts), -1)).split(counts, dim=-2)
        if self.norms is not None:
            q, k = self.norms[0](q), self.norms[1](k)
        if self.rotate is not None:
            q, k = self.rotate(q, positions), self.rotate(k, positions)
        return q, k, v


@dataclass(frozen=True, kw_only=True)
class FeedForwardParts:
    """One feed-forward sublayer: ``output(intermediate(before(x)), x)``, and the Linear inside each.

    intermediate_dense: a Linear; or two, of gates and values, whose intermediate is a `GatedPair`.
    """

    before: nn.Module = field(default_factory=nn.Identity)
    intermediate: nn.Module
    output: nn.Module
    intermediate_dense: nn.Linear | tuple[nn.Linear, nn.Linear]
    output_dense: nn.Linear


FIELDS = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "hidden_act",
    "max_position_embeddings", "type_vocab_size", "layer_norm_eps", "pad_token_id",
)  # fmt: skip
"""What is asked of every configuration, under the names that BERT's has."""


CAUSAL_FIELD = "is_causal"
"""transformers' field of any decoder, which makes it bidirectional."""
BIDIRECTIONAL = "use_bidirectional_attention"
"""Gemma's field for that."""
VERSION = tuple(int(part) for part in transformers.__version__.split(".")[:2] if part.isdigit())
"""Of transformers, such as (5, 4)."""


class Backbone(ABC):
    """One transformers model with a head, described.

    Args:
        model: such as `BertForSequenceClassification`; nothing of it is copied.
    """

    own_names: ClassVar[Mapping[str, str]] = {}
    """Those of `FIELDS` that the family's configuration calls otherwise, and how."""
    fixed: ClassVar[Mapping[str, Any]] = {}
    """Those of `FIELDS` that it does not have, and what they are. A family without token types has one."""
    least: ClassVar[Mapping[str, int]] = {
        **dict.fromkeys(("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers"), 1),
        **dict.fromkeys(("vocab_size", "type_vocab_size"), 1),
        "max_position_embeddings": 4,  # [CLS], [SEP] twice, and a token
    }
    """Integer fields of the configuration, and the least that each may be."""
    gated: ClassVar[bool] = False
    """The first product of a feed-forward gives twice its width: values, and gates for them."""
    position_types: ClassVar[tuple[str, ...]] = ("absolute",)
    """What `position_embedding_type` may be."""
    since: ClassVar[tuple[int, int]] = (4, 57)
    """The first transformers that has the family."""
    generates: ClassVar[bool] = False
    """The family's models generate text, too. Without their last product they are encoders. Where a head reads their last token, that
    one is never dropped."""
    axes: ClassVar[int] = 1
    """Of a position."""

    def __init__(self, model: nn.Module) -> None:
        self.model: Any = model  # torch types what is inside as Tensor | Module
        self.config: Any = model.config

    @classmethod
    def max_tokens(cls, config: Any) -> int:
        """Longest text that a model of this configuration reads."""
        return int(config.max_position_embeddings)

    @classmethod
    def windows(cls, config: Any) -> list[int]:
        """How far apart tokens may be that see each other in each layer, 0 without a bound; empty where all see all."""
        return []

    @classmethod
    def causal(cls, config: Any) -> bool:
        """Whether no token sees later ones."""
        return False

    @classmethod
    def check_version(cls, model_type: str) -> None:
        """Raises InputError where the installed transformers does not have the family."""
        if cls.since > VERSION:
            needed = ".".join(map(str, cls.since))
            raise InputError(
                f"model_type: got {quoted(model_type)}, which transformers {transformers.__version__} does not have; type: pip install "
                f"'transformers>={needed}'"
            )

    @classmethod
    def fp16_obstacle(cls, config: Any) -> str | None:
        """Say why the family does not work in fp16; None where it does."""
        return None

    @classmethod
    def stored(cls, weights: dict[str, Tensor], config: Any) -> dict[str, Tensor]:
        """Give weights of a file the names of transformers' modules, and leave out what none of these reads: the same dictionary."""
        return weights

    @classmethod
    def own_name(cls, name: str) -> str:
        """Return what the family's configuration calls one of `FIELDS`."""
        return cls.own_names.get(name, name)

    @classmethod
    def readable(cls, stored: Mapping[str, Any]) -> dict[str, Any]:
        """Return stored fields as transformers 4 and 5 both read them, where the two have other names for something."""
        return dict(stored)

    @classmethod
    def fields(cls, config: Any) -> dict[str, Any]:
        """Return `FIELDS` of a configuration, and what `Shape.of` asks further, where layers are not BERT's."""
        gone = pruned_heads(getattr(config, PRUNED_HEADS, None))
        others = {
            PRUNED_HEADS: {layer: sorted(heads) for layer, heads in gone.items()},
            INTERMEDIATE_SIZES: getattr(config, INTERMEDIATE_SIZES, None),
            GATED: cls.gated,
            WINDOWS: cls.windows(config),
            CAUSAL: cls.causal(config),
            KV_HEADS: getattr(config, KV_HEADS, None),
            HEAD_DIM: getattr(config, HEAD_DIM, None),
        }
        return {
            **{name: cls.fixed[name] if name in cls.fixed else getattr(config, cls.own_name(name)) for name in FIELDS},
            **{name: value for name, value in others.items() if value},
        }

    @classmethod
    def check(cls, config: Any) -> None:
        """Raises InputError for fields that the packed form cannot serve."""
        fields = cls.fields(config)
        for name, least in cls.least.items():
            check_int(cls.own_name(name), fields[name], least)
        if (pad := fields["pad_token_id"]) is not None and not 0 <= pad < config.vocab_size:
            raise InputError(f"pad_token_id must be an id of the vocabulary, got {quoted(pad)}")
        if not fields["layer_norm_eps"] >= 0:
            raise InputError(f"layer_norm_eps must not be negative, got {quoted(fields['layer_norm_eps'])}")
        if HEAD_DIM not in fields and fields["hidden_size"] % fields["num_attention_heads"]:
            raise InputError(
                f"{cls.own_name('num_attention_heads')} must divide {cls.own_name('hidden_size')}, got "
                f"{fields['num_attention_heads']} and {fields['hidden_size']}"
            )
        layer_sizes(fields)
        if cls.gated and INTERMEDIATE_SIZES in fields:
            raise InputError(
                f"{INTERMEDIATE_SIZES}: {quoted(config.model_type)} models have no such field; remove it. Accepted is one "
                "intermediate_size for all layers"
            )
        if (kind := getattr(config, "position_embedding_type", "absolute")) not in cls.position_types:
            accepted = " or ".join(map(repr, cls.position_types))
            raise InputError(f"position_embedding_type: got {quoted(kind)}; accepted is {accepted}")
        for name in ("is_decoder", "add_cross_attention", *(() if cls.generates else (CAUSAL_FIELD,))):
            if getattr(config, name, False):
                raise InputError(f"{name}: got true; accepted are encoders, in which all tokens see each other")

    @classmethod
    def precompute_obstacle(cls, config: Any) -> str | None:
        """Say why layer 0's projections cannot be precomputed in tables; None where what they read is a normalized sum of table rows."""
        return None

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

    def set_heads(self, i: int, heads: int, width: int) -> None:
        """Tell the attention of layer i how many heads it has left, and their width together.

        Raises:
            InputError: the family has no checkpoints with pruned heads.
        """
        raise InputError(f"{PRUNED_HEADS}: {quoted(self.config.model_type)} models have no such field; remove it")

    @abstractmethod
    def feed_forward(self, i: int) -> FeedForwardParts: ...

    def fit(self) -> None:
        """Make the modules of the model as small as its configuration says; those that are so already stay."""
        fields = self.fields(self.config)
        size = fields["hidden_size"] // fields["num_attention_heads"]
        for i, (heads, width) in enumerate(layer_sizes(fields)):
            attention, ffn = self.attention(i), self.feed_forward(i)
            if heads < fields["num_attention_heads"]:
                self.set_heads(i, heads, heads * size)
                for projection in attention.projections:
                    shrink(projection, 0, heads * size)
                shrink(attention.dense, 1, heads * size)
            assert isinstance(ffn.intermediate_dense, nn.Linear)  # others have one size for all layers
            shrink(ffn.intermediate_dense, 0, width)
            shrink(ffn.output_dense, 1, width)

    @property
    def finish(self) -> nn.Module:
        """What the states go through after the last layer, row by row."""
        return nn.Identity()

    @property
    def classifier_pooling(self) -> str:
        """What the head "sequence" reads: the "first" state of a text, the "mean" of all, or the "last" of a token that is no padding
        by its id.
        """
        return "first"

    @property
    def before_pooling(self) -> nn.Module:
        """What the states go through before their mean is taken for the head "sequence"."""
        return nn.Identity()

    @property
    @abstractmethod
    def classifier(self) -> nn.Module:
        """A module that takes pooled states ``(B, H)`` and gives logits ``(B, num_labels)``: the head "sequence"."""

    @property
    def token_classifier(self) -> nn.Module:
        """A module that takes states ``(T, H)`` and gives logits ``(T, num_labels)``: the head "tokens"."""
        return nn.Sequential(self.model.dropout, self.model.classifier)

    @property
    def span_classifier(self) -> nn.Module:
        """A module that takes states ``(T, H)`` and gives the logits ``(T, 2)`` of start and end: the head "spans"."""
        head: nn.Module = self.model.qa_outputs
        return head

    @property
    def predictions(self) -> Predictions:
        """The head of transformers' ``...ForMaskedLM``, where the family has one."""
        raise NotImplementedError

    def products(self, i: int) -> dict[str, tuple[nn.Linear, ...]]:
        """Return the Linear modules of layer i by the place they have in the graph (`contract.PRODUCTS`)."""
        attention, ffn = self.attention(i), self.feed_forward(i)
        return {
            QKV: attention.projections,
            ATTENTION_OUTPUT: (attention.dense,),
            INTERMEDIATE: ffn.intermediate_dense
            if isinstance(ffn.intermediate_dense, tuple)
            else (ffn.intermediate_dense,),
            OUTPUT: (ffn.output_dense,),
        }


class Residual(nn.Module):
    """Projection and residual, which end a sublayer; norm: of what is projected, before it is added."""

    def __init__(self, dense: nn.Linear, dropout: nn.Module | None = None, norm: nn.Module | None = None) -> None:
        super().__init__()
        self.dense = dense
        self.dropout = dropout or nn.Identity()
        self.norm = norm or nn.Identity()

    def forward(self, inner: Tensor, x: Tensor) -> Tensor:
        result: Tensor = x + self.norm(self.dropout(self.dense(inner)))
        return result


class GatedPair(nn.Module):
    """The first half of a feed-forward with gates of their own: ``dropout(activation(gates(x)) * values(x))``."""

    def __init__(
        self, gates: nn.Linear, values: nn.Linear, activation: nn.Module, dropout: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.gates, self.values, self.activation = gates, values, activation
        self.dropout = dropout or nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.dropout(self.activation(self.gates(x)) * self.values(x))
        return result


class RmsNorm(nn.Module):
    """States divided by their root mean square, in fp32 at least, times a weight ``(H,)``.

    transformers' own modules round to fp32 where states are fp64, and an oracle must not.

    Args:
        own: transformers' module, whose `weight` this reads. eps: added to the mean of squares.

    Source: Zhang and Sennrich, Root Mean Square Layer Normalization (NeurIPS 2019).
    """

    def __init__(self, own: Any, eps: float) -> None:
        super().__init__()
        self.weight, self.rms = own.weight, Rms(eps)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.weight * self.rms(x)
        return result


class Rms(nn.Module):
    """A module, so that its nodes are called `contract.RMS` and stay in fp32."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return self.precise(x).to(x.dtype)

    def precise(self, x: Tensor) -> Tensor:
        """Return the result before it is rounded to the dtype of `x`."""
        precise = at_least_fp32(x)
        return precise / (precise.pow(2).mean(-1, keepdim=True) + self.eps).sqrt()
