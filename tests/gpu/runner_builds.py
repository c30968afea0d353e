"""The runner compiled by g++ for tests: objects are kept below ``build/`` while their sources and flags stay the same."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import emulated_gpu
import kept_builds
import pytest
from emulated_gpu import Device
from filelock import FileLock

from adtp_export.plugins import library, shipped

GPU = Path(__file__).parent
RUNNER = tuple(library.SOURCES / f"{name}.cpp" for name in ("runner", "replay", "memory", "plan", "driver"))
ENCODER = (library.SOURCES / "encoder.cpp", library.SOURCES / "parts.cpp")
PROBE = (*RUNNER, library.SOURCES / "launch.cpp", GPU / "runner_probe.cpp")
LAUNCH_PROBE = (*(library.SOURCES / f"{name}.cpp" for name in ("launch", "driver")), GPU / "launch_probe.cpp")
FLAGS = ("-std=c++17", "-O1", "-fPIC", "-Wall", "-Wextra", "-Werror", f"-I{library.SOURCES}", f"-I{GPU}")

NEWER = 100
"""A GPU that takes PTX."""

OFF = ("ADTP_EMULATOR_MEMORY", "ADTP_EMULATOR_CALLS", "ADTP_EMULATOR_REFUSE")

Mistake = tuple[str, str, str]
"""A file, words in it, and what they become."""


@functools.cache
def _headers() -> bytes:
    return b"".join(path.read_bytes() for place in (library.SOURCES, GPU) for path in sorted(place.glob("*.h")))


def _kept(name: str, key: bytes) -> Path:
    return emulated_gpu.BUILT / "runner" / f"{hashlib.sha256(key).hexdigest()[:16]}-{name}"


def _object(source: Path, flags: tuple[str, ...], mistake: Mistake | None) -> Path:
    text = source.read_text(encoding="utf-8")
    if mistake and mistake[0] == source.name:
        assert text.count(mistake[1]) == 1, f"{mistake[1]} is in {source.name} {text.count(mistake[1])} times"
        text = text.replace(mistake[1], mistake[2])
    made = _kept(f"{source.stem}.o", " ".join((*FLAGS, *flags)).encode() + _headers() + text.encode())
    if not made.is_file():
        made.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{made}.lock"):
            changed, partial = made.with_suffix(".cpp"), made.with_suffix(".partial")
            changed.write_text(text, encoding="utf-8")
            _run(*FLAGS, *flags, "-c", changed, "-o", partial)
            changed.unlink()
            partial.replace(made)
    return made


def _run(*arguments: object) -> None:
    done = subprocess.run(["g++", *map(str, arguments)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def program(
    flags: tuple[str, ...] = (), mistake: Mistake | None = None, sources: tuple[Path, ...] = PROBE, name: str = "probe"
) -> Path:
    """`runner_probe`, or another program that has all kernels."""
    objects = [*(_object(source, flags, mistake) for source in sources), kept_builds.all_kernels()]
    made = _kept(name, "".join(map(str, (*objects, *flags))).encode())
    if not made.is_file():
        with FileLock(f"{made}.lock"):
            partial = made.with_suffix(".partial")
            _run(*flags, *objects, "-ldl", "-pthread", "-o", partial)
            partial.replace(made)
    return made


def launch_probe(old: str = "", new: str = "") -> Path:
    """`launch_probe`, in whose sources words may be replaced that are there once."""
    at = [source.name for source in LAUNCH_PROBE if old and old in source.read_text(encoding="utf-8")]
    assert len(at) == bool(old), f"{old} is in {at}"
    return program(mistake=(*at, old, new) if old else None, sources=LAUNCH_PROBE, name="launch-probe")


@functools.cache
def for_this_process(kernels: tuple[str, ...] = (), mistake: Mistake | None = None) -> tuple[Path, Path]:
    """The runner's library, and the emulated driver that it loads, which is nobody else's. Skips the test without a compiler.

    A process finds ``libcuda.so.1`` where it began with, so this library has the whole path. With kernels it is also one for ONNX
    Runtime, and these are built in.
    """
    own = _own_driver()
    path = ("driver.cpp", 'dlopen("libcuda.so.1"', f'dlopen("{own}"')
    sources = (*RUNNER, *ENCODER, library.SOURCES / "operators.cpp") if kernels else RUNNER
    objects = [_object(source, (), path if source.name == path[0] else mistake) for source in sources]
    if kernels:
        objects.append(kept_builds.table(shipped.kernels_cpp(kernels)))
    return _linked("libadtp_cuda.so", objects), own


@functools.cache
def plugin_for_this_process(kernels: tuple[str, ...], headers: Path) -> tuple[Path, Path]:
    """The encoder's plugin for TensorRT behind `plugin_probe`, and the emulated driver that it loads."""
    own = _own_driver()
    path = ("driver.cpp", 'dlopen("libcuda.so.1"', f'dlopen("{own}"')
    objects = [_object(source, (), path) for source in (*RUNNER, *ENCODER)]
    flags = ("-isystem", str(headers), "-isystem", str(library.SOURCES / "shim"))
    objects += [
        _object(source, flags, None) for source in (library.SOURCES / "encoder_plugin.cpp", GPU / "plugin_probe.cpp")
    ]
    return _linked("libadtp_plugins.so", [*objects, kept_builds.table(shipped.kernels_cpp(kernels))]), own


