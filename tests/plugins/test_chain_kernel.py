"""Products with the sum and norm behind them on CPUs, in each form that this processor runs: the products as they are alone, to the bit."""

import subprocess

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from linear_calls import (
    BY_COLUMNS,
    FORMS,
    constants,
    library_and_level,
    make_factors,
    make_product,
    multiply,
    normed,
    run_chain,
)

from adtp_export.plugins import operators
from adtp_export.runtimes.onnxruntime import OnnxRuntimeEngine

CHOICE = """
#include "chain.cpp"

#include <cstdio>

int main()
{
    adtp::Chain chain{};
    chain.first.m = 512;
    chain.first.n = chain.first.k = chain.norm.n = 64;
    for (int64_t threads : {4, 8, 9})
    {
        adtp::setThreads(threads);
        std::printf("%d ", static_cast<int>(adtp::rowsOfPieces(chain, *adtp::linearLevel("portable"))));
    }
}
"""
"""Prints the rows of a piece of 512, for some numbers of threads; without the operators for other processors, which compile for long."""


class Kernel:
    """One form of the kernel."""

    def __init__(self, library, level):
        self.library, self.level = library, level

    def chain(self, x, products, others, rows=0):
        return run_chain(self.library, x, products, *others, self.level, rows)

    def products(self, x, products):
        for i, (tensors, bias) in enumerate(products):
            x = multiply(self.library, x, tensors, bias, i + 1 < len(products), self.level)
        return x


@pytest.fixture(scope="module", params=FORMS)
def kernel(request):
    library, level, lacking = library_and_level(request)
    made = Kernel(library, level)
    x, products, others = make_chain("bf16", 1, (4, 16))
    if made.chain(x, products, others) is None:
        pytest.skip(lacking)
    return made


def make_chain(precision, m, widths, seed=0):
    """Rows, products from each width to the next, and residual, gamma and beta."""
    generator = np.random.default_rng(seed)
    made = [make_product(m, k, n, seed + i) for i, (k, n) in enumerate(zip(widths, widths[1:]))]
    products = [(constants(precision, weight), bias) for _, weight, bias in made]
    normal = [generator.normal(size=size).astype(np.float32) for size in ((m, widths[-1]), widths[-1], widths[-1])]
    return made[0][0], products, normal


def check(kernel, x, products, others, rows):
    exact, allowed = normed(kernel.products(x, products), *others)
    assert (np.abs(kernel.chain(x, products, others, rows) - exact) <= allowed).all()


@pytest.mark.parametrize("precision", ["bf16", "int8"])
@pytest.mark.parametrize("two", [False, True], ids=["one", "two"])
@given(
    st.integers(0, 40),
    st.tuples(st.integers(1, 70), st.integers(1, 70), st.integers(1, 70)),
    st.sampled_from([0, BY_COLUMNS, 1, 7, 32]),
    st.integers(0, 2**16),
)
@settings(max_examples=15, deadline=None)
def test_sizes(kernel, precision, two, m, widths, rows, seed):
    check(kernel, *make_chain(precision, m, widths if two else widths[:2], seed), rows)


@pytest.mark.parametrize("rows", [0, BY_COLUMNS, 7])
def test_factors_are_those_of_each_product(kernel, rows):
    """To the bit, rows that were multiplied before go through the first one. The residual stays as it is."""
    x, products, others = make_chain("int8", 40, (37, 50, 40))
    factors = make_factors(37), make_factors(50)
    both = [({**tensors, "factors": own}, bias) for (tensors, bias), own in zip(products, factors)]
    check(kernel, x, both, others, rows)
    last = [products[0], both[1]]
    np.testing.assert_array_equal(kernel.chain(x, both, others, rows), kernel.chain(x * factors[0], last, others, rows))
    assert not np.array_equal(kernel.chain(x, both, others, rows), kernel.chain(x, last, others, rows))


