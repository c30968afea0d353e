"""The emulated driver's streams, events, captures, graphs and pinned memory: late, in order, and strict."""

import contextlib
import ctypes
import json
import shutil

import numpy as np
import probes
import pytest
from emulated_gpu import Device, RefusedError

INVALID_VALUE, OUT_OF_MEMORY, INVALID_CONTEXT, INVALID_HANDLE, NOT_READY = 1, 2, 201, 400, 600
CONTEXT_DESTROYED, FAILED, IN_CAPTURE, INVALIDATED, ISOLATION, IMPLICIT = 709, 719, 900, 901, 905, 906
NON_BLOCKING = 1
PROGRAM = probes.program("add.s32 %r100, %r1, 1;", 1, 1)
"""Adds 1 to each of 32 words."""

WORDS = np.arange(32, dtype=np.uint32)


def refused(status, function, *arguments):
    with pytest.raises(RefusedError) as caught:
        function(*arguments)
    assert caught.value.status == status


@pytest.fixture
def own(emulated_library, tmp_path, device):
    """A driver with a context of its own; faults spoil it."""
    made = Device(shutil.copy(emulated_library, tmp_path / "own.so"))
    device.set(on={"FORGIVE": False})
    return made


def handle(device, name, *arguments):
    made = ctypes.c_void_p()
    device.call(name, ctypes.byref(made), *arguments)
    return made


@pytest.fixture
def stream(device):
    made = handle(device, "cuStreamCreate", NON_BLOCKING)
    yield made
    device.driver.cuStreamDestroy_v2(made)


@pytest.fixture
def event(device):
    made = handle(device, "cuEventCreate", 2)
    yield made
    device.driver.cuEventDestroy_v2(made)


@pytest.fixture
def kernel(device):
    return device.load(PROGRAM, "probe")


def parameters(addresses):
    held = [ctypes.c_uint64(address) for address in addresses]
    return (ctypes.c_void_p * 2)(*(ctypes.addressof(one) for one in held)), held


def launch(device, kernel, stream, addresses):
    pointers, _held = parameters(addresses)
    device.call("cuLaunchKernel", kernel, 1, 1, 1, 32, 1, 1, 0, stream, pointers, None)


