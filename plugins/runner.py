"""Run a plan on a GPU, one CUDA graph for each size of a call, through `libadtp_cuda`: build it, find it, call it.

It needs a driver and no CUDA toolkit, no cuda-python, no PyTorch. ONNX Runtime's CUDA provider takes the same library:
``SessionOptions.register_custom_ops_library(path)`` gives it the operator ``adtp::AdtpEncoder`` of `cpp/operators.cpp`. Once the
library is registered, only sessions with the CUDA provider can load such models.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from ..errors import CudaError, InputError, MissingDependencyError
from . import compiling
from .binaries import manifest
from .encoder import binaries as encoder
from .library import BUILT, SOURCES
from .plan import Plan, write
from .shipped import OLDEST, kernel, kernels_cpp, names

FILE = "adtp_cuda.dll" if platform.system() == "Windows" else "libadtp_cuda.so"
_RECORD = "build-cuda.json"
_FILES = ("CMakeLists.txt", "*.cpp", "*.h", "../cpu/onnxruntime.h")
_WRONG_CALL = 1
"""What the library returns for a call that it does not take; for what the driver refuses it returns another number."""


def build(directory: Path = BUILT, environment: Mapping[str, str] = os.environ) -> Path:
    """Compile the library into `directory`; return its path. Needs CMake and a C++17 compiler, and nothing of CUDA.

    Raises:
        MissingDependencyError: one of these is missing.
        EngineBuildError: the compiler refuses; the message has its words.
        InputError: `directory` cannot be written.
    """
    record = (_RECORD, lambda: {"sources": sources_sha256()})
    return compiling.build(
        SOURCES, {"ADTP_CUDA": "ON"}, (FILE,), record, directory, environment, lambda: kernels_cpp(names())
    )


def built() -> Path | None:
    """Return the library that `build` made, if it is of this version's sources."""
    return compiling.kept(BUILT, FILE, _RECORD, sources_sha256())


def obstacle(device: int = 0) -> str | None:
    """Say why plans cannot run here: the library is not built or does not load, there is no driver or no GPU for them. None: they can."""
    try:
        library = _load(built())
    except MissingDependencyError as error:
        return str(error)
    said: bytes = library.adtp_runner_obstacle(device, OLDEST)
    return said.decode(errors="replace") or None


@functools.cache
def sources_sha256() -> str:
    """Hash of what the library is compiled from."""
    digest = hashlib.sha256(f"{manifest()['source_sha256']} {encoder.manifest()['source_sha256']}".encode())
    for path in sorted(path for pattern in _FILES for path in SOURCES.glob(pattern)):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


class _Binary(ctypes.Structure):
    """`adtp_binary` of `cpp/runner.h`."""

    _fields_ = (
        ("architecture", ctypes.c_int32),
        ("data", ctypes.c_char_p),
        ("bytes", ctypes.c_size_t),
        ("shared_bytes", ctypes.c_uint32),
    )


class _Kernel(ctypes.Structure):
    """`adtp_kernel`."""

    _fields_ = (
        ("variant", ctypes.c_char_p),
        ("symbol", ctypes.c_char_p),
        ("arguments", ctypes.c_char_p),
        ("threads", ctypes.c_uint32),
        ("oldest_architecture", ctypes.c_int32),
        ("num_binaries", ctypes.c_int32),
        ("binaries", ctypes.POINTER(_Binary)),
    )


class _Call(ctypes.Structure):
    """`adtp_call`."""

    _fields_ = (
        ("texts", ctypes.c_int64),
        ("length", ctypes.c_int64),
        ("tokens", ctypes.c_int64),
        ("weights", ctypes.POINTER(ctypes.c_void_p)),
        ("inputs", ctypes.POINTER(ctypes.c_void_p)),
        ("outputs", ctypes.POINTER(ctypes.c_void_p)),
    )


