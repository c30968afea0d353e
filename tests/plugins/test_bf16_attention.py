"""Attention whose products are rounded to bf16, in tiles or where vdpbf16ps gains by it: the kernels, and where files let them be taken."""

import re

import numpy as np
import onnx_ir as ir
import pytest
import torch
from cpu_operators import attend, feed, kinds_that_ran, model_of, session
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import helper
from test_cpu_forms import CUT, FORMS, TEXTS, asking, make
from test_cpu_kernel import AROUND_BLOCKS, AROUND_TILES, LENGTHS, bounds, make_inputs
from testbed import ROOT

from adtp_export.contract import ATTENTION, ATTENTION_RECEIVED, BF16_PRODUCTS, DOMAIN, NUM_HEADS, SCALE
from adtp_export.environment import cpu
from adtp_export.graph.passes.allow_bf16_attention import AllowBf16Attention

LEVELS, EXACT = ("amx", "avx512_bf16"), "avx512"
LIBRARIES = {"": "operators_library", ", compiled here": "built_library", ", emulated": "lanewise_library"}
"""The last one runs on any processor: its intrinsics and tiles are computed lane by lane."""
KERNELS = [
    pytest.param((level, library), marks=[pytest.mark.slow] if form else [], id=level + form)
    for form, library in LIBRARIES.items()
    for level in LEVELS
]
LOG2E = float(np.float32(1.44269504))
ROUNDED = tuple(form for form in FORMS if form not in ("disentangled", "from others"))


@pytest.fixture(scope="module", params=KERNELS)
def kernel(request):
    """A kernel, as this processor runs it or emulated; `level` is its name."""
    own, library = request.param
    library = request.getfixturevalue(library)

    def run(*inputs, level=own, received=False, **form):
        return attend(library, *inputs, level=level, received=received, **form)

    if run(*make_inputs([1])) is None:
        pytest.skip(f"this processor has no {own}")
    run.level = own
    return run


def allowed_of(q, k, v, cu_seqlens, heads, scale, **form):
    """The exact answer of inputs that are rounded as the kernel rounds them, and what it may be off.

    So only weights are rounded besides: each by half a unit in the last of bf16's 8 bits, and before that by 2^-18 for its power of 2, as
    much as the sum of all. All else is what fp32 may be off.
    """
    factor = float(np.float32(scale) * np.float32(LOG2E))
    rounded = [(q * factor).bfloat16().float(), k.bfloat16().float(), v.bfloat16().float()]
    rest = (cu_seqlens, heads, float(np.log(2.0)))
    exact, allowed, *_ = bounds(*rounded, *rest, **form)
    sizes = bounds(*rounded[:2], rounded[2].abs(), *rest, **form)[0]
    return exact, allowed + (2.0**-8 + 2.0**-16) * sizes


def check(kernel, inputs, form):
    exact, allowed = allowed_of(*inputs, **form)
    output, _ = kernel(*inputs, **form)
    assert (np.abs(output - exact) <= allowed).all()


@pytest.mark.parametrize("lengths", [*AROUND_TILES, *AROUND_BLOCKS], ids=str)
def test_lengths_around_tiles_and_blocks(kernel, lengths):
    check(kernel, make_inputs(lengths, heads=2, head_size=32), {})


@pytest.mark.parametrize("head_size", [1, 2, 5, 16, 17, 24, 31, 32, 33, 40, 48, 64, 72, 128, 264])
@pytest.mark.parametrize("lengths", [[2, 17, 30], [300]], ids=str)
def test_head_sizes(kernel, head_size, lengths):
    check(kernel, make_inputs(lengths, heads=2, head_size=head_size), {})


@given(LENGTHS, st.integers(1, 5), st.integers(1, 40), st.integers(0, 2**16))
@settings(max_examples=60, deadline=None)
def test_ragged(kernel, lengths, heads, head_size, seed):
    check(kernel, make_inputs(lengths if sum(lengths) else [*lengths, 1], heads, head_size, seed=seed), {})


