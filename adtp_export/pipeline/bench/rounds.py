"""Rounds of a run within its budget: estimates, the plan made of them, and the timing. Nothing here imports PyTorch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from ...benchmarking.budget import Budget, LeftOut, Turn, estimate, make_plan, without_limit
from ...benchmarking.interleaved_timing import measure
from ...benchmarking.workloads import Workload
from ...data.tokenize import Batch
from ..progress import Progress, Steps
from .options import BenchOptions


class Timer(Protocol):
    """Runs a contender on a batch of a workload, after an untimed run where `warm`, and returns its ms."""

    def __call__(self, workload: Workload, name: str, batch: Batch, warm: bool) -> float: ...


def in_time(
    entries: Mapping[str, Sequence[str]],
    workloads: Sequence[Workload],
    time_ms: Timer,
    chosen: BenchOptions,
    budget: Budget,
    steps: Steps,
) -> tuple[dict[str, dict[str, np.ndarray]], list[LeftOut]]:
    """Time contenders as far as the budget goes.

    Args:
        entries: by the workload's name, its contenders, the most informative first.

    Returns:
        ms by workload and contender, as of `measure`; and what was left out.
    """
    if not chosen.budget:
        plan = without_limit(entries, chosen.seconds)
    else:
        with steps.step("estimate_s", "running each contender once") as progress:
            costs = estimate(
                entries, workloads, lambda w, name: time_ms(w, name, w.batches[0], False), budget, progress
            )
        plan = make_plan(entries, workloads, costs, chosen.seconds, budget, chosen.margin)
    works = {workload.name: workload for workload in workloads}
    to_do = sum(turn.takes_s for turn in plan.turns.values())
    found = {}
    for name, turn in plan.turns.items():
        left = f", about {to_do:.0f} s left in all" if chosen.budget else ""
        with steps.step(f"{name}_s", f"timing {name}", left) as progress:
            found[name] = _measure(works[name], turn, time_ms, chosen, progress)
        to_do -= turn.takes_s
    return found, plan.left_out


def _measure(
    workload: Workload, turn: Turn, time_ms: Timer, chosen: BenchOptions, progress: Progress
) -> dict[str, np.ndarray]:
    return measure(
        workload,
        turn.names,
        lambda name, batch: time_ms(workload, name, batch, name not in turn.limits.once),
        turn.seconds,
        progress,
        chosen.margin,
        turn.limits,
    )