class Runner:
    """Runs a plan. Threads take turns.

    Args:
        plan: what to launch; the shipped kernels are looked up by the names of its variants.
        weights: arrays that are copied to the device, in the plan's order; calls are then on host memory (`run`). None: weights,
            inputs and outputs of each call lie on the device (`enqueue`), whose context is current when the runner is made.
        device: the GPU for `weights`.
        library: default: what `build` made.

    Raises:
        InputError: the plan makes no sense, or weights are not of its sizes.
        MissingDependencyError: the library is not built.
        CudaError: there is no GPU, it has no such kernels, or too little memory for the smallest bucket.
    """

    def __init__(
        self, plan: Plan, weights: Sequence[np.ndarray] | None = None, *, device: int = 0, library: Path | None = None
    ) -> None:
        self._handle: int | None = None
        self._lock = threading.Lock()
        text = write(plan).encode()
        self._library = _load(library or built())
        kernels = [_kernel(name) for name in plan.variants]
        table = (_Kernel * len(kernels))(*kernels)
        if weights is None:
            handle = self._library.adtp_runner_create(text, table, len(kernels))
        else:
            _check_arrays("weights", weights, plan.weights, exactly=True)
            given = _addresses([array.ctypes.data for array in weights])
            handle = self._library.adtp_runner_create_for_host(text, table, len(kernels), given, device)
        if not handle:
            raise CudaError(self._error())
        self._handle = handle
        self.plan = plan
        self.warning: str = self._library.adtp_runner_warning(handle).decode()
        """Empty, or which buckets of the plan do not fit the device's memory."""

    @property
    def limits(self) -> tuple[int, int]:
        """The largest call: its rows and its texts."""
        tokens, texts = ctypes.c_int64(), ctypes.c_int64()
        with self._lock:
            self._library.adtp_runner_limits(self._open(), ctypes.byref(tokens), ctypes.byref(texts))
        return tokens.value, texts.value

    def run(
        self,
        inputs: Sequence[np.ndarray],
        outputs: Sequence[np.ndarray],
        *,
        texts: int,
        tokens: int,
        length: int = 0,
    ) -> None:
        """Run a call on arrays, which are contiguous, and fill `outputs`.

        Only the caller knows how many bytes of an input `texts`, `tokens` and `length` imply. Of an input with fewer, kernels read
        what an earlier call left behind it, and texts get wrong answers.

        Args:
            inputs, outputs: in the plan's order; those of `outputs` are writeable.
            texts: B. tokens: rows that may be used, padding included; they choose the bucket. length: S of padded inputs.

        Raises:
            InputError: the call is larger than `limits`, an array than the bucket's, or an output is read-only.
            CudaError: the driver refuses, the GPU is lost, or another thread has closed the runner: a new one may work.
        """
        _check_arrays("inputs", inputs, self.plan.buckets[0].inputs)
        _check_arrays("outputs", outputs, self.plan.buckets[0].outputs)
        if not all(output.flags.writeable for output in outputs):
            raise InputError("runner: outputs: got a read-only array; accepted: writeable ones; type: array.copy()")
        call = _call([], [i.ctypes.data for i in inputs], [o.ctypes.data for o in outputs], texts, length, tokens)
        sizes = [(ctypes.c_uint64 * len(arrays))(*(a.nbytes for a in arrays)) for arrays in (inputs, outputs)]
        with self._lock:
            self._checked(self._library.adtp_runner_run(self._open(), ctypes.byref(call), *sizes))

    def enqueue(
        self,
        weights: Sequence[int],
        inputs: Sequence[int],
        outputs: Sequence[int],
        stream: int,
        *,
        texts: int,
        tokens: int,
        length: int = 0,
    ) -> None:
        """Enqueue a call on device addresses, and return at once.

        In a stream that is being captured its kernels are launched one by one, in the runner's one workspace: whoever replays the
        capture keeps it apart from all other calls of this runner.

        Args: those of `run`, and
            stream: a CUstream of the runner's context; 0 for the legacy one.

        Raises:
            InputError: the call is larger than `limits`, or an address is no multiple of 16.
            CudaError: as `run`.
        """
        wanted = (len(self.plan.weights), len(self.plan.buckets[0].inputs), len(self.plan.buckets[0].outputs))
        got = (len(weights), len(inputs), len(outputs))
        if got != wanted:
            raise InputError(f"runner: got {got} weights, inputs and outputs; accepted: {wanted}, those of the plan")
        call = _call(weights, inputs, outputs, texts, length, tokens)
        with self._lock:
            self._checked(self._library.adtp_runner_enqueue(self._open(), ctypes.byref(call), ctypes.c_void_p(stream)))

    def close(self) -> None:
        """Wait for all calls, also of other threads, and free what the runner has on the device."""
        with self._lock:
            if self._handle is not None:
                self._library.adtp_runner_destroy(self._handle)
                self._handle = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def _open(self) -> int:
        if self._handle is None:
            raise CudaError("runner: it is closed; make another one")
        return self._handle

    def _checked(self, status: int) -> None:
        if status:
            raise (InputError if status == _WRONG_CALL else CudaError)(self._error())

    def _error(self) -> str:
        return f"runner: {self._library.adtp_runner_error().decode(errors='replace')}"


