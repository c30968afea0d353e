"""The attention operators for CPUs, compiled once for all tests, and called with ONNX Runtime or without."""

import ctypes
import json
import platform
import re
import shutil
import subprocess
from pathlib import Path

import kept_builds
import onnx
import pytest
import torch
from known_graphs import taking_known_graphs
from onnx import helper
from testbed import ROOT, made_once

import adtp_export
from adtp_export.contract import DOMAIN, DOMAIN_VERSION
from adtp_export.errors import MissingDependencyError

LEVELS = ("neon", "portable") if platform.machine().lower() in ("aarch64", "arm64") else ("avx512", "avx2", "portable")

_AVX512F = ("-mavx512f", "-Wno-maybe-uninitialized", "-Wno-uninitialized")  # GCC 12 warns in its own header
_AVX512 = (*_AVX512F, "-mavx512bw")
_BF16 = (*_AVX512, "-mavx512vnni", "-mavx512bf16")
COMPILED_FOR = {
    "avx2": ("-mavx2", "-mfma"),
    "avx512": _AVX512F,
    "avx512_bf16": (*_AVX512, "-mavx512dq", "-mavx512bf16"),
    "amx": (*_AVX512, "-mavx512dq", "-mavx512bf16", "-mamx-tile", "-mamx-bf16"),
    "linear_avx2": ("-mavx2", "-mfma"),
    "linear_avx2_vnni": ("-mavx2", "-mfma", "-mavxvnni"),
    "linear_avx512": _AVX512,
    "linear_avx512_vnni": (*_AVX512, "-mavx512vnni"),
    "linear_avx512_bf16": _BF16,
    "linear_amx": (*_BF16, "-mamx-tile", "-mamx-bf16", "-mamx-int8"),
}
"""Flags of the sources that are for one kind of processor, as CMakeLists.txt has them; those with tiles are for Linux alone."""


EMULATED = ROOT / "tests" / "plugins" / "emulated"
SOURCES = ROOT / "plugins" / "cpu"
DEFINED = ("-DADTP_X86", "-DADTP_AMX", '-DADTP_SOURCES="x"')
TILES = (*DEFINED, "-include", EMULATED / "tiles.h")
"""Flags of what is compiled for x86-64, without and with emulated tiles."""


@pytest.fixture(scope="module")
def lanewise_library(tmp_path_factory):
    """Path of a library whose AVX512 intrinsics and tiles are emulated, so it runs on any processor; attention alone."""
    folder = tmp_path_factory.mktemp("emulated")
    (folder / "level.cpp").write_text(
        '#include "attention.h"\n#include "linear_operators.h"\n#include <cstring>\n'
        "adtp::Level const* adtp::level(char const* name)\n"
        "{ for (Level const* one : {&kAmx, &kAvx512Bf16}) if (name && std::strcmp(name, one->name) == 0) return one;\n"
        "  return &kAvx512; }\n"
        "adtp::Level const& adtp::levelInBf16() { return kAmx; }\n"
        "ort::Status* adtp::addLinearOperators(ort::Api const&, ort::Domain*) { return nullptr; }\n"
        "ort::Status* adtp::addChainOperators(ort::Api const&, ort::Domain*) { return nullptr; }\n"
    )
    files = (
        "operators.cpp",
        "ragged.cpp",
        "refusal.cpp",
        "portable.cpp",
        "neon.cpp",
        "avx512.cpp",
        "avx512_bf16.cpp",
        "amx.cpp",
    )
    flags = ("-std=c++17", "-O1", "-fPIC", "-shared", *TILES, "-I", EMULATED, "-I", SOURCES)
    library = folder / "emulated.so"
    subprocess.run(["c++", *flags, *(SOURCES / f for f in files), folder / "level.cpp", "-o", library], check=True)
    return library


@pytest.fixture(scope="module")
def tiles_library(tmp_path_factory):
    """Path of a library whose tiles are emulated: "amx" runs on processors with AVX512_BF16."""
    library = tmp_path_factory.mktemp("tiles") / "tiles.so"
    objects = []
    for source in sorted(SOURCES.glob("*.cpp")):
        objects.append(library.with_name(f"{source.name}.o"))
        command = ("c++", "-std=c++17", "-O1", "-fPIC", *TILES, *COMPILED_FOR.get(source.stem, ()))
        subprocess.run([*command, "-c", source, "-o", objects[-1]], check=True)
    subprocess.run(["c++", "-shared", *objects, "-o", library], check=True)
    return library


@pytest.fixture(scope="session")
def operators_library(request, tmp_path_factory):
    """Path of the library: a copy of the package's, as if it had been built here. Where there is none, it is built."""
    from adtp_export.plugins import operators

    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(operators.SWITCH)
        patch.setattr(operators, "BUILT", tmp_path_factory.mktemp("nothing"))
        try:
            shipped = operators.library()
        except MissingDependencyError:
            return request.getfixturevalue("built_library")
    copy = tmp_path_factory.mktemp("operators") / operators.FILE
    shutil.copy(shipped, copy)
    operators.compiling.keep([copy], {"sources": operators.sources_sha256()}, copy.parent, operators._RECORD)
    return copy


