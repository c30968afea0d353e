"""Grouped attention in engines of TensorRT-RTX: its nodes become plugin layers where the host is registered."""

import onnx
import pytest
from decoder_models import make_decoder

from adtp_export.artifacts.records import PLUGIN, ShapeRange
from adtp_export.contract import (
    ATTENTION_GROUPED,
    ATTENTION_GROUPED_RECEIVED,
    ATTENTION_GROUPED_WINDOW,
    DOMAIN,
    KV_HEADS,
    NUM_HEADS,
    PLUGIN_NAMESPACE,
    PLUGIN_VERSION,
    SCALE,
    WINDOW_AHEAD,
    WINDOW_BACK,
)
from adtp_export.errors import EngineBuildError, InputError
from adtp_export.graph import program
from adtp_export.ops.onnx_function import portable_functions
from adtp_export.plugins import tensorrt as host
from adtp_export.plugins.binaries import Kind
from adtp_export.runtimes import tensorrt

needs_rtx = pytest.mark.usefixtures("has_rtx")
PROFILE = {"batch": ShapeRange(1, 2, 4), "seq": ShapeRange(1, 8, 32)}
FORMS = {ATTENTION_GROUPED: (-1, 0), ATTENTION_GROUPED_WINDOW: (3, 8), ATTENTION_GROUPED_RECEIVED: (5, 0)}
HEADS, GROUPS = 4, 2


def model_of(name, size=16, is_old=False):
    """One node with its portable body. is_old: as it was written before there were kernels for GPUs."""
    numbers = {
        NUM_HEADS: HEADS,
        KV_HEADS: GROUPS,
        SCALE: 0.25,
        WINDOW_BACK: FORMS[name][0],
        WINDOW_AHEAD: FORMS[name][1],
    }
    plugin = {} if is_old else {"plugin_version": PLUGIN_VERSION, "plugin_namespace": PLUGIN_NAMESPACE}
    inputs = {"q": ["T", HEADS * size], "k": ["K", GROUPS * size], "v": ["K", GROUPS * size]}
    inputs |= {"cu_q": ["B"], "cu_k": ["B"], "positions_q": ["T"], "positions_k": ["K"]}
    outputs = ["out", "received"] if name == ATTENTION_GROUPED_RECEIVED else ["out"]
    node = onnx.helper.make_node(name, list(inputs), outputs, domain=DOMAIN, **numbers, **plugin)
    floating, integer = onnx.TensorProto.FLOAT, onnx.TensorProto.INT32
    graph = onnx.helper.make_graph(
        [node], "attention",
        [onnx.helper.make_tensor_value_info(key, floating if key in "qkv" else integer, shape) for key, shape in inputs.items()],
        [onnx.helper.make_tensor_value_info(key, floating, None) for key in outputs],
    )  # fmt: skip
    versions = [onnx.helper.make_opsetid("", 20), onnx.helper.make_opsetid(DOMAIN, 1)]
    return onnx.helper.make_model(graph, functions=portable_functions(), opset_imports=versions, ir_version=10)


def parsed(model, wanted):
    """A network, and what its plugin layers launch."""
    trt = tensorrt.RTX.load()
    with host.registered(trt, wanted):
        logger = tensorrt.callbacks.logger(trt)
        network = trt.Builder(logger).create_network(0)
        assert trt.OnnxParser(network, logger).parse(model.SerializeToString())
        return network, host.check_network(trt, network)


@needs_rtx
@pytest.mark.parametrize("name", FORMS)
def test_a_node_is_a_plugin_layer(name):
    network, kinds = parsed(model_of(name), wanted=True)
    assert kinds == [Kind("fp32", 16, name == ATTENTION_GROUPED_RECEIVED, grouped=True)]
    layer = network.get_layer(0)
    layer.__class__ = tensorrt.RTX.load().IPluginV3Layer
    plugin = layer.plugin
    assert (plugin.plugin_name, plugin.scale) == (name, 0.25)
    assert plugin.integers == dict(zip((NUM_HEADS, KV_HEADS, WINDOW_BACK, WINDOW_AHEAD), (HEADS, GROUPS, *FORMS[name])))
    again = plugin.clone()
    assert (again.plugin_name, again.integers, again.scale) == (plugin.plugin_name, plugin.integers, plugin.scale)
    assert [tuple(layer.get_output(i).shape) for i in range(layer.num_outputs)] == [(-1, 64), (-1,)][
        : layer.num_outputs
    ]


@needs_rtx
def test_without_the_host_it_is_the_portable_body():
    network, kinds = parsed(model_of(ATTENTION_GROUPED_WINDOW), wanted=False)
    assert kinds == []
    assert network.num_layers > 10


@needs_rtx
def test_a_file_of_before_there_were_kernels_is_to_be_exported_again(tmp_path):
    path = tmp_path / "model.onnx"
    path.write_bytes(model_of(ATTENTION_GROUPED, is_old=True).SerializeToString())
    with pytest.raises(
        EngineBuildError, match="made 0 plugin layers.*an older adtp-export wrote the file; export the model again"
    ):
        tensorrt.build(tensorrt.RTX, path, PROFILE, ["sm_86"], PLUGIN)


@needs_rtx
def test_heads_without_a_kernel_are_refused():
    with pytest.raises(
        InputError, match="grouped attention: got head size 12; accepted in fp32 are multiples of 8 up to 128"
    ):
        parsed(model_of(ATTENTION_GROUPED, size=12), wanted=True)


@needs_rtx
@pytest.mark.slow
@pytest.mark.parametrize("pruning", ["none", "received-twice"])
def test_an_engine_of_a_causal_student(pruning, tmp_path):
    path = tmp_path / "model.onnx"
    program.save(
        program.export_portable(make_decoder("qwen3", "embedding", pruning, head_dim=16), {"version": "test"}), path
    )
    engine, details = tensorrt.build(tensorrt.RTX, path, PROFILE, ["sm_86"], PLUGIN)
    assert engine.nbytes > 0
    received = {"grouped-fp32-d16-received"} if pruning != "none" else set()
    assert set(details["kernels"]) == {"grouped-fp32-d16", *received}
    assert not details["kernels_emulated"]
