"""The emulated driver refuses what a driver refuses, and writes down what was executed."""

import ctypes
import json
import shutil
import zlib

import numpy as np
import probes
import pytest
from emulated_gpu import Device, RefusedError

from adtp_export.plugins import binaries

INVALID_VALUE, NOT_INITIALIZED, NO_BINARY, PTX_VERSION, INVALID_HANDLE, FAILED = 1, 3, 209, 222, 400, 719
NOTHING = probes.program("", 0, 0)


def refused(status, function, *arguments):
    with pytest.raises(RefusedError) as caught:
        function(*arguments)
    assert caught.value.status == status


def test_machine_code_runs_on_its_major_version_from_its_minor_version_on(device):
    name = binaries.manifest()["variants"][0]["name"]

    def load(code, gpu):
        device.set(gpu)
        device.call(
            "cuLibraryLoadData",
            ctypes.byref(ctypes.c_void_p()),
            binaries.binary(name, code).data,
            *[None] * 2,
            0,
            *[None] * 2,
            0,
        )

    for code, gpu in (
        ("sm_80", 80),
        ("sm_80", 86),
        ("sm_86", 89),
        ("sm_90", 90),
        ("sm_120", 121),
        ("ptx", 80),
        ("ptx", 100),
    ):
        load(code, gpu)
    for code, gpu in (("sm_89", 86), ("sm_80", 90), ("sm_90", 100), ("sm_90", 89), ("sm_120", 100), ("ptx", 75)):
        refused(NO_BINARY, load, code, gpu)


def test_ptx_of_a_newer_language_needs_a_newer_driver(device):
    """Shipped PTX is of version 8.0, for R525."""
    refused(PTX_VERSION, device.load, probes.program("", 0, 0, version="8.1"), "probe")
    device.set(120)
    device.load(probes.program("", 0, 0, version="8.7"), "probe")
    refused(PTX_VERSION, device.load, probes.program("", 0, 0, version="9.0"), "probe")


@pytest.mark.parametrize(("gpu", "most"), [(86, 99), (89, 99), (120, 99), (80, 163), (87, 163), (90, 227)])
def test_shared_memory_beyond_48_kb_needs_the_attribute(device, gpu, most):
    device.set(gpu)
    types = (ctypes.c_uint64, ctypes.c_uint64)
    kernel = device.load(NOTHING, "probe")
    device.launch(kernel, 1, 32, 48 * 1024, (0, 0), types)
    refused(INVALID_VALUE, device.launch, kernel, 1, 32, 48 * 1024 + 1, (0, 0), types)
    refused(INVALID_VALUE, device.call, "cuKernelSetAttribute", 8, most * 1024 + 1, kernel, 0)
    device.call("cuKernelSetAttribute", 8, most * 1024, kernel, 0)
    device.launch(kernel, 1, 32, most * 1024, (0, 0), types)
    refused(INVALID_VALUE, device.launch, kernel, 1, 32, most * 1024 + 1, (0, 0), types)


@pytest.mark.parametrize(("programs", "threads"), [(0, 32), (1, 64), (1, 31), (1, 0), (2**31, 32), (1, 1056)])
def test_shapes_of_a_launch(device, programs, threads):
    kernel = device.load(NOTHING, "probe")
    refused(INVALID_VALUE, device.launch, kernel, programs, threads, 0, (0, 0), (ctypes.c_uint64, ctypes.c_uint64))


def test_symbols_and_handles(device):
    with pytest.raises(RefusedError, match="no kernel other"):
        device.load(NOTHING, "other")
    refused(INVALID_HANDLE, device.launch, ctypes.c_void_p(64), 1, 32, 0, (), ())
    refused(INVALID_VALUE, device.call, "cuMemFree_v2", ctypes.c_uint64(64))
    with device.memory(np.zeros(3, np.uint8)) as (address,):
        refused(INVALID_VALUE, device.download, address, np.zeros(4, np.uint8))


def test_after_a_fault_nothing_works_any_more(emulated_library, tmp_path, device):
    own = Device(shutil.copy(emulated_library, tmp_path / "own.so"))  # a driver with a context of its own
    device.set(on={"FORGIVE": False})
    refused(FAILED, probes.run, own, "ld.global.b32 { %r100 }, [ %rd3 + 128 ];", [np.zeros(32, np.uint32)])
    refused(FAILED, own.allocate, 4)
    assert probes.run(device, "mov.u32 %r100, %r1;", [np.arange(32, dtype=np.uint32)]).sum() == 496


def test_a_host_that_does_not_begin_properly_is_refused(emulated_library, tmp_path):
    raw = ctypes.CDLL(str(shutil.copy(emulated_library, tmp_path / "raw.so")))
    address = ctypes.c_uint64()
    assert raw.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(4)) == NOT_INITIALIZED
    assert raw.cuInit(0) == 0
    assert raw.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(4)) == 201  # invalid context


def test_the_log_says_what_was_executed(device, tmp_path):
    log = tmp_path / "log.jsonl"
    device.set(log=log)
    body = "mov.u32 %r180, 0;\nst.shared.b32 [%r180], {%r180};\nshl.b32 %r181, %r0, 3;\nst.shared.b32 [%r181], {%r180};"
    probes.run(device, body, [np.arange(32, dtype=np.uint32)], shared=256)
    with pytest.raises(RefusedError):
        probes.run(device, "bar.sync 1;", [np.arange(32, dtype=np.uint32)])
    first, second = map(json.loads, log.read_text().splitlines())
    assert first["crc32"] == zlib.crc32(probes.program(body, 1, 1).rstrip(b"\0"))
    assert (first["symbol"], first["programs"], first["threads"], first["shared_bytes"]) == ("probe", 1, 32, 256)
    assert (first["bytes_read"], first["bytes_written"], first["sectors"], first["sectors_least"]) == (128, 128, 8, 8)
    assert (first["shared_passes"], first["shared_passes_least"]) == (3, 2)  # every second bank: two passes
    assert first["by_name"]["st.shared.b32"] == 2
    assert first["instructions"] == sum(first["by_name"].values())
    assert first["failure"] is None
    assert "only barrier 0" in second["failure"]
