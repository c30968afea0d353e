"""What takes longest to compile for tests, kept below ``build/`` while its sources and the compiler stay the same."""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import subprocess
from pathlib import Path
from types import ModuleType

import pytest
from filelock import FileLock

from adtp_export.plugins import compiling
from adtp_export.plugins import library as plugin

KEPT = Path(__file__).parent.parent / "build" / "libraries"
TOOLS = ("cmake", "c++")
TABLE = ("g++", "-std=c++17", "-O1", "-fPIC", "-Wall", "-Wextra", "-Werror", "-I", str(plugin.SOURCES))


def library(module: ModuleType) -> Path:
    """Return what `module.build` makes, without warnings; whoever asks first compiles it. Alone in its folder but for its record."""
    if not all(map(shutil.which, TOOLS)):
        pytest.skip("CMake or a C++ compiler is missing")
    environment = {**os.environ, "CXXFLAGS": "-Werror"}
    digest = hashlib.sha256(Path(compiling.__file__).read_bytes() + Path(module.__file__).read_bytes())
    digest.update(
        f"{module.sources_sha256()} {environment['CXXFLAGS']} {compiling.SYSTEM} {os.environ.get('CXX')}".encode()
    )
    for tool in TOOLS:
        digest.update(subprocess.check_output([tool, "--version"]))
    folder = KEPT / digest.hexdigest()[:16]
    KEPT.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if compiling.kept(folder, module.FILE, module._RECORD, module.sources_sha256()) is None:
            module.build(folder, environment)
    return folder / module.FILE


@functools.cache
def all_kernels() -> Path:
    """The object of the table of all kernels for TensorRT."""
    return table(plugin.kernels_cpp())


def table(text: str) -> Path:
    """The object of a table of compiled kernels, for programs and for libraries; `text` is its source."""
    digest = hashlib.sha256(" ".join(TABLE).encode() + subprocess.check_output(["g++", "--version"]) + text.encode())
    for header in sorted(plugin.SOURCES.glob("*.h")):
        digest.update(header.read_bytes())
    made = KEPT / f"table-{digest.hexdigest()[:16]}.o"
    KEPT.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{made}.lock"):
        if not made.is_file():
            source, partial = made.with_suffix(".cpp"), made.with_suffix(".partial")
            source.write_text(text, encoding="ascii")
            subprocess.run([*TABLE, "-c", source, "-o", partial], check=True)
            source.unlink()
            partial.replace(made)
    return made
