"""Times of verified targets on this machine's CPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from ...artifacts.records import VERIFIED, Note
from ...benchmarking.interleaved_timing import MIN_ROUNDS, Limits, in_this_process, measure
from ...benchmarking.workloads import Workload
from ...environment import fingerprint, machine
from ...targets.specs import PRECOMPUTED, RUNTIMES, TargetSpec
from ...verify.oracle import OracleRun
from .context import ExportContext, StepResult

TIMING_SECONDS = 0.5


def time_targets(run: ExportContext, oracle: OracleRun, found: StepResult, at_least: int) -> StepResult:
    """Time verified CPU targets in turns, and say which precision is no faster than a higher one. Close their engines.

    Args:
        oracle: has the batches.
        at_least: so many targets; fewer are not timed.
    """
    specs = {name: TargetSpec.parse(name) for name, t in found.targets.items() if t.status == VERIFIED}
    timed = {name: spec for name, spec in specs.items() if spec.is_timed}
    opened = dict(run.engines)
    run.engines.clear()
    if len(timed) < at_least:
        return StepResult()
    engines = {
        name: opened.get(name)
        or RUNTIMES[spec.runtime].open(run.work / found.targets[name].file, spec, stop_spinning=True)
        for name, spec in timed.items()
    }
    batch = max((b.batch for b in oracle.batches), key=lambda batch: batch["input_ids"].size)
    shape = "x".join(map(str, batch["input_ids"].shape))
    with run.steps.step("timing_s", f"timing {', '.join(engines)} on {shape}") as progress:
        time_ms = in_this_process(engines)
        round_s = sum(2 * time_ms(name, batch) for name in engines) / 1e3  # each is timed right after an untimed run
        limits = Limits(once=frozenset(engines)) if round_s * MIN_ROUNDS > TIMING_SECONDS else None
        times = measure(Workload(shape, (batch,)), list(engines), time_ms, TIMING_SECONDS, progress, limits=limits)
    medians = {name: round(float(np.median(ms)), 3) for name, ms in times.items()}
    where = {"timed_on": shape, "machine": machine(), "fingerprint": fingerprint()}
    targets = {
        name: dataclasses.replace(t := found.targets[name], details={**t.details, **where, "p50_ms": p50})
        for name, p50 in medians.items()
    }
    return StepResult(targets, _no_faster(timed, medians, shape))


def _no_faster(timed: Mapping[str, TargetSpec], medians: Mapping[str, float], shape: str) -> tuple[Note, ...]:
    best: dict[str, str] = {}
    for name, spec in timed.items():
        variant = f"{spec.precision}-{PRECOMPUTED}" if spec.form == PRECOMPUTED else spec.precision
        best[variant] = min(name, best.get(variant, name), key=medians.__getitem__)
    ms, notes, ordered = {variant: medians[name] for variant, name in best.items()}, [], list(best)
    for i, lower in enumerate(ordered[1:], start=1):
        higher = min(ordered[:i], key=ms.__getitem__)
        if ms[lower] >= ms[higher]:
            text = (
                f"{lower} is not faster than {higher} on this machine's CPU: {ms[lower]:.1f} ms against "
                f"{ms[higher]:.1f} ms on {shape}"
            )
            notes.append(Note(text, best[lower]))
    return tuple(notes)
