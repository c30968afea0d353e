"""What an encoder computes, as `planner` takes it: weights by role, in fp32, and cuts with their rules.

It says nothing about where a model keeps them: `runtimes.described` reads a student.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

NONE, GELU, TANH, RELU = "none", "gelu", "tanh", "relu"
"""Activations of products; GELU is the one with erf."""


@dataclass(frozen=True)
class Dense:
    """A product. weight: ``(N, K)``, as PyTorch stores it. bias: ``(N,)``."""

    weight: np.ndarray
    bias: np.ndarray


@dataclass(frozen=True)
class Norm:
    """A LayerNorm. weight, bias: ``(H,)``."""

    weight: np.ndarray
    bias: np.ndarray
    eps: float


@dataclass(frozen=True)
class RmsNorm:
    """A norm by the root mean square. weight: ``(H,)``."""

    weight: np.ndarray
    eps: float


@dataclass(frozen=True)
class Words:
    """Rows of a table, ``(V, H)``, and nothing else."""

    words: np.ndarray
    typed: ClassVar = False


@dataclass(frozen=True, kw_only=True)
class Embeddings:
    """The normalized sum of rows of three tables of width E; with `projection`, ``(H, E)``, what follows.

    first_place: row of `places` that the first token of a text has. typed: whether token types are an input; else they are 0.
    """

    words: np.ndarray
    types: np.ndarray
    places: np.ndarray
    norm: Norm
    first_place: int
    typed: bool
    projection: Dense | None = None


@dataclass(frozen=True)
class Saliency:
    """Scores of tokens: a predictor with a hidden layer of ReLU, ``(W, H)`` and ``(1, W)``; always in fp32."""

    first: Dense
    last: Dense


@dataclass(frozen=True)
class Received:
    """Scores of tokens: the attention that each received in the last attention executed, summed over heads and queries."""


@dataclass(frozen=True, kw_only=True)
class Skim:
    """Scores of tokens by a predictor of Transkimmer, all in fp32: norm, ``hidden (H, H)``, norm, GELU, and by how much the second number
    that ``gains (2, H)`` gives is the larger."""

    norm: Norm
    hidden: Dense
    inner_norm: Norm
    gains: Dense


Order = Saliency | Received | Skim


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """How many tokens stay: a share, that of the candidate which `predictor`, ``(C, H)``, scores highest for the first row; in fp32.

    permille: the candidates' shares, ``(C,)`` integers. min_tokens: least tokens that stay.
    """

    predictor: Dense
    permille: np.ndarray
    min_tokens: int


@dataclass(frozen=True, kw_only=True)
class Counts:
    """How many tokens stay: ``kept (L + 1,)`` of n from 0 to L. of_input: n is the length before the first cut, not the present one."""

    kept: np.ndarray
    of_input: bool = False


@dataclass(frozen=True, kw_only=True)
class Best:
    """The tokens of highest score stay; first ones always, but where `keep_first` is False. A `Ratio` goes with `Saliency` alone."""

    order: Order
    number: Ratio | Counts
    keep_first: bool = True


@dataclass(frozen=True)
class Above:
    """First tokens stay, and those whose score is at least a threshold, a number of fp32."""

    order: Order
    threshold: float


@dataclass(frozen=True)
class AboveShare:
    """First tokens stay, and those whose score, divided by the largest of their text, is at least a share, a number of fp32."""

    order: Received
    share: float


@dataclass(frozen=True)
class Ranks:
    """First tokens stay, and others whose rank by score does: ``keeps ((FEW + 1) * bins * 2,)`` is `TopPruner.table`.

    kept: of n tokens that many, as `Counts` says it.
    """

    order: Order
    keeps: np.ndarray
    bins: int
    kept: np.ndarray


Rule = Best | Above | AboveShare | Ranks


@dataclass(frozen=True, kw_only=True)
class Layer:
    """A post-norm layer with GELU. qkv: ``(3 A, H)``; scale: of scores; output: ``(H, A)``; inner: ``(I, H)``; ffn_output: ``(H, I)``."""

    qkv: Dense
    heads: int
    scale: float
    output: Dense
    attention_norm: Norm
    inner: Dense
    ffn_output: Dense
    ffn_norm: Norm


@dataclass(frozen=True)
class Turns:
    """Cosines and sines by which pairs of coordinates i and ``i + D / 2`` are turned at each position, ``(P, D / 2)`` each; in fp32."""

    cos: np.ndarray
    sin: np.ndarray


@dataclass(frozen=True, kw_only=True)
class GatedLayer:
    """A layer with RMS norms before its sublayers, turned heads, and a feed-forward with gates, of SiLU.

    qkv: ``((N + 2 KV) D, H)``. heads, kv_heads: N, KV. scale: of scores. head_norms: of each head's queries and of its keys. reach: how
    far back and how far ahead a token sees, -1 without a bound. output: ``(H, N D)``. inner: ``(2 I, H)``, gates, then values.
    ffn_output: ``(H, I)``.
    """

    norm: RmsNorm
    qkv: Dense
    heads: int
    kv_heads: int
    scale: float
    head_norms: tuple[RmsNorm, RmsNorm] | None
    turns: Turns
    reach: tuple[int, int]
    output: Dense
    ffn_norm: RmsNorm
    inner: Dense
    ffn_output: Dense


@dataclass(frozen=True, kw_only=True)
class Classifier:
    """Two products on first rows, with an activation between them; the second one gives logits."""

    dense: Dense
    activation: str
    output: Dense


@dataclass(frozen=True)
class Tokens:
    """A product on all tokens: each has logits."""

    output: Dense


@dataclass(frozen=True)
class Spans:
    """The same with two logits, of which each is an output: that a span begins, and that it ends."""

    output: Dense


FIRST, MEAN, MAX, LAST = "first", "mean", "max", "last"


@dataclass(frozen=True, kw_only=True)
class Embedding:
    """A vector of each text: states pooled by `FIRST`, `MEAN`, `MAX` or `LAST`, products with activations, and length 1 on request."""

    pooling: str
    projections: tuple[tuple[Dense, str], ...]
    normalize: bool


Head = Classifier | Tokens | Spans | Embedding


@dataclass(frozen=True, kw_only=True)
class Encoder:
    """From ids to answers. Layers are of one kind; gated ones follow `Words`, and `finish` is the norm behind them.

    cuts: rules by site, such as ``"0.ffn"``. longest: most tokens of a text. keeps_last: last tokens stay at each cut, too, and where a
    `Ratio` decides, it reads these.

    restores_entered: sites of cuts within a layer whose tokens, where a head reads all, have the states that entered the layer; the
    others have those that came to the cut.
    """

    embeddings: Embeddings | Words
    layers: tuple[Layer | GatedLayer, ...]
    cuts: Mapping[str, Rule]
    head: Head
    longest: int
    finish: RmsNorm | None = None
    keeps_last: bool = False
    restores_entered: frozenset[str] = frozenset()


def reads_received(rule: Rule | None) -> bool:
    """Say whether a rule goes by what tokens received."""
    return rule is not None and isinstance(rule.order, Received)
