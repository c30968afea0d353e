"""FLOPs of a pruned encoder, counted from the tokens that each sublayer really sees.

Per layer and sequence: attention ``8 n H A + 4 n^2 A``, feed-forward ``4 n H I``, with n the tokens alive at that sublayer, A the
width of the layer's heads together (H where none is pruned) and I its intermediate size; ``6 n H I`` where it is gated. In a layer
with a window, or where no token sees later ones, the pairs of tokens that see each other take the place of ``n^2``. Keys and values
of K heads, fewer than N, cost ``4 n H A K / N`` of the ``6 n H A`` that projections are. Retainer, embeddings and head are not counted. A
multiply-add is two FLOPs. Where each token is multiplied by R distances, that is ``2 n R A`` more; their tables are constants. Where the
last layer works for [CLS] alone, as packed files do, what it does not compute is not counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..errors import check_int
from .structured import layer_sizes

GATED, WINDOWS, CAUSAL = "gated_feed_forward", "attention_windows", "causal_attention"
DISTANCES = "distance_columns"
"""Fields that say of what is not BERT's layers; ours, beside those of a family's configuration."""
KV_HEADS, HEAD_DIM = "num_key_value_heads", "head_dim"
"""transformers' fields of decoders, where heads are grouped or not as wide as the states."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Size of an encoder: hidden H, intermediate I, heads N, layers L.

    sizes: the width of the heads together and of the feed-forward of each layer, where structured pruning made them differ.
    windows: how far apart tokens may be that see each other in each layer, 0 without a bound; empty where all see all. gated: the
    first product of a feed-forward is twice as wide. causal: no token sees later ones. width: of the heads together, 0: H; kv_width: of
    those of the keys, 0: the same. distances: products of each token with distances, whose tables are constants.
    """

    hidden: int
    intermediate: int
    heads: int
    layers: int
    sizes: tuple[tuple[int, int], ...] = ()
    windows: tuple[int, ...] = ()
    gated: bool = False
    causal: bool = False
    width: int = 0
    kv_width: int = 0
    distances: int = 0

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Shape:
        """Read it from fields under BERT's names: of a BERT's ``config.json``, of OUT's, or `registry.fields` of any model."""
        names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers")
        for name in names:
            check_int(name, fields.get(name), 1)
        hidden, intermediate, heads, layers = (fields[name] for name in names)
        size = fields.get(HEAD_DIM) or hidden // heads
        return cls(
            hidden=hidden,
            intermediate=intermediate,
            heads=heads,
            layers=layers,
            sizes=tuple((left * hidden // heads, width) for left, width in layer_sizes(fields)),
            windows=tuple(fields.get(WINDOWS, ())),
            gated=fields.get(GATED, False),
            causal=fields.get(CAUSAL, False),
            width=size * heads if HEAD_DIM in fields else 0,
            kv_width=size * fields[KV_HEADS] if fields.get(KV_HEADS) else 0,
            distances=fields.get(DISTANCES, 0),
        )

    @property
    def grouped(self) -> bool:
        """Whether queries may be other tokens than keys: the last layer then attends from the tokens alone that a head reads."""
        return self.causal or self.kv_width not in (0, self.width or self.hidden)

    def whole(self, layers: int) -> Shape:
        """The same with another number of layers, all of them BERT's."""
        return replace(
            self, layers=layers, sizes=(), windows=(), gated=False, causal=False, width=0, kv_width=0, distances=0
        )


def encoder_flops(
    shape: Shape,
    alive: Sequence[np.ndarray],
    sites: Sequence[str] = (),
    cls_only_last_layer: bool = False,
    precomputed_first_layer: bool = False,
) -> float:
    """Count the FLOPs of one batch.

    Args:
        alive: ``alive[0] (B,)`` tokens before the first site, ``alive[i + 1] (B,)`` after site i. A padded run has
            ``alive[0]`` = S for every row.
        sites: prune sites in order, such as ``["0.ffn"]``.
        cls_only_last_layer: count one row per sequence after the last layer's attention and all cuts, as `PackedStudent` computes.
        precomputed_first_layer: count no projections to query, key and value in layer 0.
    """
    rows = row_flops(
        shape, [count.astype(np.float64) for count in alive], sites, cls_only_last_layer, precomputed_first_layer
    )
    return float(rows.sum())


def row_flops(
    shape: Shape,
    alive: Sequence[Any],
    sites: Sequence[str] = (),
    cls_only_last_layer: bool = False,
    precomputed_first_layer: bool = False,
) -> Any:
    """Count the FLOPs of each sequence, ``(B,)``; see `encoder_flops`.

    Args:
        alive: ``(B,)`` each, all of them arrays or all tensors, whose gradients pass through.
    """
    n, reached = alive[0], 0
    h, total = shape.hidden, 0 * alive[0]
    for layer, (width, intermediate) in enumerate(
        shape.sizes or [(shape.width or h, shape.intermediate)] * shape.layers
    ):
        for sublayer in ("attention", "ffn"):
            if reached < len(sites) and sites[reached] == f"{layer}.{sublayer}":
                reached += 1
                n = alive[reached]
            last = layer == shape.layers - 1 and (sublayer == "ffn" or f"{layer}.ffn" not in sites)
            rows = 1 if cls_only_last_layer and last else n
            projections = (
                0 if precomputed_first_layer and layer == 0 else 2 * n * h * (width + 2 * (shape.kv_width or width))
            )
            pairs = seen_pairs(n, shape.windows[layer] if shape.windows else 0)
            pairs = (pairs + n) / 2 if shape.causal else pairs
            if shape.grouped and cls_only_last_layer and layer == shape.layers - 1:
                pairs = n.clip(max=shape.windows[layer] + 1) if shape.windows and shape.windows[layer] else n
            attention = projections + (4 * pairs + 2 * n * shape.distances) * width + 2 * rows * h * width
            ffn = (6 if shape.gated else 4) * rows * h * intermediate
            total = total + (attention if sublayer == "attention" else ffn)
    return total


def seen_pairs(n: Any, window: int) -> Any:
    """Count the pairs of tokens that see each other in texts of ``n (B,)`` tokens, as if none between them had been dropped."""
    far = (n - window - 1).clip(0) if window else 0 * n
    return n**2 - far * (far + 1)


def alive_tokens(kept_site: np.ndarray, num_sites: int) -> list[np.ndarray]:
    """Turn ``kept_site (B, S)`` into the ``(B,)`` counts of tokens before the first and after each site."""
    return [(kept_site >= i).sum(1) for i in range(num_sites + 1)]
