"""Times of verified targets on this machine's CPU."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ...artifacts.records import TIMING, VERIFIED, Note, Target
from ...benchmarking.interleaved_timing import MIN_ROUNDS, Limits, in_this_process, measure
from ...benchmarking.workloads import Workload
from ...contract import INPUT_IDS
from ...data.tokenize import Batch
from ...environment import fingerprint, machine
from ...errors import EngineBuildError
from ...runtimes import Engine
from ...targets.choice import runnable
from ...targets.specs import PRECISIONS, PRECOMPUTED, RUNTIMES, TargetSpec
from ...verify.oracle import OracleRun
from .context import LARGE_BYTES, ExportContext, stored_bytes

TIMING_SECONDS = 0.5
TIMING_FLOPS = 2e11
"""Of the batch that is timed, where there is one of no more: 1,000 tokens of BERT-base."""


class Timing(NamedTuple):
    """What timing found out. details: of each target, for its entry in the manifest; empty where nothing was timed."""

    details: Mapping[str, Mapping[str, Any]] = {}
    notes: tuple[Note, ...] = ()


def time_targets(
    run: ExportContext, oracle: OracleRun, made: Mapping[str, Target], before: Mapping[str, Target], at_least: int
) -> Timing:
    """Time verified CPU targets, and say which precision is no faster than a higher one. Close their engines.

    They take turns, where none is so large that two at once would take too much memory.

    Args:
        oracle: has the batches.
        made: targets of this run; where none of them can be timed, none is.
        before: of earlier runs. They are timed again, because only times of one run can be compared. One that does not open is left out.
        at_least: so many targets; fewer are not timed.
    """
    targets = {**before, **made}
    specs = {
        name: spec for name, spec in runnable(targets).items() if targets[name].status == VERIFIED and spec.is_timed
    }
    opened = dict(run.engines)
    run.engines.clear()
    if len(specs) < at_least or not specs.keys() & made.keys():
        return Timing()
    timed = dict(
        sorted(specs.items(), key=lambda item: (PRECISIONS.index(item[1].precision), item[1].form == PRECOMPUTED))
    )
    batch = _timed_batch(run, [each.batch for each in oracle.batches])
    shape = "x".join(map(str, batch["input_ids"].shape))
    alone = any(stored_bytes(run.work / targets[name].file) > LARGE_BYTES for name in timed)
    medians: dict[str, float] = {}
    with run.steps.step("timing_s", f"timing {', '.join(timed)} on {shape}") as progress:
        for names in [[name] for name in timed] if alone else [[*timed]]:
            engines = {}
            for name in names:
                with contextlib.suppress(*(() if name in made else (EngineBuildError,))):
                    engines[name] = _opened(run, opened, name, timed[name], targets[name])
            if not engines:
                continue
            time_ms = in_this_process(engines)
            round_s = (
                sum(2 * time_ms(name, batch) for name in engines) / 1e3
            )  # each is timed right after an untimed run
            limits = Limits(once=frozenset(engines)) if round_s * MIN_ROUNDS > TIMING_SECONDS else None
            times = measure(Workload(shape, (batch,)), [*engines], time_ms, TIMING_SECONDS, progress, limits=limits)
            medians |= {name: round(float(np.median(ms)), 3) for name, ms in times.items()}
            del engines, time_ms
    where = {"timed_on": shape, "machine": machine(), "fingerprint": fingerprint()}
    details = {name: {**where, "p50_ms": p50} for name, p50 in medians.items()}
    return Timing(details, _no_faster({name: timed[name] for name in medians}, medians, shape))


def _opened(run: ExportContext, opened: dict[str, Engine], name: str, spec: TargetSpec, target: Target) -> Engine:
    """Return the session that was verified, or a new one where that is closed."""
    if name in opened:
        return opened.pop(name)
    return RUNTIMES[spec.runtime].open(run.work / target.file, spec, stop_spinning=True)


def _timed_batch(run: ExportContext, batches: Sequence[Batch]) -> Batch:
    """Return the largest batch that a run is not too slow on."""
    student = run.checkpoint.student
    flops = [float(student.flops(np.full(*batch[INPUT_IDS].shape)).sum()) for batch in batches]
    most = max(TIMING_FLOPS, min(flops))
    return max((each for each in zip(flops, batches) if each[0] <= most), key=lambda each: each[0])[1]


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
            notes.append(Note(text, TIMING))
    return tuple(notes)