@pytest.mark.parametrize("form", ROUNDED)
@pytest.mark.parametrize("texts", CUT, ids=["one token", "one each", "gaps", "long"])
def test_forms(kernel, form, texts):
    check(kernel, *make(texts, form))


@given(TEXTS, st.sampled_from(ROUNDED), st.integers(0, 2**16))
@settings(max_examples=40, deadline=None)
def test_forms_on_any_texts(kernel, texts, form, seed):
    check(kernel, *make(texts, form, seed=seed))


@pytest.mark.parametrize("reach", [(-1, 0), (20, 5), (-1, -1)], ids=str)
def test_grouped_queries_are_those_of_repeated_keys(kernel, reach):
    """To the bit; and the first one is near fp32's kernel, which has tests of its own."""
    heads, groups, size, lengths = 6, 2, 16, [90, 1, 150]
    q, _, _, cu_seqlens, _, scale = make_inputs(lengths, heads, size)
    k, v = make_inputs(lengths, groups, size, seed=1)[1:3]
    positions = torch.cat([torch.arange(n, dtype=torch.int32) for n in lengths])
    form = {"cu_k": cu_seqlens, "positions": positions, "key_positions": positions, "reach": reach}
    grouped, _ = kernel(q, k, v, cu_seqlens, heads, scale, key_heads=groups, **form)
    k, v = (t.unflatten(1, (groups, -1)).repeat_interleave(heads // groups, 1).flatten(1) for t in (k, v))
    repeated, _ = kernel(q, k, v, cu_seqlens, heads, scale, key_heads=heads, **form)
    np.testing.assert_array_equal(grouped, repeated)
    exact, _ = kernel(q, k, v, cu_seqlens, heads, scale, key_heads=heads, level=EXACT, **form)
    rounding = 2.0**-8  # of bf16; queries, keys, weights and values are rounded
    assert rounding / 64 < np.linalg.norm(grouped - exact) / np.linalg.norm(exact) < 4 * rounding


@pytest.mark.parametrize("back", [-1, 0, 40])
def test_one_query_a_text(kernel, back):
    """As in generation: heads that share keys are computed together, and give to the bit what each gives alone."""
    together, alone = asking(kernel, [300, 1, 40], [1, 1, 1], (70, 10), 24, back)
    np.testing.assert_array_equal(together, alone)


def test_scores_far_from_zero(kernel):
    """As in fp32: the highest gets all, also where a later block of keys has it, and others get nothing."""
    rank = torch.randperm(150, generator=torch.Generator().manual_seed(0)).float()[:, None]
    sign = torch.tensor([1.0, -1.0]).repeat(75)[:, None]
    v = torch.randn(150, 1, generator=torch.Generator().manual_seed(1)).bfloat16().float()
    output, _ = kernel(100 * sign, rank, v, torch.tensor([0, 150], dtype=torch.int32), 1, 1.0)
    highest, lowest = int(rank.argmax()), int(rank.argmin())
    np.testing.assert_array_equal(output, torch.where(sign > 0, v[highest], v[lowest]).numpy())


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 1, 2], ids="qkv")
def test_a_number_that_is_none_stays_in_its_text(kernel, place, wrong):
    """And one of a query in its row."""
    inputs = make_inputs([5, 140, 7], heads=1, head_size=8)
    clean, _ = kernel(*inputs)
    inputs[place][71, 3] = wrong
    output, _ = kernel(*inputs)
    spoilt, reached = set(np.flatnonzero((output != clean).any(1))), set(range(5, 145)) if place else {71}
    assert spoilt == reached if np.isnan(wrong) else spoilt and spoilt <= reached


def test_nothing_to_do(kernel):
    assert kernel(*make_inputs([0, 0]))[0].shape == (0, 32)


