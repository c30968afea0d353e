"""The hosts of grouped attention on the emulated GPU: Python's launch, TensorRT's plugin in Python, and C++'s launch."""

import contextlib
import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path

import emulated_gpu
import numpy as np
import pytest
import runner_builds
from grouped_calls import CALLS, POINTERS, VARIANTS, Data

from adtp_export.errors import InputError, MissingDependencyError
from adtp_export.plugins import grouped, library
from adtp_export.plugins.binaries import Kind
from adtp_export.plugins.tensorrt_grouped import GROUPED

GPU = Path(__file__).parent
NEWER = 100


@pytest.fixture
def cuda_python():
    pytest.importorskip("cuda.bindings.driver", reason="cuda-python is not installed")


def run(folder, driver, *options):
    """Have the Python host run all calls; return the largest error of each, as a share of what is allowed."""
    calls = {name: Data(call) for name, call in CALLS.items()}
    for name, data in calls.items():
        np.savez(folder / f"{name}.npz", **data.arrays)
        (folder / f"{name}.json").write_text(json.dumps(data.numbers | {"is_received": data.call.received}))
    environment = dict(os.environ, LD_LIBRARY_PATH=str(driver.parent)) | emulated_gpu.settings(NEWER)
    command = [sys.executable, GPU / "grouped_host.py", folder, *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=GPU)
    assert done.returncode == 0, done.stdout + done.stderr
    read = {name: [np.fromfile(folder / f"{name}.{end}", np.uint8) for end in ("out", "received")] for name in calls}
    return {name: data.share_of_allowed(*read[name]) for name, data in calls.items()}


@pytest.mark.usefixtures("cuda_python")
def test_the_python_host_launches(tmp_path, emulated_library):
    found = run(tmp_path, emulated_library)
    assert all(share <= 1 for share in found.values()), found


@pytest.mark.usefixtures("cuda_python", "has_rtx")
def test_the_python_plugin_enqueues(tmp_path, emulated_library):
    found = run(tmp_path, emulated_library, "--enqueue")
    assert all(share <= 1 for share in found.values()), found


_ADDRESSES = (*POINTERS, "out", "received")
_INTEGERS = ("q_stride", "kv_stride", "queries", "keys", "texts", "num_heads", "kv_heads", "head_size")


class CppCall(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in _ADDRESSES),
        ("dtype", ctypes.c_char_p),
        *((name, ctypes.c_int32) for name in _INTEGERS),
        ("scale", ctypes.c_float),
        ("window_back", ctypes.c_int32),
        ("window_ahead", ctypes.c_int32),
    )


MISTAKES = {
    "as it is": None,
    "texts left out of the grid": ("grouped.cpp", "/ variant.blockM + call.texts", "/ variant.blockM"),
    "bounds exchanged": ("grouped.cpp", "&call.windowBack, &call.windowAhead", "&call.windowAhead, &call.windowBack"),
    "strides exchanged": ("grouped.cpp", "&call.qStride, &call.kvStride", "&call.kvStride, &call.qStride"),
    "attention before its log-sum-exps": (
        "grouped.cpp",
        "{GroupedKernel::kLSE, GroupedKernel::kRECEIVED, GroupedKernel::kATTENTION}",
        "{GroupedKernel::kATTENTION, GroupedKernel::kLSE, GroupedKernel::kRECEIVED}",
    ),
}
"""Planted in the C++ host."""


FEW = ("as it is", "texts left out of the grid")
"""The others are as slow as a compiler is."""


@pytest.fixture(params=[pytest.param(name, marks=() if name in FEW else pytest.mark.slow) for name in MISTAKES])
def cpp_host(request, monkeypatch):
    """The emulated GPU, a function that launches a call there, prepared before what could be a capture, and whether that is right."""
    mistake = MISTAKES[request.param]
    built = runner_builds.grouped_for_this_process(VARIANTS, mistake)
    with runner_builds.device_of(built, monkeypatch) as device:
        probe = ctypes.CDLL(str(built[0]))
        probe.probe_said.restype = ctypes.c_char_p

        def launch(data):
            call, names = data.call, [*data.arrays]
            probe.probe_prepare(call.dtype.encode(), call.head_size, call.received)
            assert probe.probe_said() == b""
            with device.memory(*data.arrays.values()) as addresses:
                places = dict(zip(names, addresses)) | ({} if call.received else {"received": None})
                given = CppCall(**places, **data.numbers | {"dtype": call.dtype.encode()})
                monkeypatch.setenv("ADTP_EMULATOR_CAPTURING", "1")
                probe.probe_launch(ctypes.byref(given), None)
                monkeypatch.setenv("ADTP_EMULATOR_CAPTURING", "0")
                kept = dict(zip(names, addresses))
                written = [device.download(kept[name], data.arrays[name]) for name in ("out", "received")]
                return probe.probe_said().decode(), written

        yield launch, mistake is None


