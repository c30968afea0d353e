"""Products in lower precision on CPUs against double, in each form that this processor runs."""

import re
import subprocess

import numpy as np
import pytest
from cpu_operators import COMPILED_FOR, DEFINED, TILES
from hypothesis import given, settings
from hypothesis import strategies as st
from linear_calls import (
    FORMS,
    GELU_ERROR,
    OF_ARM,
    OF_X86,
    constants,
    expected,
    library_and_level,
    make_factors,
    make_product,
    multiply,
    multiply_in_three,
)
from plugin_host import SANITIZERS
from testbed import ROOT

from adtp_export.contract import (
    ADD_NORM,
    BF16_FEED_FORWARD,
    BF16_LINEAR,
    EPSILON,
    GELU,
    IN_FEATURES,
    IN_THREE,
    INNER_FEATURES,
    INT8_FEED_FORWARD,
    INT8_LINEAR,
)
from adtp_export.environment import cpu

SOURCES = ROOT / "plugins" / "cpu"
ANYWHERE = ("linear", "linear_portable", "linear_neon", "linear_neon_dotprod", "chain")
"""Sources without flags of their own."""
ATTRIBUTE = r'<ort::KernelInfoGet\w+>\(info, "(\w+)"'


@pytest.fixture(scope="module", params=FORMS)
def kernel(request):
    """One form of the kernel."""
    library, level, lacking = library_and_level(request)

    def run(x, tensors, bias, gelu, call=multiply):
        return call(library, x, tensors, bias, gelu, level)

    x, weight, bias = make_product(1, 4, 16)
    if run(x, constants("bf16", weight), bias, False) is None:
        pytest.skip(lacking)
    return run


def check(kernel, precision, product, gelu):
    x, weight, bias = product
    exact, allowed = expected(precision, x, weight, bias, gelu)
    found = kernel(x, constants(precision, weight), bias, gelu)
    assert (np.abs(found - exact) <= allowed).all()


@pytest.mark.parametrize("precision", ["bf16", "int8"])
@pytest.mark.parametrize("gelu", [False, True], ids=["", "gelu"])
@given(st.integers(0, 40), st.integers(1, 70), st.integers(1, 150), st.integers(0, 2**16))
@settings(max_examples=15, deadline=None)
def test_sizes(kernel, precision, gelu, m, k, n, seed):
    check(kernel, precision, make_product(m, k, n, seed), gelu)


@pytest.mark.parametrize("precision", ["bf16", "int8"])
@pytest.mark.parametrize(("m", "k", "n"), [(200, 384, 1536), (97, 130, 200), (1, 1536, 384)])
def test_several_pieces(kernel, precision, m, k, n):
    check(kernel, precision, make_product(m, k, n), True)


@pytest.mark.parametrize("precision", ["bf16", "int8"])
@pytest.mark.parametrize("most", [1e-3, 1, 6, 1e6])
def test_the_gelu_of_many_numbers(kernel, precision, most):
    x, weight, _ = make_product(1, 4, 40_001)
    check(kernel, precision, (0 * x, weight, np.linspace(-most, most, 40_001, dtype=np.float32)), True)


@pytest.mark.parametrize("precision", ["bf16", "int8"])
@given(st.sampled_from([0, 1, 7, 40, 193]), st.integers(1, 70), st.integers(1, 6), st.integers(0, 2**16))
@settings(max_examples=15, deadline=None)
def test_three_results(kernel, precision, m, k, blocks, seed):
    """To the bit, the columns of one."""
    x, weight, bias = make_product(m, k, 48 * blocks, seed)
    tensors = constants(precision, weight)
    whole = kernel(x, tensors, bias, False)
    found = kernel(x, tensors, bias, False, multiply_in_three)
    np.testing.assert_array_equal(np.concatenate(list(found), 1), whole)