@functools.cache
def _load(path: Path | None) -> Any:
    if path is None:
        raise MissingDependencyError(f"{FILE} is not built; type: adtp-plugin build --cuda")
    try:
        library = ctypes.CDLL(str(path))
        return _declared(library)
    except (OSError, AttributeError) as error:  # of another machine, or of another version
        raise MissingDependencyError(f"{path} cannot be loaded ({error}); type: adtp-plugin build --cuda") from error


def _declared(library: Any) -> Any:
    text, pointer, count = ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int32
    kernels, addresses = ctypes.POINTER(_Kernel), ctypes.POINTER(ctypes.c_void_p)
    call, sizes, number = ctypes.POINTER(_Call), ctypes.POINTER(ctypes.c_uint64), ctypes.POINTER(ctypes.c_int64)
    for name, result, arguments in (
        ("obstacle", text, (count, count)),
        ("create", pointer, (text, kernels, count)),
        ("create_for_host", pointer, (text, kernels, count, addresses, count)),
        ("destroy", None, (pointer,)),
        ("enqueue", count, (pointer, call, pointer)),
        ("run", count, (pointer, call, sizes, sizes)),
        ("limits", None, (pointer, number, number)),
        ("warning", text, (pointer,)),
        ("error", text, ()),
    ):
        function = getattr(library, f"adtp_runner_{name}")
        function.restype, function.argtypes = result, arguments
    return library


def _kernel(name: str) -> _Kernel:
    found = kernel(name)
    codes = [_Binary(code.architecture, code.data, len(code.data), code.shared_bytes) for code in found.codes]
    texts = (found.variant.encode(), found.symbol.encode(), found.arguments.encode())
    return _Kernel(*texts, found.threads, OLDEST, len(codes), (_Binary * len(codes))(*codes))


def _addresses(values: Sequence[int]) -> Any:
    return (ctypes.c_void_p * len(values))(*values)


def _call(
    weights: Sequence[int], inputs: Sequence[int], outputs: Sequence[int], texts: int, length: int, tokens: int
) -> _Call:
    return _Call(texts, length, tokens, _addresses(weights), _addresses(inputs), _addresses(outputs))


def _check_arrays(what: str, arrays: Sequence[np.ndarray], sizes: Sequence[int], exactly: bool = False) -> None:
    if len(arrays) != len(sizes) or not all(array.flags.c_contiguous for array in arrays):
        raise InputError(
            f"runner: {what}: got {len(arrays)} arrays; accepted: {len(sizes)}, those of the plan, contiguous"
        )
    nbytes = tuple(array.nbytes for array in arrays)
    if exactly and nbytes != tuple(sizes):
        at = next(i for i, (got, wanted) in enumerate(zip(nbytes, sizes)) if got != wanted)
        raise InputError(f"runner: {what}: array {at} has {nbytes[at]} bytes; accepted: {sizes[at]}")
