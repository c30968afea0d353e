"""The compiled attention operators in the package: of these sources, for these systems, and the same wherever they are compiled."""

import ctypes
import hashlib
import importlib.metadata
import json
import os
import re
import shutil
import sys

import pytest
from cpu_operators import LEVELS, attend
from testbed import ROOT, listing, run_cli

from adtp_export.errors import InputError, MissingDependencyError
from adtp_export.plugins import operators, operators_ahead

sys.path.insert(0, str(ROOT / "tests" / "ops"))
from ragged_inputs import make_inputs

OLDEST_GLIBC = (2, 17)
MACHINES = {
    "linux-x86_64": (b"\x7fELF", 18, (62).to_bytes(2, "little")),
    "linux-aarch64": (b"\x7fELF", 18, (183).to_bytes(2, "little")),
    "macos-arm64": (b"\xcf\xfa\xed\xfe", 4, (0x0100000C).to_bytes(4, "little")),
    "windows-x86_64": (b"MZ", None, (0x8664).to_bytes(2, "little")),
}
"""How a file begins, and where it names its processor: in ELF (e_machine), Mach-O (cputype) and PE (Machine, after its signature)."""


def library(system) -> bytes:
    return (operators.COMPILED / operators.compiled()["libraries"][system]["file"]).read_bytes()


def test_they_are_compiled_from_these_sources():
    assert operators.compiled()["sources"] == operators.sources_sha256(), f"type: {operators_ahead.COMMAND}"


def test_files_are_those_of_the_record():
    record = operators.compiled()
    assert record["compiler"] == f"ziglang {operators_ahead.ZIG}"
    assert {name: entry["target"] for name, entry in record["libraries"].items()} == {
        name: system.target for name, system in operators_ahead.SYSTEMS.items()
    }
    for entry in record["libraries"].values():
        data = (operators.COMPILED / entry["file"]).read_bytes()
        assert (len(data), hashlib.sha256(data).hexdigest()) == (entry["bytes"], entry["sha256"])
    files = {entry["file"] for entry in record["libraries"].values()}
    assert set(listing(operators.COMPILED)) == {*files, operators.MANIFEST, "NOTICE"}
    assert sum(entry["bytes"] for entry in record["libraries"].values()) < 4_000_000


def test_the_version_of_the_compiler_is_pinned():
    assert f"ziglang=={operators_ahead.ZIG}\n" in (ROOT / "constraints.txt").read_text()


@pytest.mark.parametrize("system", MACHINES)
def test_each_is_for_its_processor_and_says_its_sources(system):
    data = library(system)
    begins, place, machine = MACHINES[system]
    place = data.index(b"PE\0\0") + 4 if place is None else place
    assert data.startswith(begins)
    assert data[place : place + len(machine)] == machine
    assert operators.sources_sha256().encode() in data
    assert b"RegisterCustomOps" in data
    assert str(ROOT).encode() not in data


@pytest.mark.parametrize("system", ["linux-x86_64", "linux-aarch64"])
def test_an_old_glibc_is_enough(system):
    wanted = {tuple(map(int, version)) for version in re.findall(rb"GLIBC_(\d+)\.(\d+)", library(system))}
    assert wanted
    assert max(wanted) <= OLDEST_GLIBC
    assert b"libstdc++" not in library(system)


def test_windows_libraries_need_nothing_that_windows_lacks():
    names = {name.lower() for name in re.findall(rb"[\w.-]+\.(?:dll|DLL)\0", library("windows-x86_64"))}
    others = {name for name in names if not name.startswith((b"api-ms-win-crt-", b"kernel32.dll", b"adtp_cpu.dll"))}
    assert not others


@pytest.mark.slow
@pytest.mark.usefixtures("with_shipped_operators")
def test_it_runs_all_that_the_processor_has(built_library):
    """One that finds no AVX512 answers right, and several times as slowly."""
    inputs = make_inputs([3])
    here, package = (
        [level for level in LEVELS if attend(library, *inputs, level=level) is not None]
        for library in (built_library, operators.library())
    )
    assert package == here


# Which library is run


@pytest.fixture
def copy(tmp_path, monkeypatch, with_shipped_operators):
    """The folder of compiled libraries, to be damaged."""
    folder = shutil.copytree(operators.COMPILED, tmp_path / "compiled")
    monkeypatch.setattr(operators, "COMPILED", folder)
    return folder


def on(monkeypatch, system, machine):
    monkeypatch.setattr(operators.platform, "system", lambda: system)
    monkeypatch.setattr(operators.platform, "machine", lambda: machine)
    monkeypatch.setattr(operators, "_has_glibc", lambda: True)


