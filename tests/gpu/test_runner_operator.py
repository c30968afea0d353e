"""`adtp::AdtpEncoder` in ONNX Runtime: with the provider's name changed to the CPU's, and the emulated GPU behind it.

What a provider hands over are addresses and a stream. Here the addresses are those of arrays that the emulated GPU reaches.
"""

import contextlib
import ctypes
import dataclasses

import numpy as np
import onnxruntime
import pytest
import runner_builds
from onnx import TensorProto, helper

from adtp_export.plugins import plan
from adtp_export.plugins.plan import INPUT, OUTPUT, TEXTS, TOKENS, WEIGHT, Bucket, Launch, Number, Plan, Pointer

HIDDEN = 64
VARIANT = "fp32-d32-16x16"
ON_CPU = ("operators.cpp", 'return "CUDAExecutionProvider";', "return static_cast<char const*>(nullptr);")
LENGTHS = (5, 0, 17, 10)


def attention_bucket(tokens, texts):
    """Attention on the weight, which is (T, 3H); of ids nobody asks."""
    columns = tuple(Pointer(WEIGHT, i * 4 * HIDDEN) for i in range(3))
    counts = (Number("i32", 3 * HIDDEN), Number("i32", TOKENS), Number("i32", TEXTS), Number("i32", 2))
    launch = Launch(
        variant=VARIANT,
        programs=tokens // 16 * 2,
        programs_per_text=2,
        arguments=(*columns, Pointer(INPUT, 0, 1), Pointer(OUTPUT), *counts, Number("f32", 0.125)),
    )
    return Bucket(
        tokens=tokens,
        texts=texts,
        workspace=0,
        inputs=(8 * tokens, 4 * texts + 4),
        outputs=(4 * tokens * HIDDEN,),
        launches=(launch,),
    )


PLAN = Plan((4 * 64 * 3 * HIDDEN,), (attention_bucket(32, 4), attention_bucket(64, 8)))


def model(
    text=None,
    outputs=f"float32 tokens {HIDDEN}",
    inputs="int64 tokens; int32 bounds",
    names=("ids", "bounds", "qkv"),
    function=False,
    ids=TensorProto.INT64,
):
    """A model of one node, or of a function of that name, which returns its last input."""
    kinds = {
        "ids": (ids, None),
        "bounds": (TensorProto.INT32, ["b"]),
        "qkv": (TensorProto.FLOAT, ["t", "w"]),
    }
    attributes = {"plan": text or plan.write(PLAN), "inputs": inputs, "outputs": outputs}
    node = helper.make_node("AdtpEncoder", names, ["out"], domain="adtp")
    node.attribute.extend(helper.make_attribute(name, text) for name, text in attributes.items())
    graph = helper.make_graph(
        [node],
        "encoder",
        [helper.make_tensor_value_info(name, *kinds[name]) for name in names],
        [helper.make_tensor_value_info("out", TensorProto.FLOAT, None)],
    )
    versions = [helper.make_opsetid("", 20), helper.make_opsetid("adtp", 1)]
    body = helper.make_function(
        "adtp",
        "AdtpEncoder",
        names,
        ["out"],
        [helper.make_node("Identity", ["qkv"], ["out"])],
        versions[:1],
        attributes=[*attributes],
    )
    functions = [body] if function else []
    return helper.make_model(graph, opset_imports=versions, ir_version=10, functions=functions).SerializeToString()


def session(library, content):
    options = onnxruntime.SessionOptions()
    options.register_custom_ops_library(str(library))
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])


def test_a_session_without_the_provider_does_not_fall_back_to_the_function():
    """ONNX Runtime takes the library's schema for the function, and finds no kernel: register it beside CUDA alone."""
    library, _ = runner_builds.for_this_process((VARIANT,))
    with pytest.raises(Exception, match="Could not find an implementation for AdtpEncoder"):
        session(library, model(function=True))
    options = onnxruntime.SessionOptions()
    found = onnxruntime.InferenceSession(model(function=True), options, providers=["CPUExecutionProvider"])
    given = {"ids": np.zeros(3, np.int64), "bounds": np.zeros(2, np.int32), "qkv": np.ones((3, 2), np.float32)}
    assert (found.run(None, given)[0] == 1).all()


@pytest.fixture(scope="module")
def built():
    return runner_builds.for_this_process((VARIANT,), ON_CPU)


@pytest.fixture
def device(built, monkeypatch):
    with runner_builds.device_of(built, monkeypatch) as made:
        yield made


@contextlib.contextmanager
def reachable(device, *arrays):
    """Copies of arrays that the GPU reaches, at multiples of 256 bytes."""
    made = []
    for array in arrays:
        raw = np.zeros(array.nbytes + 256, np.uint8)
        at = -raw.ctypes.data % 256
        made.append(raw[at : at + array.nbytes].view(array.dtype).reshape(array.shape))
        made[-1][:] = array
        place = made[-1].ctypes.data_as(ctypes.c_void_p)
        device.call("cuMemHostRegister_v2", place, ctypes.c_size_t(array.nbytes), 2)
    try:
        yield made
    finally:
        for array in made:
            device.call("cuMemHostUnregister", array.ctypes.data_as(ctypes.c_void_p))


