"""The TensorRT room: options, and the network that the builder sees."""

import dataclasses
import signal
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from known_graphs import known_graph
from testbed import TINY_BACKBONES, as_numpy, exported_graph, make_batch, make_encoder, make_student

from adtp_export import contract
from adtp_export.artifacts.records import DECOMPOSED, PLUGIN, ShapeRange
from adtp_export.contract import ATTENTION, ATTENTION_RECEIVED, NUM_HEADS
from adtp_export.errors import EngineBuildError, InputError
from adtp_export.graph import program
from adtp_export.pipeline.export.capabilities import Capabilities
from adtp_export.pipeline.export.file_plan import ModelFile, plan_engines
from adtp_export.pipeline.export.options import ExportOptions
from adtp_export.pipeline.export.request import EngineRequest, read_request
from adtp_export.runtimes import cuda, tensorrt
from adtp_export.verify.oracle import for_precision, run_oracle, typed
from adtp_export.verify.parity import compare

PROFILE = {"batch": ShapeRange(1, 2, 4), "seq": ShapeRange(1, 8, 32)}

needs_rtx = pytest.mark.usefixtures("has_rtx")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("trt") / "model.onnx"
    path.write_bytes(exported_graph("1.attention", "2.ffn"))
    return path


def test_gpu_lists():
    assert tensorrt.parse_gpus(None, tensorrt.RTX) == ("sm_86", "sm_89", "sm_120")
    assert tensorrt.parse_gpus("sm_120, sm_86,sm_86", tensorrt.RTX) == ("sm_86", "sm_120")
    with pytest.raises(InputError, match="got 'sm_87'.*sm_75, sm_80, sm_86.*did you mean"):
        tensorrt.parse_gpus("sm_86,sm_87", tensorrt.RTX)
    with pytest.raises(InputError, match="got ''"):
        tensorrt.parse_gpus("", tensorrt.RTX)


def test_every_flavor_has_a_name_in_the_options():
    assert [contract.AUTO, *tensorrt.FLAVORS] == list(contract.TRT_FLAVORS)


