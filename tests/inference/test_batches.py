"""How `load` divides texts into batches."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adtp_export.inference.batches import CELLS_PER_TOKEN, MAX_TOKENS, RUN_TOKENS, by_length, divide


def cost(lengths, batches):
    return sum(RUN_TOKENS + len(b) * max(lengths[i] for i in b) ** 2 / CELLS_PER_TOKEN for b in batches)


def fits(lengths, batch):
    return len(batch) == 1 or sum(lengths[i] for i in batch) <= MAX_TOKENS


@given(st.lists(st.integers(1, 800), max_size=8), st.integers(1, 9))
@settings(max_examples=100, deadline=None)
def test_no_division_of_the_sorted_texts_costs_less(lengths, most):
    found = divide(lengths, most)
    assert sorted(itertools.chain(*found)) == list(range(len(lengths)))
    assert all(1 <= len(batch) <= most and fits(lengths, batch) for batch in found)
    order, best = sorted(range(len(lengths)), key=lambda i: lengths[i]), float("inf")
    for cuts in itertools.product([False, True], repeat=max(0, len(order) - 1)):
        at = [0, *(i for i, cut in enumerate(cuts, start=1) if cut), len(order)]
        parts = [order[a:b] for a, b in itertools.pairwise(at)]
        if all(1 <= len(part) <= most and fits(lengths, part) for part in parts):
            best = min(best, cost(lengths, parts))
    assert not lengths or cost(lengths, found) == pytest.approx(best)


def test_like_lengths_run_together_and_one_long_text_by_itself():
    assert [len(batch) for batch in divide([13] * 64, 32)] == [32, 32]
    lengths = [10] * 31
    lengths.insert(7, 512)
    assert sorted(divide(lengths, 32), key=len) == [[7], [i for i in range(32) if i != 7]]


def test_kernels_that_never_pad_take_all_lengths_together():
    assert [len(batch) for batch in divide([10] * 31 + [512], 32, pads=False)] == [32]


def test_a_batch_has_a_limit_of_tokens():
    assert [len(batch) for batch in divide([512] * 40, 40)] == [MAX_TOKENS // 512] * 10
    assert divide([MAX_TOKENS + 5, MAX_TOKENS + 5], 4) == [[0], [1]]


def test_gpus_get_full_batches():
    assert by_length([9, 1, 7, 512, 3], 2) == [[1, 4], [2, 0], [3]]
    assert by_length([], 2) == []
