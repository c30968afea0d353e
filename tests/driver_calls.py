"""The emulated driver's functions for streams, graphs and pinned memory, called with small programs; a plugin of those tests."""

import contextlib
import ctypes
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


def handle(device, name, *arguments):
    made = ctypes.c_void_p()
    device.call(name, ctypes.byref(made), *arguments)
    return made


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


@pytest.fixture
def own(emulated_library, tmp_path, device):
    """A driver with a context of its own; faults spoil it."""
    made = Device(shutil.copy(emulated_library, tmp_path / "own.so"))
    device.set(on={"FORGIVE": False})
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