@pytest.mark.parametrize("precision", ["bf16", "int8"])
@pytest.mark.parametrize("widths", [(96, 130), (96, 384, 96)], ids=["one", "two"])
def test_pieces_change_nothing(kernel, precision, widths):
    """To the bit: all rows at once, a few at a time, by columns, and as many as are chosen here."""
    x, products, others = make_chain(precision, 301, widths)
    whole = kernel.chain(x, products, others, 512)
    check(kernel, x, products, others, 512)
    for rows in (0, BY_COLUMNS, 1, 96, 150):
        np.testing.assert_array_equal(kernel.chain(x, products, others, rows), whole)


@pytest.mark.parametrize("precision", ["bf16", "int8"])
@pytest.mark.parametrize("wrong", [np.nan, np.inf])
@pytest.mark.parametrize("rows", [BY_COLUMNS, 8])
def test_a_number_that_is_none_stays_in_its_row(kernel, precision, wrong, rows):
    x, products, others = make_chain(precision, 9, (37, 50, 40))
    before = kernel.chain(x, products, others, rows)
    x[4, 17] = wrong
    after = kernel.chain(x, products, others, rows)
    assert np.isnan(after[4]).all()
    np.testing.assert_array_equal(np.delete(after, 4, 0), np.delete(before, 4, 0))


def test_a_constant_row_is_beta(kernel):
    """Its variance is 0, so what is added to that decides."""
    tensors, zero = constants("bf16", np.zeros((20, 8), np.float32)), np.zeros(20, np.float32)
    beta = np.arange(20, dtype=np.float32)
    residual = np.full((3, 20), 0.1, np.float32)
    found = kernel.chain(np.ones((3, 8), np.float32), [(tensors, zero)], (residual, np.ones_like(zero), beta))
    np.testing.assert_allclose(found, np.tile(beta, (3, 1)), rtol=0, atol=20 * np.spacing(np.float32(0.1)) / 1e-5**0.5)


def test_a_mistake_is_noticed(kernel):
    """The bound tells a residual, a gamma and a beta that are one part in ten thousand off, and another epsilon."""
    x, products, others = make_chain("int8", 8, (64, 32))
    exact, allowed = normed(kernel.products(x, products), *others)
    for i in range(3):
        spoilt = [array * np.float32(1 + 1e-4 * (i == j)) for j, array in enumerate(others)]
        assert (np.abs(kernel.chain(x, products, spoilt) - exact) > allowed).any()
    small = [others[0] * 0, *others[1:]]
    products = [({**products[0][0], "scale": products[0][0]["scale"] * np.float32(1e-3)}, products[0][1] * 0)]
    exact, allowed = normed(kernel.products(x, products) * 2, *small)
    assert (np.abs(kernel.chain(x, products, small) - exact) > allowed).any()


def test_pieces_are_as_many_as_threads_until_each_has_too_few_rows(tmp_path):
    """Then products are divided by columns, which is 0 here."""
    (tmp_path / "main.cpp").write_text(CHOICE)
    others = ("linear.cpp", "linear_portable.cpp", "linear_neon.cpp", "linear_neon_dotprod.cpp")
    files = [tmp_path / "main.cpp", *(operators.SOURCES / name for name in others)]
    subprocess.run(["c++", "-std=c++17", "-I", operators.SOURCES, *files, "-o", tmp_path / "main"], check=True)
    rows = [int(word) for word in subprocess.check_output([tmp_path / "main"], text=True).split()]
    assert [-(-512 // each) if each else 0 for each in rows] == [4, 8, 0]


@pytest.mark.usefixtures("with_operators")
def test_sessions_tell_how_many_threads_they_have(operators_library, exported_by_default, monkeypatch):
    told = []
    monkeypatch.setattr(operators, "set_threads", lambda path, count: told.append((path, count)))
    for threads in (3, 1):
        OnnxRuntimeEngine(exported_by_default / "model.onnx", threads, plugin=True)
    assert told == [(str(operators.library()), 3), (str(operators.library()), 1)]
    monkeypatch.undo()
    operators.set_threads(str(operators_library), 2)  # the library has that function
