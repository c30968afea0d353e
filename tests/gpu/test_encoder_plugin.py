"""AdtpEncoder for TensorRT, called as TensorRT would, on the emulated GPU: ids and weights in, logits out, also in a capture."""

import ctypes
import dataclasses
import subprocess
import sys

import encoder_files
import encoder_runs
import numpy as np
import pytest
import runner_builds
from testbed import as_numpy, make_batch

from adtp_export.errors import MissingDependencyError
from adtp_export.plugins import library
from adtp_export.plugins import plan as plans
from adtp_export.plugins.encoder import planner
from adtp_export.runtimes import encoder_file
from adtp_export.runtimes.described import describe
from adtp_export.verify.oracle import run_oracle

TYPES = {"float32": 0, "float16": 1, "int32": 3, "int64": 8}
"""TensorRT's numbers."""
INPUTS, OUTPUTS = "; ".join(["int64 texts length"] * 3), "float32 texts 3"
SIZES = dataclasses.replace(encoder_runs.SIZES, max_tokens=64)


@pytest.fixture(scope="module")
def student():
    return encoder_runs.make()


@pytest.fixture(scope="module")
def planned(student):
    return planner.make(describe(student), "fp32", SIZES)


@pytest.fixture
def built(planned):
    try:
        headers = library.find_headers()
    except MissingDependencyError as error:
        pytest.skip(str(error))
    return runner_builds.plugin_for_this_process(planned.plan.variants, headers)


@pytest.fixture
def device(built, monkeypatch):
    with runner_builds.device_of(built, monkeypatch) as made:
        yield made


@pytest.fixture
def probe(built, device):
    probe = ctypes.CDLL(str(built[0]))
    probe.probe_said.restype = ctypes.c_char_p
    probe.probe_create.restype = ctypes.c_void_p
    return probe


@pytest.fixture(scope="module")
def whole_library(tmp_path_factory):
    try:
        return library.build(tmp_path_factory.mktemp("plugins"))
    except MissingDependencyError as error:
        pytest.skip(str(error))


class Context:
    """An execution context's plugin, with its stream."""

    def __init__(self, probe, device, planned, inputs=INPUTS):
        made = probe.probe_create(plans.write(planned.plan).encode(), inputs.encode(), OUTPUTS.encode())
        assert made, probe.probe_said()
        self.probe, self.device, self.planned, self.plugin = probe, device, planned, ctypes.c_void_p(made)
        self.stream = ctypes.c_void_p()
        device.call("cuStreamCreate", ctypes.byref(self.stream), 1)

    def close(self):
        self.probe.probe_destroy(self.plugin)

    def run(self, addresses, arrays):
        """0, or what was refused."""
        given = arrays[:-1]
        dims = [[*array.shape, *[0] * (8 - array.ndim)] for array in given]
        return self.probe.probe_run(
            self.plugin,
            len(given),
            (ctypes.c_int64 * (8 * len(given)))(*np.ravel(dims)),
            (ctypes.c_int32 * len(given))(*(array.ndim for array in given)),
            (ctypes.c_int32 * len(given))(*(TYPES[str(array.dtype)] for array in given)),
            (ctypes.c_void_p * len(given))(*addresses[:-1]),
            (ctypes.c_void_p * 1)(addresses[-1]),
            self.stream,
        )

    def arrays(self, batch):
        inputs = [np.ascontiguousarray(array) for array in batch.values()]
        return [*inputs, *self.planned.weights, np.full((len(inputs[0]), 3), np.nan, np.float32)]

    def answer(self, batch):
        arrays = self.arrays(batch)
        with self.device.memory(*arrays) as addresses:
            assert self.run(addresses, arrays) == 0, self.probe.probe_said()
            self.device.call("cuStreamSynchronize", self.stream)
            return self.device.download(addresses[-1], arrays[-1])


@pytest.fixture
def context(probe, device, planned):
    made = Context(probe, device, planned)
    yield made
    made.close()


def assert_right(student, batch, logits):
    oracle = run_oracle(student, [batch])
    assert np.abs(logits - oracle.batches[0].references["logits"]).max() <= oracle.tolerances["logits"]


@pytest.mark.parametrize(
    ("lengths", "padded"), [((17, 0, 12), 20), ((17, 3, 1, 12, 20, 9, 4), 9)], ids=["whole", "parts"]
)
def test_a_context_answers_from_ids_to_logits(student, context, lengths, padded):
    batch = as_numpy(make_batch(tuple(min(length, padded) for length in lengths), padded))
    assert_right(student, batch, context.answer(batch))


