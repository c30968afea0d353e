"""The little CUDA that engines need without a framework: which GPU is here, and buffers for inputs and outputs."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ..errors import CudaError


def local_gpu() -> str | None:
    """Return the first GPU's architecture, such as ``"sm_89"``; None without a GPU, a driver, or cuda-python."""
    if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.bindings") is None:
        return None
    from cuda.bindings import runtime

    kind = runtime.cudaDeviceAttr
    try:
        if not _call(runtime.cudaGetDeviceCount):
            return None
        major = _call(runtime.cudaDeviceGetAttribute, kind.cudaDevAttrComputeCapabilityMajor, 0)
        minor = _call(runtime.cudaDeviceGetAttribute, kind.cudaDevAttrComputeCapabilityMinor, 0)
    except CudaError:  # no driver, or one too old for this runtime
        return None
    return f"sm_{major}{minor}"


def local_gpu_name() -> str | None:
    """Return the first GPU's name, such as ``"NVIDIA L4"``, or else its architecture; None where `local_gpu` finds none."""
    architecture = local_gpu()
    if architecture is None:
        return None
    from cuda.bindings import runtime

    try:
        name: bytes = _call(runtime.cudaGetDeviceProperties, 0).name
    except CudaError:
        return architecture
    return name.split(b"\0")[0].decode(errors="replace")


class DeviceBuffers:
    """Named device buffers on one stream, grown as needed and freed with the object."""

    def __init__(self) -> None:
        from cuda.bindings import runtime

        self._runtime = runtime
        self._buffers: dict[str, tuple[int, int]] = {}
        self.stream = int(_call(runtime.cudaStreamCreate))

    def upload(self, arrays: Mapping[str, np.ndarray]) -> dict[str, int]:
        """Copy C-contiguous arrays to the device, asynchronously; return their addresses."""
        addresses = {}
        for name, array in arrays.items():
            addresses[name] = self.reserve(name, array.nbytes)
            self._copy(addresses[name], array.ctypes.data, array.nbytes, "cudaMemcpyHostToDevice")
        return addresses

    def download(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Fill arrays from the buffers of their names and wait for everything on the stream."""
        for name, array in arrays.items():
            self._copy(array.ctypes.data, self._buffers[name][0], array.nbytes, "cudaMemcpyDeviceToHost")
        _call(self._runtime.cudaStreamSynchronize, self.stream)

    def reserve(self, name: str, size_bytes: int) -> int:
        """Return the address of a buffer of at least `size_bytes`."""
        address, capacity = self._buffers.get(name, (0, 0))
        if capacity < max(size_bytes, 1):
            if address:
                del self._buffers[name]  # first: the allocation may fail
                _call(self._runtime.cudaFree, address)
            address = int(_call(self._runtime.cudaMalloc, max(size_bytes, 1)))
            self._buffers[name] = (address, max(size_bytes, 1))
        return address

    def _copy(self, target: int, source: int, size_bytes: int, kind: str) -> None:
        kind = getattr(self._runtime.cudaMemcpyKind, kind)
        _call(self._runtime.cudaMemcpyAsync, target, source, size_bytes, kind, self.stream)

    def __del__(self) -> None:
        for address, _ in getattr(self, "_buffers", {}).values():
            self._runtime.cudaFree(address)
        if hasattr(self, "stream"):
            self._runtime.cudaStreamDestroy(self.stream)


def _call(function: Callable[..., tuple[Any, ...]], *arguments: Any) -> Any:
    status, *values = function(*arguments)
    if int(status) != 0:
        raise CudaError(f"{function.__name__}: {status.name}")
    return values[0] if values else None
