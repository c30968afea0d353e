"""Histograms do not depend on how the data comes, and each observer chooses the range that it says."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from adtp_export.calibration import recipes
from adtp_export.calibration.observers import BINS, Histogram, observer
from adtp_export.errors import InputError

INT8 = recipes.built_in("ort-cpu", "int8").levels
FP8 = recipes.built_in("trt", "fp8").levels


def histogram(*parts):
    seen = Histogram()
    for part in parts:
        values = torch.as_tensor(part, dtype=torch.float32)
        seen.add(values if values.ndim > 1 else values[:, None])
    return seen


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.floats(-1e6, 1e6, width=32), min_size=2, max_size=60),
    st.integers(1, 59),
    st.randoms(use_true_random=False),
)
def test_order_and_parts_change_nothing(values, cut, random):
    whole = histogram(values)
    random.shuffle(values)
    parts = histogram(values[:cut], values[cut:])
    assert parts.limit == whole.limit
    np.testing.assert_array_equal(parts.counts, whole.counts)
    assert (parts.low, parts.high) == (whole.low, whole.high)
    assert whole.counts.sum() == len(values)
    assert whole.largest < whole.limit <= max(2 * whole.largest, 2.0**-24)


def test_a_value_lies_in_its_bin():
    seen = histogram([0.3, -0.9, 0.9])
    assert seen.limit == 1
    assert np.flatnonzero(seen.counts).tolist() == [int(0.3 * BINS), int(0.9 * BINS)]
    assert seen.counts.max() == 2


def test_channels_are_the_last_axis():
    seen = histogram([[1.0, -5.0], [-3.0, 2.0]], [[0.0, 4.0]])
    assert seen.channels.tolist() == [3, 5]


def test_infinite_activations_are_refused():
    with pytest.raises(InputError, match="are not finite"):
        histogram([1.0, float("inf")])


@pytest.fixture(scope="module")
def outlier():
    """Ten thousand values of a normal distribution and one of 50."""
    return histogram(torch.randn(10_000, generator=torch.Generator().manual_seed(0)), [50.0])


def test_minmax_clips_nothing(outlier):
    assert observer("minmax")(outlier, INT8) == 50


def test_percentile_leaves_out_the_rest(outlier):
    normal = np.abs(torch.randn(10_000, generator=torch.Generator().manual_seed(0)).numpy())
    end = observer("percentile:99")(outlier, INT8)
    assert end == pytest.approx(np.quantile(normal, 0.99), abs=2 * outlier.limit / BINS)
    assert observer("percentile:100")(outlier, INT8) == 50


@pytest.mark.parametrize("levels", [INT8, FP8], ids=["int8", "fp8"])
def test_mse_is_the_best_range_there_is(outlier, levels):
    values = np.append(torch.randn(10_000, generator=torch.Generator().manual_seed(0)).numpy(), 50.0)

    def error(end):
        nearest = np.abs(np.minimum(np.abs(values) / end, 1)[:, None] - levels).argmin(1)
        return float(((levels[nearest] * end - np.abs(values)) ** 2).sum())

    chosen = error(observer("mse")(outlier, levels))
    assert chosen <= 1.01 * min(error(end) for end in (2.0, 4.0, 8.0, 16.0, 25.0, 37.0, 50.0))


def test_entropy_clips_an_outlier_and_no_uniform_distribution(outlier):
    assert observer("entropy")(outlier, INT8) < 25
    uniform = histogram(torch.linspace(-1, 1, 20_001))
    assert observer("entropy")(uniform, INT8) > 0.95


@pytest.mark.parametrize("name", ["percentil:99", "percentile:0", "percentile:101", "percentile:x", "minmax:3", ""])
def test_unknown_observers(name):
    with pytest.raises(InputError, match=r"observer: got .*accepted are minmax, mse, entropy and percentile:P"):
        observer(name)
