"""What a record says of where it was made: the machine, the versions of what ran, and the commit.

A fingerprint tells apart machines of one name, because clouds name processors generically: two machines that both are "AMD EPYC,
2 cores" took 495 and 1009 ms for the same batch.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
from pathlib import Path
from typing import Any

from .contract import __version__

PACKAGES = (
    "torch",
    "transformers",
    "onnx",
    "onnxscript",
    "onnxruntime",
    "onnxruntime-gpu",
    "openvino",
    "ctranslate2",
    "tensorrt",
    "tensorrt-rtx",
)
_CPUINFO = Path("/proc/cpuinfo")
_CPUS, _UNREAD = Path("/sys/devices/system/cpu"), "?"
_GROUPS, _OWN_GROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
"""Linux's control groups, and which of them this process is in."""
_IDENTITY = {
    "vendor": ("vendor_id", "CPU implementer"),
    "family": ("cpu family", "CPU architecture"),
    "model": ("model", "CPU part"),
    "stepping": ("stepping", "CPU revision"),
}
"""What names a processor, as Linux calls it on x86 and on ARM."""
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
"""Of glibc's `malloc.h`."""


def processor() -> str:
    """Return the processor's name, as the system tells it."""
    return _first_cpu().get("model name") or platform.processor() or platform.machine()


def machine() -> str:
    """Return the name of this machine, for people: ``"AMD EPYC 7763, 2 cores"``."""
    cores = os.cpu_count() or 1
    return f"{processor()}, {cores} core{'s' if cores > 1 else ''}"


def instructions() -> set[str]:
    """Return the names that Linux has for what the processor can do; none elsewhere."""
    cpu = _first_cpu()
    return set((cpu.get("flags") or cpu.get("Features") or "").split())


def hardware() -> dict[str, Any]:
    """Return what is known of the processor and of what this process may use of it, ready for `json`.

    What changes on one machine is left out: clock speed, microcode, load.
    """
    cpu = _first_cpu()
    identity = {name: next((cpu[key] for key in keys if key in cpu), None) for name, keys in _IDENTITY.items()}
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    cores, quota = {"physical": _physical_cores(), "logical": os.cpu_count(), "usable": usable}, _quota()
    return {
        "name": processor(),
        **identity,
        "flags": hashlib.sha256(" ".join(sorted(instructions())).encode()).hexdigest()[:12],
        "caches": _caches(),
        "cores": cores if quota is None or quota >= usable else {**cores, "quota": quota},
    }


def fingerprint() -> str:
    """Return 12 hexadecimal digits of the hash of `hardware`. Times are trusted where they have the same."""
    return hashlib.sha256(json.dumps(hardware(), sort_keys=True).encode()).hexdigest()[:12]


@functools.cache
def _first_cpu() -> dict[str, str]:
    """Return the fields of the first processor that Linux lists; none elsewhere."""
    if not _CPUINFO.exists():
        return {}
    fields = {}
    with _CPUINFO.open(encoding="utf-8", errors="replace") as stream:
        for line in stream:
            name, colon, value = line.partition(":")
            if colon:
                fields[name.strip()] = value.strip()
            elif fields:
                break
    return fields


@functools.cache
def _caches() -> list[str]:
    """Return the first processor's caches, such as ``"2 Unified 2048K"``: level, kind, size."""
    places = sorted(_CPUS.glob("cpu0/cache/index[0-9]*"))
    return [" ".join(_read(place / name) for name in ("level", "type", "size")) for place in places]


@functools.cache
def _siblings() -> dict[int, str]:
    """Return by number of a logical core which ones share its physical core, as Linux lists them; none where it does not tell."""
    listed = _CPUS.glob("cpu[0-9]*/topology/thread_siblings_list")
    return {int(path.parts[-3].removeprefix("cpu")): _read(path) for path in listed}


def _physical_cores() -> int | None:
    """Return how many cores there are, however many threads each has; None where the system does not tell."""
    return len(set(_siblings().values())) or None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="surrogateescape").strip()
    except (OSError, ValueError):  # of a path with a NUL
        return _UNREAD


def cpu(threads: int) -> dict[str, Any]:
    """What a record of times on the CPU says of the machine; of `threads`, see `thread_count`."""
    return {
        "kind": "cpu",
        "model": processor(),
        "instructions": _instructions(),
        "cores": os.cpu_count(),
        "hardware": hardware(),
        "fingerprint": fingerprint(),
        "threads": thread_count(threads),
    }


def thread_count(threads: int) -> int:
    """Return how many threads each runtime is given; 0: one for each core that this process may use, see `usable_cores`.

    Runtimes choose differently by themselves: ONNX Runtime takes physical cores, CTranslate2 logical ones.
    """
    return threads or usable_cores()