@pytest.fixture(scope="session")
def built_library():
    """Path of the library as this machine's compiler makes it, which takes half a minute."""
    from adtp_export.plugins import operators

    return kept_builds.library(operators)


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


@pytest.fixture(scope="session")
def exported_by_default(small, tmp_path_factory):
    """The small student exported with no option where nobody has built anything."""
    from adtp_export.plugins import operators

    def make(work):
        with pytest.MonkeyPatch.context() as patch:
            patch.delenv(operators.SWITCH)
            patch.setattr(operators, "BUILT", work / "nothing is built here")
            with taking_known_graphs():
                adtp_export.export(small, work / "out")

    return made_once(tmp_path_factory, "exported-by-default", make) / "out"


def mapped(process: int | str = "self") -> set[str]:
    """Libraries that a process has loaded, on Linux."""
    return set(re.findall(r"/\S+", Path(f"/proc/{process}/maps").read_text(encoding="utf-8")))


class Call(ctypes.Structure):
    """plugins/cpu/ragged.h has the same."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "out", "received", "bounds", "key_bounds")),
        *((name, ctypes.c_void_p) for name in ("positions", "key_positions", "table")),
        *((name, ctypes.c_void_p) for name in ("distance_keys", "distance_queries", "buckets")),
        *((name, ctypes.c_int64) for name in ("tokens", "keys", "sequences", "num_heads", "key_heads", "head_size")),
        *((name, ctypes.c_int64) for name in ("table_rows", "columns", "num_buckets", "back", "ahead")),
        ("scale", ctypes.c_float),
        ("type", ctypes.c_int32),
        ("from_others", ctypes.c_int32),
        ("is_mean", ctypes.c_int32),
        ("grouped", ctypes.c_int32),
    ]


FLOAT, INT32 = onnx.TensorProto.FLOAT, onnx.TensorProto.INT32
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
    window=-1,
    key_heads=None,
    cu_k=None,
    key_positions=None,
    reach=None,
    distance_keys=None,
    distance_queries=None,
    buckets=None,
):
    """Call the kernel on torch tensors; return output and received as numpy, which were full of NaN before.

    cu_k, key_positions and reach are those of grouped queries, whose bounds and positions are `cu_seqlens` and `positions`.

    Returns None where this processor does not run the level; raises ValueError where ONNX Runtime would get an error.
    """
    q, k, v, cu_seqlens = (t.contiguous() for t in (q, k, v, cu_seqlens))
    out, got = torch.full_like(q, torch.nan), torch.full([len(k)], torch.nan)
    cu_k, key_positions = cu_seqlens if cu_k is None else cu_k, positions if key_positions is None else key_positions
    back, ahead = reach or (window, window)

    def place(tensor):
        return None if tensor is None else tensor.data_ptr()

    call = Call(
        *map(place, (q, k, v, out, got if received else None, cu_seqlens, cu_k, positions, key_positions, table)),
        *map(place, (distance_keys, distance_queries, buckets)),
        *(len(q), len(k), len(cu_seqlens) - 1, heads, key_heads or heads, q.shape[1] // heads),
        *(0 if table is None else len(table), *((0, 0) if buckets is None else (distance_keys.shape[1], len(buckets)))),
        *(back, ahead, scale, TYPES.index(q.dtype), from_others),
        *(received and reach is not None and ahead == 0, reach is not None),
    )
    status = ctypes.CDLL(str(library)).adtp_attend(ctypes.byref(call), level and level.encode())
    if status == 3:
        raise ValueError("the call is refused")
    assert status in (0, 1), "memory is short"
    return (out.float().numpy(), got.numpy()) if status == 0 else None


def model_of(nodes, outputs, kind=FLOAT, **inputs) -> onnx.ModelProto:
    """A model of nodes of ours, with their portable bodies."""
    from adtp_export.ops.onnx_function import portable_functions

    given = [helper.make_tensor_value_info(name, kind, ["T", "H"]) for name in "qkv"]
    given.append(helper.make_tensor_value_info("cu_seqlens", INT32, ["bounds"]))
    given += [helper.make_tensor_value_info(name, *form) for name, form in inputs.items()]
    results = [helper.make_tensor_value_info(name, of, None) for name, of in outputs.items()]
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid(DOMAIN, DOMAIN_VERSION)]
    graph = helper.make_graph(nodes, "ours", given, results)
    return helper.make_model(graph, opset_imports=opsets, ir_version=10, functions=portable_functions())


def session(model, library=None, threads=2, profile=None):
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = threads, 4
    if profile:
        options.enable_profiling, options.profile_file_prefix = True, str(profile)
    if library:
        options.register_custom_ops_library(str(library))
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def kinds_that_ran(profiled) -> set[str]:
    events = json.loads(Path(profiled.end_profiling()).read_text(encoding="utf-8"))
    return {event["args"]["op_name"] for event in events if event.get("cat") == "Node"}


def feed(q, k, v, cu_seqlens, *_):
    return {"q": q.numpy(), "k": k.numpy(), "v": v.numpy(), "cu_seqlens": cu_seqlens.numpy()}
