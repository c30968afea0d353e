"""What ``adtp-bench OUT --write`` found out: the median ms of targets, by machine and shape of batch, in a file beside the manifest.

The file only helps to choose. One that is missing, damaged, or of another machine never keeps a directory from being opened.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ..artifacts.checks import checked_file
from ..artifacts.records import Manifest, convert
from ..environment import fingerprint, machine, threads_to_ask_for
from ..errors import InputError, ellipsize, typed
from ..runtimes.cuda import local_gpu_name
from .sizes import sizes_of
from .specs import RUNTIMES, TargetSpec

NAME = "measured.json"
_SCHEMA = 1

Times = Mapping[str, Mapping[str, float]]
"""Median ms by target and shape of batch; the shape is the name of a workload of `adtp-bench`."""


@dataclass(frozen=True)
class Place:
    """Where times were taken. machine: processor and cores. gpu: its name. threads: of each runtime, 0 for all cores. fingerprint:
    of the machine, see `environment.fingerprint`; None in files of earlier versions, whose times are trusted nowhere.
    """

    machine: str
    gpu: str | None
    threads: int
    fingerprint: str | None = None

    @classmethod
    def here(cls, threads: int) -> Place:
        """This machine, with so many threads."""
        return cls(machine(), local_gpu_name(), threads_to_ask_for(threads), fingerprint())

    def __str__(self) -> str:
        gpu = f", {self.gpu}" if self.gpu else ""
        return f"{self.machine} (fingerprint {self.fingerprint}){gpu}, threads: {self.threads or 'default'}"

    def named_alike(self, other: Place) -> bool:
        """Say whether all but the fingerprint is the same."""
        return replace(self, fingerprint=other.fingerprint) == other


@dataclass(frozen=True)
class Timed:
    """One target. runtime: its version; files: SHA-256 of what it runs, by name; p50_ms: by shape of batch."""

    runtime: str
    files: Mapping[str, str]
    p50_ms: Mapping[str, float]

    def __post_init__(self) -> None:
        if any(not 0 < ms < math.inf for ms in self.p50_ms.values()):
            raise ValueError("a time is not above 0")

    @classmethod
    def of(cls, name: str, manifest: Manifest, p50_ms: Mapping[str, float]) -> Timed:
        """Describe a target that was timed as it is in the manifest."""
        runtime, files = _now(name, manifest)
        return cls(runtime, files, p50_ms)

    def holds(self, name: str, manifest: Manifest) -> bool:
        """Say whether that target still is what was timed: the same files in the same version of the runtime."""
        return (self.runtime, dict(self.files)) == _now(name, manifest)


@dataclass(frozen=True)
class Measured:
    """All times of one place, by target."""

    place: Place
    targets: Mapping[str, Timed]


def read(directory: Path, manifest: Manifest) -> list[Measured]:
    """Read what was measured, on all machines; an empty list where nothing was.

    Raises:
        InputError: the file is not the one that the manifest lists, or not of this version.
    """
    if NAME not in manifest.files:
        return []
    path = checked_file(directory, manifest, NAME)
    try:
        stored = convert(json.loads(path.read_text(encoding="utf-8")), dict[str, Any])
        if stored.get("schema") != _SCHEMA:
            raise ValueError("it is of another version")
        return convert(stored.get("measured"), list[Measured])
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path} is damaged ({ellipsize(str(error))})") from error


def text(measured: Sequence[Measured]) -> str:
    """Write what `read` reads."""
    return json.dumps({"schema": _SCHEMA, "measured": [asdict(each) for each in measured]}, indent=1) + "\n"


def times_here(directory: Path, manifest: Manifest, names: Sequence[str], threads: int) -> tuple[Times, str]:
    """Return what was measured of these targets on this machine, with so many threads: on all shapes that all of them were timed on.

    Where there is nothing to compare, also say why what was measured does not count; "" where nothing was.
    """
    again = f"type adtp-bench {typed(directory)} --write{f' --threads {threads}' if threads else ''}"
    try:
        known = read(directory, manifest)
    except InputError as error:
        # The error's own advice, an export anew, would cost all the rest.
        return {}, f"{NAME} is ignored: {str(error).partition('; ')[0]}; {again}"
    if not known:
        return {}, ""
    place = Place.here(threads)
    here = next((each.targets for each in known if each.place == place), None)
    if here is None:
        alike = [each.place.fingerprint or "none" for each in known if place.named_alike(each.place)]
        found = f", only of machines of that name with the fingerprint {' and '.join(alike)}" if alike else ""
        return {}, f"{NAME} is ignored: it has no times of {place}{found}; {again}"
    if missing := [name for name in names if name not in here]:
        return {}, f"{NAME} is ignored: not timed: {', '.join(missing)}; {again} --budget 0"
    if stale := [name for name in names if not here[name].holds(name, manifest)]:
        return {}, f"{NAME} is ignored: changed since: {', '.join(stale)}; {again}"
    shapes = [shape for shape in here[names[0]].p50_ms if all(shape in here[name].p50_ms for name in names)]
    if not shapes:
        return {}, f"{NAME} is ignored: no shape of batch was timed on all of {', '.join(names)}; {again} --budget 0"
    return {name: {shape: here[name].p50_ms[shape] for shape in shapes} for name in names}, ""


def typical(p50_ms: Mapping[str, float]) -> float:
    """Return the geometric mean of ms over shapes: so each shape counts alike, however long it takes."""
    return math.exp(sum(map(math.log, p50_ms.values())) / len(p50_ms))


def _now(name: str, manifest: Manifest) -> tuple[str, dict[str, str]]:
    """Return the version of a target's runtime and the hashes of the files that are opened for it, which are those of all its sizes."""
    spec = TargetSpec.parse(name)
    opened = [manifest.targets[str(size)].file for size in sizes_of(manifest.targets, spec)]
    files = [part for file in opened for part in (file, f"{file}.data") if part in manifest.files]
    return RUNTIMES[spec.runtime].installed() or "", {part: manifest.files[part]["sha256"] for part in files}
