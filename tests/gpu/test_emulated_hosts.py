"""Both hosts on the emulated GPU: right answers on every architecture, and planted mistakes are noticed.

Each host runs in a process of its own, as a user's would, whose ``libcuda.so.1`` is the emulated one.
"""

import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import emulated_gpu
import emulation
import host_calls
import host_mistakes
import pytest
import runner_builds

from adtp_export.plugins import binaries
from adtp_export.plugins.variants import ARCHITECTURES, HEAD_SIZES

GPU = Path(__file__).parent
NEWER = 100  # has no machine code of its own and takes PTX
CAPABILITIES = sorted({NEWER, *(emulation.capability_of(code) for code in ARCHITECTURES)})
TURN = CAPABILITIES[int(binaries.manifest()["source_sha256"][:8], 16) % len(CAPABILITIES)]
"""The GPU whose turn it is in `make test`, beside the newer one: by the hash of the kernels' sources."""

CALLS = host_calls.all_calls()
FEW = [
    host_calls.HostCall(
        name="short",
        dtype="fp16",
        case=emulation.Case(lengths=(4, 17, 9, 0, 32, 6), heads=3),
        head_size=64,
        received=True,
    ),
    host_calls.HostCall(
        name="tiles", dtype="bf16", case=emulation.Case(lengths=(64,) * 4, heads=2, packed=False), head_size=64
    ),
    host_calls.HostCall(name="large", dtype="fp16", case=emulation.Case(lengths=(300,), heads=1), head_size=128),
]
"""Calls that notice mistakes: packed, tiles that are full, more than 48 KB of shared memory."""


def execute(command, folder, capability, library_path):
    """Run a host on what lies in a folder; return what it said of each call, and nothing of those it did not survive."""
    environment = dict(os.environ, LD_LIBRARY_PATH=str(library_path.parent))
    environment |= emulated_gpu.settings(capability, on={"FORGIVE": True})
    result = subprocess.run([*command, folder], env=environment, capture_output=True, text=True, check=False, cwd=GPU)
    assert result.returncode <= 0, result.stdout + result.stderr  # below 0 it was killed by a signal
    return dict(line.split(" ", 1) for line in result.stdout.splitlines())


def verdicts(command, calls, folder, capability, library_path):
    """What became of each call: its error as a share of what is allowed, or what the host said."""
    folder.mkdir()
    host_calls.write(folder, calls)
    said = execute(command, folder, capability, library_path)
    found = {}
    for call in calls:
        what = said.get(call.name, "killed by a signal")
        found[call.name] = host_calls.share_of_allowed(folder, call) if what == "ok" else what
    return found


def assert_right(found):
    assert all(isinstance(value, float) and value <= 1 for value in found.values()), found


def is_noticed(found):
    return any(isinstance(value, str) or math.isinf(value) or value > 1 for value in found.values())


# The Python host


def python_host(*options):
    return [sys.executable, GPU / "python_host.py", *options]


@pytest.fixture
def machine_code():
    pytest.importorskip("cuda.bindings.driver", reason="cuda-python is not installed")
    if emulated_gpu.nvdisasm() is None:
        pytest.skip("Triton is not installed")


def by_turns(capability):
    """One head size on each architecture; on a GPU that takes PTX, all of them."""
    spread = range(len(HEAD_SIZES)) if capability == NEWER else [CAPABILITIES.index(capability) % len(HEAD_SIZES)]
    return [call for call in CALLS if HEAD_SIZES.index(call.head_size) in spread]


@pytest.mark.usefixtures("machine_code")
@pytest.mark.parametrize("capability", sorted({NEWER, TURN}))
def test_the_python_host_launches(capability, tmp_path, emulated_library):
    calls = by_turns(capability)
    assert_right(verdicts(python_host(), calls, tmp_path / "calls", capability, emulated_library))


@pytest.mark.slow
@pytest.mark.usefixtures("machine_code")
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_the_python_host_launches_everything(capability, tmp_path, emulated_library):
    assert_right(verdicts(python_host(), CALLS, tmp_path / "calls", capability, emulated_library))


SEPARATE = [replace(call, case=replace(call.case, packed=False)) for call in CALLS]
"""TensorRT hands q, k and v over as tensors of their own."""


@pytest.mark.usefixtures("machine_code", "has_rtx")
def test_the_python_plugin_enqueues(tmp_path, emulated_library):
    """What TensorRT-RTX would call, with its own descriptors. Enqueuing loads nothing, so that it can be captured."""
    assert_right(verdicts(python_host("--enqueue"), SEPARATE, tmp_path / "calls", NEWER, emulated_library))