def grouped_for_this_process(kernels: tuple[str, ...], mistake: Mistake | None = None) -> tuple[Path, Path]:
    """The C++ launch of grouped attention behind `grouped_probe`, with these kernels, and the emulated driver that it loads."""
    own = _own_driver()
    path = ("driver.cpp", 'dlopen("libcuda.so.1"', f'dlopen("{own}"')
    sources = (library.SOURCES / "driver.cpp", library.SOURCES / "grouped.cpp", GPU / "grouped_probe.cpp")
    objects = [_object(source, (), path if source.name == path[0] else mistake) for source in sources]
    table = kept_builds.table(shipped.kernels_cpp(kernels) + library.grouped_cpp(kernels))
    return _linked("libgrouped.so", [*objects, table]), own


@functools.cache
def grouped_plugin_for_this_process(kernels: tuple[str, ...], headers: Path) -> tuple[Path, Path]:
    """The plugins of grouped attention for TensorRT behind `plugin_probe`, and the emulated driver that they load."""
    own = _own_driver()
    path = ("driver.cpp", 'dlopen("libcuda.so.1"', f'dlopen("{own}"')
    objects = [_object(library.SOURCES / name, (), path) for name in ("driver.cpp", "grouped.cpp")]
    flags = ("-isystem", str(headers), "-isystem", str(library.SOURCES / "shim"), "-DADTP_GROUPED")
    sources = (library.SOURCES / "grouped_plugin.cpp", GPU / "plugin_probe.cpp")
    objects += [_object(source, flags, None) for source in sources]
    table = kept_builds.table(shipped.kernels_cpp(kernels) + library.grouped_cpp(kernels))
    return _linked("libadtp_grouped_plugins.so", [*objects, table]), own


def _own_driver() -> Path:
    try:
        driver = emulated_gpu.library()
    except emulated_gpu.MissingError as error:
        pytest.skip(str(error))
    own = driver.with_name("own") / driver.name
    if not own.is_file():
        own.parent.mkdir(exist_ok=True)
        shutil.copy(driver, own.with_suffix(".partial"))
        own.with_suffix(".partial").replace(own)
    return own


def _linked(name: str, objects: list[Path]) -> Path:
    made = _kept(name, "".join(map(str, objects)).encode())
    if not made.is_file():
        with FileLock(f"{made}.lock"):
            partial = made.with_suffix(".partial")
            _run("-shared", "-Wl,-z,defs", *objects, "-ldl", "-o", partial)
            partial.replace(made)
    return made


def driver_of(built: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> ctypes.CDLL:
    """The emulated driver that a library loads, as a GPU that takes PTX."""
    settings = emulated_gpu.settings(NEWER)
    for name, value in {**settings, **dict.fromkeys(OFF, "")}.items():
        monkeypatch.setenv(name, value)
    return ctypes.CDLL(str(built[1]))


@contextlib.contextmanager
def device_of(built: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    """The same with a context, and memory on it."""
    driver_of(built, monkeypatch)
    made = Device(built[1])
    made.set(NEWER, on={"FORGIVE": False})
    yield made
    made.driver.cuCtxSetCurrent(None)
    made.driver.cuDevicePrimaryCtxRelease_v2(0)