@contextlib.contextmanager
def pinned(device, nbytes, flags=0):
    """A pinned array of words."""
    made = handle(device, "cuMemHostAlloc", ctypes.c_size_t(nbytes), flags)
    try:
        yield np.ctypeslib.as_array(ctypes.cast(made, ctypes.POINTER(ctypes.c_uint32)), (nbytes // 4,))
    finally:
        device.driver.cuMemFreeHost(made)


def copy_to_host(device, array, address, stream):
    place = array.ctypes.data_as(ctypes.c_void_p)
    device.call("cuMemcpyDtoHAsync_v2", place, ctypes.c_uint64(address), ctypes.c_size_t(array.nbytes), stream)


def copy_to_device(device, address, array, stream):
    place = array.ctypes.data_as(ctypes.c_void_p)
    device.call("cuMemcpyHtoDAsync_v2", ctypes.c_uint64(address), place, ctypes.c_size_t(array.nbytes), stream)


class NodeParameters(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS_v2."""

    _fields_ = (
        ("function", ctypes.c_void_p),
        ("sizes", ctypes.c_uint32 * 7),
        ("parameters", ctypes.c_void_p),
        ("extra", ctypes.c_void_p),
        ("kernel", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
    )


def node_parameters(kernel, addresses, context=None):
    pointers, held = parameters(addresses)
    made = NodeParameters(kernel, (1, 1, 1, 32, 1, 1, 0), ctypes.addressof(pointers), None, None, context)
    return made, (pointers, held)


def add_node(device, graph, after, kernel, addresses):
    given, _held = node_parameters(kernel, addresses)
    before = (ctypes.c_void_p * max(len(after), 1))(*after)
    return handle(device, "cuGraphAddKernelNode_v2", graph, before, ctypes.c_size_t(len(after)), ctypes.byref(given))


@contextlib.contextmanager
def graph_of(device, kernel, *launches, chained=True):
    """A graph of launches, its nodes, and what it was instantiated to."""
    graph, nodes = handle(device, "cuGraphCreate", 0), []
    for addresses in launches:
        nodes.append(add_node(device, graph, nodes[-1:] if chained else [], kernel, addresses))
    instance = handle(device, "cuGraphInstantiateWithFlags", graph, ctypes.c_uint64(0))
    try:
        yield graph, nodes, instance
    finally:
        device.driver.cuGraphExecDestroy(instance)
        device.driver.cuGraphDestroy(graph)


def test_work_of_a_stream_is_done_late_and_in_order(device, stream, kernel):
    with device.memory(WORDS, WORDS * 0, WORDS * 0) as (a, b, c):
        launch(device, kernel, stream, (a, b))
        launch(device, kernel, stream, (b, c))
        assert not device.download(c, WORDS).any()
        refused(NOT_READY, device.call, "cuStreamQuery", stream)
        device.call("cuStreamSynchronize", stream)
        assert (device.download(c, WORDS) == WORDS + 2).all()
        device.call("cuStreamQuery", stream)


def test_asking_makes_things_go_on(device, stream, event, kernel):
    with device.memory(WORDS, WORDS) as (a, b):
        launch(device, kernel, stream, (a, b))
        device.call("cuEventRecord", event, stream)
        asked = 0
        while device.driver.cuEventQuery(event) == NOT_READY:
            asked += 1
        assert asked == 2
        assert (device.download(b, WORDS) == WORDS + 1).all()


def test_streams_that_do_not_wait_get_into_each_others_way(device, stream, event, kernel):
    """One writes what the other reads: an event in between makes it right."""
    other = handle(device, "cuStreamCreate", NON_BLOCKING)
    for waits in (False, True):
        with device.memory(WORDS, WORDS * 0, WORDS * 0, WORDS * 0) as (a, b, c, d):
            launch(device, kernel, stream, (a, b))
            launch(device, kernel, stream, (b, c))
            device.call("cuEventRecord", event, stream)
            if waits:
                device.call("cuStreamWaitEvent", other, event, 0)
            launch(device, kernel, other, (c, d))
            device.call("cuStreamSynchronize", other)
            assert (device.download(d, WORDS) == WORDS + 3).all() == waits
            device.call("cuStreamSynchronize", stream)
    device.call("cuStreamDestroy_v2", other)


def test_the_legacy_stream_waits_for_streams_that_block(device, kernel):
    blocking = handle(device, "cuStreamCreate", 0)
    with device.memory(WORDS, WORDS * 0, WORDS * 0) as (a, b, c):
        launch(device, kernel, blocking, (a, b))
        launch(device, kernel, None, (b, c))
        assert (device.download(c, WORDS) == WORDS + 2).all()
    device.call("cuStreamDestroy_v2", blocking)


def test_copies_of_pinned_memory_are_done_late_and_others_at_once(device, stream, tmp_path, monkeypatch):
    log = tmp_path / "calls"
    with device.memory(WORDS * 0) as (a,), pinned(device, WORDS.nbytes) as page:
        page[:] = WORDS
        copy_to_device(device, a, page, stream)
        page[:] = 7  # too early
        device.call("cuStreamSynchronize", stream)
        assert (device.download(a, WORDS) == 7).all()
        plain = WORDS.copy()
        copy_to_device(device, a, plain, stream)
        plain[:] = 9  # it has a copy of its own
        monkeypatch.setenv("ADTP_EMULATOR_CALLS", str(log))
        copy_to_host(device, page, a, stream)
        assert (page == 7).all()
        assert not log.exists()
        copy_to_host(device, plain, a, stream)
        assert (plain == WORDS).all()
    waits = [line["call"] for line in map(json.loads, log.read_text().splitlines()) if line["did"] == "wait"]
    assert waits == ["cuMemcpyDtoHAsync to pageable memory"]


def test_kernels_reach_pinned_memory_that_is_mapped(own, monkeypatch):
    kernel, address = own.load(PROGRAM, "probe"), ctypes.c_uint64()
    with own.memory(WORDS) as (a,):
        with pinned(own, WORDS.nbytes, flags=2) as page:
            own.call("cuMemHostGetDevicePointer_v2", ctypes.byref(address), page.ctypes.data_as(ctypes.c_void_p), 0)
            launch(own, kernel, None, (a, address.value))
            assert (page == WORDS + 1).all()
        with pinned(own, WORDS.nbytes) as page:
            place = page.ctypes.data_as(ctypes.c_void_p)
            refused(INVALID_VALUE, own.call, "cuMemHostGetDevicePointer_v2", ctypes.byref(address), place, 0)
            refused(FAILED, launch, own, kernel, None, (a, page.ctypes.data))


def test_a_graph_replays_with_the_parameters_of_its_launch(device, stream, kernel):
    with (
        device.memory(WORDS, WORDS * 0, WORDS * 0, WORDS * 0) as (a, b, c, d),
        graph_of(device, kernel, (a, b), (b, c)) as (_, nodes, instance),
    ):
        device.call("cuGraphLaunch", instance, stream)
        given, _held = node_parameters(kernel, (b, d))
        device.call("cuGraphExecKernelNodeSetParams_v2", instance, nodes[1], ctypes.byref(given))
        device.call("cuGraphLaunch", instance, stream)
        device.call("cuStreamSynchronize", stream)
        assert (device.download(c, WORDS) == WORDS + 2).all()
        assert (device.download(d, WORDS) == WORDS + 2).all()


def test_nodes_without_an_edge_have_no_order(device, stream, kernel):
    for chained in (True, False):
        with (
            device.memory(WORDS, WORDS * 0, WORDS * 0) as (a, b, c),
            graph_of(device, kernel, (a, b), (b, c), chained=chained) as (_, _, instance),
        ):
            device.call("cuGraphLaunch", instance, stream)
            device.call("cuStreamSynchronize", stream)
            assert (device.download(c, WORDS) == WORDS + 2).all() == chained


def test_launches_of_one_graph_follow_each_other(device, stream, kernel):
    other = handle(device, "cuStreamCreate", NON_BLOCKING)
    with device.memory(WORDS) as (a,), graph_of(device, kernel, (a, a), (a, a)) as (_, _, instance):
        for place in (stream, other, stream, other):
            device.call("cuGraphLaunch", instance, place)
        device.call("cuStreamSynchronize", stream)
        device.call("cuStreamSynchronize", other)
        assert (device.download(a, WORDS) == WORDS + 8).all()
    device.call("cuStreamDestroy_v2", other)


def test_what_is_destroyed_or_of_another_graph_is_refused(device, stream, kernel):
    with device.memory(WORDS, WORDS) as (a, b), graph_of(device, kernel, (a, b)) as (graph, nodes, instance):
        with graph_of(device, kernel, (a, b)) as (other, others, gone):
            given, _held = node_parameters(kernel, (a, b))
            refused(
                INVALID_VALUE,
                device.call,
                "cuGraphExecKernelNodeSetParams_v2",
                instance,
                others[0],
                ctypes.byref(given),
            )
            refused(INVALID_VALUE, add_node, device, other, nodes, kernel, (a, b))
        refused(INVALID_HANDLE, device.call, "cuGraphLaunch", gone, stream)
        refused(INVALID_HANDLE, device.call, "cuGraphExecDestroy", gone)
        refused(INVALID_HANDLE, add_node, device, other, [], kernel, (a, b))
        foreign, _held = node_parameters(kernel, (a, b), 64)
        refused(
            INVALID_CONTEXT, device.call, "cuGraphExecKernelNodeSetParams_v2", instance, nodes[0], ctypes.byref(foreign)
        )
        device.call("cuGraphDestroy", graph)
        device.call("cuGraphLaunch", instance, stream)  # it needs its graph no more, but for naming nodes
        refused(
            INVALID_VALUE, device.call, "cuGraphExecKernelNodeSetParams_v2", instance, nodes[0], ctypes.byref(given)
        )
        device.call("cuStreamSynchronize", stream)
    for name, arguments in (
        ("cuStreamSynchronize", (ctypes.c_void_p(64),)),
        ("cuEventRecord", (ctypes.c_void_p(64), stream)),
        ("cuStreamWaitEvent", (stream, ctypes.c_void_p(64), 0)),
        ("cuEventSynchronize", (ctypes.c_void_p(64),)),
        ("cuGraphLaunch", (ctypes.c_void_p(64), stream)),
    ):
        refused(INVALID_HANDLE, device.call, name, *arguments)


def test_a_capture_becomes_a_graph(device, stream, event, kernel):
    capturing = ctypes.c_int()
    with device.memory(WORDS, WORDS * 0, WORDS * 0) as (a, b, c):
        device.call("cuStreamBeginCapture_v2", stream, 0)
        device.call("cuStreamIsCapturing", stream, ctypes.byref(capturing))
        assert capturing.value == 1
        device.call("cuKernelGetFunction", ctypes.byref(ctypes.c_void_p()), kernel)
        launch(device, kernel, stream, (a, b))
        launch(device, kernel, stream, (b, c))
        graph = ctypes.c_void_p()
        device.call("cuStreamEndCapture", stream, ctypes.byref(graph))
        assert not device.download(c, WORDS).any()
        instance = handle(device, "cuGraphInstantiateWithFlags", graph, ctypes.c_uint64(0))
        device.call("cuGraphLaunch", instance, stream)
        device.call("cuStreamSynchronize", stream)
        assert (device.download(c, WORDS) == WORDS + 2).all()


def synchronize(device, stream, **_):
    device.call("cuStreamSynchronize", stream)


def graph_launch(device, stream, instance, **_):
    device.call("cuGraphLaunch", instance, stream)


def wait_for_what_is_outside(device, stream, event, **_):
    device.call("cuStreamWaitEvent", stream, event, 0)


def allocate(device, **_):
    device.allocate(16)


def copy_now(device, address, **_):
    device.download(address, WORDS)


def free(device, address, **_):
    device.call("cuMemFree_v2", ctypes.c_uint64(address))


@pytest.mark.parametrize(
    ("forbidden", "status", "mode"),
    [
        (synchronize, IN_CAPTURE, 0),
        (graph_launch, IN_CAPTURE, 0),
        (wait_for_what_is_outside, ISOLATION, 0),
        (allocate, IN_CAPTURE, 0),
        (allocate, IN_CAPTURE, 1),
        (copy_now, IN_CAPTURE, 0),
        (free, IN_CAPTURE, 0),
        (synchronize, IN_CAPTURE, 2),
    ],
)
def test_what_a_capture_forbids_ends_it(device, stream, event, kernel, forbidden, status, mode):
    with device.memory(WORDS, WORDS) as (a, b), graph_of(device, kernel, (a, b)) as (_, _, instance):
        device.call("cuEventRecord", event, None)
        device.call("cuStreamBeginCapture_v2", stream, mode)
        launch(device, kernel, stream, (a, b))
        given = {"device": device, "stream": stream, "instance": instance, "event": event, "address": a}
        refused(status, lambda: forbidden(**given))
        refused(INVALIDATED, launch, device, kernel, stream, (a, b))
        refused(INVALIDATED, device.call, "cuStreamEndCapture", stream, ctypes.byref(ctypes.c_void_p()))
        device.call("cuStreamSynchronize", stream)


def test_a_relaxed_capture_forbids_little(device, stream, kernel):
    with device.memory(WORDS, WORDS) as (a, b):
        launch(device, kernel, None, (a, b))
        device.call("cuStreamBeginCapture_v2", stream, 2)
        device.driver.cuMemFree_v2(ctypes.c_uint64(device.allocate(16)))
        assert (device.download(b, WORDS) == WORDS + 1).all()
        device.call("cuStreamEndCapture", stream, ctypes.byref(ctypes.c_void_p()))


def test_the_legacy_stream_may_not_work_while_a_blocking_one_captures(device, kernel):
    blocking = handle(device, "cuStreamCreate", 0)
    with device.memory(WORDS, WORDS) as (a, b):
        launch(device, kernel, None, (a, b))
        device.call("cuStreamBeginCapture_v2", blocking, 1)
        refused(IMPLICIT, launch, device, kernel, None, (a, b))
        refused(INVALIDATED, device.call, "cuStreamEndCapture", blocking, ctypes.byref(ctypes.c_void_p()))
    device.call("cuStreamDestroy_v2", blocking)


def test_code_that_is_not_in_the_context_is_not_loaded_in_a_capture(device, stream):
    kernel = device.load(PROGRAM, "probe")
    with device.memory(WORDS, WORDS) as (a, b):
        device.call("cuStreamBeginCapture_v2", stream, 0)
        refused(IN_CAPTURE, launch, device, kernel, stream, (a, b))
        refused(IN_CAPTURE, device.load, PROGRAM, "probe")
        device.driver.cuStreamEndCapture(stream, ctypes.byref(ctypes.c_void_p()))


def test_a_replay_of_freed_memory_faults_where_it_is_waited_for(own):
    kernel, stream = own.load(PROGRAM, "probe"), handle(own, "cuStreamCreate", NON_BLOCKING)
    a, b = own.allocate(128), own.allocate(128)
    with graph_of(own, kernel, (a, b)) as (_, _, instance):
        own.call("cuMemFree_v2", ctypes.c_uint64(a))
        own.call("cuGraphLaunch", instance, stream)
        refused(FAILED, own.call, "cuStreamSynchronize", stream)
        refused(FAILED, own.call, "cuGraphLaunch", instance, stream)


def test_freeing_waits_for_the_work_that_uses_the_memory(device, stream, kernel):
    with device.memory(WORDS) as (b,):
        a = device.allocate(128)
        launch(device, kernel, stream, (a, b))
        device.call("cuMemFree_v2", ctypes.c_uint64(a))
        device.call("cuStreamSynchronize", stream)
        assert not device.download(b, WORDS).any()  # of 0xFF, and 1


def test_memory_has_an_end(device, kernel, monkeypatch):
    before = handle(device, "cuGraphCreate", 0)
    monkeypatch.setenv("ADTP_EMULATOR_MEMORY", "0")
    refused(OUT_OF_MEMORY, device.allocate, 1)
    refused(OUT_OF_MEMORY, device.call, "cuGraphInstantiateWithFlags", ctypes.byref(before), before, ctypes.c_uint64(0))
    monkeypatch.setenv("ADTP_EMULATOR_MEMORY", str(2**40))
    device.driver.cuMemFree_v2(ctypes.c_uint64(device.allocate(1)))


def test_a_context_that_all_have_released_is_gone_with_what_lay_in_it(own):
    stream, address = handle(own, "cuStreamCreate", 0), own.allocate(128)
    own.call("cuDevicePrimaryCtxRelease_v2", 0)
    refused(CONTEXT_DESTROYED, own.allocate, 128)
    refused(INVALID_CONTEXT, own.call, "cuDevicePrimaryCtxRelease_v2", 0)
    context = handle(own, "cuDevicePrimaryCtxRetain", 0)
    own.call("cuCtxSetCurrent", context)
    refused(INVALID_HANDLE, own.call, "cuStreamSynchronize", stream)
    refused(INVALID_VALUE, own.call, "cuMemFree_v2", ctypes.c_uint64(address))
    own.allocate(128)


def test_a_fault_is_over_with_its_context(own):
    kernel = own.load(PROGRAM, "probe")
    refused(FAILED, launch, own, kernel, None, (64, 64))
    refused(FAILED, own.allocate, 128)
    own.call("cuDevicePrimaryCtxRelease_v2", 0)
    own.call("cuCtxSetCurrent", handle(own, "cuDevicePrimaryCtxRetain", 0))
    with own.memory(WORDS, WORDS) as (a, b):
        launch(own, kernel, None, (a, b))
        assert (own.download(b, WORDS) == WORDS + 1).all()


def test_the_log_of_calls_says_what_the_device_did_and_where_the_host_waited(
    device, stream, kernel, tmp_path, monkeypatch
):
    log = tmp_path / "calls"
    with device.memory(WORDS, WORDS) as (a, b), graph_of(device, kernel, (a, b), (b, a)) as (_, nodes, instance):
        monkeypatch.setenv("ADTP_EMULATOR_CALLS", str(log))
        given, _held = node_parameters(kernel, (b, a))
        device.call("cuGraphExecKernelNodeSetParams_v2", instance, nodes[1], ctypes.byref(given))
        device.call("cuGraphLaunch", instance, stream)
        launch(device, kernel, stream, (a, b))
        device.call("cuStreamSynchronize", stream)
        device.download(a, WORDS)
        monkeypatch.setenv("ADTP_EMULATOR_CALLS", "")
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    number, graph = lines[1]["stream"], lines[1]["graph"]
    kernel_line = {"did": "kernel", "stream": number, "graph": graph, "symbol": "probe", "programs": 1}
    assert lines == [
        {"did": "parameters"},
        {"did": "graph", "stream": number, "graph": graph, "nodes": 2},
        {"did": "wait", "call": "cuStreamSynchronize"},
        kernel_line,
        kernel_line,
        kernel_line | {"graph": 0},
        {"did": "wait", "call": "cuMemcpyDtoH"},
        {"did": "copy", "stream": 0, "graph": 0, "bytes": 128, "to": "host"},
    ]
