"""The attention operators for CPUs, compiled once for all tests, and called without ONNX Runtime."""

import ctypes
import os
import shutil

import numpy as np
import pytest
from filelock import FileLock

LEVELS = ("avx512", "avx2", "portable")


@pytest.fixture(scope="session")
def operators_library(tmp_path_factory):
    """Path of the library; the first worker that asks compiles it."""
    from adtp_export.plugins import operators

    if shutil.which("cmake") is None or shutil.which("c++") is None:
        pytest.skip("CMake or a C++ compiler is missing")
    base = tmp_path_factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    with FileLock(base / "operators.lock"):
        if not (base / "operators" / operators.FILE).exists():
            operators.build(base / "operators", {**os.environ, "CXXFLAGS": "-Werror"})
    return base / "operators" / operators.FILE


@pytest.fixture
def with_operators(operators_library, monkeypatch):
    """As after `adtp-plugin build --cpu`."""
    from adtp_export.plugins import operators

    monkeypatch.delenv(operators.SWITCH)
    monkeypatch.setattr(operators, "BUILT", operators_library.parent)


@pytest.fixture
def with_shipped_operators(tmp_path, monkeypatch):
    """As where nobody has built anything."""
    from adtp_export.plugins import operators

    monkeypatch.delenv(operators.SWITCH)
    monkeypatch.setattr(operators, "BUILT", tmp_path / "nothing is built here")


class Call(ctypes.Structure):
    """plugins/cpu/ragged.h has the same."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "out", "received", "bounds")),
        *((name, ctypes.c_int64) for name in ("sequences", "num_heads", "head_size")),
        ("scale", ctypes.c_float),
    ]


def attend(library, q, k, v, cu_seqlens, heads, scale, *, level=None, received=True):
    """Call the kernel on torch tensors; return output and received as numpy, which were full of NaN before.

    Returns None where this processor does not run the level.
    """
    arrays = [np.ascontiguousarray(t.numpy()) for t in (q, k, v)]
    bounds = np.ascontiguousarray(cu_seqlens.numpy())
    out, got = np.full_like(arrays[0], np.nan), np.full(len(q), np.nan, np.float32)
    places = [a.ctypes.data for a in (*arrays, out)]
    sizes = (len(bounds) - 1, heads, q.shape[1] // heads)
    call = Call(*places, got.ctypes.data if received else None, bounds.ctypes.data, *sizes, scale)
    status = ctypes.CDLL(str(library)).adtp_attend(ctypes.byref(call), level and level.encode())
    assert status in (0, 1), "memory is short"
    return (out, got) if status == 0 else None
