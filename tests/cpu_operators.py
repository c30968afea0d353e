"""The attention operators for CPUs, compiled once for all tests, and called without ONNX Runtime."""

import ctypes
import os
import platform
import shutil

import pytest
import torch
from filelock import FileLock

LEVELS = ("neon", "portable") if platform.machine().lower() in ("aarch64", "arm64") else ("avx512", "avx2", "portable")


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
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "out", "received", "bounds", "positions", "table")),
        *((name, ctypes.c_int64) for name in ("tokens", "sequences", "num_heads", "key_heads", "head_size")),
        *((name, ctypes.c_int64) for name in ("table_rows", "window")),
        ("scale", ctypes.c_float),
        ("type", ctypes.c_int32),
        ("from_others", ctypes.c_int32),
    ]


TYPES = (torch.float32, torch.float16, torch.bfloat16)


def attend(
    library,
    q,
    k,
    v,
    cu_seqlens,
    heads,
    scale,
    *,
    level=None,
    received=True,
    from_others=False,
    positions=None,
    table=None,
    window=0,
    key_heads=None,
):
    """Call the kernel on torch tensors; return output and received as numpy, which were full of NaN before.

    Returns None where this processor does not run the level; raises ValueError where ONNX Runtime would get an error.
    """
    q, k, v, cu_seqlens = (t.contiguous() for t in (q, k, v, cu_seqlens))
    out, got = torch.full_like(q, torch.nan), torch.full([len(q)], torch.nan)

    def place(tensor):
        return None if tensor is None else tensor.data_ptr()

    call = Call(
        *map(place, (q, k, v, out, got if received else None, cu_seqlens, positions, table)),
        *(len(q), len(cu_seqlens) - 1, heads, key_heads or heads, q.shape[1] // heads),
        *(0 if table is None else len(table), window, scale, TYPES.index(q.dtype), from_others),
    )
    status = ctypes.CDLL(str(library)).adtp_attend(ctypes.byref(call), level and level.encode())
    if status == 3:
        raise ValueError("the call is refused")
    assert status in (0, 1), "memory is short"
    return (out.float().numpy(), got.numpy()) if status == 0 else None