def test_a_mistake_is_noticed(kernel):
    """The tolerance tells a scale that is off by a fiftieth, a key too many, and a key that is left out of a pair."""
    *inputs, scale = make_inputs([1, 41, 9], heads=2, head_size=32)
    exact, allowed = allowed_of(*inputs, scale)
    assert (np.abs(kernel(*inputs, scale * 1.02)[0] - exact) > allowed).any()
    q, k, v, cu_seqlens, heads = inputs
    for step in (torch.tensor([0, 0, 1, 0]), torch.tensor([0, 1, 0, 0])):
        output, _ = kernel(q, k, v, cu_seqlens + step.int(), heads, scale)
        assert (np.abs(output - exact) > allowed).any()
    v = v.clone()
    v[41] = 0
    assert (np.abs(kernel(q, k, v, cu_seqlens, heads, scale)[0] - exact) > allowed).any()


@pytest.mark.parametrize("form", FORMS)
def test_received_attention_is_computed_in_fp32(kernel, form):
    """To the bit, and so are products with distances and numbers of 16 bits."""
    inputs, fields = make(CUT[2], form)
    for mine, theirs in zip(
        *(kernel(*inputs, level=level, received=True, **fields) for level in (kernel.level, EXACT))
    ):
        np.testing.assert_array_equal(mine, theirs)
    for dtype in (torch.float16, torch.bfloat16):
        inputs, fields = make(CUT[2], form, dtype=dtype)
        mine, theirs = (kernel(*inputs, level=level, **fields)[0] for level in (kernel.level, EXACT))
        np.testing.assert_array_equal(mine, theirs)
    inputs, fields = make(CUT[2], "disentangled")
    mine, theirs = (kernel(*inputs, level=level, **fields)[0] for level in (kernel.level, EXACT))
    np.testing.assert_array_equal(mine, theirs)


def test_the_best_level_is_fp32(kernel):
    inputs = make_inputs([100])
    exact, best, rounded = (kernel(*inputs, level=level)[0] for level in (EXACT, None, kernel.level))
    np.testing.assert_array_equal(exact, best)
    assert not np.array_equal(exact, rounded)


def files(operator):
    """A model of one node as exported, and the same as products in lower precision have it."""
    outputs = {"y": 1} | ({"received": 1} if operator == ATTENTION_RECEIVED else {})
    attributes = {NUM_HEADS: 4, SCALE: 8**-0.5}
    node = helper.make_node(operator, ["q", "k", "v", "cu_seqlens"], list(outputs), domain=DOMAIN, **attributes)
    plain = model_of([node], outputs)
    allowed = ir.from_proto(plain)
    AllowBf16Attention()(allowed)
    return plain, ir.to_proto(allowed)


@pytest.mark.parametrize("operator", [ATTENTION, ATTENTION_RECEIVED])
def test_only_files_that_allow_it_get_it(operators_library, operator, tmp_path):
    """A file without the attribute, as of earlier versions, is computed in fp32; on Intel's processors without tiles every file is."""
    inputs = make_inputs([40, 3, 150])
    receives = operator == ATTENTION_RECEIVED
    exact, tiles, dot = (
        attend(operators_library, *inputs, level=level, received=receives) for level in (None, *LEVELS)
    )
    rounded = tiles or (dot if cpu(1)["hardware"]["vendor"] != "GenuineIntel" else None) or exact
    for model, expected in zip(files(operator), (exact, rounded), strict=True):
        profiled = session(model, operators_library, profile=tmp_path / "profile")
        found = profiled.run(["y"], feed(*inputs))[0]
        assert kinds_that_ran(profiled) == {operator}
        np.testing.assert_array_equal(found, expected[0])


@pytest.mark.parametrize("operator", [ATTENTION, ATTENTION_RECEIVED])
def test_bodies_do_not_read_it(operator):
    inputs = feed(*make_inputs([40, 3, 15]))
    plain, allowed = files(operator)
    assert (BF16_PRODUCTS in {each.name for each in allowed.graph.node[0].attribute}) == (operator == ATTENTION)
    for before, after in zip(session(plain).run(None, inputs), session(allowed).run(None, inputs), strict=True):
        np.testing.assert_array_equal(before, after)


def test_its_name_is_that_of_the_contract():
    source = (ROOT / "plugins" / "cpu" / "operators.cpp").read_text(encoding="utf-8")
    assert re.findall(r'"(bf16\w+)"', source) == [BF16_PRODUCTS]
