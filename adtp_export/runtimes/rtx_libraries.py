"""The libraries of TensorRT-RTX's wheel, loaded so that its parser can meet a plugin.

The parser then opens `libtensorrt_rtx.so`, looks beside itself only, and aborts the process where it finds nothing; the
wheel has `libtensorrt_rtx.so.1` alone (1.7.1). So both are loaded from a directory of links that has the other name too.
It must still be there when the first plugin is met. Commands end without running exit handlers, and would leave a
temporary directory at each run; so there is one per user and wheel, which is kept.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import hashlib
import importlib.util
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

MODULE = "tensorrt_rtx"


@functools.cache
def load() -> bool:
    """Load the libraries; once is enough.

    Returns:
        Whether plugins can be parsed: False where the libraries had been loaded before.

    Raises:
        OSError: a library does not load.
    """
    found = importlib.util.find_spec("tensorrt_rtx_libs")
    if platform.system() != "Linux" or found is None or found.origin is None:
        return True
    if MODULE in sys.modules:
        return False
    libraries = sorted(Path(found.origin).parent.glob("lib*.so.*"))
    directory = _directory_of_links(libraries)
    for library in sorted(libraries, key=lambda path: "parser" in path.name):  # the parser needs the other one
        ctypes.CDLL(str(directory / library.name))
    return True


def _directory_of_links(libraries: Sequence[Path]) -> Path:
    """Return a directory with links to the libraries, by their names with and without a version."""
    links: dict[str, Path] = {}
    for library in libraries:
        links[library.name] = library
        links.setdefault(f"{library.name.split('.so')[0]}.so", library)
    wheel = hashlib.sha256("\n".join(map(str, libraries)).encode()).hexdigest()[:16]
    try:
        directory = _cache() / f"tensorrt-rtx-{wheel}"
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if directory.stat().st_uid not in (0, os.getuid()):
            raise PermissionError(f"{directory} belongs to somebody else")
        for name, library in links.items():
            _link(directory / name, library)
    except (OSError, RuntimeError):  # no home, or one that cannot be written
        directory = Path(tempfile.mkdtemp(prefix="tensorrt-rtx-"))
        atexit.register(shutil.rmtree, directory, ignore_errors=True)
        for name, library in links.items():
            _link(directory / name, library)
    return directory


def _cache() -> Path:
    """This program's cache directory, after the XDG base directory specification; RuntimeError where there is no home."""
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (given if given.is_absolute() else Path.home() / ".cache") / "adtp-export"


def _link(place: Path, library: Path) -> None:
    """Make a link, unless it is there; other processes may do the same at the same time."""
    if place.is_symlink() and Path(os.readlink(place)) == library:
        return
    fresh = place.with_name(f"{place.name}.{os.getpid()}")
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(library)
    fresh.replace(place)