@pytest.mark.parametrize("gelu", [False, True], ids=["", "gelu"])
@given(st.integers(0, 40), st.integers(1, 70), st.integers(1, 150), st.integers(0, 2**16))
@settings(max_examples=15, deadline=None)
def test_factors(kernel, gelu, m, k, n, seed):
    """To the bit, rows that were multiplied before."""
    x, weight, bias = make_product(m, k, n, seed)
    factors = make_factors(k, seed)
    found = kernel(x, constants("int8", weight, factors), bias, gelu)
    np.testing.assert_array_equal(found, kernel(x * factors, constants("int8", weight), bias, gelu))


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf, np.finfo(np.float32).max])
def test_with_factors_a_number_that_is_none_stays_in_its_row(kernel, wrong):
    """Or one that is none once it is multiplied."""
    x, weight, bias = make_product(9, 37, 40)
    tensors = constants("int8", weight, make_factors(37) + 1)
    before = kernel(x, tensors, bias, False)
    x[4, 17] = wrong
    after = kernel(x, tensors, bias, False)
    assert np.isnan(after[4]).all()
    np.testing.assert_array_equal(np.delete(after, 4, 0), np.delete(before, 4, 0))


@pytest.mark.parametrize("precision", ["bf16", "int8"])
@pytest.mark.parametrize("scale", [1e-38, 1e-30, 0.0, 1e30])
def test_large_and_small_rows(kernel, precision, scale):
    x, weight, bias = make_product(5, 24, 20)
    x = (x * scale).astype(np.float32)
    exact, allowed = expected(precision, x, weight, bias, False)
    found = kernel(x, constants(precision, weight), bias, False)
    lost = 24 * 2.0**-126 * 4  # numbers below the smallest normal one count as 0 in some dot products
    assert (np.abs(found - exact) <= allowed + lost).all()


@pytest.mark.parametrize("precision", ["bf16", "int8"])
@pytest.mark.parametrize("gelu", [False, True], ids=["", "gelu"])
@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 17, 36])
def test_a_number_that_is_none_stays_in_its_row(kernel, precision, gelu, wrong, place):
    x, weight, bias = make_product(9, 37, 40)
    tensors = constants(precision, weight)
    before = kernel(x, tensors, bias, gelu)
    x[4, place] = wrong
    after = kernel(x, tensors, bias, gelu)
    if precision == "int8" or np.isnan(wrong):
        assert np.isnan(after[4]).all()
    elif not gelu:  # of which minus infinity is 0
        assert not np.isfinite(after[4]).any()
    np.testing.assert_array_equal(np.delete(after, 4, 0), np.delete(before, 4, 0))


@pytest.mark.parametrize("precision", ["bf16", "int8"])
def test_the_gelu_of_infinity_is_infinity_or_0(kernel, precision):
    x, weight, bias = make_product(3, 16, 40)
    bias[[0, 17, 39]] = np.inf
    bias[[1, 30]] = -np.inf
    found = kernel(x, constants(precision, weight), bias, True)
    assert (found[:, [0, 17, 39]] == np.inf).all()
    assert (np.abs(found[:, [1, 30]]) <= GELU_ERROR).all()
    assert np.isfinite(np.delete(found, [0, 17, 39], 1)).all()


def test_no_pair_of_products_saturates(kernel):
    """vpmaddubsw, which processors without VNNI have, adds 255 * 127 twice in 16 bits."""
    x = np.full((3, 64), 1.0, np.float32)
    weight = np.full((16, 64), 0.5, np.float32)
    check(kernel, "int8", (x, weight, np.zeros(16, np.float32)), False)


def test_a_mistake_is_noticed(kernel):
    """The bounds tell one weight that is one step off, a zero point that is forgotten, and factors that are."""
    x, weight, bias = make_product(8, 64, 32)
    for precision in ("bf16", "int8"):
        exact, allowed = expected(precision, x, weight, bias, False)
        tensors = constants(precision, weight)
        tensors["weight"] = tensors["weight"].copy()
        bits = tensors["weight"].view(np.int16 if precision == "bf16" else np.int8)
        bits[0, 3, 5, 1] += 1
        assert (np.abs(kernel(x, tensors, bias, False) - exact) > allowed).any()
    tensors = constants("int8", weight)
    tensors["sums"] = np.zeros_like(tensors["sums"])
    assert (np.abs(kernel(x, tensors, bias, False) - exact) > allowed).any()
    tensors = constants("int8", weight, np.full(64, 1.001, np.float32))
    assert (np.abs(kernel(x, tensors, bias, False) - exact) > allowed).any()


