"""Targets of fixed sizes that stand for one another: `load` opens all of them, and takes the smallest that a batch fits."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import cast

from ..artifacts.records import Target
from ..runtimes import Engine
from ..runtimes.packed import StaticEngines
from .specs import RUNTIMES, TargetSpec, size_of


def sizes_of(targets: Mapping[str, Target], spec: TargetSpec) -> list[TargetSpec]:
    """Return a target in all its sizes, the smallest first: itself alone where its sizes are free."""
    if spec.size is None:
        return [spec]
    forms = {form for name in targets if size_of(form := name.rpartition("-")[2])}
    found = [dataclasses.replace(spec, form=form) for form in forms]
    status = targets[str(spec)].status
    alike = [other for other in found if str(other) in targets and targets[str(other)].status == status]
    return sorted(alike, key=lambda other: other.size or (0, 0))


def open_with_sizes(
    targets: Mapping[str, Target], spec: TargetSpec, file: Callable[[str], Path], threads: int
) -> Engine:
    """Open a target in all its sizes; file: checks a file of the manifest and returns its path.

    Raises:
        MissingDependencyError, EngineBuildError: as `Runtime.open`.
    """
    runtime = RUNTIMES[spec.runtime]
    opened = [runtime.open(file(targets[str(other)].file), other, threads) for other in sizes_of(targets, spec)]
    return opened[0] if len(opened) == 1 else together(*opened)


def together(*engines: Engine) -> StaticEngines:
    """Make one of several engines of fixed sizes, each opened by `Runtime.open`."""
    return StaticEngines([fixed for engine in engines for fixed in cast(StaticEngines, engine).engines])
