"""Compile a library of the plugin with CMake, and keep it with a record of what it was compiled from."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import platform
import shlex
import shutil
import signal
import struct
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import EngineBuildError, InputError, MissingDependencyError, quoted
from ..io import sha256, telling_full_disk, written_whole

SYSTEM = f"{platform.system()} {platform.machine()}"
LEAST_ROOM = 1 << 20
"""Bytes in the directory of temporary files; with fewer, that is why a compiler has ended."""


def check_cmake(environment: Mapping[str, str] = os.environ) -> str:
    """Return the path of CMake.

    Raises:
        MissingDependencyError: it is not installed.
    """
    cmake = shutil.which("cmake", path=environment.get("PATH"))
    if cmake is None:
        raise MissingDependencyError("adtp-plugin build needs CMake; type: pip install cmake")
    return cmake


def _check_compiler(environment: Mapping[str, str]) -> None:
    """Raises MissingDependencyError where CXX names a program that is not there; CMake's words would not say which."""
    named, path = environment.get("CXX", ""), environment.get("PATH")
    try:
        program = shlex.split(named, posix=os.name != "nt")[:1]
    except ValueError:  # CMake has the last word on it
        return
    if named and not any(shutil.which(each, path=path) for each in (named, *program)):
        raise MissingDependencyError(
            f"adtp-plugin build needs a C++17 compiler, and CXX names {quoted(named)}, which is no program here; correct it "
            "or leave it out"
        )


def build(
    project: Path,
    settings: Mapping[str, object],
    files: Sequence[str],
    record: tuple[str, Callable[[], Mapping[str, str]]],
    directory: Path,
    environment: Mapping[str, str],
    kernels: Callable[[], str] | None = None,
) -> Path:
    """Compile a project into `directory`, with a record for `kept`; return the first of its files.

    Args:
        files: names of what it makes.
        record: the record's name, and what says its words beside system and hashes; asked once the library is compiled.
        kernels: writes the table of compiled kernels that the project includes.

    Raises:
        MissingDependencyError: CMake or a compiler is missing.
        EngineBuildError: the compiler refuses; the message has its words.
        InputError: `directory` cannot be written, or the disk is full.
    """
    check_cmake(environment)
    _check_compiler(environment)
    try:
        there = next(place for place in (directory, *directory.absolute().parents) if place.exists())
        tempfile.TemporaryFile(dir=there).close()  # before minutes of compiling
    except OSError as error:
        raise _unwritable(directory, error) from error
    name, said = record
    with telling_full_disk(), tempfile.TemporaryDirectory() as scratch:
        if kernels is not None:
            table = Path(scratch) / "kernels.cpp"
            table.write_text(kernels(), encoding="ascii")
            settings = {**settings, "ADTP_KERNELS": table}
        made = compile_library(project, settings, files, Path(scratch), environment)
        keep(made, said(), directory, name)
    return directory / files[0]


def compile_library(
    sources: Path, settings: Mapping[str, object], names: Iterable[str], scratch: Path, environment: Mapping[str, str]
) -> list[Path]:
    """Compile the project in `sources` below `scratch`; return the files of these names that it made.

    Needs CMake and a C++17 compiler.

    Raises:
        MissingDependencyError: one of these is missing.
        EngineBuildError: the compiler refuses; the message has its words.
    """
    cmake, folder = check_cmake(environment), scratch / "build"
    options = [f"-D{name}={value}" for name, value in {**settings, "CMAKE_BUILD_TYPE": "Release"}.items()]
    _run([cmake, "-S", sources, "-B", folder, *options], environment)
    _run([cmake, "--build", folder, "--config", "Release", "--parallel"], environment)
    return [made for name in names for made in folder.rglob(name)]


def keep(files: Sequence[Path], record: Mapping[str, str], directory: Path, record_name: str) -> None:
    """Copy what was made to `directory`, with a record for `kept`. Whoever looks there meanwhile sees whole files.

    Raises:
        EngineBuildError: nothing was made.
        InputError: `directory` cannot be written.
    """
    if not files:
        raise EngineBuildError("the compiler has made no library of the expected name")
    for made in files:
        replace(made, directory / made.name)
    document = {**record, "system": SYSTEM, "sha256": {made.name: sha256(made) for made in files}}
    try:
        with written_whole(directory / record_name) as part:
            part.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise _unwritable(directory, error) from error


def replace(made: Path, place: Path) -> Path:
    """Copy a file to its place, all of it at once, and return that; raises InputError where it cannot be written."""
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with written_whole(place) as part:  # on Linux and macOS a process that has the old one open keeps its bytes
            shutil.copy(made, part)
    except OSError as error:
        raise _unwritable(place.parent, error) from error
    return place


def _unwritable(directory: Path, error: OSError) -> InputError:
    return InputError(f"{directory} cannot be written ({error.strerror}); give another one with --out DIR")


def kept(directory: Path, name: str, record_name: str, sources: str) -> Path | None:
    """Return the library that was put into `directory`, if it was compiled from these sources, for this system, and is as it was."""
    library = directory / name
    try:
        record = json.loads((directory / record_name).read_text(encoding="utf-8"))
        known = record["sources"] == sources and record["system"] == SYSTEM and record["sha256"][name]
        return library if known and sha256(library) == known else None
    except (OSError, ValueError, LookupError, TypeError):
        return None


def _run(command: list[Any], environment: Mapping[str, str]) -> None:
    # Compilers are processes of CMake's, so all of them end together where this one does.
    with subprocess.Popen(
        [str(part) for part in command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
        env=dict(environment),
        start_new_session=True,
    ) as process:
        try:
            said = process.communicate()[0].strip()
        except BaseException:
            if hasattr(os, "killpg"):
                # Where it has just ended, Linux says the first and macOS the second.
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
            raise
    if process.returncode == 0:
        return
    if "No CMAKE_CXX_COMPILER" in said or "CMAKE_CXX_COMPILER not set" in said:
        raise MissingDependencyError("adtp-plugin build needs a C++17 compiler: g++, clang++ or MSVC; install one")
    if shutil.disk_usage(tempfile.gettempdir()).free < LEAST_ROOM:  # compilers say it in many ways, or not at all
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    errors = [
        line for line in said.splitlines() if "error" in line.lower() and not line.lstrip().startswith("See also")
    ]
    raise EngineBuildError("the C++ plugin does not compile:\n" + "\n".join(errors[:10] or said.splitlines()[-10:]))


def array(name: str, data: bytes) -> str:
    """C++'s definition of an array with these bytes, and zeros up to a multiple of 8."""
    words = struct.unpack(f"<{-(-len(data) // 8)}Q", data.ljust(-(-len(data) // 8) * 8, b"\0"))
    return f"uint64_t const {name}[] = {{{','.join(f'{word:#x}u' for word in words)}}};"