def test_the_cpp_host_launches_and_its_mistakes_are_noticed(cpp_host):
    launch, is_right = cpp_host
    shares = []
    with contextlib.nullcontext() if is_right else contextlib.suppress(emulated_gpu.RefusedError):
        for call in CALLS.values():
            data = Data(call)
            said, written = launch(data)
            assert said == ""
            shares.append(data.share_of_allowed(*written))
    assert (len(shares) == len(CALLS) and all(share <= 1 for share in shares)) == is_right, shares


TYPES = {"fp32": 0, "fp16": 1, "bf16": 7, "int32": 3}
"""TensorRT's numbers."""

REFUSED_SHAPES = 2
"""What `probe_run` returns."""


@pytest.fixture
def cpp_plugin(monkeypatch):
    """The emulated GPU, and the library of the C++ plugins."""
    try:
        headers = library.find_headers()
    except MissingDependencyError as error:
        pytest.skip(str(error))
    built = runner_builds.grouped_plugin_for_this_process(VARIANTS, headers)
    with runner_builds.device_of(built, monkeypatch) as device:
        probe = ctypes.CDLL(str(built[0]))
        probe.probe_said.restype = ctypes.c_char_p
        probe.probe_create.restype = ctypes.c_void_p
        probe.probe_create.argtypes = (ctypes.c_int32, ctypes.c_void_p, ctypes.c_float)
        yield device, probe


def created(probe, data):
    """A plugin of the form that a call needs."""
    integers = np.array([data.numbers[name] for name in GROUPED.integers], np.int32)
    form = 2 if data.call.received else int(min(integers[2:]) >= 0)
    return probe.probe_create(form, integers.ctypes.data, data.numbers["scale"])


def enqueued(device, probe, data, sizes):
    """Return what a plugin says to a call, 0 of one that it takes, and what it wrote. sizes: rows that some inputs are said to have."""
    plugin, names = ctypes.c_void_p(created(probe, data)), [*data.arrays]
    dims = np.zeros((len(POINTERS), 8), np.int64)
    for name, place, tensor in zip(POINTERS, dims, data.tensors):
        place[: tensor.dim()] = (sizes.get(name, len(tensor)), *tensor.shape[1:])
    ranks = np.array([tensor.dim() for tensor in data.tensors], np.int32)
    types = np.array([TYPES[data.call.dtype]] * 3 + [TYPES["int32"]] * 4, np.int32)
    with device.memory(*data.arrays.values()) as addresses:
        pointers = (ctypes.c_void_p * len(addresses))(*addresses)
        at = [array.ctypes.data_as(ctypes.c_void_p) for array in (dims, ranks, types)]
        outputs = ctypes.byref(pointers, len(POINTERS) * ctypes.sizeof(ctypes.c_void_p))
        status = probe.probe_run(plugin, len(POINTERS), *at, pointers, outputs, None)
        kept = dict(zip(names, addresses))
        written = [device.download(kept[name], data.arrays[name]) for name in ("out", "received")]
    probe.probe_destroy(plugin)
    return status, written


def test_the_cpp_plugin_enqueues(cpp_plugin):
    for call in CALLS.values():
        data = Data(call)
        status, written = enqueued(*cpp_plugin, data, {})
        assert status == 0, cpp_plugin[1].probe_said()
        assert data.share_of_allowed(*written) <= 1


@pytest.mark.parametrize("name", ["cu_q", "cu_k", "positions_q", "positions_k"])
def test_the_cpp_plugin_refuses_sizes_that_do_not_fit(cpp_plugin, name):
    """A kernel would read behind them."""
    status, _ = enqueued(*cpp_plugin, Data(CALLS["last"]), {name: 1})
    assert status == REFUSED_SHAPES
    assert b"cu_q and cu_k must be (B+1,), positions_q (T,) and positions_k (T',); got " in cpp_plugin[1].probe_said()


def test_the_cpp_plugin_refuses_fields_that_cannot_be(cpp_plugin):
    data = Data(CALLS["causal"])
    data.numbers |= {"kv_heads": 3}
    assert created(cpp_plugin[1], data) is None
    assert b"kv_heads (int32, a divisor of it)" in cpp_plugin[1].probe_said()


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Kind("fp8", 64, grouped=True), "got dtype fp8; accepted are fp32, fp16, bf16"),
        (Kind("fp16", 12, grouped=True), "got head size 12; accepted in fp16 are multiples of 8 up to 256"),
        (Kind("fp32", 256, grouped=True), "got head size 256; accepted in fp32 are multiples of 8 up to 128"),
    ],
    ids=str,
)
def test_what_there_is_no_kernel_for_is_named(kind, message):
    with pytest.raises(InputError, match=message):
        grouped.variants_of(kind)