@pytest.mark.slow
@pytest.mark.usefixtures("machine_code", "has_rtx")
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_the_python_plugin_enqueues_everywhere(capability, tmp_path, emulated_library):
    assert_right(verdicts(python_host("--enqueue"), SEPARATE, tmp_path / "calls", capability, emulated_library))


def check_mistake(name, why, command, tmp_path, emulated_library, calls=FEW):
    found = verdicts(command, calls, tmp_path / "mistaken", 86, emulated_library)
    assert is_noticed(found) == (why == host_mistakes.NOTICED), f"{name}: {found}; {why}"


@pytest.mark.usefixtures("machine_code")
@pytest.mark.parametrize("name", ["grid: B left out", "shared memory not asked for"])
def test_a_mistake_of_the_python_host_is_noticed(name, tmp_path, emulated_library):
    command = python_host("--mistake", name)
    check_mistake(name, host_mistakes.PYTHON[name].why, command, tmp_path, emulated_library)


@pytest.mark.slow
@pytest.mark.usefixtures("machine_code")
@pytest.mark.parametrize("name", host_mistakes.PYTHON)
def test_all_mistakes_of_the_python_host(name, tmp_path, emulated_library):
    command = python_host("--mistake", name)
    check_mistake(name, host_mistakes.PYTHON[name].why, command, tmp_path, emulated_library)


# The C++ host


@pytest.fixture
def cpp_host(emulated_library):
    """Build `launch_probe` with `launch.cpp` and `driver.cpp`, in which words may be replaced; return the command."""
    return lambda old="", new="": [runner_builds.launch_probe(old, new)]


def test_the_cpp_host_launches(cpp_host, tmp_path, emulated_library):
    command = cpp_host()
    for capability in sorted({NEWER, TURN} if emulated_gpu.nvdisasm() else {NEWER}):
        found = verdicts(command, by_turns(capability), tmp_path / str(capability), capability, emulated_library)
        assert_right(found)


CAPTURED = FEW[:1]
"""What was received and attention: three kernels."""


def test_the_cpp_host_launches_in_a_capture_what_it_prepared(cpp_host, tmp_path, emulated_library):
    command = [*cpp_host(), "--capturing"]
    assert_right(verdicts(command, CAPTURED, tmp_path / "calls", NEWER, emulated_library))


def test_a_kernel_that_is_not_prepared_is_refused_in_a_capture(cpp_host, tmp_path, emulated_library):
    """It is loaded, but not into the context."""
    command = [
        *cpp_host(
            "Status const s = driver().cuKernelGetFunction(&function, kernel)",
            "Status const s{kernel || function ? 0 : 1}",
        ),
        "--capturing",
    ]
    found = verdicts(command, CAPTURED, tmp_path / "calls", NEWER, emulated_library)
    assert found["short"] == "cuLaunchKernel: operation not permitted when stream is capturing (900)"


def test_a_mistake_of_the_cpp_host_is_noticed(cpp_host, tmp_path, emulated_library):
    name = "grid: B left out"
    found = verdicts(cpp_host(*host_mistakes.CPP[name][:2]), FEW, tmp_path / "mistaken", NEWER, emulated_library)
    assert is_noticed(found), found


def test_an_older_gpu_is_refused_with_what_is_accepted(cpp_host, tmp_path, emulated_library):
    found = verdicts(cpp_host(), FEW[:1], tmp_path / "calls", 75, emulated_library)
    assert found["short"] == "no kernel for sm_75; accepted are GPUs from sm_80 on"


def test_bounds_without_a_number_are_refused(cpp_host, tmp_path, emulated_library):
    host_calls.write(tmp_path, FEW[:1])
    fields = (tmp_path / "calls.txt").read_text().split()
    (tmp_path / "calls.txt").write_text(" ".join([*fields[:5], "-1", *fields[6:]]) + "\n")
    said = execute(cpp_host(), tmp_path, NEWER, emulated_library)
    assert said == {"short": "cu_seqlens has no number; accepted is at least one"}


@pytest.mark.slow
@pytest.mark.usefixtures("machine_code")
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_the_cpp_host_launches_everything(capability, cpp_host, tmp_path, emulated_library):
    assert_right(verdicts(cpp_host(), CALLS, tmp_path / "calls", capability, emulated_library))


@pytest.mark.slow
@pytest.mark.usefixtures("machine_code")
@pytest.mark.parametrize("name", host_mistakes.CPP)
def test_all_mistakes_of_the_cpp_host(name, cpp_host, tmp_path, emulated_library):
    old, new, why = host_mistakes.CPP[name]
    check_mistake(name, why, cpp_host(old, new), tmp_path, emulated_library)
