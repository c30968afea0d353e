"""How far two models are apart on the same rows, and how sure that is.

Rows are drawn in groups, because phrases of one sentence are right or wrong together, and training is repeated with other seeds. So
groups and seeds are drawn anew, each with replacement and independently of the other. `scipy.stats.bootstrap` draws along one axis alone.

Source: Owen, The pigeonhole bootstrap, Annals of Applied Statistics 2007, which shows that this errs towards wide intervals where both
matter; with one or few seeds it cannot see how far seeds lie apart. Holm, Scandinavian Journal of Statistics 1979. Gaffke, Three test
statistics for a nonparametric one-sided hypothesis on the mean of a nonnegative variable, Mathematical Methods of Statistics 2005.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

DRAWS, TOGETHER = 10_000, 500
"""How often seeds and groups are drawn, and how often at a time."""
LOW, HIGH = 0.025, 0.975
KEPT_GROUPS = 5000
"""Draws of up to so many groups are kept for later comparisons, ten times 50 MB at most: drawing takes nearly all of the time."""

Draws = tuple[np.ndarray, np.ndarray]
"""How often each seed and each group is drawn: ``(TOGETHER, seeds)`` and ``(TOGETHER, groups)``."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Of mean scores: the first model's minus the second's.

    mean: over seeds and rows. low, high: its 95% interval. p: two-sided, of no difference. seeds, rows, groups: what it rests on.
    """

    mean: float
    low: float
    high: float
    p: float
    seeds: int
    rows: int
    groups: int


def difference(first: np.ndarray, second: np.ndarray, groups: Sequence[int] | np.ndarray) -> Difference:
    """Compare two models by a score of each row, such as 1 where the answer is right.

    Args:
        first, second: ``(seeds, rows)``, or ``(rows,)`` for one seed; row by row, and seed by seed, of the same.
        groups: ``(rows,)`` numbers from 0 of the group of each row, as `data.overlaps.overlapping` gives them.

    Raises:
        ValueError: shapes differ, or there are no rows.
    """
    first, second, groups = (np.atleast_2d(first), np.atleast_2d(second), np.asarray(groups))
    if first.shape != second.shape or groups.shape != first.shape[1:] or not first.size:
        raise ValueError(f"scores {first.shape} and {second.shape}, groups {groups.shape}: need equal rows and seeds")
    seeds, rows = first.shape
    apart = first - second.astype(float)
    drawn = means_drawn(apart, groups)
    low, high = np.quantile(drawn, (LOW, HIGH))
    beyond = min((drawn <= 0).sum(), (drawn >= 0).sum())
    return Difference(
        mean=float(apart.mean()),
        low=float(low),
        high=float(high),
        p=float(min(1.0, 2 * (1 + beyond) / (1 + len(drawn)))),
        seeds=seeds,
        rows=rows,
        groups=int(groups.max()) + 1,
    )


def means_drawn(apart: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Return the mean of ``apart (seeds, rows)`` for each time that seeds and groups are drawn, ``(DRAWS,)``; always the same draws."""
    seeds, sizes = len(apart), np.bincount(groups).astype(np.float64)
    sums = np.stack([np.bincount(groups, weights=row, minlength=len(sizes)) for row in apart])
    draws = _kept_draws if len(sizes) <= KEPT_GROUPS else _draws
    drawn: Iterable[Draws] = draws(seeds, len(sizes), DRAWS // TOGETHER)
    means = []
    for of_seeds, drawn_groups in drawn:
        of_groups = drawn_groups.astype(np.float64)
        means.append(((of_seeds @ sums) * of_groups).sum(1) / (seeds * (of_groups @ sizes)))
    return np.concatenate(means)


def _draws(seeds: int, groups: int, times: int) -> Iterator[Draws]:
    draw = np.random.default_rng(0)
    for _ in range(times):
        of_seeds = draw.multinomial(seeds, np.full(seeds, 1 / seeds), TOGETHER)
        of_groups = draw.multinomial(groups, np.full(groups, 1 / groups), TOGETHER)
        yield of_seeds, of_groups


@functools.lru_cache(maxsize=10)
def _kept_draws(seeds: int, groups: int, times: int) -> tuple[Draws, ...]:
    """On average a group is drawn once, so a byte holds how often."""
    return tuple((s, g.astype(np.int8)) for s, g in _draws(seeds, groups, times))


def means_at_most(values: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Return means of ``values (rows,)`` whose quantiles bound the true mean from above, ``(DRAWS,)``; always the same draws.

    Groups are weighted at random, beside one more whose rows all have the largest value that there can be (Gaffke). So the bounds hold
    where rows are few or losses rare: if none of n rows lost anything, 95% of the draws lie below 3 / n. Quantiles of a bootstrap would
    all be 0. That group is as large as the group of a row that is drawn at random. With one of mean size, a bound of 95% failed in up to a
    third of simulated cases in which some groups were twenty times as large as others and were lost whole.

    Args:
        values: of each row, up to 1.
    """
    sizes = np.bincount(groups).astype(np.float64)
    more = np.square(sizes).sum() / sizes.sum()
    sums = np.append(np.bincount(groups, weights=values), more)
    sizes = np.append(sizes, more)
    draw = np.random.default_rng(0)
    means = []
    for _ in range(DRAWS // TOGETHER):
        weights = draw.standard_exponential((TOGETHER, len(sizes)))
        means.append((weights @ sums) / (weights @ sizes))
    return np.concatenate(means)


def holm(p: Sequence[float]) -> list[float]:
    """Adjust p-values for how many there are, in their order: those below 5% are all true with a probability of 95%."""
    adjusted, largest = [0.0] * len(p), 0.0
    for place, number in enumerate(sorted(range(len(p)), key=lambda number: p[number])):
        largest = max(largest, min(1.0, (len(p) - place) * p[number]))
        adjusted[number] = largest
    return adjusted
