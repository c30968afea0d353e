"""The CPU kernel against the one reference, in each form that this processor runs; and in AVX512's, emulated."""

import re
import sys

import numpy as np
import pytest
import torch
from cpu_operators import LEVELS, attend
from hypothesis import given, settings
from hypothesis import strategies as st
from testbed import ROOT

from adtp_export.contract import (
    BF16_PRODUCTS,
    DOMAIN,
    KV_HEADS,
    NUM_HEADS,
    SCALE,
    WINDOW,
    WINDOW_AHEAD,
    WINDOW_BACK,
)
from adtp_export.ops.onnx_function import portable_functions

sys.path.insert(0, str(ROOT / "tests" / "ops"))
from ragged_inputs import bounds, make_inputs

SOURCES = ROOT / "plugins" / "cpu"
AROUND_TILES = ([1], [3, 4, 5], [7, 8, 9], [11, 12, 13], [15, 16, 17], [23, 24, 25], [47, 48, 49])
AROUND_BLOCKS = ([127, 128, 129], [1, 260, 2], [0, 5, 0, 0, 3, 0])


@pytest.fixture(scope="module", params=LEVELS)
def kernel(request, operators_library):
    """One form of the kernel, as a function of the operator's inputs."""

    def run(*inputs, received=True):
        return attend(operators_library, *inputs, level=request.param, received=received)

    if run(*make_inputs([1])) is None:
        pytest.skip(f"this processor has no {request.param}")
    return run


def check(kernel, inputs):
    """Both outputs, as near to the reference as fp32 has to be, and the first one whether or not the second is wanted."""
    exact, allowed, exact_received, allowed_received = bounds(*inputs)
    output, received = kernel(*inputs)
    assert (np.abs(output - exact) <= allowed).all()
    assert (np.abs(received - exact_received) <= allowed_received).all()
    alone, untouched = kernel(*inputs, received=False)
    assert (np.abs(alone - exact) <= allowed).all()
    assert np.isnan(untouched).all()


@pytest.mark.parametrize("lengths", [*AROUND_TILES, *AROUND_BLOCKS], ids=str)
def test_lengths_around_tiles_and_blocks(kernel, lengths):
    check(kernel, make_inputs(lengths, heads=2, head_size=32))


@pytest.mark.parametrize("head_size", [1, 5, 8, 12, 16, 24, 32, 40, 64, 72, 128, 264])
def test_head_sizes(kernel, head_size):
    check(kernel, make_inputs([2, 17, 30], heads=2, head_size=head_size))


LENGTHS = st.one_of(
    st.lists(st.integers(0, 30), min_size=1, max_size=12),
    st.tuples(st.integers(100, 200), st.lists(st.integers(0, 6), max_size=20)).map(lambda t: [*t[1], t[0], *t[1]]),
)


@given(LENGTHS, st.integers(1, 5), st.integers(1, 40), st.integers(0, 2**16))
@settings(max_examples=30, deadline=None)
def test_ragged(kernel, lengths, heads, head_size, seed):
    if sum(lengths) == 0:
        lengths = [*lengths, 1]
    check(kernel, make_inputs(lengths, heads, head_size, seed=seed))


@pytest.mark.parametrize("lengths", [[0], [0, 0, 0], []], ids=str)
def test_nothing_to_do(kernel, lengths):
    output, received = kernel(*make_inputs(lengths))
    assert output.shape == (0, 32)
    assert received.shape == (0,)


def test_scores_far_from_zero(kernel):
    """Scores 100 apart, up to 15,000 and down to -15,000: the highest gets all, and nothing overflows on the way."""
    rank = torch.randperm(150, generator=torch.Generator().manual_seed(0)).float()[:, None]
    sign = torch.tensor([1.0, -1.0]).repeat(75)[:, None]
    v = torch.randn(150, 1, generator=torch.Generator().manual_seed(1))
    output, received = kernel(100 * sign, rank, v, torch.tensor([0, 150], dtype=torch.int32), 1, 1.0)
    highest, lowest = int(rank.argmax()), int(rank.argmin())
    np.testing.assert_array_equal(output, torch.where(sign > 0, v[highest], v[lowest]).numpy())
    np.testing.assert_allclose(received[[highest, lowest]], 75)
    assert np.delete(received, [highest, lowest]).max() < 1e-30


def test_nan_stays_in_its_sequence(kernel):
    q, k, v, *rest = make_inputs([5, 140, 6], heads=1, head_size=8)
    k[70] = torch.nan
    output, received = kernel(q, k, v, *rest)
    assert np.isnan(output[5:145]).all()
    assert np.isnan(received[5:145]).all()
    assert not np.isnan(output[:5]).any()
    assert not np.isnan(output[145:]).any()


def test_a_mistake_is_noticed(kernel):
    """The tolerance tells a scale that is off by a thousandth, and a key too many."""
    *inputs, scale = make_inputs([1, 40, 9], heads=2, head_size=32)
    exact, allowed, exact_received, allowed_received = bounds(*inputs, scale)
    output, received = kernel(*inputs, scale * 1.001)
    assert (np.abs(output - exact) > allowed).any()
    assert (np.abs(received - exact_received) > allowed_received).any()
    q, k, v, cu_seqlens, heads = inputs
    output, _ = kernel(q, k, v, cu_seqlens + torch.tensor([0, 0, 1, 0], dtype=torch.int32), heads, scale)
    assert (np.abs(output - exact) > allowed).any()


def test_names_are_those_of_the_contract():
    source = (SOURCES / "operators.cpp").read_text(encoding="utf-8")
    names = [function.name for function in portable_functions()]
    assert re.findall(r'\{"(\w+)", By::', source) == names
    settings = [KV_HEADS, WINDOW_BACK, WINDOW_AHEAD, BF16_PRODUCTS, NUM_HEADS, SCALE, WINDOW]
    assert re.findall(r'<ort::KernelInfoGet\w+>\(info, "(\w+)"', source) == settings
    assert re.findall(r'<ort::CreateCustomOpDomain>\("(\w+)"', source) == [DOMAIN]


@pytest.mark.slow
def test_avx512_emulated(lanewise_library):
    """The file for AVX512, its intrinsics computed lane by lane: its shuffles and masks are right on any processor."""
    for lengths in (*AROUND_TILES, *AROUND_BLOCKS):
        for head_size in (5, 16, 24, 32, 64):
            check(
                lambda *inputs, **options: attend(lanewise_library, *inputs, level="avx512", **options),
                make_inputs(lengths, heads=2, head_size=head_size),
            )
