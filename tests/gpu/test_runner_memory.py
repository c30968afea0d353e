"""The runner where memory is scarce: fewer buckets, errors, and nothing left behind."""

import ctypes

import numpy as np
import pytest
import runner_builds
from runner_calls import counted, make, ran
from runner_plans import CALLS, PLAN

from adtp_export.errors import CudaError, InputError
from adtp_export.plugins.plan import Plan


@pytest.fixture(scope="module")
def built():
    return runner_builds.for_this_process()


@pytest.fixture
def gpu(built, monkeypatch):
    """The emulated driver that the runner loads. No context is current."""
    return runner_builds.driver_of(built, monkeypatch)


@pytest.fixture
def expected(gpu, built):
    with make(built) as runner:
        return {call.name: ran(runner, call) for call in CALLS}


def bytes_for(buckets, graphs):
    """Device memory that a runner on host memory takes: a block for these buckets, and what each graph takes."""

    def places(sizes):
        return sum(-(-size // 256) * 256 for size in sizes)

    blocks = [places([b.workspace]) + places(b.inputs) + places(b.outputs) for b in PLAN.buckets[:buckets]]
    return max(blocks) + graphs * 64 * 1024


@pytest.mark.parametrize(("buckets", "graphs"), [(2, 2), (1, 1), (3, 2)])
def test_memory_for_fewer_buckets_is_said_once(expected, gpu, built, monkeypatch, buckets, graphs):
    """Where a workspace does not fit, or where a graph does not."""
    monkeypatch.setenv("ADTP_EMULATOR_MEMORY", str(bytes_for(buckets, graphs)))
    kept = PLAN.buckets[graphs - 1]
    with make(built) as runner:
        assert runner.warning == (
            f"the GPU's free memory is enough for {kept.tokens} tokens of {kept.texts} texts at a time, not for 128 of 8: "
            "larger calls run in parts"
        )
        assert runner.limits == (kept.tokens, kept.texts)
        assert ran(runner, CALLS[0]) == expected["few"]
        with pytest.raises(InputError, match="split the call"):
            ran(runner, CALLS[3])


def test_memory_for_no_bucket_is_an_error_and_takes_nothing(gpu, built, monkeypatch):
    monkeypatch.setenv("ADTP_EMULATOR_MEMORY", str(bytes_for(1, 1) - 1))
    with pytest.raises(CudaError, match=r"cuGraphInstantiate: out of memory \(2\)"):
        make(built)
    monkeypatch.setenv("ADTP_EMULATOR_MEMORY", "1000")
    with pytest.raises(CudaError, match=r"cuMemAlloc: out of memory \(2\) for a workspace of 32 tokens"):
        make(built)
    with pytest.raises(CudaError, match=r"cuMemAlloc: out of memory \(2\) for weights of 2048 bytes"):
        make(built, Plan((2000,), PLAN.buckets), [np.zeros(500, np.float32)])
    monkeypatch.setenv("ADTP_EMULATOR_MEMORY", "")
    make(built).close()


@pytest.mark.parametrize("name", ["cuGraphCreate", "cuGraphAddKernelNode", "cuGraphAddMemcpyNode", "cuGraphUpload"])
def test_lack_of_memory_for_a_graph_leads_to_fewer_buckets(gpu, built, tmp_path, monkeypatch, name):
    """Here down to none: of three buckets, of two, of one."""
    log = tmp_path / "calls"
    monkeypatch.setenv("ADTP_EMULATOR_CALLS", str(log))
    monkeypatch.setenv("ADTP_EMULATOR_REFUSE", f"{name}=2")
    with pytest.raises(CudaError, match=rf"{name}: out of memory \(2\)"):
        make(built)
    assert counted(log, "allocate") == 3
    log.unlink()
    monkeypatch.setenv("ADTP_EMULATOR_REFUSE", f"{name}=1")
    with pytest.raises(CudaError, match=rf"{name}: invalid argument"):
        make(built)
    assert counted(log, "allocate") == 1


def test_each_bucket_is_uploaded_once(gpu, built, tmp_path, monkeypatch):
    monkeypatch.setenv("ADTP_EMULATOR_CALLS", str(tmp_path / "calls"))
    with make(built) as runner:
        for _ in range(2):
            ran(runner, CALLS[0])
    assert counted(tmp_path / "calls", "upload") == 3


def test_the_device_gets_all_back(gpu, built, tmp_path, monkeypatch):
    """Twenty runners one after the other fit where one does."""
    monkeypatch.setenv("ADTP_EMULATOR_MEMORY", str(bytes_for(3, 3)))
    context = ctypes.c_void_p()
    gpu.cuInit(0)
    gpu.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)  # so that the context does not go with the runner
    try:
        for _ in range(20):
            with make(built) as runner:
                assert not runner.warning
    finally:
        gpu.cuDevicePrimaryCtxRelease_v2(0)
