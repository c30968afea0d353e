"""The C++ host: how its build fails, and, where the TensorRT headers are, that it builds and does what TensorRT asks."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from testbed import run_cli

from adtp_export.errors import EngineBuildError, InputError, MissingDependencyError
from adtp_export.io import telling_full_disk
from adtp_export.plugins import binaries, compiling, library, shipped

COMPILER = """
import os, subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)", "that a compiler runs"])
time.sleep(300)
"""
BUILD = """
import os, signal, sys
from adtp_export.plugins import compiling
def ended(number, frame): raise SystemExit(128 + number)
signal.signal(signal.SIGTERM, ended)
compiling._run([sys.executable, "-c", sys.argv[1]], os.environ)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_build_that_is_ended_ends_its_compilers():
    def compilers():
        found = []
        for place in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                found += [place] if mark in place.read_bytes() else []
        return found

    mark = f"that compiler {os.getpid()} runs".encode()
    code = COMPILER.replace("that a compiler runs", mark.decode())
    build = subprocess.Popen([sys.executable, "-c", BUILD, code])
    while len(compilers()) < 3:  # the build and the driver have its words in their code, too
        assert build.poll() is None
        time.sleep(0.02)
    build.terminate()
    assert build.wait(60) == 128 + signal.SIGTERM
    while compilers():
        time.sleep(0.02)


def test_a_compiler_that_had_no_room_is_not_blamed(monkeypatch):
    """CMake says that there is no Makefile where it could not write one."""
    command = [sys.executable, "-c", "print('No rule to make target'); raise SystemExit(1)"]
    with pytest.raises(EngineBuildError, match="No rule to make target"):
        compiling._run(command, os.environ)
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=0))
    with pytest.raises(InputError, match=r"the disk is full; free some space, or type TMPDIR=DIR"), telling_full_disk():
        compiling._run(command, os.environ)


def test_a_compiler_and_a_place_that_are_not_there_are_told_before_anything_is_compiled(tmp_path, monkeypatch):
    monkeypatch.setattr(compiling, "_run", lambda *command: pytest.fail("it compiles"))
    record = "record.json", dict
    with pytest.raises(MissingDependencyError, match=r"needs a C\+\+17 compiler, and CXX names '/no/compiler -O1'"):
        compiling.build(tmp_path, {}, ["x"], record, tmp_path, {**os.environ, "CXX": "/no/compiler -O1"})
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"file/below cannot be written .*; give another one with --out DIR"):
        compiling.build(tmp_path, {}, ["x"], record, tmp_path / "file" / "below", os.environ)


def test_a_copy_that_fails_leaves_nothing(tmp_path):
    (tmp_path / "made").write_bytes(bytes(20_000))
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (9_999, 9_999))"
    call = "compiling.replace(Path('made'), Path('place/library').absolute())"
    program = f"from pathlib import Path; from adtp_export.plugins import compiling; {limit}; {call}"
    run = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "place cannot be written (File too large)" in run.stderr
    assert not [*(tmp_path / "place").iterdir()]


def test_what_a_compiler_says_is_read_whatever_its_encoding():
    with pytest.raises(EngineBuildError, match="error: \ufffd"):
        compiling._run(
            [sys.executable, "-c", r"import os; os.write(1, b'error: \xe9'); raise SystemExit(1)"], os.environ
        )


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    try:
        library.find_headers()
    except MissingDependencyError as error:
        pytest.skip(str(error))
    return library.build(tmp_path_factory.mktemp("plugin"), {**os.environ, "CXXFLAGS": "-Werror"})


@pytest.fixture
def without_headers(tmp_path):
    """What to set so that the TensorRT headers are not found."""
    environment = {"TENSORRT_ROOT": str(tmp_path)}
    try:
        library.find_headers(environment)
    except MissingDependencyError:
        return environment
    pytest.skip("the TensorRT headers are in the system's paths")


def test_missing_headers_are_named(tmp_path, without_headers):
    result = run_cli("adtp-plugin", "build", "--out", tmp_path, env=without_headers)
    assert result.returncode == 3
    assert f"no NvInferRuntime.h in {tmp_path}/include" in result.stderr
    assert "type: TENSORRT_ROOT=DIR adtp-plugin build" in result.stderr


def test_missing_tools_are_named(tmp_path):
    (tmp_path / "NvInferRuntime.h").write_text("")
    with pytest.raises(MissingDependencyError, match="CMake; type: pip install cmake"):
        library.build(tmp_path, {"TENSORRT_ROOT": str(tmp_path), "PATH": str(tmp_path)})