def test_what_ran_once_can_be_captured_and_what_did_not_is_refused(student, context, device, probe):
    batch = as_numpy(make_batch((17, 5, 12), 20))
    arrays = context.arrays(batch)
    with device.memory(*arrays) as addresses:

        def captured():
            graph = ctypes.c_void_p()
            device.call("cuStreamBeginCapture_v2", context.stream, 1)
            status = context.run(addresses, arrays)
            device.call("cuStreamEndCapture", context.stream, ctypes.byref(graph))
            return status, graph

        assert captured()[0] == 3
        assert b"enqueue once before the capture" in probe.probe_said()
        context.answer(batch)
        status, graph = captured()
        assert status == 0, probe.probe_said()
        assert np.isnan(device.download(addresses[-1], arrays[-1])).all()
        ready = ctypes.c_void_p()
        device.call("cuGraphInstantiateWithFlags", ctypes.byref(ready), graph, ctypes.c_uint64(0))
        device.call("cuGraphLaunch", ready, context.stream)
        device.call("cuStreamSynchronize", context.stream)
        assert_right(student, batch, device.download(addresses[-1], arrays[-1]))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (("adtp-plan 7\n", INPUTS, OUTPUTS), b"AdtpEncoder: "),
        ((None, "int65 texts; int64 texts; int64 texts", OUTPUTS), b"inputs: got 'int65'; accepted are float32"),
        ((None, INPUTS, "float16 texts 3"), b"outputs: accepted are those of type float32"),
        ((None, "", OUTPUTS), b"fields: needs plan, inputs and outputs"),
    ],
)
def test_wrong_fields_are_refused(probe, planned, fields, words):
    text = fields[0] or plans.write(planned.plan)
    assert not probe.probe_create(text.encode(), fields[1].encode(), fields[2].encode())
    assert words in probe.probe_said()


def test_inputs_of_another_type_or_shape_are_refused(context, probe):
    arrays = context.arrays(as_numpy(make_batch((17, 5), 20)))
    addresses = [256] * len(arrays)
    assert context.run(addresses, [arrays[0].astype(np.int32), *arrays[1:]]) == 1
    assert context.run(addresses, [*arrays[:-2], arrays[-2][:0], arrays[-1]]) == 1
    assert context.run(addresses, [arrays[0], arrays[1][:, :19], *arrays[2:]]) == 2
    assert b"input 1 is of shape (2, 19); accepted is (2, 20)" in probe.probe_said()


def test_a_library_without_a_kernel_of_the_plan_is_refused_when_a_plugin_is_made(planned, built, monkeypatch):
    missing = planned.plan.buckets[0].launches[3]
    left = tuple(name for name in planned.plan.variants if name != missing.variant)
    other = runner_builds.plugin_for_this_process(left, library.find_headers())
    probe = ctypes.CDLL(str(other[0]))
    probe.probe_said.restype = ctypes.c_char_p
    assert not probe.probe_create(plans.write(planned.plan).encode(), INPUTS.encode(), OUTPUTS.encode())
    assert probe.probe_said().decode() == (
        f"AdtpEncoder: the plan launches {missing.variant} ({missing.note}), and this library has no such kernel; accepted are plans "
        "of the version of adtp-export that built it"
    )


def test_a_gpu_older_than_all_kernels_is_an_error_of_the_call(context, device):
    device.set(75)
    arrays = context.arrays(as_numpy(make_batch((17, 5), 20)))
    with device.memory(*arrays) as addresses:
        assert context.run(addresses, arrays) == 3
    assert b"no kernel for sm_75; accepted are GPUs from sm_80 on" in context.probe.probe_said()


@pytest.mark.usefixtures("has_rtx")
@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
def test_tensorrt_rtx_builds_an_engine_of_one_plugin_from_the_file(whole_library, student, precision, tmp_path):
    """In a process of its own: a library's creators stay."""
    file = encoder_files.write(student, tmp_path, precision)[1]
    code = f"""
from adtp_export.runtimes import tensorrt
trt = tensorrt.RTX.load()
logger = tensorrt.callbacks.logger(trt)
assert trt.get_plugin_registry().load_library({str(whole_library)!r})
builder = trt.Builder(logger)
network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
parser = trt.OnnxParser(network, logger)
assert parser.parse_from_file({str(file)!r}), logger.said()
kinds = [network.get_layer(i).type for i in range(network.num_layers)]
print(kinds.count(trt.LayerType.PLUGIN_V3), {{*kinds}} - {{trt.LayerType.PLUGIN_V3, trt.LayerType.CONSTANT}})
output = network.get_output(0)
print(output.name, output.dtype, tuple(output.shape))
config, profile = builder.create_builder_config(), builder.create_optimization_profile()
for i in range(network.num_inputs):
    profile.set_shape(network.get_input(i).name, (1, 1), (2, 8), (4, 16))
config.add_optimization_profile(profile)
config.num_compute_capabilities = 1
config.set_compute_capability(trt.ComputeCapability.SM86, 0)
engine = builder.build_serialized_network(network, config)
print(engine is not None and engine.nbytes > {sum(array.nbytes for array in encoder_file.read(file).weights)}, logger.said())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    first, second, third = done.stdout.splitlines() or [done.stderr, "", ""]
    assert first == "1 set()", done.stderr
    assert second == "logits DataType.FLOAT (-1, 3)"
    assert third.startswith("True"), third
