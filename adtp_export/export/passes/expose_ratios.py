"""Let retention be given from outside, for measurements: one file then serves every ratio."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import InPlacePass, PassResult

RATIO = ".ratio"
"""What the names of the new inputs end with."""


class ExposeRatios(InPlacePass):
    """The ratio predictors see nothing, and their biases become inputs: fp32 ``(C,)``, one per site in order."""

    def call(self, model: ir.Model) -> PassResult:
        found = [node for node in model.graph if node.op_type == "Gemm" and node.name.endswith(".ratio_predictor/Gemm")]
        for node in found:
            weight = node.inputs[1]
            blind = np.zeros_like(weight.const_value.numpy())
            weight.const_value = ir.tensor(blind, name=weight.name)
            name = node.name.removesuffix("/Gemm") + RATIO
            bias = ir.Input(name, ir.Shape(blind.shape[:1]), ir.TensorType(ir.DataType.FLOAT))
            node.resize_inputs(3)
            node.replace_input_with(2, bias)
            model.graph.inputs.append(bias)
        return PassResult(model, modified=bool(found))
