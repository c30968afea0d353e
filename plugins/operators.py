"""Build `libadtp_cpu`, the attention operators for ONNX Runtime on CPUs, and find the one that was built.

Any application of ONNX Runtime may register it: ``SessionOptions.register_custom_ops_library(path)``. The operators then take
the place of the model's local functions of their names.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
from collections.abc import Mapping
from pathlib import Path

from . import compiling
from .binaries import HERE
from .library import BUILT

SOURCES = HERE / "cpu"
FILE = {"Windows": "adtp_cpu.dll", "Darwin": "libadtp_cpu.dylib"}.get(platform.system(), "libadtp_cpu.so")
_RECORD = "build-cpu.json"


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


@functools.cache
def sources_sha256() -> str:
    """Hash of what the library is compiled from."""
    digest = hashlib.sha256()
    for path in sorted(path for path in SOURCES.iterdir() if path.suffix in (".cpp", ".h", ".inl", ".txt")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()
