"""The targets of an output directory, timed on this machine as `load` runs them, and what it then takes. Nothing here imports PyTorch."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ...artifacts.checks import check_reads_texts, checked_file
from ...artifacts.directory import OutputDirectory
from ...artifacts.manifest import add_file, read_manifest
from ...artifacts.records import Manifest
from ...benchmarking.budget import Budget, LeftOut
from ...benchmarking.interleaved_timing import PERCENTILES, cycles_of
from ...benchmarking.processes import DEPLOYED, Contender, Processes
from ...benchmarking.workloads import Workload
from ...environment import commit, cpu, versions
from ...errors import InputError
from ...inference.config import read_config
from ...io import telling_full_disk
from ...targets import measured
from ...targets.choice import PREFERENCES, candidates, choose
from ...targets.measured import Measured, Place, Timed
from ...targets.specs import profile_of
from ..progress import Steps
from .options import BenchOptions
from .rounds import in_time
from .workloads import Read, texts_for, workloads


@telling_full_disk()
def time_and_write(out: Path, chosen: BenchOptions, steps: Steps) -> dict[str, Any]:
    """Time all targets that `load` may take here where none is asked for, and write the medians into the directory.

    Returns, raises: as `bench`.
    """
    manifest = read_manifest(out)
    check_reads_texts(out, manifest)
    OutputDirectory(out, update=True)  # what cannot be written is told before any work
    budget = Budget(chosen.budget)
    timed = workloads(_read(out, manifest, chosen), chosen, steps)
    results, left_out = _time(out, manifest, timed, chosen, budget, steps)
    place = Place.here(chosen.threads)
    _write(out, manifest, place, results, steps)
    manifest = read_manifest(out)
    choices = {prefer: choose(manifest, None, prefer, out, chosen.threads) for prefer in PREFERENCES}
    return {
        "command": chosen.command,
        "commit": commit(),
        "device": cpu(chosen.threads) | ({"gpu": place.gpu} if place.gpu else {}),
        "versions": versions(),
        "subject": out.name,
        "results": results,
        "left_out": [dataclasses.asdict(each) for each in left_out],
        "load": {prefer: {"target": choice.name, "reason": choice.reason} for prefer, choice in choices.items()},
    }


def _read(out: Path, manifest: Manifest, chosen: BenchOptions) -> Read:
    """Say what a directory's model takes; raises InputError where the directory is damaged."""
    config, tokenizer = read_config(out, functools.partial(checked_file, out, manifest))
    return Read(
        inputs=("input_ids", "attention_mask", "token_type_ids"),  # a target takes of these what it has
        vocabulary=config.vocab_size,
        max_tokens=config.max_tokens,
        tokenizer=tokenizer,
        texts=texts_for(config.adtp.head, chosen)[1],
    )


def _time(
    out: Path, manifest: Manifest, timed: Sequence[Workload], chosen: BenchOptions, budget: Budget, steps: Steps
) -> tuple[list[dict[str, Any]], list[LeftOut]]:
    """Time the targets in turns; return a row for each workload and each target that takes its batches, and what was left out."""
    names = list(candidates(manifest.targets))
    contenders = [Contender(name=name, path=out, layers=0, padded=False, engine=DEPLOYED) for name in names]
    results = []
    with contextlib.ExitStack() as stack:
        with steps.step("load_s", f"loading {len(names)} targets, each in a process of its own"):
            processes = stack.enter_context(Processes(contenders, chosen.threads))
        entries = {workload.name: [n for n in names if _takes(manifest, n, workload)] for workload in timed}
        for workload in [name for name, able in entries.items() if not able]:
            steps.note(f"left out {workload}: no engine was built for such batches")
            del entries[workload]
        found, left_out = in_time(entries, timed, lambda _, *asked: processes.time_ms(*asked), chosen, budget, steps)
    batches = {workload.name: len(workload.batches) for workload in timed}
    for workload, times in found.items():
        for name, ms in times.items():
            cycles = cycles_of(name, times, batches[workload])
            percentiles = {f"p{p}_ms": round(float(np.percentile(cycles, p)), 3) for p in PERCENTILES}
            results.append({"workload": workload, "contender": name, **percentiles, "rounds": len(ms)})
    return results, left_out


def _takes(manifest: Manifest, name: str, workload: Workload) -> bool:
    """Say whether a target takes these batches: an engine has ranges."""
    axes = profile_of(manifest.targets[name])
    shapes = [dict(zip(("batch", "seq"), batch["input_ids"].shape)) for batch in workload.batches]
    return all(known.min <= shape[axis] <= known.max for shape in shapes for axis, known in axes.items())


def _write(out: Path, manifest: Manifest, place: Place, results: list[dict[str, Any]], steps: Steps) -> None:
    """Put this place's times into the directory; those of other places stay.

    Raises:
        InputError: the directory cannot be written, or another run has replaced it.
    """
    by_target: dict[str, dict[str, float]] = {}
    for row in results:
        by_target.setdefault(row["contender"], {})[row["workload"]] = row["p50_ms"]
    try:
        others = [each for each in measured.read(out, manifest) if each.place != place]
    except InputError:
        steps.note(f"{measured.NAME} was damaged, and is written anew")
        others = []
    entry = Measured(place, {name: Timed.of(name, manifest, p50_ms) for name, p50_ms in by_target.items()})
    add_file(out, manifest, measured.NAME, measured.text([*others, entry]))
    steps.note(f"wrote {out / measured.NAME}")
