"""Exports whose matrix products are operators of lower precision: what they hold, their verdict, and what `load` takes."""

import onnx
import pytest
from known_graphs import taking_known_graphs

import adtp_export
from adtp_export.contract import BF16_LINEAR, DOMAIN, INT8_LINEAR, PRUNERS
from adtp_export.errors import InputError

NOTHING = """
target = "linear"
format = "int8"
base = "fp32"
activations = "per-token"
exclude = ["*"]
"""
TARGETS = {
    precision: {f"onnxruntime-cpu-{precision}-linear", f"onnxruntime-cpu-{precision}-linear-plugin"}
    for precision in ("bf16", "int8")
}


@pytest.fixture(scope="module")
def exported(small, tmp_path_factory, operators_library):
    from adtp_export.plugins import operators

    out = tmp_path_factory.mktemp("linear") / "out"
    with pytest.MonkeyPatch.context() as patch, taking_known_graphs():
        patch.delenv(operators.SWITCH)
        patch.setattr(operators, "BUILT", operators_library.parent)
        return out, adtp_export.export(small, out, precisions="bf16,int8")


@pytest.mark.parametrize("precision", TARGETS)
def test_body_and_operators_are_verified(exported, precision):
    _, manifest = exported
    found = {name for name in manifest.targets if f"-{precision}-linear" in name}
    assert found == TARGETS[precision]
    assert {manifest.targets[name].status for name in found} == {"verified"}
    assert {manifest.targets[name].file for name in found} == {f"model.linear.{precision}.onnx"}
    assert "onnxruntime-cpu-int8" not in manifest.targets  # that one takes text


@pytest.mark.parametrize(("precision", "operator"), [("bf16", BF16_LINEAR), ("int8", INT8_LINEAR)])
def test_pruners_stay_in_fp32(exported, precision, operator):
    out, _ = exported
    graph = onnx.load(out / f"model.linear.{precision}.onnx").graph
    linear = [node for node in graph.node if node.domain == DOMAIN and node.op_type.startswith(operator)]
    assert linear
    assert all(node.name.startswith("layers.") for node in linear)
    assert not any(node.op_type == "Gemm" and node.name.startswith("layers.") for node in graph.node)
    pruners = [tensor for tensor in graph.initializer if tensor.name.startswith(PRUNERS)]
    assert pruners
    assert {tensor.data_type for tensor in pruners} <= {onnx.TensorProto.FLOAT, onnx.TensorProto.INT64}


def test_a_recipe_that_leaves_nothing_to_quantize_is_refused(small, tmp_path):
    recipe = tmp_path / "none.toml"
    recipe.write_text(NOTHING)
    with pytest.raises(InputError, match="recipe none: it excludes every matrix product"):
        adtp_export.export(small, tmp_path / "out", precisions="int8", recipes=[recipe], skip_parity_check=False)
    assert [path.name for path in tmp_path.iterdir()] == ["none.toml"]


@pytest.mark.usefixtures("with_operators")
def test_load_takes_what_was_measured_fastest(exported):
    out, manifest = exported
    times = {name: target.details["p50_ms"] for name, target in manifest.targets.items() if "p50_ms" in target.details}
    assert set().union(*TARGETS.values()) <= set(times)
    assert adtp_export.load(out, prefer="speed").target == min(times, key=times.__getitem__)
    assert adtp_export.load(out).target.startswith("onnxruntime-cpu-fp32")