@pytest.mark.parametrize(
    ("system", "machine", "folder"),
    [
        ("Linux", "x86_64", "linux-x86_64"),
        ("Linux", "aarch64", "linux-aarch64"),
        ("Darwin", "arm64", "macos-arm64"),
        ("Windows", "AMD64", "windows-x86_64"),
    ],
)
def test_each_machine_has_its_own(copy, monkeypatch, system, machine, folder):
    on(monkeypatch, system, machine)
    assert operators.library().parent == copy / folder


def test_other_machines_have_none(copy, monkeypatch):
    on(monkeypatch, "Linux", "riscv64")
    with pytest.raises(
        MissingDependencyError,
        match=r"no compiled attention operators for Linux riscv64; type: adtp-plugin build --cpu$",
    ):
        operators.library()
    on(monkeypatch, "Linux", "x86_64")
    monkeypatch.setattr(operators, "_has_glibc", lambda: False)
    with pytest.raises(MissingDependencyError, match="for Linux x86_64 without glibc; type: adtp-plugin build --cpu"):
        operators.library()


def test_what_the_user_built_himself_comes_first(copy, monkeypatch, operators_library):
    monkeypatch.setattr(operators, "BUILT", operators_library.parent)
    assert operators.library() == operators_library
    record = operators_library.parent / "build-cpu.json"
    elsewhere = shutil.copytree(operators_library.parent, copy.parent / "older")
    (elsewhere / record.name).write_text(
        json.dumps(json.loads(record.read_text()) | {"sources": "of an older version"})
    )
    monkeypatch.setattr(operators, "BUILT", elsewhere)
    assert copy in operators.library().parents


def test_only_the_bytes_of_the_record_are_loaded(copy):
    found = operators.library()
    data = bytearray(found.read_bytes())
    data[len(data) // 2] ^= 1
    found.write_bytes(data)
    with pytest.raises(
        MissingDependencyError, match=f"{found} is not the file that its record lists, and is not loaded"
    ):
        operators.library()
    found.unlink()
    with pytest.raises(MissingDependencyError, match=f"{found} cannot be read .No such file"):
        operators.library()


def test_libraries_of_other_sources_are_left_alone(copy, monkeypatch):
    monkeypatch.setattr(operators, "sources_sha256", lambda: "of a later version")
    with pytest.raises(MissingDependencyError, match="not of this version's sources; type: adtp-plugin build --cpu"):
        operators.library()


def test_the_switch(copy, monkeypatch):
    monkeypatch.setenv(operators.SWITCH, "off")
    with pytest.raises(MissingDependencyError, match="ADTP_OPERATORS=off leaves the attention operators out"):
        operators.library()
    monkeypatch.setenv(operators.SWITCH, "0")
    with pytest.raises(InputError, match=r"ADTP_OPERATORS: got '0'; accepted is off, or on"):
        operators.library()


def test_path_tells_other_applications(copy):
    result = run_cli("adtp-plugin", "path", env={operators.SWITCH: "on"})
    assert result.returncode == 0, result.stderr
    said = ctypes.CDLL(result.stdout.strip()).adtp_sources
    said.restype = ctypes.c_char_p
    assert said().decode() == operators.sources_sha256()
    result = run_cli("adtp-plugin", "path", env={operators.SWITCH: "off"})
    assert (result.returncode, result.stdout) == (3, "")


# How they are made


def test_the_compiler_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.1.0")
    with pytest.raises(
        MissingDependencyError,
        match=r"needs ziglang [\d.]+, and 0.1.0 is installed; type: pip install ziglang==[\d.]+$",
    ):
        operators_ahead.build(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_all_is_for_the_cpu():
    result = run_cli("adtp-plugin", "build", "--all")
    assert result.returncode == 2
    assert result.stderr.splitlines()[-1].endswith("type: adtp-plugin build --cpu --all")


@pytest.mark.slow
@pytest.mark.timeout(1800)  # the first time, ziglang compiles its C++ library for each system
def test_compiling_again_gives_the_same_bytes(tmp_path, monkeypatch):
    """In another folder, with flags of the user's own in the environment."""
    try:
        operators_ahead.check_zig()
    except MissingDependencyError as error:
        pytest.skip(str(error))
    elsewhere = shutil.copytree(operators.SOURCES, tmp_path / "elsewhere")
    monkeypatch.setattr(operators, "SOURCES", elsewhere)
    written = operators_ahead.build(tmp_path / "made", environment={**os.environ, "CXXFLAGS": "-O0", "LDFLAGS": "-g"})
    assert {path.relative_to(tmp_path / "made").as_posix(): path.read_bytes() for path in written} == {
        name: data for name, data in listing(operators.COMPILED).items() if name != "NOTICE"
    }
