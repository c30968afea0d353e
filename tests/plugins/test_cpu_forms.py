"""The CPU kernel's forms: biases by distance, windows, what others give, grouped queries, and numbers of 16 bits."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from cpu_operators import COMPILED_FOR, DEFINED, LEVELS, TILES, attend
from hypothesis import given, settings
from hypothesis import strategies as st
from plugin_host import SANITIZERS
from testbed import ROOT

sys.path.insert(0, str(ROOT / "tests" / "ops"))
from ragged_inputs import bounds, make_distances, make_inputs

SOURCES = ROOT / "plugins" / "cpu"
REACH = 400
"""Positions are below it."""
CUT = ([[5]], [[0], [5], [399]], [list(range(90)), [0, 1, 399], list(range(0, 390, 3))], [list(range(300)), [9]])
"""Positions of what is left of each text: gaps are where tokens were dropped."""
TEXTS = st.lists(
    st.lists(st.integers(0, REACH - 1), min_size=1, max_size=120, unique=True).map(sorted), min_size=1, max_size=4
)
FORMS = ("relative", "disentangled", "window 1", "window 20", "window 64", "from others")
LOW = {torch.float16: 2.0**-24, torch.bfloat16: 0.0}
"""Types of 16 bits, and the least number of each that matters here."""


@pytest.fixture(scope="module", params=LEVELS)
def kernel(request, operators_library):
    """One form of the kernel, as a function of the operator's inputs."""

    def run(*inputs, **form):
        return attend(operators_library, *inputs, level=request.param, **form)

    if run(*make_inputs([1])) is None:
        pytest.skip(f"this processor has no {request.param}")
    return run


def make(texts, form, heads=2, head_size=16, seed=0, dtype=torch.float32):
    """Inputs of an operator, and what a form adds to them."""
    inputs = make_inputs([len(text) for text in texts], heads, head_size, seed=seed, dtype=dtype)
    positions = torch.tensor([place for text in texts for place in text], dtype=torch.int32)
    if form == "relative":
        generator = torch.Generator().manual_seed(seed)
        table = torch.randn(2 * REACH - 1, heads, generator=generator).to(dtype)
        return inputs, {"positions": positions, "table": table}
    if form == "disentangled":
        return inputs, {"positions": positions, **make_distances(heads, head_size, 90, 100, dtype, seed)}
    if form == "from others":
        return inputs, {"from_others": True}
    return inputs, {"positions": positions, "window": int(form.split()[1])}


def check(kernel, inputs, form):
    """Both outputs, as near to the reference as fp32 has to be, and the first one whether or not the second is wanted."""
    exact, allowed, exact_received, allowed_received = bounds(*inputs, **form)
    output, received = kernel(*inputs, **form)
    assert (np.abs(output - exact) <= allowed).all()
    assert (np.abs(received - exact_received) <= allowed_received).all()
    alone, untouched = kernel(*inputs, received=False, **form)
    assert (np.abs(alone - exact) <= allowed).all()
    assert np.isnan(untouched).all()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("texts", CUT, ids=len)
def test_equals_the_reference(kernel, form, texts):
    check(kernel, *make(texts, form))


@given(TEXTS, st.sampled_from(FORMS), st.integers(1, 3), st.integers(1, 20), st.integers(0, 2**16))
@settings(max_examples=20, deadline=None)
def test_ragged(kernel, texts, form, heads, head_size, seed):
    check(kernel, *make(texts, form, heads, head_size, seed))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_numbers_of_16_bits(kernel, form, dtype):
    """Sums are those of fp32, and the result is rounded once."""
    inputs, options = make(CUT[2], form, dtype=dtype, head_size=20)
    in_fp32 = [t.float() for t in inputs[:3]]
    wide = {name: t.float() if torch.is_tensor(t) and t.dtype == dtype else t for name, t in options.items()}
    exact, allowed, exact_received, allowed_received = bounds(*in_fp32, *inputs[3:], **wide)
    for received in (True, False):
        output, got = kernel(*inputs, received=received, **options)
        rounding = torch.finfo(dtype).eps / 2 * (np.abs(exact) + allowed) + LOW[dtype]
        assert (np.abs(output - exact) <= allowed + rounding).all()
        assert not received or (np.abs(got - exact_received) <= allowed_received).all()