def run(opened, given, out):
    binding = opened.io_binding()
    for name, array in given.items():
        binding.bind_ortvalue_input(name, onnxruntime.OrtValue.ortvalue_from_numpy(array))
    binding.bind_ortvalue_output("out", onnxruntime.OrtValue.ortvalue_from_numpy(out))
    opened.run_with_iobinding(binding)


def attention(qkv, bounds):
    q, k, v = (np.split(qkv.astype(np.float64), 3, axis=1)[i].reshape(len(qkv), 2, -1) for i in range(3))
    out = np.zeros((len(qkv), 2, HIDDEN // 2))
    for begin, end in zip(bounds, bounds[1:]):
        scores = np.einsum("qhd,khd->hqk", q[begin:end], k[begin:end]) * 0.125
        weights = np.exp(scores - scores.max(-1, keepdims=True)) if end > begin else scores
        out[begin:end] = np.einsum(
            "hqk,khd->qhd", weights / np.maximum(weights.sum(-1, keepdims=True), 1e-9), v[begin:end]
        )
    return out.reshape(len(qkv), HIDDEN)


PADDED = "int64 texts length; int32 bounds"


@pytest.mark.parametrize(
    ("shape", "inputs"), [((32,), "int64 tokens; int32 bounds"), ((4, 8), PADDED)], ids=["packed", "padded"]
)
def test_a_session_runs_the_plan(device, built, shape, inputs):
    opened = session(built[0], model(inputs=inputs))
    bounds = np.cumsum([0, *LENGTHS], dtype=np.int32)
    qkv = np.random.default_rng(0).standard_normal((64, 3 * HIDDEN), np.float32)
    for factor in (1, 2):
        arrays = (np.zeros(shape, np.int64), bounds, factor * qkv, np.full((32, HIDDEN), np.nan, np.float32))
        with reachable(device, *arrays) as (ids, there, states, out):
            run(opened, {"ids": ids, "bounds": there, "qkv": states}, out)
            np.testing.assert_allclose(out, attention(factor * qkv[:32], bounds), atol=1e-5)


def packed_bucket(tokens, texts):
    """Attention on an input of a row for each token."""
    one = attention_bucket(tokens, texts)
    columns = tuple(Pointer(INPUT, i * 4 * HIDDEN, 2) for i in range(3))
    launch = dataclasses.replace(one.launches[0], arguments=(*columns, *one.launches[0].arguments[3:]))
    return dataclasses.replace(one, inputs=(*one.inputs, 12 * tokens * HIDDEN), launches=(launch,))


@pytest.fixture
def packed(device, built):
    """Runs packed texts of so many tokens, beyond a largest bucket of 64 tokens of 8 texts; or of other `cu_seqlens`."""
    text = plan.write(Plan((), (packed_bucket(32, 4), packed_bucket(64, 8))))
    opened = session(built[0], model(text, inputs=f"int64 tokens; int32 bounds; float32 tokens {3 * HIDDEN}"))

    def run_packed(lengths, bounds=None):
        bounds = np.cumsum([0, *lengths], dtype=np.int32) if bounds is None else np.array(bounds, np.int32)
        tokens = sum(lengths)
        qkv = np.random.default_rng(1).standard_normal((tokens, 3 * HIDDEN), np.float32)
        arrays = (np.zeros(tokens, np.int64), bounds, qkv, np.full((tokens, HIDDEN), np.nan, np.float32))
        with reachable(device, *arrays) as (ids, there, states, out):
            run(opened, {"ids": ids, "bounds": there, "qkv": states}, out)
            return out.copy(), attention(qkv, bounds)

    return run_packed


@pytest.mark.parametrize(
    "lengths",
    [
        (30, 20, 40, 9, 17, 4),
        (64, 64, 2),
        (2,) * 20,
        (0, 60, 0, 10, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0),
        (7, 5, 60, 3, 3, 1, 1),
    ],
    ids=["tokens", "whole buckets", "texts", "nothing at the end", "odd beginnings"],
)
def test_packed_calls_beyond_the_largest_bucket_run_in_parts(packed, lengths):
    found, expected = packed(lengths)
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_packed_calls_that_cannot_be_divided_are_refused(packed):
    """Rows of 8 bytes begin at multiples of 16 for every second token only."""
    with pytest.raises(
        Exception, match="got 99 tokens of 3 texts; accepted are at most 64 tokens of 8 texts: split the call"
    ):
        packed((33, 33, 33))
    with pytest.raises(Exception, match="got 70 tokens of 1 texts; accepted are at most 64 tokens"):
        packed((70,))


@pytest.mark.parametrize("bounds", [(0, 40, 30, 80), (2, 40, 60, 80), (0, 40, 60, 81)])
def test_cu_seqlens_that_make_no_sense_are_refused_where_parts_need_them(packed, bounds):
    with pytest.raises(
        Exception,
        match="input 1 makes no cu_seqlens; accepted are numbers that begin with 0, never fall, and end with at most 80",
    ):
        packed((40, 20, 20), bounds)


@pytest.mark.parametrize("early", [True, False])
def test_the_runner_is_made_with_the_session_where_there_is_a_context(device, built, early, tmp_path, monkeypatch):
    log, context = tmp_path / "calls", ctypes.c_void_p()
    monkeypatch.setenv("ADTP_EMULATOR_CALLS", str(log))
    device.call("cuCtxGetCurrent", ctypes.byref(context))
    if not early:
        device.call("cuCtxSetCurrent", None)
    opened = session(built[0], model())
    assert log.exists() == early
    device.call("cuCtxSetCurrent", context)
    bounds = np.cumsum([0, *LENGTHS], dtype=np.int32)
    arrays = (np.zeros(32, np.int64), bounds, np.zeros((64, 3 * HIDDEN), np.float32), np.ones((32, HIDDEN), np.float32))
    with reachable(device, *arrays) as (ids, there, states, out):
        run(opened, {"ids": ids, "bounds": there, "qkv": states}, out)
        assert (out == 0).all()
    assert log.read_text().count('"upload"') == 2


def test_a_stream_that_is_being_captured_is_refused(device, built):
    """A provider without streams means the legacy one, which cannot go on while a blocking stream captures."""
    opened = session(built[0], model())
    given = {"ids": np.zeros(32, np.int64), "bounds": np.zeros(5, np.int32), "qkv": np.zeros((64, 192), np.float32)}
    stream = ctypes.c_void_p()
    device.call("cuStreamCreate", ctypes.byref(stream), 0)
    device.call("cuStreamBeginCapture_v2", stream, 1)
    with pytest.raises(Exception, match="is being captured; accepted are sessions without enable_cuda_graph"):
        opened.run(None, given)
    graph = ctypes.c_void_p()
    device.call("cuStreamEndCapture", stream, ctypes.byref(graph))  # it still is one
    device.call("cuStreamDestroy_v2", stream)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"text": "adtp-plan 0"}, "plan, line 1: got 'adtp-plan 0'"),
        ({"inputs": "int64 tokens; long bounds"}, "inputs: got 'long'; accepted are float32, uint8, "),
        ({"inputs": "int64 tokens"}, "inputs: got 1; accepted is one for each of the plan's 2"),
        (
            {"inputs": "int64 tokens; int32 ends"},
            "inputs: got 'ends'; accepted are numbers, texts, length, tokens and bounds",
        ),
        (
            {"outputs": "float32 tokens rows"},
            "outputs: got 'rows'; accepted are numbers, texts, length, tokens and bounds",
        ),
        ({"outputs": f"float32 {'1 ' * 9}"}, "outputs: got more than 8 axes"),
        ({"outputs": "float32 tokens 64; float32 texts"}, "outputs: got 2; accepted is one for each of the plan's 1"),
        ({"outputs": "int32 tokens 64"}, "outputs: accepted are those of type float32"),
    ],
)
def test_attributes_that_are_wrong_are_refused_when_a_session_is_made(built, options, message):
    with pytest.raises(Exception, match=message):
        session(built[0], model(**options))


