"""`adtp::AdtpBf16Linear`, `adtp::AdtpInt8Linear` and what may stand behind them: products in lower precision with fp32 rows in and out.

Runtimes with a kernel of that name take the node as it is; all others inline the body below. It unpacks the weights from the order
in which the kernel multiplies them (`plugins/cpu/linear.h`), which runtimes do once, when they fold constants.
"""

from __future__ import annotations

import functools

import ml_dtypes
import numpy as np
import onnx
from onnxscript import opset20 as op
from onnxscript import script

from .onnx_function import flat
from .onnx_layout import FLOAT, OURS

BFLOAT16, UINT8, INT32 = onnx.TensorProto.BFLOAT16, onnx.TensorProto.UINT8, onnx.TensorProto.INT32
COLUMNS = 16
"""Of a block of packed weights."""
GROUP = {"bf16": 2, "int8": 4}
"""Weights of one column that lie together: four bytes."""
LEAST_SCALE = float(np.finfo(np.float32).tiny)
"""Of a row in INT8: its inverse is finite."""


def packed(weight: np.ndarray, group: int) -> np.ndarray:
    """Lay weights ``(N, K)`` out as ``(N/16, K/group, 16, group)``, with zeros where N or K is no multiple."""
    n, k = weight.shape
    padded = np.pad(weight, ((0, -n % COLUMNS), (0, -k % group)))
    blocks = padded.reshape(len(padded) // COLUMNS, COLUMNS, -1, group)
    return np.ascontiguousarray(blocks.transpose(0, 2, 1, 3))


def bf16_weight(weight: np.ndarray) -> np.ndarray:
    """Round weights ``(N, K) float32`` to bf16, and pack them."""
    return packed(weight.astype(ml_dtypes.bfloat16), GROUP["bf16"])


def int8_weight(stored: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Pack weights ``(N, K) int8``, and sum each row: ``(N,) int32``."""
    return packed(stored, GROUP["int8"]), stored.sum(1, dtype=np.int32)


@script(OURS)
def Unpack(weight, bias, in_features: int):
    """Packed weights to ``(K, N)``, of the same type."""
    zero = op.Constant(value_ints=[0])
    columns = op.Flatten(op.Transpose(weight, perm=[1, 3, 0, 2]), axis=2)
    size = op.Concat(op.Unsqueeze(op.Constant(value_int=in_features), zero), op.Shape(bias), axis=0)
    return op.Slice(columns, op.Constant(value_ints=[0, 0]), size, op.Constant(value_ints=[0, 1]))


@script(OURS)
def AdtpBf16Linear(x, weight, bias, in_features: int):
    rounded = op.Cast(op.Cast(x, to=BFLOAT16), to=FLOAT)
    return op.Gemm(rounded, op.Cast(Unpack(weight, bias, in_features), to=FLOAT), bias)


@script(OURS)
def AdtpBf16LinearGelu(x, weight, bias, in_features: int):
    return op.Gelu(AdtpBf16Linear(x, weight, bias, in_features))


@script(OURS)
def AdtpBf16LinearQkv(x, weight, bias, in_features: int):
    queries, keys, values = op.Split(AdtpBf16Linear(x, weight, bias, in_features), num_outputs=3, axis=1)
    return queries, keys, values


@script(OURS)
def QuantizeRows(x, least_scale: float):
    """Give each row 256 numbers from its smallest to its largest value, with 0 among them; NaN where the row has one, or an infinity.

    There has to be a row: of none, ONNX Runtime's reductions have a wrong shape. A graph always has one.

    Returns:
        ``(T, K) uint8``, the scale ``(T, 1)``, and the zero point ``(T, 1) int32``.
    """
    last = op.Constant(value_ints=[-1])
    zero = op.Constant(value_float=0.0)
    steps = op.Constant(value_float=255.0)
    least = op.Min(op.ReduceMin(x, last, keepdims=1), zero)
    largest = op.Max(op.ReduceMax(x, last, keepdims=1), zero)
    width = op.Sub(op.Div(largest, steps), op.Div(least, steps))
    scale = op.Max(width, op.Constant(value_float=least_scale))
    inverse = op.Div(op.Constant(value_float=1.0), scale)
    zero_point = op.Round(op.Mul(op.Neg(least), inverse))
    whole = op.Clip(op.Add(op.Round(op.Mul(x, inverse)), zero_point), zero, steps)
    wrong = op.ReduceSum(op.Mul(x, zero), last, keepdims=1)
    return op.Cast(whole, to=UINT8), op.Add(scale, wrong), op.Cast(zero_point, to=INT32)


@script(OURS)
def IntegerLinear(x, factors, weight, scale, sums, bias, in_features: int, least_scale: float):
    """Multiply rows by factors, ``(K,)`` or ``(1,)`` of 1, round them, and multiply in integers.

    Weights are unsigned there, because ONNX Runtime adds pairs of u8 x s8 in 16 bits where there is no VNNI, and saturates silently. The
    zero point is taken off as an integer, which also keeps ONNX Runtime from its MatMulIntegerToFloat: that adds a bias before the scale
    of a row.
    """
    rows, row_scale, zero_point = QuantizeRows(op.Mul(x, factors), least_scale)
    middle = op.Constant(value_int=128)
    unsigned = op.Cast(
        op.Add(op.Cast(Unpack(weight, bias, in_features), to=INT32), op.Cast(middle, to=INT32)), to=UINT8
    )
    none = op.Cast(op.Constant(value_int=0), to=UINT8)
    product = op.MatMulInteger(rows, unsigned, none, op.Cast(middle, to=UINT8))
    whole = op.Cast(op.Sub(product, op.Mul(zero_point, sums)), to=FLOAT)
    return op.Add(op.Mul(op.Mul(whole, scale), row_scale), bias)


@script(OURS)
def AdtpInt8Linear(x, factors, weight, scale, sums, bias, in_features: int, least_scale: float = LEAST_SCALE):
    return IntegerLinear(x, factors, weight, scale, sums, bias, in_features, least_scale)


@script(OURS)
def AdtpInt8LinearGelu(x, factors, weight, scale, sums, bias, in_features: int, least_scale: float = LEAST_SCALE):
    return op.Gelu(IntegerLinear(x, factors, weight, scale, sums, bias, in_features, least_scale))


@script(OURS)
def AdtpInt8LinearQkv(x, factors, weight, scale, sums, bias, in_features: int, least_scale: float = LEAST_SCALE):
    whole = IntegerLinear(x, factors, weight, scale, sums, bias, in_features, least_scale)
    queries, keys, values = op.Split(whole, num_outputs=3, axis=1)
    return queries, keys, values


@script(OURS)
def AdtpBf16LinearAddNorm(x, weight, bias, residual, gamma, beta, in_features: int, epsilon: float):
    total = op.Add(AdtpBf16Linear(x, weight, bias, in_features), residual)
    return op.LayerNormalization(total, gamma, beta, axis=-1, epsilon=epsilon)


@script(OURS)
def AdtpInt8LinearAddNorm(
    x,
    factors,
    weight,
    scale,
    sums,
    bias,
    residual,
    gamma,
    beta,
    in_features: int,
    epsilon: float,
    least_scale: float = LEAST_SCALE,
):
    total = op.Add(IntegerLinear(x, factors, weight, scale, sums, bias, in_features, least_scale), residual)
    return op.LayerNormalization(total, gamma, beta, axis=-1, epsilon=epsilon)


@script(OURS)
def AdtpBf16FeedForwardAddNorm(
    x, weight, bias, weight_out, bias_out, gamma, beta, in_features: int, inner_features: int, epsilon: float
):
    inner = op.Gelu(AdtpBf16Linear(x, weight, bias, in_features))
    total = op.Add(AdtpBf16Linear(inner, weight_out, bias_out, inner_features), x)
    return op.LayerNormalization(total, gamma, beta, axis=-1, epsilon=epsilon)


@script(OURS)
def AdtpInt8FeedForwardAddNorm(
    x,
    factors,
    weight,
    scale,
    sums,
    bias,
    factors_out,
    weight_out,
    scale_out,
    sums_out,
    bias_out,
    gamma,
    beta,
    in_features: int,
    inner_features: int,
    epsilon: float,
    least_scale: float = LEAST_SCALE,
):
    inner = op.Gelu(IntegerLinear(x, factors, weight, scale, sums, bias, in_features, least_scale))
    product = IntegerLinear(inner, factors_out, weight_out, scale_out, sums_out, bias_out, inner_features, least_scale)
    return op.LayerNormalization(op.Add(product, x), gamma, beta, axis=-1, epsilon=epsilon)


@functools.cache
def linear_functions() -> tuple[onnx.FunctionProto, ...]:
    """The bodies of all operators: standard operators, opset 20."""
    written_out = (Unpack, QuantizeRows, IntegerLinear, AdtpBf16Linear)
    operators = (
        *(AdtpBf16Linear, AdtpBf16LinearGelu, AdtpBf16LinearQkv, AdtpBf16LinearAddNorm, AdtpBf16FeedForwardAddNorm),
        *(AdtpInt8Linear, AdtpInt8LinearGelu, AdtpInt8LinearQkv, AdtpInt8LinearAddNorm, AdtpInt8FeedForwardAddNorm),
    )
    return tuple(flat(each, [part for part in written_out if part is not each]) for each in operators)