@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_every_number_of_16_bits(kernel, dtype):
    """A text of one token answers its value; one of two alike the mean of theirs, rounded to the nearest, ties to even."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)[:, None]
    ones = torch.zeros_like(every)
    output, _ = kernel(ones, ones, every, torch.arange(2**16 + 1, dtype=torch.int32), 1, 1.0)
    np.testing.assert_array_equal(output, every.float().numpy())
    pairs = every[torch.randperm(2**16, generator=torch.Generator().manual_seed(0))]
    pairs[::4] = (pairs[1::4].float() * 1.01).to(dtype)  # some of one size
    pairs[pairs.float().abs() > 1e38] = 0  # sums of two would overflow in fp32
    output, _ = kernel(ones, ones, pairs, torch.arange(0, 2**16 + 1, 2, dtype=torch.int32), 1, 1.0)
    halves = pairs.float().mul(0.5)
    mean = (halves[::2] + halves[1::2]).to(dtype).float()
    np.testing.assert_array_equal(output[::2], mean.numpy())


def test_what_changes_nothing_changes_no_bit(kernel):
    """A table of zeros, a window that holds the texts, and heads of keys that are all of queries."""
    inputs, form = make(CUT[3], "relative")
    plain = kernel(*inputs)
    wide = {"positions": form["positions"], "window": REACH}
    for other in ({**form, "table": torch.zeros_like(form["table"])}, wide, {"key_heads": 2}):
        for ours, theirs in zip(kernel(*inputs, **other), plain):
            np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_groups_of_queries_share_keys(kernel, dtype):
    """Each of two heads of keys serves three of queries, as if it were there three times."""
    q, _, _, *rest = make_inputs([3, 70, 1], heads=6, head_size=12, dtype=dtype)
    _, k, v, *_ = make_inputs([3, 70, 1], heads=2, head_size=12, dtype=dtype)
    whole = [t.unflatten(1, (2, 12)).repeat_interleave(3, dim=1).flatten(1) for t in (k, v)]
    for ours, theirs in zip(kernel(q, k, v, *rest, key_heads=2), kernel(q, *whole, *rest)):
        np.testing.assert_array_equal(ours, theirs)


@given(
    st.lists(st.integers(1, 300), min_size=1, max_size=4),
    st.lists(st.sampled_from([1, 1, 0, 5, 64]), min_size=4, max_size=4),
    st.sampled_from([(6, 2), (9, 3), (8, 1), (70, 1)]),
    st.sampled_from([torch.float32, *LOW]),
    st.sampled_from([-1, 0, 40]),
)
@settings(max_examples=30, deadline=None)
def test_one_query_a_text(kernel, lengths, counts, heads, dtype, back):
    """As in generation: heads that share keys are computed together, and give to the bit what each gives alone. Beside them are texts that
    ask nothing, or more."""
    asked = [min(length, count) for length, count in zip(lengths, counts)]
    together, alone = asking(kernel, lengths, asked, heads, 12, back, dtype)
    np.testing.assert_array_equal(together, alone)


def asking(kernel, lengths, asked, heads, size, back, dtype=torch.float32):
    """What the last tokens of texts get, so many of each: of heads that share keys, and of as many that have copies of them."""
    own, shared = heads
    _, k, v, cu_k, *_ = make_inputs(lengths, heads=shared, head_size=size, dtype=dtype)
    q, _, _, cu_q, *rest = make_inputs(asked, heads=own, head_size=size, dtype=dtype)
    place = torch.cat([torch.arange(length, dtype=torch.int32) for length in lengths])
    ends = torch.cat([torch.arange(length - count, length, dtype=torch.int32) for length, count in zip(lengths, asked)])
    form = {"positions": ends, "key_positions": place, "cu_k": cu_k, "reach": (back, 0), "received": False}
    whole = [t.unflatten(1, (shared, size)).repeat_interleave(own // shared, dim=1).flatten(1) for t in (k, v)]
    return kernel(q, k, v, cu_q, *rest, key_heads=shared, **form)[0], kernel(q, *whole, cu_q, *rest, **form)[0]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_in_its_text(kernel, form, value):
    texts = [list(range(5)), list(range(0, 280, 2)), list(range(6))]
    inputs, options = make(texts, form)
    clean = kernel(*inputs, **options)
    for tensor in inputs[:3]:
        kept = tensor[70].clone()
        tensor[70] = value
        for ours, theirs in zip(kernel(*inputs, **options), clean):
            np.testing.assert_array_equal(ours[:5], theirs[:5])
            np.testing.assert_array_equal(ours[145:], theirs[145:])
        assert not np.isfinite(kernel(*inputs, **options)[0][70]).all()
        tensor[70] = kept


@given(st.sampled_from(FORMS), st.lists(st.integers(-2, 9) | st.just(2**31 - 1), min_size=1, max_size=5))
@settings(max_examples=25, deadline=None)
def test_bounds_that_are_none_are_refused(kernel, form, bounds):
    (q, k, v, _, *rest), options = make([list(range(8))], form)
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32)
    if bounds[0] == 0 and bounds[-1] == 8 and sorted(bounds) == bounds:
        kernel(q, k, v, cu_seqlens, *rest, **options)
        return
    with pytest.raises(ValueError, match="refused"):
        kernel(q, k, v, cu_seqlens, *rest, **options)


@pytest.mark.parametrize("bad", [[0, 2, 1], [-1, 0, 1], [0, 1, REACH], [0, 1, 2**31 - 1], [-(2**31), 0, 1]], ids=str)
def test_positions_that_are_none_are_refused(kernel, bad):
    inputs, form = make([[0, 1, 2], [7]], "relative")
    form["positions"][:3] = torch.tensor(bad, dtype=torch.int32)
    with pytest.raises(ValueError, match="refused"):
        kernel(*inputs, **form)


@pytest.mark.parametrize("heads", [1, 3])
def test_positions_that_repeat(kernel, heads):
    """A gap and two equal ones may leave the ends as far apart as the tokens are."""
    check(kernel, *make([[0, 0, 2, 3], [5, 7, 7, 8], [3] * 20, [*range(40), 39, 41]], "relative", heads))


def test_positions_far_apart(kernel):
    """Differences of positions are taken where they do not overflow."""
    inputs, form = make([[0, 1, 2**31 - 2, 2**31 - 1]], "window 1")
    check(kernel, inputs, form)


def test_a_mistake_is_noticed(kernel):
    """The tolerance tells a window that is wider by one, a table that is off by one row, a sign, and what a token gives itself."""
    inputs, window = make(CUT[2], "window 20")
    _, relative = make(CUT[2], "relative")
    _, apart = make(CUT[2], "disentangled")
    swapped = {**apart, "distance_queries": apart["distance_queries"].flip(1)}
    wrong = (
        {**window, "window": 21},
        {**relative, "table": relative["table"].roll(1, 0)},
        swapped,
        {"from_others": False},
    )
    for form, mistaken in zip((window, relative, apart, {"from_others": True}), wrong, strict=True):
        exact, allowed, exact_received, allowed_received = bounds(*inputs, **form)
        output, received = kernel(*inputs, **mistaken)
        assert form.get("from_others") or (np.abs(output - exact) > allowed).any()
        assert (np.abs(received - exact_received) > allowed_received).any()


@pytest.mark.slow
@pytest.mark.parametrize("defined", [DEFINED, TILES], ids=["", "emulated tiles"])
def test_sanitizers_find_nothing(operators_library, tmp_path, defined):
    """On random calls, and on such whose bounds or positions are spoilt. What tiles read and write is only seen of emulated ones."""
    common = ("c++", "-std=c++17", *defined, f"-I{SOURCES}")
    checked = ("-O1", *SANITIZERS)
    objects = []
    for source in sorted(SOURCES.glob("*.cpp")):
        objects.append(tmp_path / f"{source.name}.o")
        products = source.stem.startswith("linear") and source.stem != "linear_operators"
        flags = ("-O0",) if products else checked  # products have a test of their own, in test_linear_kernel.py
        subprocess.run(
            [*common, *flags, *COMPILED_FOR.get(source.stem, ()), "-c", source, "-o", objects[-1]], check=True
        )
    check = ROOT / "tests" / "plugins" / "operators_check.cpp"
    subprocess.run([*common, *checked, check, *objects, "-o", tmp_path / "check"], check=True)
    done = subprocess.run([tmp_path / "check", "60"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    said = done.stdout.splitlines()
    assert said[-1].startswith("ok    portable: 60 calls")
    assert all(int(line.split(";")[2].split()[0]) > 40 for line in said)  # spoilt ones that were refused
    ran = {line.split(":")[0].split()[1] for line in said}
    assert defined is not TILES or ("avx512_bf16" in ran) == ("amx" in ran)
