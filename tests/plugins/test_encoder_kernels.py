"""The encoder's kernels in Triton's interpreter on the CPU, against the portable bodies."""

import itertools

import encoder_cases
import encoder_checks as checks
import encoder_choices as choices
import encoder_launch
import pytest
import torch
from encoder_launch import WRITES, StrayWriteError, interpret, raw
from hypothesis import given, settings
from hypothesis import strategies as st
from triton_interpreter import bf16_as_on_a_gpu

pytest.importorskip("triton", reason="Triton is not installed")

from adtp_export.plugins.encoder.variants import ABOVE, ALL, BY_NAME, CHOICE, GROUPED, GROUPED_RECEIVED, PRODUCT, UNPAD

MANY = 100
"""Texts from which on the interpreter, which runs one program after the other, is slow."""


def form_of(variant):
    """What a variant computes: its kernel, its activation, and what it leaves out. Others differ in types and in sizes of blocks."""
    return variant.kernel, *((name, what) for name, what in variant.constants.items() if not isinstance(what, int))


FIRST = {form_of(variant): variant for variant in reversed(ALL)}


def is_slow(variant, case):
    """Whether a case waits for `--slow`: many programs, and all but one variant of each form. The emulator runs one of each type."""
    is_long = variant.kernel in (GROUPED, GROUPED_RECEIVED, CHOICE) and len(case["lengths"]) > MANY
    return is_long or FIRST[form_of(variant)] != variant


ALL_CASES = [
    pytest.param(
        variant,
        check,
        case,
        id=f"{variant.name}-{number}",
        marks=pytest.mark.slow if is_slow(variant, case) else (),
    )
    for variant in ALL
    for number, (check, case) in enumerate(encoder_cases.cases(variant))
]


@pytest.fixture(scope="module", autouse=True)
def interpreter():
    with bf16_as_on_a_gpu():
        yield


@pytest.mark.parametrize(("variant", "check", "case"), ALL_CASES)
def test_kernels_compute_what_the_portable_bodies_say(variant, check, case):
    assert check(interpret, variant, **case) <= 1


LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=7)
SCORE_VALUES = st.sampled_from([None, 1, 4])


def variants_of(kernel, *names):
    return [v for v in ALL if v.kernel == kernel and (not names or any(name in v.name for name in names))]


@given(
    st.sampled_from(variants_of(CHOICE, "given-512", "table-512")),
    LENGTHS,
    st.integers(1, 1000),
    SCORE_VALUES,
    st.booleans(),
    st.integers(0, 2**16),
)
@settings(max_examples=12, deadline=None)
def test_any_choice_of_the_best(variant, lengths, permille, values, keep_first, seed):
    case = {"lengths": lengths, "permille": permille, "values": values, "keep_first": keep_first, "seed": seed}
    assert choices.check_best(interpret, variant, **case) == 0


@given(
    st.sampled_from(variants_of(CHOICE, "ranks-512")),
    LENGTHS,
    st.text("01", min_size=1, max_size=9),
    SCORE_VALUES,
    st.integers(0, 2**16),
)
@settings(max_examples=8, deadline=None)
def test_any_choice_by_ranks(variant, lengths, bins, values, seed):
    assert choices.check_ranks(interpret, variant, lengths=lengths, bins=bins, values=values, seed=seed) == 0


@given(LENGTHS, st.floats(-2, 2, width=32), SCORE_VALUES, st.integers(0, 2**16))
@settings(max_examples=40, deadline=None)
def test_any_choice_by_a_threshold(lengths, threshold, values, seed):
    (variant,) = variants_of(ABOVE)
    case = {"lengths": lengths, "threshold": threshold, "values": values, "seed": seed}
    assert choices.check_above(interpret, variant, **case) == 0


@given(st.lists(st.integers(0, 9), min_size=1, max_size=40), st.integers(9, 12), st.integers(0, 5))
@settings(max_examples=40, deadline=None)
def test_any_padding_is_removed(lengths, padded, further):
    (variant,) = variants_of(UNPAD)
    num_texts = len(lengths) + further
    assert checks.check_unpad(interpret, variant, lengths=lengths, padded=padded, num_texts=num_texts) == 0


