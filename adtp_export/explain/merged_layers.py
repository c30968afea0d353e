"""Fewer layers for attention flow: stretches of layers are merged into one, so the graph of a long prompt is smaller.

An edge of a merged layer leads to whatever can be reached along the stretch, with the largest capacity in it.
The first layer and the last stay. Of the others, it keeps those in which random routes are narrowest most often, as many as there is
room for. Dynamic programming finds them.

Source: Xu et al., FlowPrune (NeurIPS 2025).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np

SEED, ROUTES = 0, 5
"""Of the random routes, and how many there are from each token in each direction."""
FEWEST = 3
"""Layers that layers can be merged into: the first, the last, and what is between."""


def merge(layers: Sequence[np.ndarray], left: int) -> list[np.ndarray]:
    """Merge the capacities ``(n, n)`` of layers into those of at most `left` layers; no more layers than that stay as they are.

    Args:
        left: at least `FEWEST`.
    """
    if len(layers) <= left:
        return list(layers)
    return [merged(layers[begin:end]) for begin, end in stretches(narrowest(layers).tolist(), left)]


def narrowest(layers: Sequence[np.ndarray]) -> np.ndarray:
    """Count for each layer the random routes that are narrowest there, ``(layers,) int64``; edges without capacity are no part of one."""
    random, tokens = np.random.default_rng(SEED), len(layers[0])
    counts = np.zeros(len(layers), np.int64)
    for upward in (True, False):
        for _ in range(ROUTES):
            place, least, where = np.arange(tokens), np.full(tokens, np.inf), np.zeros(tokens, np.int64)
            for number in range(len(layers)) if upward else reversed(range(len(layers))):
                edges = (layers[number].T if upward else layers[number])[place]
                step = np.where(edges > 0, random.random(edges.shape, np.float32), -1).argmax(1)
                width = edges[np.arange(tokens), step]
                where, least, place = np.where(width < least, number, where), np.minimum(width, least), step
            counts += np.bincount(where, minlength=len(layers))
    return counts


def stretches(counts: Sequence[int], left: int) -> list[tuple[int, int]]:
    """Divide layers into at most `left` stretches ``[begin, end)``, so that those of one layer have the largest count together.

    The first layer and the last are stretches of their own, so `left` is at least `FEWEST`.
    """

    @cache
    def best(end: int, room: int) -> tuple[int, tuple[tuple[int, int], ...]]:
        if end == 1:
            return counts[0], ((0, 1),)
        if room < 2:
            return -1, ()
        found = []
        for begin in range(1, end):
            gain, before = best(begin, room - 1)
            if before:
                found.append((gain + (counts[begin] if end - begin == 1 else 0), (*before, (begin, end))))
        return max(found, key=lambda each: (each[0], len(each[1])), default=(-1, ()))

    last = len(counts) - 1
    return [*best(last, left - 1)[1], (last, last + 1)]


def merged(layers: Sequence[np.ndarray]) -> np.ndarray:
    """Merge a stretch of layers; one alone stays as it is."""
    if len(layers) == 1:
        return layers[0]
    reached = layers[0] > 0
    for layer in layers[1:]:
        reached = (layer > 0).astype(np.float32) @ reached.astype(np.float32) > 0
    return np.where(reached, max(float(layer.max()) for layer in layers), 0.0)
