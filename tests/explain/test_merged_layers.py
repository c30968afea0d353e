"""Layers merged for attention flow, as FlowPrune's search should have them."""

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from adtp_export.explain.merged_layers import merge, merged, narrowest, stretches


def all_divisions(layers, left):
    """Every division of the layers between the first and the last into at most `left` - 2 stretches."""
    for count in range(left - 2):
        for inner in itertools.combinations(range(2, layers - 1), count):
            cuts = [0, 1, *inner, layers - 1, layers]
            yield [*itertools.pairwise(cuts)]


@given(st.lists(st.integers(0, 50), min_size=3, max_size=8), st.integers(3, 8))
def test_no_other_division_keeps_more_narrow_layers(counts, left):
    def kept(division):
        return sum(counts[begin] for begin, end in division if end - begin == 1)

    found = stretches(counts, left)
    assert len(found) == min(left, len(counts))
    assert found in [*all_divisions(len(counts), left)]
    assert kept(found) == max(map(kept, all_divisions(len(counts), left)))


def test_merged_layers_lead_to_what_can_be_reached():
    first, second = np.diag([0.5, 0.6, 0.7]), np.diag([0.9, 0.5, 0.5])
    second[2, 1] = 0.1
    whole = merged([first, second])
    assert whole.tolist() == [[0.9, 0, 0], [0, 0.9, 0], [0, 0.9, 0.9]]
    assert merged([second]) is second


def test_routes_are_counted_where_they_are_narrowest():
    """Each token has one route, through its residual connections; 5 in either direction."""
    assert narrowest([np.diag([0.5, 0.5]), np.diag([0.4, 0.9]), np.diag([0.6, 0.3])]).tolist() == [0, 10, 10]


def test_what_fits_stays_as_it_is():
    random = np.random.default_rng(0)
    layers = [np.tril(random.random((4, 4))) for _ in range(6)]
    assert all(found is layer for found, layer in zip(merge(layers, 6), layers, strict=True))
    found = merge(layers, 4)
    assert len(found) == 4
    assert (found[0] is layers[0], found[-1] is layers[-1]) == (True, True)
