"""FLOPs of a pruned encoder, counted from the tokens that each sublayer really sees.

Per layer and sequence: attention ``8 n H A + 4 n^2 A``, feed-forward ``4 n H I``, with n the tokens alive at that sublayer, A the
width of the layer's heads together (H where none is pruned) and I its intermediate size; gated feed-forwards cost ``6 n H I``.
Layers that see a window are counted as if they saw the whole text. Retainer, embeddings and head are not counted. A multiply-add
is two FLOPs. Where the last layer works for [CLS] alone, as packed files do, what it does not compute is not counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..errors import at_least
from .structured import layer_sizes

GATED = "gated_feed_forward"
"""Field of an encoder whose feed-forwards have gates."""


@dataclass(frozen=True)
class Shape:
    """Size of an encoder: hidden H, intermediate I, heads N, layers L.

    sizes: the width of the heads together and of the feed-forward of each layer, where structured pruning made them differ.
    gated: the feed-forward's first product makes gates as well, so it is twice as large.
    """

    hidden: int
    intermediate: int
    heads: int
    layers: int
    sizes: tuple[tuple[int, int], ...] = ()
    gated: bool = False

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Shape:
        """Read it from fields under BERT's names: of a BERT's ``config.json``, of OUT's, or `backbones.fields` of any model."""
        names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers")
        for name in names:
            at_least(name, fields.get(name), 1)
        hidden, intermediate, heads, layers = (fields[name] for name in names)
        sizes = tuple((left * hidden // heads, width) for left, width in layer_sizes(fields))
        return cls(hidden, intermediate, heads, layers, sizes, bool(fields.get(GATED)))

    def whole(self, layers: int) -> Shape:
        """BERT of this size with another number of layers, none of which is pruned."""
        return replace(self, layers=layers, sizes=(), gated=False)


def encoder_flops(
    shape: Shape,
    alive: Sequence[np.ndarray],
    sites: Sequence[str] = (),
    narrow: bool = False,
    looked_up: bool = False,
) -> float:
    """Count the FLOPs of one batch.

    Args:
        alive: ``alive[0] (B,)`` tokens before the first site, ``alive[i + 1] (B,)`` after site i. A padded run has
            ``alive[0]`` = S for every row.
        sites: prune sites in order, such as ``["0.ffn"]``.
        narrow: count one row per sequence behind the last layer's attention and all cuts, as `PackedStudent` computes.
        looked_up: count no projections to query, key and value in layer 0.
    """
    n, reached = alive[0].astype(np.float64), 0
    h, total, per_unit = shape.hidden, 0.0, 6 if shape.gated else 4
    for layer, (width, intermediate) in enumerate(shape.sizes or [(h, shape.intermediate)] * shape.layers):
        for sublayer in ("attention", "ffn"):
            if reached < len(sites) and sites[reached] == f"{layer}.{sublayer}":
                reached += 1
                n = alive[reached].astype(np.float64)
            last = layer == shape.layers - 1 and (sublayer == "ffn" or f"{layer}.ffn" not in sites)
            rows = np.ones_like(n) if narrow and last else n
            projections = 0 if looked_up and layer == 0 else 6 * n * h * width
            attention = projections + 4 * n**2 * width + 2 * rows * h * width
            total += float((attention if sublayer == "attention" else per_unit * rows * h * intermediate).sum())
    return total


def alive_tokens(kept_site: np.ndarray, num_sites: int) -> list[np.ndarray]:
    """Turn ``kept_site (B, S)`` into the ``(B,)`` counts of tokens before the first and after each site."""
    return [(kept_site >= i).sum(1) for i in range(num_sites + 1)]
