"""`libadtp_cpu`, the attention operators for ONNX Runtime on CPUs: which library to run here, and how to build one of your own.

The package has compiled ones in `cpu/compiled`, which `operators_ahead` makes. Any application of ONNX Runtime may register one:
``SessionOptions.register_custom_ops_library(path)``. The operators then take the place of the model's local functions of their names.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import json
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import InputError, MissingDependencyError, quoted
from . import compiling
from .binaries import HERE
from .library import BUILT

SOURCES = HERE / "cpu"
COMPILED = SOURCES / "compiled"
"""The package's own libraries, one folder for each system, beside the record of their hashes."""
MANIFEST = "manifest.json"
SWITCH = "ADTP_OPERATORS"
"""Environment variable; "off" leaves the operators out."""
FILE = {"Windows": "adtp_cpu.dll", "Darwin": "libadtp_cpu.dylib"}.get(platform.system(), "libadtp_cpu.so")
_RECORD = "build-cpu.json"
_SYSTEMS = {
    ("Linux", "x86_64"): "linux-x86_64",
    ("Linux", "aarch64"): "linux-aarch64",
    ("Darwin", "arm64"): "macos-arm64",
    ("Windows", "AMD64"): "windows-x86_64",
}
"""Folders of `COMPILED` by what `platform` says."""


def build(directory: Path = BUILT, environment: Mapping[str, str] = os.environ) -> Path:
    """Compile the library into `directory`; return its path. Needs CMake and a C++17 compiler, and nothing of ONNX Runtime.

    Raises:
        MissingDependencyError: one of these is missing.
        EngineBuildError: the compiler refuses; the message has its words.
        InputError: `directory` cannot be written.
    """
    sources = sources_sha256()
    record = (_RECORD, lambda: {"sources": sources})
    return compiling.build(SOURCES, {"ADTP_SOURCES": sources}, (FILE,), record, directory, environment)


def built() -> Path | None:
    """Return the library that `build` made, if it is of this version's sources."""
    return compiling.kept(BUILT, FILE, _RECORD, sources_sha256())


def library() -> Path:
    """Return the library to run here: the one that was built here if it is of this version's sources, or else the package's own.

    Raises:
        MissingDependencyError: they are switched off, none is for this machine, or the package's is not what its record says.
        InputError: the switch has a value that is not accepted.
    """
    if not enabled():
        raise MissingDependencyError(f"{SWITCH}=off leaves the attention operators out")
    return built() or _shipped()


def set_threads(path: str, count: int) -> None:
    """Set the number of threads that a library assumes from now on. It cannot ask ONNX Runtime, and otherwise assumes one per processor."""
    ctypes.CDLL(path).adtp_threads(ctypes.c_int64(count))


def enabled() -> bool:
    """Say whether the operators are to be used at all; raises InputError where the switch has a value that is not accepted."""
    switch = os.environ.get(SWITCH, "on")
    if switch not in ("on", "off"):
        raise InputError(f"{SWITCH}: got {quoted(switch)}; accepted is off, or on, which is the default")
    return switch == "on"


def _shipped() -> Path:
    """Return the package's library for this machine once its bytes are those of the record; errors as of `library`."""
    build = "type: adtp-plugin build --cpu"
    system, record = _system(), compiled()
    if record["sources"] != sources_sha256():
        raise MissingDependencyError(f"the compiled attention operators are not of this version's sources; {build}")
    if system not in record["libraries"]:
        raise MissingDependencyError(f"the package has no compiled attention operators for {system}; {build}")
    listed = record["libraries"][system]
    found = COMPILED / listed["file"]
    try:
        whole = hashlib.sha256(found.read_bytes()).hexdigest() == listed["sha256"]
    except OSError as error:
        raise MissingDependencyError(f"{found} cannot be read ({error.strerror}); {build}") from error
    if not whole:
        raise MissingDependencyError(f"{found} is not the file that its record lists, and is not loaded; {build}")
    return found


def compiled() -> dict[str, Any]:
    """The record of the package's libraries; `operators_ahead.build` says what is in it."""
    return json.loads((COMPILED / MANIFEST).read_text(encoding="utf-8"))


def _system() -> str:
    """Name this machine's folder of `COMPILED`, or what it is where there can be none."""
    system, machine = platform.system(), platform.machine()
    if system == "Linux" and not _has_glibc():
        return f"Linux {machine} without glibc"
    return _SYSTEMS.get((system, machine), f"{system} {machine}")


def _has_glibc() -> bool:
    try:
        return bool(os.confstr("CS_GNU_LIBC_VERSION"))
    except (OSError, ValueError):  # musl does not know the name
        return False


@functools.cache
def sources_sha256() -> str:
    """Hash of what the library is compiled from."""
    digest = hashlib.sha256()
    for path in sorted(path for path in SOURCES.iterdir() if path.suffix in (".cpp", ".h", ".inl", ".txt", ".map")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()
