"""Attention flow: how much can pass from a token at the input to the answer, along the attention of all layers.

A node is a token at a level: level 0 is the input, level l + 1 comes after layer l's attention. An edge leads from the token that is
attended to, a level up, to the token that attends. Its capacity is the attention, mean over heads, halved for the residual
connection, which gives each token another half to itself.

Source: Abnar and Zuidema, Quantifying Attention Flow in Transformers (ACL 2020), for the graph. Xu et al., FlowPrune (NeurIPS 2025), for
leaving small edges out. Its other idea, fewer layers, is not used: see `docs/decisions.md`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import maximum_flow

MIN_FLOW = 1e-6
"""Edges below that are left out."""
SCALE = 10**6
"""Of capacities, which are integers in scipy. Each edge is off by half of 1e-6 at most."""


def capacities(attention: np.ndarray) -> np.ndarray:
    """Return the capacities ``(n, n)`` of one layer, to and from, for its attention ``(N, n, n)`` by head, query and key."""
    heads = attention.astype(np.float64).mean(0)
    return np.asarray(0.5 * heads + 0.5 * np.eye(len(heads)))


def flows(layers: Sequence[np.ndarray], depths: np.ndarray, sources: Sequence[int], ends: Sequence[int]) -> np.ndarray:
    """Return the maximum flow from each source at the input to the ends, ``(sources,)`` in fp64.

    Args:
        layers: capacities ``(n, n)`` of each layer, as `capacities` gives them.
        depths: ``(n,)``, the last level that each token is at; the number of layers where it stays to the end.
        sources: tokens.
        ends: tokens that the answer is read off, each at its last level.
    """
    tokens = len(depths)
    sink = (len(layers) + 1) * tokens
    begins, targets, sizes = [np.array(ends) + tokens * depths[ends]], [np.full(len(ends), sink)], [np.ones(len(ends))]
    for level, layer in enumerate(layers):
        there = depths > level
        to, origin = np.nonzero((layer >= MIN_FLOW) & there[:, None] & there)
        begins.append(origin + tokens * level)
        targets.append(to + tokens * (level + 1))
        sizes.append(layer[to, origin])
    whole = np.rint(SCALE * np.concatenate(sizes)).astype(np.int32)
    places = tuple(np.concatenate(side).astype(np.int32) for side in (begins, targets))
    graph = csr_array((whole, places), shape=(sink + 1, sink + 1))
    return np.array([maximum_flow(graph, source, sink).flow_value for source in sources], np.float64) / SCALE
