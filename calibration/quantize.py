"""Write a plan into an exported graph: quantize and dequantize nodes of standard ONNX around its matrix products."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import onnx_ir as ir

from ..contract import METADATA, RECIPE, RESIDUALS, product
from ..contract import PRECISION as PRECISION_KEY
from ..graph import program
from ..graph.passes import PRECISION, Int8Weight, linear, run_passes
from .plan import QuantizationPlan, Scales
from .recipes import PER_TOKEN

TYPES = {"int8": (ir.DataType.INT8, np.int8), "fp8": (ir.DataType.FLOAT8E4M3FN, ml_dtypes.float8_e4m3fn)}


def write_quantized(source: Path, path: Path, plan: QuantizationPlan) -> None:
    """Write an exported fp32 file quantized after a plan.

    Raises:
        InputError: a weight is beyond the range of the base precision.
    """
    model = ir.load(source)
    if plan.recipe.activations == PER_TOKEN:
        gemms = {node.name: node for node in model.graph}
        weights = {name: _constant(_input(gemms[f"{name}/Gemm"], 1)) for name in plan.scales}
        chosen = {
            name: Int8Weight(stored_weight(weights[name], s, plan), s.weight, 1 / s.smooth)
            for name, s in plan.scales.items()
        }
        run_passes(model, linear(chosen))
    else:
        insert(model, plan)
    if plan.recipe.base != "fp32":
        run_passes(model, PRECISION[plan.recipe.base])
    model.metadata_props[f"{METADATA}{PRECISION_KEY}"] = plan.recipe.format
    model.metadata_props[f"{METADATA}{RECIPE}"] = plan.recipe.name
    program.save(model, path)


def insert(model: ir.Model, plan: QuantizationPlan) -> None:
    """Quantize the matrix products of an fp32 graph in place.

    The input of a product becomes ``DequantizeLinear(QuantizeLinear(x))``; a weight is stored in 8 bits, one scale per row,
    before a DequantizeLinear. Zero points are 0.
    """
    graph = model.graph
    nodes = {node.name: node for node in graph}
    for name, scales in plan.scales.items():
        gemm = nodes[f"{name}/Gemm"]
        x, weight = _input(gemm, 0), _constant(_input(gemm, 1))
        bias = _constant(_input(gemm, 2)) if len(gemm.inputs) > 2 else np.zeros(len(weight), np.float32)
        if scales.activation is not None:
            smoothed = _smoothed(graph, gemm, name, x, scales) if plan.recipe.smooth else x
            gemm.replace_input_with(0, _rounded(graph, gemm, f"{name}.input", smoothed, scales.activation, plan))
        if scales.residual is not None:
            layer, place = name.split(".", 2)[1:]
            total = nodes[f"{product(int(layer), RESIDUALS[place])}/Add"]
            which = next(i for i, value in enumerate(total.inputs) if _comes_from(value, x))
            rounded = _rounded(graph, total, f"{name}.residual", _input(total, which), scales.residual, plan)
            total.replace_input_with(which, rounded)
        stored = stored_weight(weight, scales, plan)
        gemm.replace_input_with(1, _dequantized(graph, gemm, f"{name}.weight", stored, scales.weight))
        if plan.recipe.bias == "int32":
            gemm.resize_inputs(3)
            gemm.replace_input_with(2, _quantized_bias(graph, gemm, name, bias, scales))
    for unused in [name for name, value in graph.initializers.items() if not value.uses()]:
        graph.initializers.pop(unused)


def _input(node: ir.Node, index: int) -> ir.Value:
    """An input that a node of its kind always has; onnx_ir types all as optional."""
    value = node.inputs[index]
    assert value is not None
    return value


def _constant(value: ir.Value) -> np.ndarray:
    assert value.const_value is not None
    return value.const_value.numpy()


def _comes_from(value: ir.Value | None, x: ir.Value) -> bool:
    """Whether a value is x, or those of its rows that the last layer works on."""
    node = value.producer() if value is not None else None
    return value is x or (node is not None and node.op_type == "Gather" and node.inputs[0] is x)


def stored_weight(weight: np.ndarray, scales: Scales, plan: QuantizationPlan) -> np.ndarray:
    """Return the weights ``(N, K)`` as they are stored: int8 or float8_e4m3fn."""
    most = plan.recipe.largest
    scaled = np.clip(weight * scales.smooth / scales.weight[:, None], -most, most)
    return (np.rint(scaled) if plan.recipe.format == "int8" else scaled).astype(TYPES[plan.recipe.format][1])


def _smoothed(graph: ir.Graph, gemm: ir.Node, product: str, x: ir.Value, scales: Scales) -> ir.Value:
    """Smoothed inputs are multiplied first: quantizing with one scale per channel would do both at once, but no TensorRT
    takes that, and ONNX Runtime is six times slower with it."""
    factors = _initializer(graph, f"{product}.input/factors", 1 / scales.smooth)
    smoothed = _node(graph, gemm, "Mul", [x, factors], f"{product}.input/Mul", ir.DataType.FLOAT)
    smoothed.shape = x.shape
    return smoothed


def _rounded(
    graph: ir.Graph, before: ir.Node, name: str, x: ir.Value, scale: float, plan: QuantizationPlan
) -> ir.Value:
    dtype, numpy_dtype = TYPES[plan.recipe.format]
    s = _initializer(graph, f"{name}/scale", np.array(scale, np.float32))
    zero = _initializer(graph, f"{name}/zero_point", np.zeros((), numpy_dtype))
    stored = _node(graph, before, "QuantizeLinear", [x, s, zero], f"{name}/QuantizeLinear", dtype)
    real = _node(graph, before, "DequantizeLinear", [stored, s, zero], f"{name}/DequantizeLinear", ir.DataType.FLOAT)
    stored.shape = real.shape = x.shape
    return real


def _quantized_bias(graph: ir.Graph, gemm: ir.Node, name: str, bias: np.ndarray, scales: Scales) -> ir.Value:
    """The bias as the integer product adds it: in units of activation scale times weight scale."""
    unit = (np.float32(scales.activation) * scales.weight).astype(np.float32)
    largest = np.iinfo(np.int32).max
    stored = np.clip(np.rint(bias.astype(np.float64) / unit), -largest, largest).astype(np.int32)
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
            ir.Value(name=name, shape=ir.Shape(np.shape(array)), type=ir.TensorType(tensor.dtype), const_value=tensor)
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