def test_calls_that_are_wrong_are_refused(device, built):
    def fails(
        message,
        given_ids,
        names=("ids", "bounds", "qkv"),
        bounds=LENGTHS,
        rows=64,
        **options,
    ):
        given = {
            "ids": given_ids,
            "bounds": np.cumsum([0, *bounds], dtype=np.int32),
            "qkv": np.zeros((rows, 192), np.float32),
        }
        with pytest.raises(Exception, match=message):
            session(built[0], model(names=names, **options)).run(None, {name: given[name] for name in names})

    padded = {"inputs": PADDED}
    fails("got 2 inputs; accepted are the plan's 2 and its 1 weights", np.zeros(32, np.int64), ("ids", "bounds"))
    fails(r"accepted are ids of shape \(B, S\)", np.zeros((1, 2, 3), np.int64))
    many = (1,) * 8
    fails(
        r"got 72 tokens of 8 texts; accepted are at most 64 tokens of 8 texts: split",
        np.zeros((8, 9), np.int64),
        bounds=many,
        **padded,
    )
    fails("got 0 texts, 32 tokens", np.zeros(32, np.int64), bounds=())

    ids = np.zeros(32, np.int64)
    fails("input 0 is of type int32; accepted is int64", ids.astype(np.int32), ids=TensorProto.INT32)
    fails("weight 0 has 24576 bytes; accepted are 49152", ids, rows=32)
    fails("output 0 has 8320 bytes; accepted are at most 8192", ids, outputs="float32 tokens 65")
    wrong = r"input 1 is of shape \({}\); accepted is \(5\), as of 4 texts and 32 tokens"
    fails(wrong.format(6), np.zeros((4, 8), np.int64), bounds=(32, 0, 0, 0, 0), **padded)
    fails(wrong.format(4), np.zeros((4, 8), np.int64), bounds=(32, 0, 0), **padded)
    fails(r"input 0 is of shape \(32\); accepted is \(4, 0\)", ids, **padded)
