"""Load the compiled kernels and launch them through the CUDA driver (cuda-python)."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ..errors import CudaError, InputError
from .binaries import Binary, Gpu, Kind, choose, of_kernel
from .variants import ATTENTION, LSE, RECEIVED

_MORE_THAN_ALWAYS_ALLOWED = 48 * 1024
"""Shared memory of a program, in bytes, above which a kernel has to be told."""

TOO_OLD = (200, 209, 222)
"""What a driver answers to code it does not know: invalid image, no binary for the GPU, unsupported PTX version."""

_POINTERS = {
    ATTENTION: ("q", "k", "v", "cu_seqlens", "out"),
    LSE: ("q", "k", "cu_seqlens", "out"),
    RECEIVED: ("q", "k", "cu_seqlens", "out", "received"),
}
_SCRATCH = 2
"""Pointers to Triton's scratch memory, which these kernels have none of."""


class Code(Hashable, Protocol):
    """Compiled code of one variant for one GPU."""

    @property
    def symbol(self) -> str: ...
    @property
    def data(self) -> bytes: ...
    @property
    def threads(self) -> int: ...
    @property
    def shared_bytes(self) -> int: ...


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call of an operator.

    q, k, v: device addresses of row 0, multiples of 16; rows lie `row_stride` elements apart, a multiple of 16.
    cu_seqlens: address of ``(B+1,) int32``. out: address of ``(T, N*D)``, contiguous. dtype: "fp16", "bf16" or "fp32".
    received: address of ``(T,) fp32``, or 0 where it is not wanted. If it is, log-sum-exps lie in the memory of `out` at first:
    a head of 32 numbers has room for one in fp32, and builders do not know the largest T of a workspace.
    """

    q: int
    k: int
    v: int
    cu_seqlens: int
    out: int
    row_stride: int
    tokens: int
    sequences: int
    num_heads: int
    head_size: int
    dtype: str
    scale: float
    received: int = 0

    @property
    def kernels(self) -> tuple[str, ...]:
        """What is launched, in this order."""
        return self.kind.kernels

    @property
    def kind(self) -> Kind:
        return Kind(self.dtype, self.head_size, bool(self.received))


def launch(call: Call, stream: int, binaries: Sequence[Binary] = (), device: int = 0) -> None:
    """Enqueue a call's kernels on a stream of the current CUDA context; return at once.

    Args:
        device: whose primary context to take where the thread has none.
        binaries: the variants to run, one for each of the call's kernels; by default `choose` decides.

    Raises:
        InputError: no kernel for the dtype, the head size or the GPU; an address or the stride is no multiple of 16.
        CudaError: the driver refuses.
    """
    if (call.q | call.k | call.v | call.out) % 16 or call.row_stride % 16:
        raise InputError(
            "ragged attention: addresses (in bytes) and the row stride (in elements) must be multiples of 16; got "
            f"q {call.q:#x}, k {call.k:#x}, v {call.v:#x}, out {call.out:#x}, stride {call.row_stride}"
        )
    device = device_of_context(device)
    shape = (call.tokens, call.sequences, call.num_heads)
    for binary in binaries or [choose(gpu(device), call.kind, *shape, kernel) for kernel in call.kernels]:
        if programs := binary.programs(*shape):
            launch_binary(binary, device, programs, stream, arguments(call, binary.kernel))


def launch_binary(binary: Code, device: int, programs: int, stream: int, given: tuple[Any, ...]) -> None:
    """Enqueue compiled code with its arguments and their C types; raises CudaError where the driver refuses."""
    from cuda.bindings import driver

    grid = (programs, 1, 1, binary.threads, 1, 1, binary.shared_bytes)
    _checked(driver.cuLaunchKernel(_load(binary, device), *grid, stream, given, 0))


def has_context() -> bool:
    """Whether the thread has a CUDA context."""
    from cuda.bindings import driver

    return bool(int(_checked(driver.cuCtxGetCurrent())))


def device_of_context(device: int) -> int:
    """Return the device of the current CUDA context; where there is none, take the primary one of `device`."""
    from cuda.bindings import driver

    if not has_context():
        _checked(driver.cuCtxSetCurrent(_checked(driver.cuDevicePrimaryCtxRetain(device))))
    return int(_checked(driver.cuCtxGetDevice()))


def bring_in(binary: Code, device: int) -> None:
    """Load code into the current context. Libraries load lazily: a context gets code when it is first asked for."""
    from cuda.bindings import driver

    _checked(driver.cuKernelGetFunction(driver.CUkernel(int(_load(binary, device)))))


def prepare(kind: Kind) -> None:
    """Load all that calls of a kind may launch into the current CUDA context, so that launching loads nothing.

    Loading code takes long where a GPU has none of its own, and a stream that is being captured takes none. Without a context
    there is nothing to load into.

    Raises:
        InputError: no kernel for the dtype, the head size or the GPU.
        CudaError: the driver refuses.
    """
    if not has_context():
        return
    device = device_of_context(0)
    for kernel in kind.kernels:
        for binary in of_kernel(gpu(device).architecture, kind.dtype, kind.head_size, kernel):
            bring_in(binary, device)


def arguments(call: Call, kernel: str) -> tuple[tuple[float, ...], tuple[Any, ...]]:
    """A kernel's arguments with their C types, as cuda-python takes them."""
    pointers = [getattr(call, name) for name in _POINTERS[kernel]]
    values = (*pointers, call.row_stride, call.tokens, call.sequences, call.num_heads, call.scale, *(0,) * _SCRATCH)
    types = (*(ctypes.c_void_p,) * len(pointers), *(ctypes.c_int32,) * 4, ctypes.c_float)
    return values, (*types, *(ctypes.c_void_p,) * _SCRATCH)


@functools.cache
def gpu(device: int) -> Gpu:
    """Architecture and processors of a device."""
    from cuda.bindings import driver

    kind = driver.CUdevice_attribute
    major, minor, processors = (
        _checked(driver.cuDeviceGetAttribute(attribute, device))
        for attribute in (
            kind.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
            kind.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
            kind.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT,
        )
    )
    return Gpu(f"sm_{major}{minor}", processors)


@functools.cache
def _load(binary: Code, device: int) -> Any:
    """Load a binary for good. Libraries, unlike modules, serve every context of a device."""
    from cuda.bindings import driver

    library = _checked(driver.cuLibraryLoadData(binary.data, [], [], 0, [], [], 0))
    kernel = _checked(driver.cuLibraryGetKernel(library, binary.symbol.encode()))
    if binary.shared_bytes > _MORE_THAN_ALWAYS_ALLOWED:
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        _checked(driver.cuKernelSetAttribute(attribute, binary.shared_bytes, kernel, device))
    return driver.CUfunction(int(kernel))  # a kernel may stand for its function in a launch


def _checked(result: tuple[Any, ...]) -> Any:
    from cuda.bindings import driver

    status, *values = result
    if status != driver.CUresult.CUDA_SUCCESS:
        _, text = driver.cuGetErrorString(status)
        advice = "; the driver may be too old: the kernels need R525, on RTX 50 R570" if int(status) in TOO_OLD else ""
        raise CudaError(f"CUDA driver: {(text or b'unknown error').decode()} ({int(status)}){advice}")
    return values[0] if values else None
