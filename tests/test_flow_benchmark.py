"""The benchmarks of attention flow: layers merged as FlowPrune's search should have them, and figures of dropped tokens."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.cpu.flow import compare, merged, narrowest, stretches
from benchmarks.students.dropped import auc, share


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
    assert len(found) <= left
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


def test_figures():
    found = compare(np.array([0.5, 0.0, 1.0]), np.array([0.25, 0.0, 1.0]))
    assert (found["most"], found["relative"], found["agree"]) == (0.25, 0.5, 3)
    values, dropped = np.array([3.0, 1.0, 1.0, 7.0]), np.array([True, True, False, False])
    assert share(values, dropped) == pytest.approx(2 / 3)
    pairs = [(values[i] > values[j]) + (values[i] == values[j]) / 2 for i in (2, 3) for j in (0, 1)]
    assert auc(values, dropped) == pytest.approx(np.mean(pairs))
