"""Building the attention operators for CPUs: what it needs, how it fails, and what is found afterwards."""

import ctypes
import json
import os
import platform
import subprocess
import sys

import pytest
from testbed import run_cli

from adtp_export.cli import plugin
from adtp_export.errors import EngineBuildError, InputError, MissingDependencyError
from adtp_export.plugins import library, operators, runner


def test_missing_tools_are_named(tmp_path):
    with pytest.raises(MissingDependencyError, match="needs CMake; type: pip install cmake"):
        operators.build(tmp_path, {"PATH": str(tmp_path)})
    result = run_cli("adtp-plugin", "build", "--cpu", "--out", tmp_path, env={"PATH": str(tmp_path)})
    assert result.returncode == 3
    assert (
        result.stderr.splitlines()[-1] == "adtp-plugin: error: adtp-plugin build needs CMake; type: pip install cmake"
    )


@pytest.mark.usefixtures("operators_library")
def test_a_missing_compiler_is_named(tmp_path):
    (tmp_path / "nothing").mkdir()
    tools = {"PATH": "/nowhere", "CXX": str(tmp_path / "nothing" / "c++")}
    with pytest.MonkeyPatch.context() as patch:
        cmake = operators.compiling.check_cmake()
        patch.setattr(operators.compiling, "check_cmake", lambda environment: cmake)
        with pytest.raises(MissingDependencyError, match=r"needs a C\+\+17 compiler"):
            operators.build(tmp_path / "out", tools)
    assert not (tmp_path / "out").exists()


def test_a_build_of_other_sources_is_not_taken(operators_library, with_operators, monkeypatch):
    assert operators.built() == operators_library
    monkeypatch.setattr(operators, "sources_sha256", lambda: "of a later version")
    assert operators.built() is None


def test_the_library_says_what_it_was_compiled_from_and_needs_no_runtime(operators_library):
    said = ctypes.CDLL(str(operators_library)).adtp_sources
    said.restype = ctypes.c_char_p
    assert said().decode() == operators.sources_sha256()
    if sys.platform == "linux":
        needed = subprocess.run(["ldd", operators_library], capture_output=True, text=True, check=True).stdout
        assert not any(name in needed for name in ("onnxruntime", "not found"))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_no_code_for_one_processor_is_shared(tmp_path):
    """A function that the linker merges across files could be the one that was compiled with AVX512. It merges weak ones."""
    operators.compiling.compile_library(operators.SOURCES, {}, [operators.FILE], tmp_path, os.environ)
    objects = list(tmp_path.rglob("*.o"))
    assert any("avx512" in path.name for path in objects) or platform.machine() != "x86_64"
    for path in objects:
        listed = subprocess.run(["nm", "--defined-only", path], capture_output=True, text=True, check=True).stdout
        kinds = {line.split()[-2] for line in listed.splitlines()}
        if any(name in path.name for name in ("avx", "neon")):
            assert not kinds & set("WVu"), path.name


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_applications_see_no_other_names(operators_library):
    listed = subprocess.run(
        ["nm", "-D", "--defined-only", operators_library], capture_output=True, text=True, check=True
    )
    names = {line.split()[-1] for line in listed.stdout.splitlines()}
    assert names - {"_init", "_fini"} == {
        "RegisterCustomOps",
        "adtp_attend",
        "adtp_chain",
        "adtp_linear",
        "adtp_sources",
        "adtp_threads",
    }


def test_a_directory_that_cannot_be_written(operators_library, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be written .*; give another one with --out DIR"):
        operators.compiling.keep([operators_library], {}, tmp_path / "file", "build.json")


def test_nothing_made_leaves_no_record(tmp_path):
    with pytest.raises(EngineBuildError, match="made no library"):
        operators.compiling.keep([], {}, tmp_path, "build.json")
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("with_operators")
def test_list(operators_library, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(library, "BUILT", tmp_path)
    monkeypatch.setattr(runner, "BUILT", tmp_path)
    options = plugin.make_parser().parse_args(["list"])
    assert plugin.command(options) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{library.FILE} is not built; type: adtp-plugin build",
        str(operators_library),
        f"{runner.FILE} is not built; type: adtp-plugin build --cuda",
    ]
    options = plugin.make_parser().parse_args(["list", "--json"])
    plugin.command(options)
    assert json.loads(capsys.readouterr().out) == {
        library.FILE: None,
        operators.FILE: str(operators_library),
        runner.FILE: None,
    }
