"""The products in lower precision of the operators for CPUs, called without ONNX Runtime, and what they may be off."""

import ctypes

import ml_dtypes
import numpy as np
import torch

from adtp_export.ops.onnx_linear import bf16_weight, int8_weight

LEVELS = ("amx", "avx512_bf16", "avx512_vnni", "avx2_vnni", "avx512", "avx2", "portable")
EPS = float(np.finfo(np.float32).eps)
GELU_ERROR = 1e-6
"""erf is off by 1.5e-7 and everything else rounds a few times: of x, this much."""


class Call(ctypes.Structure):
    """plugins/cpu/linear.h has the same."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "weight", "scale", "sums", "bias", "y")),
        *((name, ctypes.c_int64) for name in "mkn"),
        ("gelu", ctypes.c_int32),
    ]


def make_product(m, k, n, seed=0, scale=1.0):
    """Rows, weights ``(N, K)`` and a bias."""
    generator = np.random.default_rng(seed)
    rows = generator.standard_normal((m, k)) * generator.lognormal(size=(m, 1)) * scale + generator.normal(size=(m, 1))
    weight = generator.standard_normal((n, k)) / np.sqrt(k)
    return rows.astype(np.float32), weight.astype(np.float32), generator.standard_normal(n).astype(np.float32)


def constants(precision, weight):
    """What the operator takes between rows and bias."""
    if precision == "bf16":
        return {"weight": bf16_weight(weight)}
    scale = np.maximum(np.abs(weight).max(1) / 127, np.finfo(np.float32).tiny).astype(np.float32)
    stored = np.rint(weight / scale[:, None]).astype(np.int8)
    stored, sums = int8_weight(stored)
    return {"weight": stored, "scale": scale, "sums": sums}


def multiply(library, x, tensors, bias, gelu, level=None):
    """Run the kernel; None where this processor does not run the level. The result was full of NaN before, and has a guard behind it."""
    (m, k), n, guard = x.shape, len(bias), 64
    y = np.full(m * n + guard, np.nan, np.float32)
    places = [
        array.ctypes.data if array is not None else None
        for array in (x, *(tensors.get(key) for key in ("weight", "scale", "sums")), bias, y)
    ]
    call = Call(*places, m, k, n, gelu)
    status = ctypes.CDLL(str(library)).adtp_linear(ctypes.byref(call), level and level.encode())
    assert status in (0, 1), "memory is short"
    assert np.isnan(y[m * n :]).all()
    return y[: m * n].reshape(m, n) if status == 0 else None


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
        y, allowed = y * normal(y), 1.2 * allowed + GELU_ERROR * np.abs(y)  # its slope is at most 1.13
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
