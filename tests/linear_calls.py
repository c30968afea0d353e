"""The products in lower precision of the operators for CPUs, called without ONNX Runtime, and what they may be off."""

import ctypes
import platform

import ml_dtypes
import numpy as np
import pytest
import torch

from adtp_export.ops.onnx_linear import bf16_weight, int8_weight

OF_X86 = ("amx", "avx512_bf16", "avx512_vnni", "avx2_vnni", "avx512", "avx2")
OF_ARM = ("neon_dotprod", "neon")
LEVELS = (*(OF_ARM if platform.machine().lower() in ("aarch64", "arm64") else OF_X86), "portable")
TILES = "amx, emulated"
FORMS = [*LEVELS, pytest.param(TILES, marks=pytest.mark.slow)]
EPS = float(np.finfo(np.float32).eps)
GELU_ERROR, GELU_ROUNDS = 5e-6, 1e-6
"""A polynomial in place of erf is off by the first, and everything rounds a few times: of a result, the second."""


class Call(ctypes.Structure):
    """plugins/cpu/linear.h has the same."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "factors", "weight", "scale", "sums", "bias", "y")),
        *((name, ctypes.c_int64) for name in "mkn"),
        ("gelu", ctypes.c_int32),
        ("low", ctypes.c_void_p),
        ("lowPitch", ctypes.c_int64),
        ("second", ctypes.c_void_p),
        ("third", ctypes.c_void_p),
    ]


class AddNorm(ctypes.Structure):
    """linear.h has the same."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("residual", "gamma", "beta", "y")),
        ("n", ctypes.c_int64),
        ("epsilon", ctypes.c_float),
    ]


class Chain(ctypes.Structure):
    """chain.h has the same."""

    _fields_ = [("first", Call), ("second", Call), ("norm", AddNorm)]


EPSILON = 1e-5
BY_COLUMNS = -1
"""In place of the rows of a piece."""


def make_product(m, k, n, seed=0, scale=1.0):
    """Rows, weights ``(N, K)`` and a bias."""
    generator = np.random.default_rng(seed)
    rows = generator.standard_normal((m, k)) * generator.lognormal(size=(m, 1)) * scale + generator.normal(size=(m, 1))
    weight = generator.standard_normal((n, k)) / np.sqrt(k)
    return rows.astype(np.float32), weight.astype(np.float32), generator.standard_normal(n).astype(np.float32)


def make_factors(k, seed=0):
    """By which rows are multiplied before they are rounded."""
    return np.random.default_rng(seed).lognormal(size=k).astype(np.float32)


def constants(precision, weight, factors=None):
    """What the operator takes between rows and bias. Weights are for rows that were multiplied by the factors."""
    if precision == "bf16":
        return {"weight": bf16_weight(weight)}
    scale = np.maximum(np.abs(weight).max(1) / 127, np.finfo(np.float32).tiny).astype(np.float32)
    stored = np.rint(weight / scale[:, None]).astype(np.int8)
    stored, sums = int8_weight(stored)
    factors = np.ones(1, np.float32) if factors is None else factors
    return {"factors": factors, "weight": stored, "scale": scale, "sums": sums}


def multiply(library, x, tensors, bias, gelu, level=None):
    """Run the kernel; None where this processor does not run the level."""
    (m, k), n = x.shape, len(bias)
    call = make_call(x, tensors, bias, m, k, gelu)
    return _filled(m, n, lambda y: _run(library, "adtp_linear", call, level, y=y))


