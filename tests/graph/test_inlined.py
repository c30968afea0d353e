"""The graph without functions: tools that do not know model-local functions keep it whole."""

import numpy as np
import onnx
import pytest
from onnx import version_converter
from testbed import as_numpy, exported_graph, make_batch

from adtp_export.graph import program
from adtp_export.graph.inlined import inlined
from adtp_export.runtimes.onnxruntime import OnnxRuntimeEngine

NEWER = program.OPSET + 1


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_converted_file_answers_the_same(tmp_path, precision):
    """`onnx.version_converter` drops functions, and leaves nodes that nobody knows."""
    written, whole, converted = (tmp_path / f"{name}.onnx" for name in ("written", "whole", "converted"))
    written.write_bytes(exported_graph("1.attention", "2.ffn"))
    if precision != "fp32":
        program.convert_precision(written, written := tmp_path / "typed.onnx", precision)
    program.save(inlined(written), whole)
    onnx.save(version_converter.convert_version(onnx.load(whole), NEWER), converted)
    model = onnx.load(converted)
    assert {opset.domain: opset.version for opset in model.opset_import}[""] == NEWER
    onnx.checker.check_model(model, full_check=True)
    batch = as_numpy(make_batch([9, 30, 1, 17], 30))
    expected, found = (OnnxRuntimeEngine(path).run(batch)["logits"] for path in (whole, converted))
    np.testing.assert_array_equal(found, expected)
