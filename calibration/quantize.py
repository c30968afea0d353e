"""Write a plan into an exported graph: quantize and dequantize nodes of standard ONNX around its matrix products."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import onnx_ir as ir

from ..contract import METADATA, RECIPE, RESIDUALS, product
from ..contract import PRECISION as PRECISION_KEY
from ..graph import program
from ..graph.passes import PRECISION, run_passes
from .plan import Plan, Scales

TYPES = {"int8": (ir.DataType.INT8, np.int8), "fp8": (ir.DataType.FLOAT8E4M3FN, ml_dtypes.float8_e4m3fn)}


def write_quantized(source: Path, path: Path, plan: Plan) -> None:
    """Write an exported fp32 file quantized after a plan.

    Raises:
        InputError: a weight is beyond the range of the base precision.
    """
    model = ir.load(source)
    insert(model, plan)
    if plan.recipe.base != "fp32":
        run_passes(model, PRECISION[plan.recipe.base])
    model.metadata_props[f"{METADATA}{PRECISION_KEY}"] = plan.recipe.format
    model.metadata_props[f"{METADATA}{RECIPE}"] = plan.recipe.name
    program.save(model, path)


def insert(model: ir.Model, plan: Plan) -> None:
    """Quantize the matrix products of an fp32 graph in place.

    The input of a product becomes ``DequantizeLinear(QuantizeLinear(x))``; a weight is stored in 8 bits, one scale per row,
    before a DequantizeLinear. Zero points are 0.
    """
    graph = model.graph
    nodes = {node.name: node for node in graph}
    for name, scales in plan.scales.items():
        gemm = nodes[f"{name}/Gemm"]
        x, weight = gemm.inputs[0], gemm.inputs[1]
        bias = gemm.inputs[2] if len(gemm.inputs) > 2 else None
        if scales.activation is not None:
            gemm.replace_input_with(0, _quantized_input(graph, gemm, name, x, scales, plan))
        if scales.residual is not None:
            layer, place = name.split(".", 2)[1:]
            total = nodes[f"{product(int(layer), RESIDUALS[place])}/Add"]
            which = next(i for i, value in enumerate(total.inputs) if _comes_from(value, x))
            rounded = _rounded(graph, total, f"{name}.residual", total.inputs[which], scales.residual, plan)
            total.replace_input_with(which, rounded)
        gemm.replace_input_with(1, _quantized_weight(graph, gemm, weight, scales, plan))
        if plan.recipe.bias == "int32":
            gemm.resize_inputs(3)
            gemm.replace_input_with(2, _quantized_bias(graph, gemm, name, bias, scales))
    for value in [v for v in graph.initializers.values() if not v.uses()]:
        graph.initializers.pop(value.name)


def _comes_from(value: ir.Value, x: ir.Value) -> bool:
    """Whether a value is x, or those of its rows that the last layer works on."""
    node = value.producer()
    return value is x or (node is not None and node.op_type == "Gather" and node.inputs[0] is x)


def stored_weight(weight: np.ndarray, scales: Scales, plan: Plan) -> np.ndarray:
    """Return the weights ``(N, K)`` as they are stored: int8 or float8_e4m3fn."""
    most = plan.recipe.largest
    scaled = np.clip(weight * scales.smooth / scales.weight[:, None], -most, most)
    return (np.rint(scaled) if plan.recipe.format == "int8" else scaled).astype(TYPES[plan.recipe.format][1])


def _quantized_input(graph: ir.Graph, gemm: ir.Node, product: str, x: ir.Value, scales: Scales, plan: Plan) -> ir.Value:
    """Smoothed inputs are multiplied first: quantizing with one scale per channel would do both at once, but no TensorRT
    takes that, and ONNX Runtime is six times slower with it."""
    name = f"{product}.input"
    if plan.recipe.smooth:
        factors = _initializer(graph, f"{name}/factors", 1 / scales.smooth)
        smoothed = _node(graph, gemm, "Mul", [x, factors], f"{name}/Mul", ir.DataType.FLOAT)
        smoothed.shape, x = x.shape, smoothed
    return _rounded(graph, gemm, name, x, scales.activation, plan)


def _rounded(graph: ir.Graph, before: ir.Node, name: str, x: ir.Value, scale: float, plan: Plan) -> ir.Value:
    dtype, numpy_dtype = TYPES[plan.recipe.format]
    s = _initializer(graph, f"{name}/scale", np.float32(scale))
    zero = _initializer(graph, f"{name}/zero_point", np.zeros((), numpy_dtype))
    stored = _node(graph, before, "QuantizeLinear", [x, s, zero], f"{name}/QuantizeLinear", dtype)
    real = _node(graph, before, "DequantizeLinear", [stored, s, zero], f"{name}/DequantizeLinear", ir.DataType.FLOAT)
    stored.shape = real.shape = x.shape
    return real


def _quantized_weight(graph: ir.Graph, gemm: ir.Node, weight: ir.Value, scales: Scales, plan: Plan) -> ir.Value:
    stored = stored_weight(weight.const_value.numpy(), scales, plan)
    return _dequantized(graph, gemm, weight.name, stored, scales.weight)


def _quantized_bias(graph: ir.Graph, gemm: ir.Node, name: str, bias: ir.Value | None, scales: Scales) -> ir.Value:
    """The bias as the integer product adds it: in units of activation scale times weight scale."""
    unit = (np.float32(scales.activation) * scales.weight).astype(np.float32)
    values = np.zeros(int(gemm.outputs[0].shape[1])) if bias is None else bias.const_value.numpy().astype(np.float64)
    largest = np.iinfo(np.int32).max
    stored = np.clip(np.rint(values / unit), -largest, largest).astype(np.int32)
    return _dequantized(graph, gemm, f"{name}.bias", stored, unit)


def _dequantized(graph: ir.Graph, before: ir.Node, name: str, stored: np.ndarray, scale: np.ndarray) -> ir.Value:
    """A constant in 8 (a bias: 32) bits with one scale per row, or one for all. Zero points of 0 are written out: ONNX
    Runtime makes integer products only of nodes that have them."""
    per_row = len(scale) > 1
    scale = scale if per_row else scale[0]
    inputs = [
        _initializer(graph, f"{name}/stored", stored),
        _initializer(graph, f"{name}/scale", scale),
        _initializer(graph, f"{name}/zero_point", np.zeros(np.shape(scale), stored.dtype)),
    ]
    axis = {"axis": 0} if per_row else {}
    real = _node(graph, before, "DequantizeLinear", inputs, f"{name}/DequantizeLinear", ir.DataType.FLOAT, **axis)
    real.shape = ir.Shape(stored.shape)
    return real


def _initializer(graph: ir.Graph, name: str, array: np.ndarray) -> ir.Value:
    if name not in graph.initializers:
        tensor = ir.tensor(np.array(array, order="C"), name=name)
        graph.register_initializer(
            ir.Value(name=name, shape=tensor.shape, type=ir.TensorType(tensor.dtype), const_value=tensor)
        )
    return graph.initializers[name]


def _node(
    graph: ir.Graph,
    before: ir.Node,
    op_type: str,
    inputs: list[ir.Value],
    name: str,
    dtype: ir.DataType,
    **attributes: int,
) -> ir.Value:
    node = ir.node(op_type, inputs, attributes, name=name)
    node.outputs[0].name, node.outputs[0].type = name, ir.TensorType(dtype)
    graph.insert_before(before, node)
    return node.outputs[0]
