"""The emulated driver's streams, events, pinned memory and contexts: late, in order, and strict."""

import ctypes
import json

import pytest
from driver_calls import (
    CONTEXT_DESTROYED,
    FAILED,
    INVALID_CONTEXT,
    INVALID_HANDLE,
    INVALID_VALUE,
    NON_BLOCKING,
    NOT_READY,
    OUT_OF_MEMORY,
    PROGRAM,
    WORDS,
    copy_to_device,
    copy_to_host,
    graph_of,
    handle,
    launch,
    node_parameters,
    pinned,
    refused,
)


@pytest.mark.parametrize("flags", [0, NON_BLOCKING])
def test_uploads_may_be_late_for_streams_that_do_not_wait(device, event, kernel, flags, monkeypatch):
    stream = handle(device, "cuStreamCreate", flags)
    with device.memory(WORDS * 0, WORDS * 0, WORDS * 0) as (a, b, c):
        monkeypatch.setenv("ADTP_EMULATOR_LATE_UPLOADS", "1")
        given = WORDS.copy()
        device.call("cuMemcpyHtoD_v2", ctypes.c_uint64(a), given.ctypes.data_as(ctypes.c_void_p), WORDS.nbytes)
        given[:] = 0  # the driver has it
        launch(device, kernel, stream, (a, b))
        device.call("cuStreamSynchronize", stream)
        device.call("cuEventRecord", event, None)
        device.call("cuStreamWaitEvent", stream, event, 0)
        launch(device, kernel, stream, (a, c))
        device.call("cuStreamSynchronize", stream)
        assert (device.download(b, WORDS) == (WORDS * (flags == 0) + 1)).all()
        assert (device.download(c, WORDS) == WORDS + 1).all()
    device.driver.cuStreamDestroy_v2(stream)


@pytest.mark.parametrize("name", ["cuEventRecord", "cuGraphCreate", "cuGraphUpload"])
def test_what_is_to_be_refused_is_refused(device, event, name, monkeypatch):
    monkeypatch.setenv("ADTP_EMULATOR_REFUSE", f"{name}=2")
    refused(OUT_OF_MEMORY, device.call, name, event, None)


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
