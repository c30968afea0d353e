"""Time contenders in turns, so that what slows the machine for a while slows all of them. Nothing here imports PyTorch."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from ..data.tokenize import Batch
from ..runtimes import Engine
from .workloads import Workload

WARM_UP, MIN_ROUNDS, MAX_ROUNDS = 3, 10, 60
PATIENCE = 10
"""How many times as long, and as many rounds, it may take to know ratios within a margin that is asked for."""

PERCENTILES = (50, 90, 99)
"""Of times in ms, which records have."""

CYCLES, CYCLED = 3, 8
"""Workloads of up to 8 batches are run through at least so many times; ratios are then those of whole cycles."""


def in_this_process(engines: Mapping[str, Engine]) -> Callable[[str, Batch], float]:
    """Return a timer, for `measure`, of engines loaded here."""

    def time_ms(name: str, batch: Batch) -> float:
        began = time.perf_counter()
        engines[name].run(batch)
        return (time.perf_counter() - began) * 1e3

    return time_ms


def measure(
    workload: Workload,
    names: Sequence[str],
    time_ms: Callable[[str, Batch], float],
    seconds: float,
    progress: Callable[[int, int], None] = lambda done, total: None,
    within: float | None = None,
) -> dict[str, np.ndarray]:
    """Time contenders on the workload's batches in turns; return ms by name, ``(rounds,)``, paired by round.

    Rounds go on for about `seconds`, but for at least 10 (or `CYCLES` times through up to `CYCLED` batches) and at most 60 (or one
    per batch). Each round takes the next batch and starts with the next contender, so that none always follows the same one.

    Args:
        time_ms: runs a contender on a batch and returns its ms.
        within: go on, ten times as long at most, until the speedup of the first contender over each other one is known within
            this share of it.
    """
    times: dict[str, list[float]] = {name: [] for name in names}
    count = len(workload.batches)
    least = max(MIN_ROUNDS, CYCLES * count if count <= CYCLED else 0)
    most = max(MAX_ROUNDS, len(workload.batches)) * (1 if within is None else PATIENCE)
    for batch in workload.batches[:WARM_UP]:
        for name in names:
            for _ in range(max(1, WARM_UP // len(workload.batches))):
                time_ms(name, batch)
    began = time.perf_counter()
    for i in range(most):
        batch = workload.batches[i % len(workload.batches)]
        for name in [*names[i % len(names) :], *names[: i % len(names)]]:
            times[name].append(time_ms(name, batch))
        elapsed = time.perf_counter() - began
        progress(int(100 * max(min(1.0, elapsed / max(seconds, 1e-9)), (i + 1) / most)), 100)
        if i + 1 >= least and elapsed > seconds and (elapsed > PATIENCE * seconds or _known(times, within, count)):
            break
    return {name: np.array(values) for name, values in times.items()}


def _known(times: Mapping[str, list[float]], within: float | None, batches: int) -> bool:
    """Say whether the ratios of all contenders to the first one have margins within that share of them."""
    if within is None:
        return True
    first, *others = (by_cycle(np.array(values), batches) for values in times.values())
    return all(margin(other / first) <= within * float(np.median(other / first)) for other in others)


def by_cycle(ms: np.ndarray, batches: int) -> np.ndarray:
    """Return the mean ms of each time through all batches of a workload, ``(cycles,)``, for ratios differ between batches.

    Where there are too few whole cycles, it is the ms of each round, ``(rounds,)``.
    """
    cycles = len(ms) // batches
    return ms[: cycles * batches].reshape(cycles, batches).mean(1) if cycles >= CYCLES else ms


def margin(values: np.ndarray) -> float:
    """Return half the width of the 95% confidence interval of the median of ``values (n,)``, from their order alone."""
    ordered, n = np.sort(values), len(values)
    reach = 0.98 * n**0.5  # 1.96 standard deviations of how many of n values lie below the median
    low, high = max(0, int(n / 2 - reach)), min(n - 1, int(np.ceil(n / 2 + reach)) - 1)
    return float(ordered[high] - ordered[low]) / 2
