"""Speedup against retention: one file, whose retention is set from outside, against packed dense.

The file is a student of the given size and sites with random weights, also where an exported student is timed: how long it
takes depends on sizes and on how many tokens stay, and not on weights or on which tokens these are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from ..data.tokenize import Batch
from ..graph.passes.expose_settings import setting_name
from ..model.flops import Shape, encoder_flops
from ..model.selection import PERMILLE, kept_count
from .compare import Latency, relate
from .contenders import Architecture, adjustable_student
from .interleaved_timing import measure
from .processes import Contender, Processes
from .workloads import Workload

MAX_RATIOS = 10


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """Latencies of one workload by retention, ascending, and the retention at which the speedup over packed dense is 1.

    break_even: None where pruning is faster at every retention timed, or at none.
    """

    workload: str
    baseline: str
    retention: tuple[float, ...]
    points: tuple[Latency, ...]
    break_even: float | None


@dataclass(frozen=True)
class Swept:
    """What is swept: a student of this size and with these sites. ratios: ascending, at most 10 of them are timed.
    min_tokens: what it keeps of each text at least."""

    architecture: Architecture
    sites: tuple[str, ...]
    ratios: tuple[float, ...]
    min_tokens: int = 1


def sweep(
    swept: Swept,
    packed: Contender,
    timed: Sequence[Workload],
    folder: Path,
    seconds: Callable[[int], float | None],
    threads: int = 0,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Sweep]:
    """Time a student with random weights at each ratio at its first site, all later sites keeping all.

    Args:
        packed: dense of the same depth.
        seconds: for the next workload, by how many there still are; None ends the sweep.
    """
    student, _ = adjustable_student(swept.architecture, swept.sites, folder / "sweep.onnx", min_tokens=swept.min_tokens)
    chosen = np.unique(np.linspace(0, len(swept.ratios) - 1, min(MAX_RATIOS, len(swept.ratios))).round().astype(int))
    retention = tuple(swept.ratios[i] for i in chosen)
    permille = {f"{ratio:g}": round(PERMILLE * ratio) for ratio in retention}
    names, shape = list(permille), swept.architecture.shape
    results = []
    with Processes([student, packed], threads) as processes:

        def time_ms(name: str, batch: Batch) -> float:
            if name == packed.name:
                return processes.time_ms(name, batch)
            return processes.time_ms(student.name, {**batch, **settings(swept.sites, permille[name])})

        for done, workload in enumerate(timed):
            if (most := seconds(len(timed) - done)) is None:
                break
            times = measure(workload, [packed.name, *names], time_ms, most)
            flops = {name: _flops(shape, swept, permille[name], workload) for name in names}
            flops[packed.name] = _flops(shape, replace(swept, sites=()), PERMILLE, workload)
            rows = [packed, *(replace(student, name=name) for name in names)]
            points = tuple(relate(workload.name, times, flops, rows, [packed.name])[1:])
            speedups = [row.vs[packed.name].speedup for row in points]
            even = break_even(retention, speedups)
            results.append(
                Sweep(workload=workload.name, baseline=packed.name, retention=retention, points=points, break_even=even)
            )
            progress(done + 1, len(timed))
    return results


def settings(sites: Sequence[str], permille: int) -> dict[str, np.ndarray]:
    """Return inputs that keep a share, in 1/1000, at the first site and all at later ones: int64 scalars."""
    return {
        setting_name(site, "permille"): np.array(PERMILLE if i else permille, np.int64) for i, site in enumerate(sites)
    }


def break_even(retention: Sequence[float], speedups: Sequence[float]) -> float | None:
    """Return the retention, between the last two neighbours on either side of a speedup of 1, at which it would be 1."""
    crossing = None
    for r0, s0, r1, s1 in zip(retention, speedups, retention[1:], speedups[1:]):
        if s0 >= 1 > s1:
            crossing = r0 + (r1 - r0) * (s0 - 1) / (s0 - s1)
    return None if crossing is None else round(crossing, 3)


def _flops(shape: Shape, swept: Swept, permille: int, workload: Workload) -> np.ndarray:
    counts = []
    for batch in workload.batches:
        n = batch["attention_mask"].sum(1)
        kept = kept_count(torch.from_numpy(n), permille, swept.min_tokens).numpy()
        alive, first_alone = [n, *[kept] * len(swept.sites)], not swept.architecture.every_token
        counts.append(encoder_flops(shape, alive, swept.sites, cls_only_last_layer=first_alone))
    return np.array(counts)