def test_a_signal_counts_where_the_build_fails():
    """Ctrl-C beats the error, which is still told; in a process of its own, which it may end."""
    code = """
import signal
from adtp_export.runtimes import tensorrt
from adtp_export.errors import EngineBuildError

signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it
try:
    with tensorrt._signals_held():
        signal.raise_signal(signal.SIGINT)
        raise EngineBuildError("the builder refuses")
except KeyboardInterrupt as stopped:
    assert isinstance(stopped.__context__, EngineBuildError)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    print("stopped")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "stopped\n", done.stderr


def test_a_handler_of_c_code_is_left_alone(monkeypatch):
    """Python gives None for it, and takes no None."""
    known = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(signal, "getsignal", lambda number: None if number == signal.SIGTERM else known)
    seen = []
    monkeypatch.setattr(signal, "signal", lambda number, handler: seen.append(number))
    with tensorrt._signals_held():
        pass
    assert set(seen) == {signal.SIGINT}


def test_rows_longer_than_topk_takes():
    tensorrt.check_profile({"batch": ShapeRange(1, 1, 1), "seq": ShapeRange(1, 1, 3840)})
    with pytest.raises(InputError, match="at most 3840"):
        tensorrt.check_profile({"batch": ShapeRange(1, 1, 1), "seq": ShapeRange(1, 1, 3841)})
    with pytest.raises(InputError, match="--batch: got a MAX of 3841"):
        tensorrt.check_profile({"batch": ShapeRange(1, 1, 3841), "seq": ShapeRange(1, 1, 1)})


@needs_rtx
def test_every_named_gpu_is_known_to_the_library():
    trt = tensorrt.RTX.load()
    for gpu in tensorrt.RTX_GPUS:
        assert hasattr(trt.ComputeCapability, gpu.replace("sm_", "SM"))


@needs_rtx
def test_build_reports_progress(model):
    steps = []
    engine, details = tensorrt.build(
        tensorrt.RTX, model, PROFILE, ["sm_86", "sm_89"], progress=lambda *step: steps.append(step)
    )
    assert steps
    assert all(1 <= step <= total for _, step, total in steps)
    assert details["gpus"] == ["sm_86", "sm_89"]
    assert details["network_layers"] > 100
    assert engine.nbytes > 0


@needs_rtx
@pytest.mark.slow
def test_engines_of_one_file_are_of_one_size(model):
    first, again = (tensorrt.build(tensorrt.RTX, model, PROFILE, ["sm_86"])[0] for _ in range(2))
    assert abs(first.nbytes - again.nbytes) < 0.01 * first.nbytes


@needs_rtx
def test_a_file_for_packed_inputs_builds_with_the_plugin(packed_export):
    """TensorRT's parser and builder are RTX's; it alone keeps such engines, for Triton."""
    engine, details = tensorrt.build(
        tensorrt.RTX, packed_export / "out" / "model.packed.onnx", PROFILE, ["sm_86"], PLUGIN
    )
    assert engine.nbytes > 0
    assert details["plugin_layers"] == 2


def test_ranges_of_packed_inputs_hold_every_batch_of_the_profile():
    assert tensorrt._range("input_ids", (-1,), PROFILE) == [(1,), (16,), (128,)]
    assert tensorrt._range("cu_seqlens", (-1,), PROFILE) == [(2,), (3,), (5,)]
    assert tensorrt._range("input_ids", (-1, -1), PROFILE) == [(1, 1), (2, 8), (4, 32)]
    assert tensorrt._range("cu_seqlens.3", (-1,), PROFILE) == [(2,), (3,), (5,)]
    assert tensorrt._range("past.3.key", (-1, 2, 8), PROFILE) == [(1, 2, 8), (16, 2, 8), (128, 2, 8)]


@pytest.mark.parametrize(("flavor", "forms"), [(tensorrt.TENSORRT, ["", "packed"]), (tensorrt.RTX, [""])])
def test_packed_engines_are_built_for_tensorrt_alone(flavor, forms):
    precomputed = ModelFile(name="x", runtime="onnxruntime", form="precomputed")
    files = [*(ModelFile(name="x", form=form) for form in ("", "packed", "inline")), precomputed]
    asked = EngineRequest(flavor=flavor, gpus=("sm_90",), groups={"fp32": (("sm_90",),)})
    request = dataclasses.replace(read_request(ExportOptions("MODEL")), engines=asked)
    student = make_student(["1.attention"], hidden_size=64, num_attention_heads=2)
    plans, notes = plan_engines(files, request, Capabilities(SimpleNamespace(student=student)))
    assert [plan.file.form for plan in plans] == forms
    assert [[spec.attention for spec in plan.specs] for plan in plans] == [[PLUGIN, DECOMPOSED]] * len(forms)
    assert notes == []


@pytest.fixture(scope="module")
def wide_model(tmp_path_factory):
    """A student whose heads are as wide as the plugin wants them."""
    path = tmp_path_factory.mktemp("trt") / "model.onnx"
    student = make_student(["1.attention"], hidden_size=64, num_attention_heads=2, num_hidden_layers=2)
    program.save(known_graph(student, {"version": "test"}), path)
    return path


@pytest.fixture(scope="module")
def model_of_received(tmp_path_factory):
    """Three such layers: what tokens received in the first and in the last is read."""
    path = tmp_path_factory.mktemp("received") / "model.onnx"
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"hidden_size": 64, "num_attention_heads": 2}.items():
            patch.setitem(TINY_BACKBONES["bert"], name, value)
        model = make_encoder("bert", "received-twice")
    program.save(known_graph(model, {"version": "test"}), path)
    return path


@needs_rtx
def test_one_file_builds_with_the_plugin_and_without(wide_model):
    """In any order: what was registered for one build is gone for the next."""
    for attention, plugin_layers in ((PLUGIN, 2), (DECOMPOSED, 0), (PLUGIN, 2)):
        engine, details = tensorrt.build(tensorrt.RTX, wide_model, PROFILE, ["sm_86", "sm_120"], attention)
        assert details["plugin_layers"] == plugin_layers
        assert engine.nbytes > 0


@needs_rtx
def test_what_tokens_received_comes_from_the_plugin(model_of_received):
    for attention, plugin_layers in ((PLUGIN, 3), (DECOMPOSED, 0)):
        engine, details = tensorrt.build(tensorrt.RTX, model_of_received, PROFILE, ["sm_86"], attention)
        assert details["plugin_layers"] == plugin_layers
        assert engine.nbytes > 0


@needs_rtx
@pytest.mark.parametrize(
    ("model", "layers"),
    [("wide_model", [ATTENTION] * 2), ("model_of_received", [ATTENTION_RECEIVED, ATTENTION, ATTENTION_RECEIVED])],
)
def test_the_plugin_leaves_no_softmax(model, layers, request):
    from adtp_export.plugins import tensorrt as host

    trt = tensorrt.RTX.load()
    with host.registered(trt):
        logger = tensorrt.callbacks.logger(trt)
        network = trt.Builder(logger).create_network(0)
        parser = trt.OnnxParser(network, logger)
        assert parser.parse_from_file(str(request.getfixturevalue(model)))
        found = [network.get_layer(i) for i in range(network.num_layers)]
        plugins = [layer for layer in found if layer.type == trt.LayerType.PLUGIN_V3]
        assert not any(layer.type == trt.LayerType.SOFTMAX for layer in found)
        for layer, name in zip(plugins, layers, strict=True):
            layer.__class__ = trt.IPluginV3Layer
            assert layer.plugin.plugin_name == name
            outputs = [layer.get_output(i) for i in range(layer.num_outputs)]
            assert [tensor.dtype for tensor in outputs] == [trt.DataType.FLOAT] * len(outputs)
            assert [len(tensor.shape) for tensor in outputs] == ([2, 1] if name == ATTENTION_RECEIVED else [2])


@needs_rtx
def test_serialized_fields_outlive_their_making():
    """A collection copies pointers; what they point at must not have been freed when the builder reads it."""
    from adtp_export.plugins import tensorrt as host

    creator = host.creator_class(tensorrt.RTX.load(), host.RAGGED)(ATTENTION_RECEIVED)
    plugin = creator.plugin(ATTENTION_RECEIVED, {NUM_HEADS: 12}, 0.125)
    fields = plugin.get_fields_to_serialize()
    others = [np.full(1, 7, np.int32) for _ in range(64)]
    again = creator.create_plugin("x", fields, None)
    assert len(others) == 64
    for found in (again, again.clone()):
        assert (found.plugin_name, found.integers, found.scale) == (ATTENTION_RECEIVED, {NUM_HEADS: 12}, 0.125)


@needs_rtx
def test_the_plugin_refuses_heads_it_has_no_kernel_for(model):
    with pytest.raises(InputError, match="got head size 8; accepted are 32, 64, 128"):
        tensorrt.build(tensorrt.RTX, model, PROFILE, ["sm_86"], PLUGIN)


def test_what_keeps_the_plugin_out_is_said():
    assert tensorrt.plugin_obstacle("fp32", 64, ["sm_86", "sm_121"]) is None
    assert "no kernel for sm_75" in tensorrt.plugin_obstacle("fp32", 64, ["sm_75", "sm_86"])
    assert "got head size 48" in tensorrt.plugin_obstacle("fp32", 48, ["sm_86"])


@needs_rtx
def test_parser_errors_are_reported(tmp_path):
    (tmp_path / "junk.onnx").write_bytes(b"not a model")
    with pytest.raises(EngineBuildError, match=r"cannot parse junk\.onnx"):
        tensorrt.build(tensorrt.RTX, tmp_path / "junk.onnx", PROFILE, ["sm_86"])


@needs_rtx
@pytest.mark.usefixtures("no_gpu")
def test_an_engine_is_not_run_where_it_cannot(model, tmp_path):
    engine, _ = tensorrt.build(tensorrt.RTX, model, PROFILE, ["sm_86"])
    path = tmp_path / "x.engine"
    path.write_bytes(bytes(engine))
    with pytest.raises(EngineBuildError, match=r"cannot load x\.engine"):
        tensorrt.TensorRtEngine(path, tensorrt.RTX)


@pytest.fixture
def flavors():
    """Those that run on the GPU of this machine."""
    gpu = cuda.local_gpu()
    found = [
        f for f in tensorrt.FLAVORS.values() if f.installed() and (f is tensorrt.TENSORRT or gpu in tensorrt.RTX_GPUS)
    ]
    if gpu is None or not found:
        pytest.skip(f"needs a GPU and a TensorRT that runs on it; GPU here: {gpu}")
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("attention", [DECOMPOSED, PLUGIN])
@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
def test_engine_equals_the_oracle(tmp_path, flavors, attention, precision):
    student = make_student(["1.attention", "2.ffn"], hidden_size=64, num_attention_heads=2)
    debug = program.export_portable(student, {"version": "test"})
    program.add_debug_outputs(debug)
    file = tmp_path / "fp32.onnx"
    program.save(debug, file)
    oracle = run_oracle(student, [as_numpy(make_batch([9, 32, 1], 32)), as_numpy(make_batch([5], 7, seed=1))])
    if precision != "fp32":
        program.convert_precision(file, tmp_path / f"{precision}.onnx", precision)
        file, oracle = tmp_path / f"{precision}.onnx", for_precision(oracle, typed(student, precision), precision)
    for flavor in flavors:
        engine, _ = tensorrt.build(flavor, file, PROFILE, [cuda.local_gpu()], attention)
        path = tmp_path / f"{flavor.short}.engine"
        path.write_bytes(bytes(engine))
        assert compare(oracle, tensorrt.TensorRtEngine(path, flavor, attention)).failure is None