def test_intel_multiplies_bf16_in_fp32_or_in_tiles(operators_library):
    """Its vdpbf16ps is half as fast as fp32 multiply-adds; each sums in another order, so bits tell them apart."""
    x, weight, bias = make_product(24, 200, 64)
    best, fp32, own, tiles = (
        multiply(operators_library, x, constants("bf16", weight), bias, False, level)
        for level in (None, "avx512_vnni", "avx512_bf16", "amx")
    )
    if own is None:
        pytest.skip("this processor has no vdpbf16ps")
    assert not np.array_equal(fp32, own)
    dot = fp32 if cpu(1)["hardware"]["vendor"] == "GenuineIntel" else own
    np.testing.assert_array_equal(best, dot if tiles is None else tiles)


@pytest.mark.parametrize("precision", ["bf16", "int8"])
def test_a_row_does_not_depend_on_its_neighbours(kernel, precision):
    """To the bit: one row at a time, and pieces of a large product, whose last one has one row."""
    x, weight, bias = make_product(193, 200, 64)
    tensors = constants(precision, weight)
    whole = kernel(x, tensors, bias, True)
    for row in (0, 95, 96, 191, 192):
        np.testing.assert_array_equal(kernel(x[row : row + 1], tensors, bias, True)[0], whole[row])


def test_names_are_those_of_the_contract():
    source = (SOURCES / "linear_operators.cpp").read_text(encoding="utf-8")
    names = re.findall(r'\{"(\w+)", "(\w+)", "(\w+)"\}', source)
    assert names == [(name, f"{name}{GELU}", f"{name}{IN_THREE}") for name in (BF16_LINEAR, INT8_LINEAR)]
    assert re.findall(ATTRIBUTE, source) == [IN_FEATURES]
    source = (SOURCES / "chain_operators.cpp").read_text(encoding="utf-8")
    names = re.findall(r'Two \? "(\w+)" : "(\w+)"', source)
    products = ((INT8_FEED_FORWARD, INT8_LINEAR), (BF16_FEED_FORWARD, BF16_LINEAR))
    assert names == [(two, f"{one}{ADD_NORM}") for two, one in products]
    assert re.findall(ATTRIBUTE, source) == [IN_FEATURES, INNER_FEATURES, EPSILON]
    levels = re.findall(
        r'LinearLevel const kLinear\w+\{"(\w+)"', "".join(p.read_text() for p in SOURCES.glob("linear_*.cpp"))
    )
    assert sorted(levels) == sorted((*OF_X86, *OF_ARM, "portable"))


@pytest.mark.slow
@pytest.mark.parametrize("defined", [DEFINED, TILES], ids=["", "emulated tiles"])
def test_under_sanitizers(tmp_path, defined):
    """No read or write outside, and nothing undefined, in all forms and sizes around tiles, whose own reads only emulated tiles show."""
    flags = [*defined, "-std=c++17", "-O1", *SANITIZERS]
    own = {name: flags for name, flags in COMPILED_FOR.items() if name.startswith("linear_")}
    objects = []
    for name in (*ANYWHERE, *own):
        objects.append(tmp_path / f"{name}.o")
        subprocess.run(
            ["c++", *flags, *own.get(name, []), "-c", SOURCES / f"{name}.cpp", "-o", objects[-1]], check=True
        )
    program = tmp_path / "check"
    check = ROOT / "tests" / "plugins" / "linear_check.cpp"
    subprocess.run(["c++", *flags, "-I", SOURCES, check, *objects, "-o", program, "-ldl"], check=True)
    ran = subprocess.run([program], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "portable" in ran.stdout
    assert defined is not TILES or ("avx512_bf16" in ran.stdout) == ("amx" in ran.stdout)
