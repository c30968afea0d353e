"""FLOPs of a pruned encoder, counted from the tokens that each sublayer really sees.

Per layer and sequence: attention ``8 n H^2 + 4 n^2 H``, feed-forward ``4 n H I`` (I: intermediate size), with n the
tokens alive at that sublayer; retainer, embeddings and head are not counted. A multiply-add is two FLOPs. Where the
last layer works for [CLS] alone, as packed files do, what it does not compute is not counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import at_least


@dataclass(frozen=True)
class Shape:
    """Size of an encoder: hidden H, intermediate I, heads N, layers L."""

    hidden: int
    intermediate: int
    heads: int
    layers: int

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Shape:
        """Read it from the fields of a BERT's ``config.json``."""
        fields = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers")
        for field in fields:
            at_least(field, config.get(field), 1)
        return cls(*(config[field] for field in fields))


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
    h, total = shape.hidden, 0.0
    for layer in range(shape.layers):
        for sublayer in ("attention", "ffn"):
            if reached < len(sites) and sites[reached] == f"{layer}.{sublayer}":
                reached += 1
                n = alive[reached].astype(np.float64)
            last = layer == shape.layers - 1 and (sublayer == "ffn" or f"{layer}.ffn" not in sites)
            rows = np.ones_like(n) if narrow and last else n
            projections = 0 if looked_up and layer == 0 else 6 * n * h**2
            attention = projections + 4 * n**2 * h + 2 * rows * h**2
            total += float((attention if sublayer == "attention" else 4 * rows * h * shape.intermediate).sum())
    return total


def alive_tokens(kept_site: np.ndarray, num_sites: int) -> list[np.ndarray]:
    """Turn ``kept_site (B, S)`` into the ``(B,)`` counts of tokens before the first and after each site."""
    return [(kept_site >= i).sum(1) for i in range(num_sites + 1)]
