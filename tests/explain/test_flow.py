"""Attention flow is the maximum flow of the graph that the definition describes."""

import networkx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adtp_export.explain import flow
from adtp_export.explain.flow import capacities, unit


def flows(*given):
    """Those of the whole graph, as for short texts, which have to be those of a growing one, as for long texts."""
    found = flow.flows(*given)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flow, "SMALL", 0)
        np.testing.assert_array_equal(found, flow.flows(*given))
    return found


def layers_of(tokens, layers, seed=0):
    """Random attention of three heads as capacities: some of it is too small to count."""
    generator = np.random.default_rng(seed)
    scores = generator.normal(scale=9.0, size=(layers, 3, tokens, tokens))
    attention = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    return [capacities(weights) for weights in attention]


def networkx_flow(layers, depths, source, ends):
    """The same graph with capacities as they are, node by node, solved by another library."""
    graph = networkx.DiGraph()
    graph.add_node((0, source))
    for end in ends:
        graph.add_edge((int(depths[end]), end), "answer", capacity=1.0)
    for level, layer in enumerate(layers):
        for to, origin in np.ndindex(layer.shape):
            if min(depths[to], depths[origin]) > level and layer[to, origin] > 0:
                graph.add_edge((level, origin), (level + 1, to), capacity=layer[to, origin])
    return networkx.maximum_flow_value(graph, (0, source), "answer")


def test_capacities_are_the_mean_of_heads_and_half_a_residual():
    attention = np.array([[[0.2, 0.8], [1.0, 0.0]], [[0.4, 0.6], [0.0, 1.0]]])
    np.testing.assert_allclose(capacities(attention), [[0.65, 0.35], [0.25, 0.75]])


def test_a_graph_by_hand():
    """Rows attend, columns are attended to. From token 2 at the input two ways lead to token 0 above: over 0, at most 0.25, and over 1,
    at most 0.2 of the 0.5 that reach it; over itself nothing does. Without token 1 from level 1 on, the second is gone."""
    first = np.array([[0.75, 0.0, 0.25], [0.0, 0.5, 0.5], [0.0, 0.0, 1.0]])
    second = np.array([[0.8, 0.2, 0.0], [0.0, 1.0, 0.0], [0.0, 0.5, 0.5]])
    stays = np.array([2, 2, 2])
    assert flows([first, second], stays, [2], [0]) == pytest.approx([0.45])
    assert flows([first, second], np.array([2, 0, 2]), [2], [0]) == pytest.approx([0.25])
    assert flows([first, second], np.array([2, 2, 1]), [2], [0]) == pytest.approx([0.45])
    assert flows([first, second], np.array([2, 2, 0]), [2], [0]) == pytest.approx([0.0])
    # Token 2 answers for itself with what it was at level 1, and token 0 at the top, each as it is there.
    assert flows([first, second], np.array([2, 2, 1]), [2], [2]) == pytest.approx([1.0])
    assert flows([first, second], stays, [0, 1, 2], [0]) == pytest.approx([0.75, 0.2, 0.45])


@pytest.mark.parametrize("seed", range(4))
def test_flows_are_those_of_networkx(seed):
    tokens, count = 9, 4
    layers = layers_of(tokens, count, seed)
    generator = np.random.default_rng(seed)
    depths, ends = np.where(generator.random(tokens) < 0.5, generator.integers(0, count, tokens), count), [0, 3]
    depths[0] = count
    found = flows(layers, depths, range(tokens), ends)
    expected = [networkx_flow(layers, depths, source, ends) for source in range(tokens)]
    assert np.ptp(expected) > 0
    rounding = count * tokens**2 * 0.5 * unit(len(ends))  # a cut has at most all edges, each of which is rounded once
    np.testing.assert_allclose(found, expected, atol=rounding, rtol=0)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    tokens=st.integers(1, 12),
    count=st.integers(1, 5),
    spread=st.sampled_from((0, 2, 9)),
)
def test_flows_of_causal_attention_are_those_of_networkx(seed, tokens, count, spread):
    """From even attention, where cuts lie at an end, to sharp attention, where they lie between and edges have to be added."""
    scores = np.random.default_rng(seed).normal(scale=spread, size=(count, 2, tokens, tokens))
    seen = np.exp(scores - scores.max(-1, keepdims=True)) * np.tri(tokens)
    layers = [capacities(weights / weights.sum(-1, keepdims=True).clip(1e-300)) for weights in seen]
    depths, end = np.full(tokens, count), tokens - 1
    expected = [networkx_flow(layers, depths, source, [end]) for source in range(tokens)]
    rounding = count * tokens**2 * 0.5 * unit(1)
    np.testing.assert_allclose(flows(layers, depths, range(tokens), [end]), expected, atol=rounding, rtol=0)


def test_cuts_leave_no_more_than_there_was():
    layers = layers_of(12, 5)
    whole = flows(layers, np.full(12, 5), range(12), [0])
    left = flows(layers, np.array([5, 0, 1, 2, 3, 4] * 2), range(12), [0])
    assert (left <= whole).all()
    assert (left < whole).any()
    assert left[1] == left[7] == 0  # gone before the first attention
