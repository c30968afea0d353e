"""Compile `libadtp_cpu` for every system that the wheel serves, with the compiler in the PyPI package ziglang.

The same sources give the same bytes on any machine, so `cpu/compiled` can be checked against its record.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import EngineBuildError, MissingDependencyError
from . import compiling, operators

ZIG = "0.17.1"
"""Of ziglang. Another version makes other bytes."""
SCHEMA = 1
COMMAND = "adtp-plugin build --cpu --all"
_COMPILER_FLAGS = "-g0"
_LINKER_FLAGS = "-s"  # stripped while linking: zig signs macOS's library, and a change breaks the signature
_LEFT_OUT = ("CXX", "CXXFLAGS", "CPPFLAGS", "LDFLAGS", "CPATH", "CPLUS_INCLUDE_PATH", "CMAKE_TOOLCHAIN_FILE")
"""Variables of the environment that would change what is compiled."""


@dataclass(frozen=True, kw_only=True)
class System:
    """target: zig's name, with the oldest glibc or macOS that it serves. cmake: CMake's names of system and processor."""

    target: str
    cmake: tuple[str, str]
    file: str


SYSTEMS = {
    "linux-x86_64": System(target="x86_64-linux-gnu.2.17", cmake=("Linux", "x86_64"), file="libadtp_cpu.so"),
    "linux-aarch64": System(target="aarch64-linux-gnu.2.17", cmake=("Linux", "aarch64"), file="libadtp_cpu.so"),
    "macos-arm64": System(target="aarch64-macos.11.0", cmake=("Darwin", "arm64"), file="libadtp_cpu.dylib"),
    "windows-x86_64": System(target="x86_64-windows-gnu", cmake=("Windows", "AMD64"), file="adtp_cpu.dll"),
}


def build(
    directory: Path = operators.COMPILED,
    progress: Callable[[int, int], object] = lambda done, total: None,
    environment: Mapping[str, str] = os.environ,
) -> list[Path]:
    """Compile the library for all systems into `directory`, and write their record; return what was written, the record last.

    The record says what they were compiled from and how: "sources" (hash), "compiler", "flags", and for each of "libraries" its zig
    target, file, size and SHA-256.

    Raises:
        MissingDependencyError: CMake or this version of ziglang is missing.
        EngineBuildError: the compiler refuses; the message has its words.
        InputError: `directory` cannot be written.
    """
    check_zig()
    directory = directory.absolute()
    libraries: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        staged = Path(scratch) / "compiled"
        for i, (name, system) in enumerate(SYSTEMS.items()):
            progress(i, len(SYSTEMS))
            made = _compile(system, Path(scratch) / name, environment)
            (staged / name).mkdir(parents=True)
            shutil.copy(made, staged / name / system.file)
            data = made.read_bytes()
            libraries[name] = {
                "target": system.target,
                "file": f"{name}/{system.file}",
                "bytes": len(data),
                "sha256": hashlib.sha256(data).hexdigest(),
            }
        document = {
            "schema": SCHEMA,
            "command": COMMAND,
            "sources": operators.sources_sha256(),
            "compiler": f"ziglang {ZIG}",
            "flags": f"{_COMPILER_FLAGS} {_LINKER_FLAGS}",
            "libraries": libraries,
        }
        (staged / operators.MANIFEST).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        files = [
            *(entry["file"] for entry in libraries.values()),
            operators.MANIFEST,
        ]  # whoever looks meanwhile compares hashes
        return [compiling.replace(staged / file, directory / file) for file in files]


def check_zig() -> None:
    """Raises MissingDependencyError where this version of ziglang is not installed."""
    try:
        found = importlib.metadata.version("ziglang")
    except importlib.metadata.PackageNotFoundError:
        found = None
    if found != ZIG:
        there = f", and {found} is installed" if found else ""
        raise MissingDependencyError(f"{COMMAND} needs ziglang {ZIG}{there}; type: pip install ziglang=={ZIG}")


def _compile(system: System, scratch: Path, environment: Mapping[str, str]) -> Path:
    name, processor = system.cmake
    settings = {
        "ADTP_SOURCES": operators.sources_sha256(),
        "CMAKE_SYSTEM_NAME": name,
        "CMAKE_SYSTEM_PROCESSOR": processor,
        "CMAKE_CXX_COMPILER": f"{sys.executable};-m;ziglang;c++;-target;{system.target}",
        "CMAKE_CXX_COMPILER_WORKS": 1,
        "CMAKE_CXX_FLAGS": f'{_COMPILER_FLAGS} "-ffile-prefix-map={operators.SOURCES}=."',
        "CMAKE_CXX_STANDARD_LIBRARIES": "",  # not all that CMake links on Windows
        "CMAKE_SHARED_LINKER_FLAGS": _LINKER_FLAGS,
        "CMAKE_INSTALL_NAME_TOOL": "unused",  # CMake wants macOS's, for an installation that there is not
    }
    clean = {key: value for key, value in environment.items() if key not in _LEFT_OUT}
    clean["SOURCE_DATE_EPOCH"] = "0"  # otherwise a DLL holds the time of its linking
    made = compiling.compile_library(operators.SOURCES, settings, [system.file], scratch, clean)
    if not made:
        raise EngineBuildError(f"ziglang has made no {system.file} for {system.target}")
    return made[0]
