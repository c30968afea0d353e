"""One deployment, called from many threads: what a server does with it."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
import soak

import adtp_export
from adtp_export.inference import session as room
from adtp_export.runtimes import tensorrt
from adtp_export.runtimes.onnxruntime import OnnxRuntimeEngine
from adtp_export.runtimes.openvino import OpenVinoEngine

THREADS = 8
TEXTS = ["a wonderful film", "the soup was terrible and the room was not good", "so-so"]


def together(function):
    """Call a function from all threads at once; return what each call returned, or raise what one raised."""
    ready = threading.Barrier(THREADS)

    def call(number):
        ready.wait()
        return function(number)

    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(call, range(THREADS)))


def check_all_targets(out):
    targets = soak.targets_here(out)
    assert targets
    for target in targets:
        found = soak.soak(out, target, calls=120, threads=THREADS, requests=16)
        assert (found["wrong"], found["errors"]) == (0, []), found
    return targets


@pytest.mark.parametrize("made", ["exported", "packed_export"])
def test_every_target_answers_threads_as_it_answers_one(made, request):
    out = request.getfixturevalue(made)
    check_all_targets(out / "out" if made == "packed_export" else out)


@pytest.mark.slow
@pytest.mark.usefixtures("with_operators")
def test_operators_answer_threads_as_they_answer_one(demo, tmp_path):
    settings = {"precisions": ["fp32", "bf16", "int8"], "precompute_embedding_projections": True}
    adtp_export.export(demo, tmp_path / "out", **settings)
    precisions = {name.split("-")[2] for name in check_all_targets(tmp_path / "out") if name.endswith("-plugin")}
    assert precisions == {"fp32", "bf16", "int8"}


def test_the_debug_form_is_opened_once(exported, monkeypatch):
    deployment, opened = adtp_export.load(exported, target="onnxruntime-cpu-fp32"), []
    whole = room.Session._open_debug_form

    def opening(self):
        opened.append(self)
        return whole(self)

    monkeypatch.setattr(room.Session, "_open_debug_form", opening)
    expected = adtp_export.load(exported, target="onnxruntime-cpu-fp32").kept(TEXTS)
    opened.clear()
    assert together(lambda number: deployment.kept(TEXTS)) == [expected] * THREADS
    assert len(opened) == 1


def test_a_call_changes_nothing_in_the_tokenizer(exported):
    """In older tokenizers a change is refused with "Already borrowed" while another thread reads texts."""
    deployment, asked = adtp_export.load(exported, target="onnxruntime-cpu-fp32"), []

    class Watched:
        def __init__(self, tokenizer):
            self.tokenizer = tokenizer

        def __getattr__(self, name):
            asked.append(name)
            return getattr(self.tokenizer, name)

    deployment.tokenizer = Watched(deployment.tokenizer)
    deployment(TEXTS, return_kept=True)
    assert "encode_batch_fast" in asked
    assert not [name for name in asked if name.startswith(("no_", "enable_", "add_"))]


class Device:
    """Buffers of a GPU that is not there, with the interface of `DeviceBuffers`: memory by name, shared by all who run."""

    stream = 0

    def __init__(self):
        self.memory = {}

    def upload(self, arrays):
        self.memory.update({name: array.copy() for name, array in arrays.items()})
        return dict.fromkeys(arrays, 0)

    def reserve(self, name, size_bytes):
        return 0

    def download(self, arrays):
        for name, array in arrays.items():
            array[...] = self.memory[name]


class Context:
    """Doubles its input in that memory, a little later, as kernels do."""

    def __init__(self, device):
        self.device, self.shape = device, None

    def set_input_shape(self, name, shape):
        self.shape = shape
        return True

    def set_tensor_address(self, name, address):
        return True

    def get_tensor_shape(self, name):
        return self.shape

    def execute_async_v3(self, stream):
        time.sleep(0.001)
        self.device.memory["logits"] = 2 * self.device.memory["input_ids"]
        return True


def test_an_engine_with_one_context_is_run_by_one_thread_at_a_time():
    """The rest of `TensorRtEngine` needs a GPU, and there the test of every target calls it."""
    engine = object.__new__(tensorrt.TensorRtEngine)
    engine._buffers = Device()
    engine._context, engine._fixed, engine._name = Context(engine._buffers), True, "x"
    engine._engine, engine._trt = SimpleNamespace(get_tensor_dtype=str), SimpleNamespace(nptype=lambda kind: np.int64)
    engine._alone = threading.Lock()
    engine.inputs, engine.outputs = ("input_ids",), ("logits", "states")

    def run(number):
        ids = np.full((number + 1, 3), number)
        found = [engine.run({"input_ids": ids}, ["logits"]) for _ in range(20)]  # the device has no states to copy
        return all((each["logits"] == 2 * ids).all() for each in found)

    assert all(together(run))


CONTAINER = {(3.0, 0): 3, (3.0, 1): 1, (3.0, 3): 3, (2.5, 0): 2}
"""Threads by limit and by what is asked for: there, runtimes by themselves take a thread for each core of the machine."""


def test_onnxruntime_gets_as_many_threads_as_cores_may_be_used(exported, on_cores):
    def told(quota, threads):
        on_cores(4, quota)
        return OnnxRuntimeEngine(exported / "model.onnx", threads)._session.get_session_options().intra_op_num_threads

    assert {asked: told(*asked) for asked in CONTAINER} == CONTAINER
    assert [told(None, threads) for threads in (0, 4, 2)] == [0, 0, 2]  # with 0 it binds them


@pytest.mark.usefixtures("has_openvino")
def test_openvino_gets_as_many_threads_as_cores_may_be_used(exported, on_cores, monkeypatch):
    import openvino

    def told(quota, threads):
        on_cores(4, quota)
        OpenVinoEngine(exported / "model.onnx", threads)
        return configs.pop().get("INFERENCE_NUM_THREADS")

    configs, compile_model = [], openvino.Core.compile_model

    def compile_and_tell(core, model, device, config):
        configs.append(config)
        return compile_model(core, model, device, config)

    monkeypatch.setattr(openvino.Core, "compile_model", compile_and_tell)
    assert {asked: told(*asked) for asked in CONTAINER} == CONTAINER
    assert [told(None, threads) for threads in (0, 4, 2)] == [None, 4, 2]