@pytest.fixture
def compiler():
    if shutil.which("cmake") is None or shutil.which("c++") is None:
        pytest.skip("CMake or a C++ compiler is missing")


@pytest.mark.usefixtures("compiler")
def test_compiler_errors_are_shown(tmp_path, monkeypatch):
    sources = shutil.copytree(library.SOURCES, tmp_path / "sources")
    for path in sources.glob("*.cpp"):
        if path.name != "plugin.cpp":
            path.write_text("")  # make ends once all files that it began with are compiled
    monkeypatch.setattr(library, "SOURCES", sources)
    monkeypatch.setattr(library, "kernels_cpp", str)
    (tmp_path / "NvInferRuntime.h").write_text("#error these are no headers\n")
    (tmp_path / "NvInferVersion.h").write_text("")
    with pytest.raises(EngineBuildError, match="these are no headers"):
        library.build(tmp_path, {**os.environ, "TENSORRT_ROOT": str(tmp_path)})


def test_the_table_has_every_binary():
    table = library.kernels_cpp()
    for entry in binaries.manifest()["variants"]:
        symbol = binaries.manifest()["kernels"][entry["kernel"]]["symbol"]
        row = f'"{symbol}", "{entry["dtype"]}", {entry["head_size"]}, {entry["block_m"]}'
        assert re.search(rf'{{"{entry["name"]}", Kind::k[A-Z_]+, {row}', table)
    kernels = shipped.names()
    assert set(kernels) > {entry["name"] for entry in binaries.manifest()["variants"]}
    assert table.count("uint64_t const") == 7 * len(kernels)  # each once, though two tables have those of attention
    assert all(f'    {{"{name}", ' in table for name in kernels)


@pytest.mark.parametrize("kernels", ["attention", "encoder"])
def test_a_build_of_other_kernels_is_not_taken(tmp_path, monkeypatch, kernels):
    (tmp_path / library.FILE).write_bytes(b"a library")
    compiling.keep([tmp_path / library.FILE], {"sources": library._sources_sha256()}, tmp_path, library._RECORD)
    monkeypatch.setattr(library, "BUILT", tmp_path)
    assert library.built() == tmp_path / library.FILE
    other = {"source_sha256": "of a later version"}
    owner = library if kernels == "attention" else library.encoder
    monkeypatch.setattr(owner, "manifest", lambda: other)
    assert library.built() is None


def test_harness(built):
    result = subprocess.run([built.with_name(library.HARNESS), built], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout
    assert "FAIL" not in result.stdout
    assert result.stdout.count("ok  ") > 70


def test_the_library_needs_neither_cuda_nor_tensorrt(built):
    needed = subprocess.run(["ldd", built], capture_output=True, text=True, check=True).stdout
    assert not any(name in needed for name in ("cuda", "nvinfer", "tensorrt", "not found"))


@pytest.mark.usefixtures("has_rtx")
def test_tensorrt_rtx_takes_it_in_place_of_the_python_host(built, exported):
    """In a process of its own: a library's creators stay."""
    code = f"""
from pathlib import Path
from adtp_export.runtimes import tensorrt
from adtp_export.artifacts.records import PLUGIN, ShapeRange
from adtp_export.contract import PLUGIN_NAMESPACE, PLUGIN_VERSION
from adtp_export.plugins import tensorrt as host
trt = tensorrt.RTX.load()
assert trt.get_plugin_registry().load_library({str(built)!r})
for operator in host.OPERATORS:
    for name in operator.names:
        creator = trt.get_plugin_registry().get_creator(name, PLUGIN_VERSION, PLUGIN_NAMESPACE)
        made = host.creator_class(trt, operator)(name)
        assert [(f.name, f.type) for f in creator.field_names] == [(f.name, f.type) for f in made.field_names]
network = trt.Builder(tensorrt.callbacks.logger(trt)).create_network(0)
parser = trt.OnnxParser(network, tensorrt.callbacks.logger(trt))
assert parser.parse_from_file({str(exported / "model.onnx")!r})
kinds = [network.get_layer(i).type for i in range(network.num_layers)]
print(kinds.count(trt.LayerType.PLUGIN_V3), kinds.count(trt.LayerType.SOFTMAX))
profile = {{"batch": ShapeRange(1, 2, 4), "seq": ShapeRange(1, 8, 32)}}
host.registered = lambda trt, wanted: __import__("contextlib").nullcontext()  # the library is registered already
engine, details = tensorrt.build(tensorrt.RTX, Path({str(exported / "model.onnx")!r}), profile, ["sm_86"], PLUGIN)
print(details["plugin_layers"], engine.nbytes > 0)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.stdout.splitlines() == ["4 0", "4 True"], result.stderr