def multiply_in_three(library, x, tensors, bias, gelu, level=None):
    """The same with a result for each third of the columns, ``(3, M, N/3)``."""
    (m, k), n = x.shape, len(bias)
    call = make_call(x, tensors, bias, m, k, gelu)

    def run(y):
        third = m * n // 3 * 4
        call.second, call.third = y + third, y + 2 * third
        return _run(library, "adtp_linear", call, level, y=y)

    found = _filled(m, n, run)
    return None if found is None else found.reshape(3, m, n // 3)


def make_call(x, tensors, bias, m, k, gelu):
    """A product without the place of its result. Its arrays have to be kept meanwhile."""
    factors = tensors.get("factors")
    if factors is not None and len(factors) < k:
        factors = None
    arrays = (x, factors, *(tensors.get(key) for key in ("weight", "scale", "sums")), bias)
    return Call(*(None if array is None else array.ctypes.data for array in arrays), None, m, k, len(bias), gelu)


def run_chain(library, x, products, residual, gamma, beta, level=None, rows=0):
    """One product or two, given as tensors and bias, with the sum and norm behind them; None as for `multiply`."""
    (m, k), n, calls = x.shape, len(gamma), [Call(), Call()]
    for i, (tensors, bias) in enumerate(products):
        calls[i] = make_call(None if i else x, tensors, bias, m, k, i + 1 < len(products))
        k = len(bias)
    norm = AddNorm(residual.ctypes.data, gamma.ctypes.data, beta.ctypes.data, None, n, EPSILON)

    def run(y):
        norm.y = y
        return _run(library, "adtp_chain", Chain(*calls, norm), level, ctypes.c_int64(rows))

    return _filled(m, n, run)


def _run(library, name, call, level, *others, y=None):
    if y is not None:
        call.y = y
    return getattr(ctypes.CDLL(str(library)), name)(ctypes.byref(call), level and level.encode(), *others)


def _filled(m, n, run):
    """What a call fills; None where this processor does not run the level. It is full of NaN before, and has a guard behind it."""
    y = np.full(m * n + 64, np.nan, np.float32)
    status = run(y.ctypes.data)
    assert status in (0, 1), "memory is short"
    assert np.isnan(y[m * n :]).all()
    return y[: m * n].reshape(m, n) if status == 0 else None


def normed(x, residual, gamma, beta):
    """The norm of a sum in double, and what a result in fp32 may be off: sums over a row round as often as it has values."""
    total = x.astype(np.float64) + residual
    n, mean = total.shape[1], total.mean(1, keepdims=True)
    apart = total - mean
    factor = 1 / np.sqrt((apart**2).mean(1, keepdims=True) + EPSILON)
    y = apart * factor * gamma + beta
    of_mean = (n + 4) * EPS * np.abs(total).mean(1, keepdims=True) + 2 * EPS * np.abs(total)
    of_factor = (n + 8) * EPS + 2 * of_mean.mean(1, keepdims=True) * factor
    return y, np.abs(gamma) * factor * (of_mean + of_factor * np.abs(apart)) + 4 * EPS * (np.abs(y) + np.abs(beta))


def expected(precision, x, weight, bias, gelu):
    """The result in double, of numbers rounded as the operator rounds them, and what a result in fp32 may be off."""
    low = x.astype(ml_dtypes.bfloat16).astype(np.float64)
    real = weight.astype(ml_dtypes.bfloat16).astype(np.float64)
    summed = (x.shape[1] + 4) * EPS
    if precision == "int8":
        low, real, summed = rounded_rows(x), weight_in_int8(weight), 4 * EPS
    product, size = low @ real.T, np.abs(low) @ np.abs(real.T)
    size = np.abs(product) if precision == "int8" else size
    y = product + bias
    allowed = summed * size + 2 * EPS * (np.abs(product) + np.abs(bias))
    if gelu:
        y = y * normal(y)
        allowed = 1.2 * allowed + GELU_ERROR + GELU_ROUNDS * np.abs(y)  # its slope is at most 1.13
    return y, allowed


def rounded_rows(x):
    """Rows as the operator rounds them to 8 bits, in double: the scale is fp32's."""
    low = np.minimum(x.min(1, keepdims=True, initial=0), 0)
    high = np.maximum(x.max(1, keepdims=True, initial=0), 0)
    steps = np.float32(255)
    scale = np.maximum(high / steps - low / steps, np.finfo(np.float32).tiny).astype(np.float32)
    inverse = np.float32(1) / scale
    zero = np.rint(-low * inverse)
    return (np.clip(np.rint(x * inverse) + zero, 0, 255).astype(np.float64) - zero) * scale


def weight_in_int8(weight):
    scale = np.maximum(np.abs(weight).max(1) / 127, np.finfo(np.float32).tiny).astype(np.float32)
    return np.rint(weight / scale[:, None]).astype(np.float64) * scale[:, None]


def normal(y):
    """The normal distribution's share below y."""
    return torch.special.ndtr(torch.from_numpy(y)).numpy()


def library_and_level(request):
    """Return the library that runs one of `FORMS`, the name of its level, and what to say where this processor does not run it."""
    tiles = request.param == TILES
    level = request.param.partition(",")[0]
    lacking = f"this processor has no {'avx512_bf16, for emulated tiles' if tiles else level}"
    return request.getfixturevalue("tiles_library" if tiles else "operators_library"), level, lacking
