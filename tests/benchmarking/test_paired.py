"""Differences of models on the same rows: intervals that cover, whatever is drawn in groups."""

import numpy as np
import pytest
import scipy.stats

from adtp_export.benchmarking import paired


def answers(rng, groups, rates, seeds=1):
    """Right answers of two models: the rows of a group are right or wrong together."""
    own = rng.random((2, seeds, groups.max() + 1))
    return [(own[i] < rate)[:, groups].astype(float) for i, rate in enumerate(rates)]


def test_an_interval_is_that_of_scipy_where_there_is_one_seed():
    rng = np.random.default_rng(0)
    groups = np.repeat(np.arange(200), rng.integers(1, 8, 200))
    first, second = answers(rng, groups, (0.8, 0.75))
    found = paired.difference(first, second, groups)
    ahead, sizes = (np.bincount(groups, weights=w) for w in ((first - second)[0], np.ones(len(groups))))
    drawn = scipy.stats.bootstrap(
        (ahead, sizes),
        lambda ahead, sizes, axis: ahead.sum(axis) / sizes.sum(axis),
        paired=True,
        method="percentile",
        n_resamples=9999,
        rng=1,
    )
    assert found.mean == pytest.approx((first - second).mean())
    assert (found.low, found.high) == pytest.approx(drawn.confidence_interval, abs=0.004)
    assert (found.seeds, found.rows, found.groups) == (1, len(groups), 200)


def test_rows_that_repeat_others_make_nothing_surer():
    rng = np.random.default_rng(1)
    first, second = answers(rng, np.arange(300), (0.8, 0.75))
    once = paired.difference(first, second, np.arange(300))
    thrice = paired.difference(first.repeat(3, 1), second.repeat(3, 1), np.arange(300).repeat(3))
    assert (thrice.low, thrice.high, thrice.p) == pytest.approx((once.low, once.high, once.p))
    taken_apart = paired.difference(first.repeat(3, 1), second.repeat(3, 1), np.arange(900))
    assert taken_apart.high - taken_apart.low == pytest.approx((once.high - once.low) / 3**0.5, rel=0.05)


def test_seeds_that_lie_apart_make_a_difference_less_sure():
    rng = np.random.default_rng(2)
    shared = (rng.random(500) < 0.5).astype(float)
    lucky = np.stack([shared, shared, (shared + (rng.random(500) < 0.2)).clip(max=1)])
    found = paired.difference(lucky, np.stack([shared] * 3), np.arange(500))
    assert found.low <= 0 < found.mean
    assert found.p > 0.05
    alone = paired.difference(lucky[2], shared, np.arange(500))
    assert alone.low > 0
    assert alone.p < 0.001


def test_intervals_cover_a_true_difference(monkeypatch):
    """Of 300 draws 95% should: within four standard errors of that, and more where seeds are drawn, too."""
    monkeypatch.setattr(paired, "DRAWS", 1000)
    rng = np.random.default_rng(3)
    groups = np.repeat(np.arange(120), rng.integers(1, 6, 120))
    covered = []
    for _ in range(300):
        found = paired.difference(*answers(rng, groups, (0.8, 0.7), seeds=5), groups)
        covered.append(found.low <= 0.1 <= found.high)
    assert np.mean(covered) > 0.95 - 4 * (0.05 * 0.95 / 300) ** 0.5


@pytest.mark.parametrize(("first", "second", "groups"), [((2, 3), (3, 3), 3), ((3,), (3,), 2), ((1, 0), (1, 0), 0)])
def test_scores_that_are_not_of_the_same_rows_are_refused(first, second, groups):
    with pytest.raises(ValueError, match="need equal rows and seeds"):
        paired.difference(np.zeros(first), np.zeros(second), np.zeros(groups, int))


def test_holm_counts_what_is_compared():
    assert paired.holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert paired.holm([0.6, 0.5]) == [1.0, 1.0]
    assert paired.holm([]) == []
