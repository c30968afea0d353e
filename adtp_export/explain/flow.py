"""Attention flow: how much can pass from a token at the input to the answer, along the attention of all layers.

A node is a token at a level: level 0 is the input, level l + 1 comes after layer l's attention. An edge leads from the token that is
attended to, a level up, to the token that attends. Its capacity is the attention, mean over heads, halved for the residual
connection, which gives each token another half to itself.

A text of 1,000 tokens has millions of edges, and few of them decide. So each flow of a long text begins on a small graph: the
residual connections, what the source gives, and what the ends take. The minimum cut found there is measured in the whole graph. If no
other edge crosses it, the flow is that of the whole graph, for no flow exceeds a cut. Else the edges that cross it are added, and the
flow is computed again.

Source: Abnar and Zuidema, Quantifying Attention Flow in Transformers (ACL 2020), for the graph. Xu et al., FlowPrune (NeurIPS 2025), for
the idea that a cut says which edges matter. Its other idea, fewer layers, is `merged_layers`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

LARGEST = 2**30
"""Of flows, in units of capacity, which are integers of 32 bits in scipy."""

SMALL = 96
"""Tokens up to which the whole graph is solved at once: at 20 tokens five times as fast as a growing one, from 200 on slower."""


def capacities(attention: np.ndarray) -> np.ndarray:
    """Return the capacities ``(n, n)`` of one layer, to and from, for its attention ``(N, n, n)`` by head, query and key."""
    heads = attention.astype(np.float64).mean(0)
    return np.asarray(0.5 * heads + 0.5 * np.eye(len(heads)))


def flows(layers: Sequence[np.ndarray], depths: np.ndarray, sources: Iterable[int], ends: Sequence[int]) -> np.ndarray:
    """Return the maximum flow from each source at the input to the ends, ``(sources,)`` in fp64.

    Args:
        layers: capacities ``(n, n)`` of each layer, as `capacities` gives them. Each is rounded to a whole number of `unit`s.
        depths: ``(n,)``, the last level that each token is at; the number of layers where it stays to the end.
        sources: tokens.
        ends: tokens that the answer is read off, each at its last level.
    """
    graph = _Layered(layers, depths, ends)
    return np.array([graph.flow(source) for source in sources], np.float64) * unit(len(ends))


def unit(ends: int) -> float:
    """Return what capacities are rounded to: an edge is off by half of that at most."""
    return ends / LARGEST


class _Layered:
    """The graph of all layers, in whole units."""

    def __init__(self, layers: Sequence[np.ndarray], depths: np.ndarray, ends: Sequence[int]) -> None:
        self.tokens, self.sink = len(depths), (len(layers) + 1) * len(depths)
        self.layers = []
        for level, layer in enumerate(layers):
            there = depths > level
            whole = np.rint(layer / unit(len(ends))).astype(np.int32)
            self.layers.append(whole * (there[:, None] & there))
        own, last = np.arange(self.tokens), np.array(ends)
        self.last = last + self.tokens * depths[last]
        self.whole = self._graph(self._edges(own[:, None], own)) if self.tokens <= SMALL else None
        self.shared = np.concatenate([self._edges(own, own), self._edges(last[:, None], own)])

    def _edges(self, to: np.ndarray, origin: np.ndarray) -> np.ndarray:
        """Number the edges between these tokens in all layers, as ``(level * n + to) * n + origin``."""
        numbers = (to.astype(np.int64) * self.tokens + origin).ravel()
        return (np.arange(len(self.layers))[:, None] * self.tokens**2 + numbers).ravel()

    def flow(self, source: int) -> int:
        """Return the maximum flow from a token at the input, in units."""
        if self.whole is not None:
            return int(maximum_flow(self.whole, source, self.sink).flow_value)
        given = self._edges(np.arange(self.tokens), np.array([source]))
        edges = np.unique(np.concatenate([self.shared, given]))
        while True:
            found, reached = self._solved(edges, source)
            missing = np.setdiff1d(self._crossing(reached), edges, assume_unique=True)
            if not len(missing):
                return found
            edges = np.union1d(edges, missing)

    def _graph(self, edges: np.ndarray) -> csr_array:
        """Return the capacities of these edges by node, a level after the other, and of those to the sink, which is the last node."""
        rows, origin = np.divmod(edges, self.tokens)
        level, to = np.divmod(rows, self.tokens)
        sizes = np.concatenate([layer[to[level == i], origin[level == i]] for i, layer in enumerate(self.layers)])
        begins = np.concatenate([level * self.tokens + origin, self.last])
        targets = np.concatenate([rows + self.tokens, np.full(len(self.last), self.sink)])
        sizes = np.concatenate([sizes, np.full(len(self.last), LARGEST // len(self.last), np.int32)])
        places = (begins.astype(np.int32), targets.astype(np.int32))
        graph = csr_array((sizes, places), shape=(self.sink + 1, self.sink + 1))
        graph.eliminate_zeros()
        return graph

    def _solved(self, edges: np.ndarray, source: int) -> tuple[int, np.ndarray]:
        """Return the maximum flow over these edges, and ``(levels, n) bool``, the source's side of a minimum cut."""
        graph = self._graph(edges)
        result = maximum_flow(graph, source, self.sink)
        left = graph - result.flow
        left.eliminate_zeros()
        reached = np.zeros(self.sink + 1, bool)
        reached[breadth_first_order(left, source, return_predecessors=False)] = True
        return int(result.flow_value), reached[:-1].reshape(-1, self.tokens)

    def _crossing(self, reached: np.ndarray) -> np.ndarray:
        """Number the edges that lead out of a side ``(levels, n) bool``."""
        found = [np.empty(0, np.int64)]
        for level, layer in enumerate(self.layers):
            origin, to = np.flatnonzero(reached[level]), np.flatnonzero(~reached[level + 1])
            rows, columns = np.nonzero(layer[np.ix_(to, origin)])
            found.append((level * self.tokens + to[rows].astype(np.int64)) * self.tokens + origin[columns])
        return np.concatenate(found)
