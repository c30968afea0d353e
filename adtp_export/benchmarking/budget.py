"""Plan a run of many contenders within a number of seconds: the most informative first, the slow ones few times, the rest left out by name.

One run of each contender says what it takes. How many rounds follow is fixed by that before any of them, for the reason that
`interleaved_timing.measure` gives.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from .interleaved_timing import CYCLES, PILOT, PILOT_WITHIN, Limits, least_rounds
from .workloads import Workload

SLOW_S = 1.0
"""A contender that takes longer for a batch runs `CYCLES` batches, each once: a warm cache would save it little."""

COMPILING = 200
"""A first run that takes so many times as long as the fastest contender's has compiled something, as `torch.compile` does; a second one
says what a run takes."""

ESTIMATING = 1 / 3
"""The share of the time that may go into estimates."""

OTHER_WORK = 0.9
"""The share of what is left that goes into timing; the rest is for the profile."""


class Budget:
    """Counts from now on; without a limit where `seconds` is 0."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._end = clock, clock() + seconds if seconds else float("inf")

    @property
    def left_s(self) -> float:
        """Return the seconds that are left, 0 at least."""
        return max(0.0, self._end - self._clock())

    def for_next(self, most: float, parts: int) -> float | None:
        """Return the seconds for the next of so many equal parts of what is left, `most` at most; None where nothing is."""
        return min(most, self.left_s / parts) if self.left_s else None


@dataclass(frozen=True)
class LeftOut:
    """A contender that there was no time for. seconds: what it would have taken at least; None where not even one run was tried."""

    workload: str
    contender: str
    seconds: float | None


@dataclass(frozen=True, kw_only=True)
class Turn:
    """What is run on one workload: `names`, with the arguments of `measure`. takes_s: all of it, as estimated."""

    names: tuple[str, ...]
    seconds: float
    limits: Limits
    takes_s: float


@dataclass
class Plan:
    """By the workload's name, what is run on it; and what is left out."""

    turns: dict[str, Turn] = field(default_factory=dict)
    left_out: list[LeftOut] = field(default_factory=list)


def estimate(
    entries: Mapping[str, Sequence[str]],
    workloads: Iterable[Workload],
    time_ms: Callable[[Workload, str], float],
    budget: Budget,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[tuple[str, str], float]:
    """Run every contender once on the first batch of each workload; return seconds by workload and contender.

    A third of the budget at most goes into that, and then the rest is missing. The first two contenders of the first workload are always
    run, for nothing could be told without them.

    Args:
        entries: by the workload's name, its contenders, the most informative first.
        time_ms: runs a contender once on the first batch of a workload and returns its ms.
    """
    works = {workload.name: workload for workload in workloads}
    pairs = _by_rank(entries)
    least_left = (1 - ESTIMATING) * budget.left_s
    always = _always(entries)
    found: dict[tuple[str, str], float] = {}
    for done, (workload, name) in enumerate(pairs, start=1):
        if (workload, name) in always or budget.left_s > least_left:
            found[workload, name] = time_ms(works[workload], name) / 1e3
            known = [cost for (other, _), cost in found.items() if other == workload]
            if found[workload, name] > max(SLOW_S, COMPILING * min(known)) and budget.left_s > least_left:
                found[workload, name] = time_ms(works[workload], name) / 1e3
        progress(done, len(pairs))
    return found


def make_plan(
    entries: Mapping[str, Sequence[str]],
    workloads: Iterable[Workload],
    costs: Mapping[tuple[str, str], float],
    seconds: float,
    budget: Budget,
    within: float | None = None,
) -> Plan:
    """Share what is left of the budget out: each contender's least rounds, by rank, then `seconds` for each workload as far as they go.

    Args:
        costs: seconds of one run by workload and contender, as of `estimate`.
        seconds, within: as of `measure`.
    """
    works = {workload.name: workload for workload in workloads}
    left = OTHER_WORK * budget.left_s
    pilot, always = PILOT if within is None else PILOT_WITHIN, _always(entries)
    chosen: dict[str, dict[str, bool]] = {name: {} for name in entries}  # by contender: whether it runs few times
    spent = dict.fromkeys(entries, 0.0)
    plan = Plan()
    for workload, name in _by_rank(entries):
        cost = costs.get((workload, name))
        if cost is None or (name != entries[workload][0] and not chosen[workload]):  # without the first, no ratios
            plan.left_out.append(LeftOut(workload, name, None if cost is None else round(CYCLES * cost, 1)))
            continue
        # A round that counts follows an untimed one; so do those of the pilot.
        whole, few = 2 * cost * (pilot + least_rounds(works[workload])), CYCLES * cost
        once = cost > SLOW_S or whole > left
        if (takes := few if once else whole) > left and (workload, name) not in always:
            plan.left_out.append(LeftOut(workload, name, round(takes, 1)))
            continue
        chosen[workload][name] = once
        spent[workload] += takes
        left = max(0.0, left - takes)
    running = [name for name in entries if chosen[name]]
    for done, name in enumerate(running):
        rest = left / (len(running) - done)  # what one does not need is for those behind it
        often = [each for each, once in chosen[name].items() if not once]
        least_s = 2 * sum(costs[name, each] for each in often) * least_rounds(works[name])
        most_s = least_s + rest
        more = (rest if within is not None else max(0.0, min(seconds - least_s, rest))) if often else 0.0
        plan.turns[name] = Turn(
            names=tuple(each for each in entries[name] if each in chosen[name]),
            seconds=min(seconds, most_s),
            limits=Limits(frozenset(chosen[name]).difference(often), most_s),
            takes_s=spent[name] + more,
        )
        left -= more
    return plan


def without_limit(entries: Mapping[str, Sequence[str]], seconds: float) -> Plan:
    """Return the plan to run everything; nobody knows how long it takes."""
    return Plan(
        {
            name: Turn(names=tuple(names), seconds=seconds, limits=Limits(), takes_s=0.0)
            for name, names in entries.items()
        }
    )


def _by_rank(entries: Mapping[str, Sequence[str]]) -> list[tuple[str, str]]:
    """Return pairs of a workload and a contender: the first contender on all workloads, then the second."""
    deepest = max(map(len, entries.values()), default=0)
    return [(workload, names[i]) for i in range(deepest) for workload, names in entries.items() if i < len(names)]


def _always(entries: Mapping[str, Sequence[str]]) -> set[tuple[str, str]]:
    """Return what runs however long it takes: the first two contenders on the first workload, since a ratio needs two."""
    return {(workload, name) for workload, names in list(entries.items())[:1] for name in names[:2]}