@given(
    st.sampled_from(variants_of(PRODUCT, "32x64")),
    st.integers(0, 70),
    st.integers(1, 12),
    st.integers(1, 20),
    st.integers(1, 5),
    st.booleans(),
    st.integers(1, 9),
    st.integers(0, 2**16),
)
@settings(max_examples=20, deadline=None)
def test_any_product(variant, rows, n, k, parts, indexed, programs, seed):
    parts = parts if variant.constants.get("bias", 0) is None else 1
    case = {"n": 8 * n, "k": 8 * k, "parts": parts, "indexed": indexed, "programs": programs, "seed": seed}
    assert checks.check_product(interpret, variant, rows=rows, **case) <= 1


def test_a_write_beside_an_argument_is_noticed():
    """Told of more rows than there are, a product writes behind its output."""
    variant = BY_NAME["product-fp32-32x64-none"]

    def more(variant, programs, *, out, **given):
        interpret(variant, programs, out=out[:-1].clone(), **given | {"live": given["live"] + 3})

    with pytest.raises(StrayWriteError):
        checks.check_product(more, variant, rows=5, n=8, k=8)


def test_a_write_to_an_input_is_noticed(monkeypatch):
    """So is one to an output, where it is taken for an input."""
    variant = BY_NAME["product-fp32-32x64-none"]
    monkeypatch.setitem(encoder_launch.WRITES, PRODUCT, ())
    with pytest.raises(StrayWriteError, match="changes out"):
        checks.check_product(interpret, variant, rows=5, n=8, k=8)


@pytest.mark.parametrize("mistake", ["bias", "rows", "part"])
def test_a_mistake_in_a_product_is_noticed(mistake):
    variant = BY_NAME["product-fp32-32x64-parts" if mistake == "part" else "product-fp32-32x64-none"]

    def wrong(variant, programs, **given):
        if mistake == "bias":
            given["bias"] = given["bias"] + 0.01
        if mistake == "rows":
            given["live"] = given["live"] - 1
        if mistake == "part":
            given["parts"] = 2
        interpret(variant, programs, **given)

    assert not checks.check_product(wrong, variant, rows=5, n=8, k=136, parts=3 if mistake == "part" else 1) <= 1


def written(check, variant, changed, **case):
    """Bytes that a launch writes to which some arguments are given in place of the right ones."""
    found = {}

    def spoilt(variant, programs, **given):
        interpret(variant, programs, **given | changed)
        found.update({name: raw(given[name]).tolist() for name in WRITES[variant.kernel]})

    check(spoilt, variant, **case)
    return found


def test_counts_that_make_no_sense_stay_inside():
    """`live` and `texts` from outside the bucket are taken as its ends; whatever is in `cu_seqlens`, nothing else is written."""
    variant = BY_NAME["product-fp32-32x64-none"]
    for live, end in ((-(2**31), 0), (2**31 - 1, 9)):
        found, wanted = (
            written(checks.check_product, variant, {"live": checks.int32(count)}, rows=5, capacity=9)
            for count in (live, end)
        )
        assert found == wanted
    (above,) = variants_of(ABOVE)
    words = torch.randint(-(2**31), 2**31 - 1, (6,), generator=torch.Generator().manual_seed(1)).to(torch.int32)
    garbage = (words, words.sort().values, checks.int32(*[-1] * 6), checks.int32(0, 9, 4, 30, 30, 30))
    for variant in (above, *variants_of(CHOICE, "512")):
        further = {"bins": "10"} if "ranks" in variant.name else {}
        check = choices.check_ranks if further else choices.check_above if variant is above else choices.check_best
        for bad, (texts, end) in zip(garbage, itertools.cycle(((2**30, 5), (-(2**31), 0)))):
            found, wanted = (
                written(check, variant, {"cu_seqlens": bad, "texts": checks.int32(count)}, lengths=(3, 4, 2), **further)
                for count in (texts, end)
            )
            assert found == wanted
