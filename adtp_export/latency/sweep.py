"""Speedup against retention: one file, whose retention is set from outside, against packed dense."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from ..model.config import PERMILLE, ratios_in_permille
from ..model.flops import Shape, encoder_flops
from ..model.retainer import tokens_to_keep
from ..text import Batch
from .compare import Latency, measure, relate
from .processes import Contender, Processes
from .workloads import Workload

MOST_RATIOS = 10


@dataclass(frozen=True)
class Sweep:
    """Latencies of one workload by retention, ascending, and the retention at which the speedup over packed dense is 1.

    break_even: None where pruning is faster at every retention timed, or at none.
    """

    workload: str
    baseline: str
    retention: tuple[float, ...]
    points: tuple[Latency, ...]
    break_even: float | None


def sweep(
    student: Contender,
    packed: Contender,
    shape: Shape,
    ratios: Sequence[float],
    min_tokens: int,
    timed: Sequence[Workload],
    folder: Path,
    seconds: float,
    threads: int = 0,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Sweep]:
    """Time a student at each of its candidate ratios (at most 10 of them) at the first site, all later sites keeping all.

    Args:
        packed: dense of the same depth.
        ratios: the student's candidates, ascending. min_tokens: that it keeps.
    """
    from ..export.program import expose_ratios

    exposed = replace(student, path=folder / "sweep.onnx")
    inputs = expose_ratios(student.path, exposed.path)
    chosen = np.unique(np.linspace(0, len(ratios) - 1, min(MOST_RATIOS, len(ratios))).round().astype(int))
    names, retention = [f"{ratios[i]:g}" for i in chosen], tuple(ratios[i] for i in chosen)
    setting = {name: _pick(inputs, i, len(ratios)) for name, i in zip(names, chosen)}
    permille = dict(zip(names, (ratios_in_permille(ratios)[i] for i in chosen)))
    results = []
    with Processes([exposed, packed], threads) as processes:

        def time_ms(name: str, batch: Batch) -> float:
            if name == packed.name:
                return processes.time_ms(name, batch)
            return processes.time_ms(student.name, {**batch, **setting[name]})

        for done, workload in enumerate(timed):
            times = measure(workload, [packed.name, *names], time_ms, seconds)
            flops = {name: _flops(shape, student.sites, permille[name], min_tokens, workload) for name in names}
            flops[packed.name] = _flops(shape, (), PERMILLE, min_tokens, workload)
            settings = [replace(student, name=name) for name in names]
            points = tuple(relate(workload.name, times, flops, [packed, *settings], [packed.name])[1:])
            speedups = [row.vs[packed.name].speedup for row in points]
            results.append(Sweep(workload.name, packed.name, retention, points, break_even(retention, speedups)))
            progress(done + 1, len(timed))
    return results


def break_even(retention: Sequence[float], speedups: Sequence[float]) -> float | None:
    """Return the retention, between the last two neighbours on either side of a speedup of 1, at which it would be 1."""
    crossing = None
    for r0, s0, r1, s1 in zip(retention, speedups, retention[1:], speedups[1:]):
        if s0 >= 1 > s1:
            crossing = r0 + (r1 - r0) * (s0 - 1) / (s0 - s1)
    return None if crossing is None else round(crossing, 3)


def _pick(inputs: Sequence[str], index: int, candidates: int) -> Mapping[str, np.ndarray]:
    chosen = dict.fromkeys(inputs, candidates - 1) | {inputs[0]: index}
    return {name: np.eye(candidates, dtype=np.float32)[i] for name, i in chosen.items()}


def _flops(shape: Shape, sites: Sequence[str], permille: int, min_tokens: int, workload: Workload) -> np.ndarray:
    counts = []
    for batch in workload.batches:
        n = batch["attention_mask"].sum(1)
        kept = tokens_to_keep(torch.from_numpy(n), permille, min_tokens).numpy()
        counts.append(encoder_flops(shape, [n, *[kept] * len(sites)], sites, narrow=True))
    return np.array(counts)
