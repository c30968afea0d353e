"""A GPU that is not there: builds the emulated `libcuda.so.1` of `gpu/emulator/` and launches kernels on it.

Used as a plugin by `conftest.py`. Code "executed in an emulator, never on a GPU" was executed by this.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from filelock import FileLock

SOURCES = Path(__file__).parent / "gpu" / "emulator"
BUILT = Path(__file__).parent.parent / "build" / "emulator"
COMPILER = (
    "g++",
    "-std=c++17",
    "-O2",
    "-ffp-contract=off",
    "-fPIC",
    "-fvisibility=hidden",
    "-Wall",
    "-Wextra",
    "-Werror",
)

SWITCHES = ("EARLY", "REVERSE", "TRUNCATE", "NO_RACES", "FORGIVE", "CAPTURING", "LATE_UPLOADS")
"""What may be on or off; `machine.h`, `driver.h`, `driver_launch.cpp` and `driver_memory.cpp` of the sources say what they do."""


class MissingError(Exception):
    """What the emulator needs is not on this machine."""


def nvdisasm() -> str | None:
    """Return the path of the disassembler that comes with Triton; without it machine code cannot be read."""
    with contextlib.suppress(ImportError, RuntimeError):
        import triton

        return triton.knobs.nvidia.nvdisasm.path
    return None


def library() -> Path:
    """Build the library, if this tree's sources have not been built yet; return its path.

    It has no name of its own (DT_SONAME), so that no other library in this process takes it for the driver. For a process
    of its own, whose host loads ``libcuda.so.1``, LD_LIBRARY_PATH is its directory.

    Raises:
        MissingError: there is no compiler.
    """
    if shutil.which(COMPILER[0]) is None:
        raise MissingError("CMake or a C++ compiler is missing: the emulator needs g++")
    sources = sorted(SOURCES.glob("*.cpp"))
    digest = hashlib.sha256(" ".join((*COMPILER, platform.machine())).encode())
    for path in sorted(SOURCES.glob("*.[ch]*")):
        digest.update(path.name.encode() + path.read_bytes())
    made = BUILT / digest.hexdigest()[:16] / "libcuda.so.1"
    if not made.is_file():
        made.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(made.parent / "lock"):
            if not made.is_file():
                _compile(sources, made)
    return made


def _compile(sources: list[Path], made: Path) -> None:
    def compiled(source: Path) -> Path:
        target = made.parent / f"{source.stem}.o"
        subprocess.run([*COMPILER, "-c", source, "-o", target], check=True)
        return target

    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(compiled, sources))
    partial = made.with_suffix(".partial")
    subprocess.run([COMPILER[0], "-shared", "-Wl,-z,defs", "-o", partial, *objects, "-ldl"], check=True)
    partial.replace(made)


def settings(
    capability: int = 86, log: Path | None = None, most: int | None = None, on: Mapping[str, bool] = {}
) -> dict[str, str]:
    """Environment variables of a GPU of a compute capability, such as 86, with the switches that are on."""
    unknown = set(on) - set(SWITCHES)
    assert not unknown, f"no such switches: {unknown}"
    chosen = {f"ADTP_EMULATOR_{name}": "1" if on.get(name) else "0" for name in SWITCHES}
    chosen |= {"ADTP_EMULATOR_SM": str(capability), "ADTP_EMULATOR_LOG": str(log or "")}
    chosen |= {"ADTP_EMULATOR_MOST": str(most or 10**9), "ADTP_EMULATOR_CACHE": str(BUILT / "disassembled")}
    return chosen | {"ADTP_EMULATOR_NVDISASM": nvdisasm() or ""}


class RefusedError(Exception):
    """The driver's answer was no success. status: its number (CUresult); the text has what the kernel did wrong."""

    def __init__(self, status: int, text: str):
        super().__init__(f"{text} ({status})")
        self.status = status


class Device:
    """The emulated driver, called directly in this process. Kernels that fault do not spoil it."""

    def __init__(self, path: Path):
        self.driver = ctypes.CDLL(str(path), mode=os.RTLD_LOCAL)
        self.set(on={"FORGIVE": True})
        context = ctypes.c_void_p()
        self.call("cuInit", 0)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
        self.call("cuCtxSetCurrent", context)

    def set(
        self, capability: int = 86, log: Path | None = None, most: int | None = None, on: Mapping[str, bool] = {}
    ) -> None:
        """Be another GPU, or run in another way; see `settings`."""
        os.environ.update(settings(capability, log, most, {"FORGIVE": True, **on}))

    def call(self, name: str, *arguments: Any) -> None:
        if status := getattr(self.driver, name)(*arguments):
            text = ctypes.c_char_p()
            self.driver.cuGetErrorString(status, ctypes.byref(text))
            raise RefusedError(status, (text.value or b"").decode())

    def allocate(self, nbytes: int) -> int:
        address = ctypes.c_uint64()
        self.call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(max(nbytes, 1)))
        return address.value

    @contextlib.contextmanager
    def memory(self, *arrays: np.ndarray) -> Iterator[list[int]]:
        """Addresses of copies of arrays, each in an allocation of exactly its size."""
        addresses = [self.allocate(array.nbytes) for array in arrays]
        for address, array in zip(addresses, arrays):
            if array.nbytes:
                data = np.ascontiguousarray(array)
                self.call(
                    "cuMemcpyHtoD_v2",
                    ctypes.c_uint64(address),
                    data.ctypes.data_as(ctypes.c_void_p),
                    ctypes.c_size_t(array.nbytes),
                )
        try:
            yield addresses
        finally:
            for address in addresses:
                self.driver.cuMemFree_v2(ctypes.c_uint64(address))

    def download(self, address: int, like: np.ndarray) -> np.ndarray:
        result = np.empty_like(like, order="C")
        if result.nbytes:
            self.call(
                "cuMemcpyDtoH_v2",
                result.ctypes.data_as(ctypes.c_void_p),
                ctypes.c_uint64(address),
                ctypes.c_size_t(result.nbytes),
            )
        return result

    def load(self, image: bytes, symbol: str, shared_bytes: int = 0) -> ctypes.c_void_p:
        library, kernel = ctypes.c_void_p(), ctypes.c_void_p()
        nothing = (None, None, 0, None, None, 0)
        self.call("cuLibraryLoadData", ctypes.byref(library), image, *nothing)
        self.call("cuLibraryGetKernel", ctypes.byref(kernel), library, symbol.encode())
        if shared_bytes > 48 * 1024:
            self.call("cuKernelSetAttribute", 8, shared_bytes, kernel, 0)
        return kernel

    def launch(
        self, kernel: ctypes.c_void_p, programs: int, threads: int, shared_bytes: int, values: Any, types: Any
    ) -> None:
        held = [kind(value) for kind, value in zip(types, values, strict=True)]
        pointers = (ctypes.c_void_p * len(held))(*(ctypes.cast(ctypes.byref(h), ctypes.c_void_p) for h in held))
        self.call("cuLaunchKernel", kernel, programs, 1, 1, threads, 1, 1, shared_bytes, None, pointers, None)


@functools.cache
def device_of_this_process() -> Device:
    return Device(library())


@pytest.fixture(scope="session")
def emulated_library():
    """Path of the emulated ``libcuda.so.1``."""
    try:
        return library()
    except MissingError as error:
        pytest.skip(str(error))


@pytest.fixture
def device(emulated_library):
    """The emulated driver in this process, as an sm_86 without switches; afterwards the environment is as before."""
    before = dict(os.environ)
    found = device_of_this_process()
    found.set()
    yield found
    for name in set(os.environ) - set(before):
        del os.environ[name]
    os.environ.update(before)