def threads_to_ask_for(threads: int) -> int:
    """Return the number to tell ONNX Runtime, which can choose by itself; 0, its own choice, where it is to have all cores of the machine.

    It binds each thread to a core of its own where it chooses their number, and none where it is told one. Unbound threads of sessions
    that take turns wake up on a core that is in use: one text of 32 tokens took three times as long. But its choice, unlike
    `usable_cores`, counts cores that this process may not use.
    """
    physical, usable = _physical_cores(), usable_cores()
    if physical is None and usable == (os.cpu_count() or 1):  # macOS and Windows: nothing is known, and nothing limited
        return threads
    wanted = threads or usable
    return 0 if wanted == usable == physical else wanted


def usable_cores() -> int:
    """Return how many cores this process may use: those of its affinity, or fewer where a container has a CPU limit.

    Threads of one core count once: products of matrices gain nothing by the second. Of a limit of 1.5 cores one counts: threads that use
    up a limit all stop until the next tenth of a second. With two threads the slowest of a hundred short texts took 30 ms, and 5 with one.
    """
    cores, quota = _affine_cores(), _quota()
    return cores if quota is None else max(1, min(cores, int(quota)))


def _affine_cores() -> int:
    if not hasattr(os, "sched_getaffinity"):
        return _physical_cores() or os.cpu_count() or 1
    listed = {i: _siblings().get(i, _UNREAD) for i in os.sched_getaffinity(0)}
    return len({str(i) if siblings == _UNREAD else siblings for i, siblings in listed.items()})


def _quota() -> float | None:
    """Return how many cores' time Linux gives this process, as ``docker run --cpus`` and limits of Kubernetes say; None: all there is.

    The smallest limit counts, of this process's control group and of the groups above it, in either version of control groups.
    """
    found = []
    for line in _read(_OWN_GROUPS).splitlines():
        _, controllers, path = (*line.split(":", 2), "", "")[:3]  # a path may have colons
        if controllers and "cpu" not in controllers.split(","):
            continue
        root, parts = (_GROUPS / "cpu" if controllers else _GROUPS), [part for part in path.split("/") if part]
        for place in (root.joinpath(*parts[:depth]) for depth in range(len(parts) + 1)):
            if controllers:
                limit, period = _read(place / "cpu.cfs_quota_us"), _read(place / "cpu.cfs_period_us")
            else:
                limit, _, period = _read(place / "cpu.max").partition(" ")
            if limit.isdecimal() and period.isdecimal() and int(period):  # not "max", -1 or no such file
                found.append(int(limit) / int(period))
    return min(found, default=None)


def _instructions() -> list[str]:
    """Return what the processor has of the instructions that matrix products are made of, as Linux names them."""
    known = instructions()
    return [name for name in ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8", "amx_bf16") if name in known]


def keep_freed_memory() -> None:
    """Have this process keep what it frees for what it asks for next, from now on to its end, as training on a CPU wants it.

    By default glibc returns large blocks to Linux, which clears them anew: every step of training asks for the same ones. Keeping them
    halved the time of a step on texts of 512 tokens, and took 40% more memory. Does nothing where the C library has no such settings.
    Where steps ask for blocks of ever new sizes, `give_back_freed_memory` has to be called at times.
    """
    if (c_library := _glibc()) is not None:
        c_library.mallopt(_M_MMAP_MAX, 0)
        c_library.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


def give_back_freed_memory() -> None:
    """Return to Linux, once, what this process has kept: among blocks of many sizes it grew from 6 to 12 GB in half an hour of training."""
    if (c_library := _glibc()) is not None:
        c_library.malloc_trim(0)


def _glibc() -> ctypes.CDLL | None:
    return ctypes.CDLL(None) if platform.libc_ver()[0] == "glibc" else None


def commit() -> str | None:
    """Return the commit of a source checkout; None when installed.

    It ends in ``-dirty`` where tracked files differ from it, but for records of benchmarks: what is measured does not depend on these.
    """
    root = Path(__file__).resolve().parents[1]
    if not (root / ".git").exists() or shutil.which("git") is None:
        return None

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", "-C", root, *arguments], capture_output=True, text=True, check=False)
        return done.stdout.strip()

    head = git("rev-parse", "HEAD")
    return (
        f"{head}-dirty"
        if git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!benchmarks/records")
        else head
    ) or None


def versions() -> dict[str, str]:
    """Return versions of this package, of Python, and of what is installed of `PACKAGES`."""
    found = {
        "adtp-export": __version__,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
    }
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
