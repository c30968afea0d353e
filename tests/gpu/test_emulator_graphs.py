"""The emulated driver's graphs and captures, and what a capture forbids."""

import ctypes

import pytest
from driver_calls import (
    IMPLICIT,
    IN_CAPTURE,
    INVALID_CONTEXT,
    INVALID_HANDLE,
    INVALID_VALUE,
    INVALIDATED,
    ISOLATION,
    NON_BLOCKING,
    PROGRAM,
    WORDS,
    add_node,
    graph_of,
    handle,
    launch,
    node_parameters,
    refused,
)


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
