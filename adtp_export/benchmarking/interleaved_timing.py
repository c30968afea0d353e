"""Time contenders in turns, so that what slows the machine for a while slows all of them. Nothing here imports PyTorch.

One rule for all: a run is timed right after an untimed one of the same batch. One statistic for all: a contender's time is the median over
*cycles*, times through all batches of a workload, of the mean ms of a batch; a speedup is the quotient of two such times.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from ..data.tokenize import Batch
from ..runtimes import Engine
from .workloads import Workload

MIN_ROUNDS, MAX_ROUNDS = 10, 60
PATIENCE = 10
"""How many times as long, and as many rounds, it may take to know ratios within a margin that is asked for."""

PERCENTILES = (50, 90, 99)
"""Of times in ms, which records have."""

CYCLES, CYCLED = 6, 8
"""Workloads of up to 8 batches are run through at least so many times. Of longer ones, so many parts of a run count as cycles. The extremes
of six values are a 97% confidence interval of their median; those of five would be one of 94%."""

PILOT = 3
"""Rounds that say how long a round takes; `PILOT_WITHIN` where they also say how much ratios vary. They do not count."""
PILOT_WITHIN = 12


def in_this_process(engines: Mapping[str, Engine]) -> Callable[[str, Batch], float]:
    """Return a timer, for `measure`, of engines loaded here."""

    def time_ms(name: str, batch: Batch) -> float:
        engines[name].run(batch)
        began = time.perf_counter()
        engines[name].run(batch)
        return (time.perf_counter() - began) * 1e3

    return time_ms


@dataclass(frozen=True)
class Limits:
    """How long a run may take, or has to. once: contenders that run in the first `CYCLES` rounds alone, and not in the pilot, so that there
    are fewer times of them. most_seconds: what rounds may take where a margin is asked for. cycles: as many times through all batches at
    least, however many there are, and whole ones."""

    once: frozenset[str] = frozenset()
    most_seconds: float = float("inf")
    cycles: int = 0


def measure(
    workload: Workload,
    names: Sequence[str],
    time_ms: Callable[[str, Batch], float],
    seconds: float,
    progress: Callable[[int, int], None] = lambda done, total: None,
    within: float | None = None,
    limits: Limits | None = None,
) -> dict[str, np.ndarray]:
    """Time contenders on the workload's batches in turns; return ms by name, ``(rounds,)``, paired by round.

    Each round takes the next batch and starts with the next contender, so that none always follows the same one. A pilot says
    how many rounds there will be: what fits into `seconds`, but at least 10 (or `CYCLES` times through up to `CYCLED` batches)
    and at most 60 (or one per batch). The number is fixed before any round that counts, because stopping at a narrow margin
    would choose lucky runs.

    Args:
        time_ms: runs a contender on a batch and returns its ms.
        within: as many more rounds, ten times as many at most, as the pilot's spread needs to know the speedup of the first contender over
            each other one within this share of it.
        limits: None sets none.
    """
    limits = limits or Limits()
    often = [name for name in names if name not in limits.once]
    total = _rounds_for(workload, often, time_ms, seconds, within, limits) if often else CYCLES
    times: dict[str, list[float]] = {name: [] for name in names}
    for done, row in enumerate(islice(_rounds(workload, names, time_ms, limits.once), total), start=1):
        for name, ms in row.items():
            times[name].append(ms)
        progress(100 * done // total, 100)
    return {name: np.array(values) for name, values in times.items()}


def _rounds_for(
    workload: Workload,
    names: Sequence[str],
    time_ms: Callable[[str, Batch], float],
    seconds: float,
    within: float | None,
    limits: Limits,
) -> int:
    """Run a pilot; return how many rounds `measure` runs of contenders that are timed in all of them."""
    count = len(workload.batches)
    unit = count if limits.cycles else _unit(workload)
    began = time.perf_counter()
    pilot = _collected(names, islice(_rounds(workload, names, time_ms), PILOT if within is None else PILOT_WITHIN))
    round_s = max((time.perf_counter() - began) / len(pilot[names[0]]), 1e-9)
    least = max(least_rounds(workload), limits.cycles * count)
    rounds = min(max(seconds / round_s, least), max(MAX_ROUNDS, count, least))
    if within is not None:
        rounds = min(max(rounds, _needed(pilot, names, within)), PATIENCE * max(rounds, MAX_ROUNDS))
        rounds = max(least, min(rounds, min(PATIENCE * seconds, limits.most_seconds) / round_s))
    return unit * math.ceil(rounds / unit)


def least_rounds(workload: Workload) -> int:
    """Return how many rounds of a workload `measure` runs at least."""
    return max(MIN_ROUNDS, CYCLES * unit if (unit := _unit(workload)) > 1 else 0)


def _unit(workload: Workload) -> int:
    """Return the number of rounds of which the total is a multiple."""
    count = len(workload.batches)
    return count if count <= CYCLED else 1


def _rounds(
    workload: Workload, names: Sequence[str], time_ms: Callable[[str, Batch], float], once: Collection[str] = ()
) -> Iterator[dict[str, float]]:
    """Yield the ms of all contenders, round by round, without end; those of `once` in the first `CYCLES` rounds alone."""
    i = 0
    while True:
        batch = workload.batches[i % len(workload.batches)]
        first = i % len(names)
        turn = [*names[first:], *names[:first]]
        yield {name: time_ms(name, batch) for name in turn if i < CYCLES or name not in once}
        i += 1


def _collected(names: Sequence[str], rows: Iterator[dict[str, float]]) -> dict[str, np.ndarray]:
    found = list(rows)
    return {name: np.array([row[name] for row in found]) for name in names}


def _needed(pilot: Mapping[str, np.ndarray], names: Sequence[str], within: float) -> float:
    """Return how many rounds it takes to know the ratios of all contenders to the first one, from how much the pilot's vary.

    The spread is that between quartiles, for one run that was interrupted says nothing of the others; the median of n normal values has
    1.25 times the standard error of their mean.
    """
    needed = 0.0
    for name in names[1:]:
        ratios = pilot[name] / pilot[names[0]]
        low, middle, high = np.percentile(ratios, (25, 50, 75))
        needed = max(needed, (1.96 * 1.25 * (high - low) / 1.35 / (within * middle)) ** 2)
    return needed


def by_cycle(ms: np.ndarray, batches: int) -> np.ndarray:
    """Return the mean ms of a batch in each cycle, ``(cycles,)``.

    A cycle is one time through all batches of a workload. Of a workload that was not run through `CYCLES` times, it is one of `CYCLES`
    parts of the run, each of other batches; of fewer rounds, it is a round.
    """
    cycles = len(ms) // batches
    if cycles >= CYCLES:
        return ms[: cycles * batches].reshape(cycles, batches).mean(1)
    return np.array([part.mean() for part in np.array_split(ms, min(CYCLES, len(ms)))])


def cycles_of(name: str, times: Mapping[str, np.ndarray], batches: int) -> np.ndarray:
    """Return the mean ms of a batch in each cycle of one contender of several, ``(cycles,)``, as of `by_cycle`.

    Who ran few batches was perhaps given the shorter ones. Each of its times is therefore scaled from its batch to the mean batch, by
    what the first contender that ran more took for both.
    """
    ms = times[name]
    others = [other for other in times.values() if len(other) > len(ms)]
    if not others or batches == 1:
        return by_cycle(ms, batches)
    return ms / others[0][: len(ms)] * float(np.median(by_cycle(others[0], batches)))


def interval(values: np.ndarray) -> tuple[float, float]:
    """Return a confidence interval of at least 95% of the median of ``values (n,)``, from their order alone.

    Raises:
        ValueError: there are fewer than six values, and even their extremes are no such interval.
    """
    ordered, n = np.sort(values), len(values)
    if n < CYCLES:
        raise ValueError(f"got {n} values; a 95% interval of their median takes at least {CYCLES}")
    outside, below = 0, 0.0  # the chance that as many values or fewer lie below the median
    while (below := below + math.comb(n, outside) / 2**n) <= 0.025:
        outside += 1
    return float(ordered[outside - 1]), float(ordered[n - outside])


def speedup(slower: np.ndarray, faster: np.ndarray) -> tuple[float, float]:
    """Return the quotient of two medians, of ``(n,)`` paired times, and its margin.

    The margin reaches from the quotient to both ends of the 95% interval of the median of paired ratios.
    """
    found = float(np.median(slower) / np.median(faster))
    low, high = interval(slower / faster)
    return found, max(high - found, found - low)


def speedup_of_sums(slower: np.ndarray, faster: np.ndarray) -> tuple[float, float]:
    """Return the quotient of two sums, of ``(n,)`` paired times of perhaps unequal batches, and its margin.

    The margin reaches to both ends of the 95% interval of the median of paired ratios. From six values that is their whole range, in which
    the quotient of sums always lies. A bootstrap of six pairs would be narrower, and cover less than 95%.
    """
    found = float(slower.sum() / faster.sum())
    low, high = interval(slower / faster)
    return found, max(high - found, found - low)
