"""What is compared with what: which trials go on, which are exported, and what the confirmation proves. Plain arithmetic."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...benchmarking.paired import means_at_most

ALPHA = 0.05
KEPT = 1 / 3
"""Of the arms of a level, how many go on to more rows, rounded up."""
PROVEN, LIKELY, NEAREST = "proven", "likely", "nearest"


def standard_error(values: np.ndarray, groups: np.ndarray) -> float:
    """Return the standard error of the mean of ``values (rows,)`` that are drawn in groups: of groups of one row, the usual one."""
    sums = np.bincount(groups, weights=values - values.mean())
    return float(np.sqrt(np.square(sums).sum()) / len(values))


def going_on(
    losses: Sequence[np.ndarray], groups: np.ndarray, scores: Sequence[np.ndarray], score_groups: np.ndarray
) -> list[int]:
    """Return which arms of a level go on: the best third by mean loss, and the next one if it is within one paired error of the last.

    So does the arm of the best mean score, if it is ahead of these by more than one paired error: tokens that were dropped early may be
    answered right by logits that are far from the teacher's.

    Args:
        losses, scores: of each arm ``(rows,)``, of the same rows; those of losses may be windows.
    """
    if not losses:
        return []
    order = sorted(range(len(losses)), key=lambda arm: (losses[arm].mean(), arm))
    count = math.ceil(KEPT * len(losses))
    if count < len(order):
        apart = losses[order[count]] - losses[order[count - 1]]
        count += apart.mean() <= standard_error(apart, groups)
    best, kept = (max(arms, key=lambda arm: scores[arm].mean()) for arms in (order, order[:count]))
    ahead = scores[best] - scores[kept]
    return [*order[:count], *([best] if ahead.mean() > standard_error(ahead, score_groups) else [])]


@dataclass(frozen=True, kw_only=True)
class Confirmed:
    """What the confirmation rows say of a candidate, in points below the teacher.

    drop: the mean. bound: one-sided, at the level that Holm's correction gives the candidate. proven: the bound is within what may be
    lost; the chance that any candidate is called proven wrongly is 5% at most.
    """

    drop: float
    bound: float
    proven: bool


def confirm(drops: Sequence[np.ndarray], groups: np.ndarray, most: float | None) -> list[Confirmed]:
    """Bound what candidates lose, the surest first: each that is proven leaves more of the 5% to the others.

    Args:
        drops: of each candidate, the teacher's score minus its own, ``(rows,)``, from 0 to 1.
        groups: ``(rows,)``, of rows that were drawn together.
        most: points that may be lost; None: nothing is to be proven, and the bounds hold for all candidates together.
    """
    limit = -math.inf if most is None else most
    drawn = [100 * means_at_most(drop, groups) for drop in drops]
    found: dict[int, Confirmed] = {}
    unproven = len(drops)
    for i in sorted(range(len(drops)), key=lambda i: (drawn[i] > limit).mean()):
        # Of the draws, not between them: so a candidate after one that is not proven is not proven either.
        bound = float(np.quantile(drawn[i], 1 - ALPHA / unproven, method="higher"))
        found[i] = Confirmed(drop=100 * float(drops[i].mean()), bound=bound, proven=bound <= limit)
        unproven -= found[i].proven
    return [found[i] for i in range(len(drops))]


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """An export in one precision. drop: of its own answers on dev, in points. speedup and margin: measured, over the model in fp32."""

    name: str
    precision: str
    speedup: float
    margin: float
    drop: float
    confirmed: Confirmed


def meets(candidate: Candidate, most: float | None, speedup: float | None) -> str | None:
    """Say how sure it is that a candidate meets the goal: `PROVEN`, `LIKELY`, or None. One that is no faster than the model does not.

    Args:
        most: points that may be lost, or None. speedup: that is asked for, or None.
    """
    if not is_faster(candidate):
        return None
    if most is not None:
        proven, likely = candidate.confirmed.proven, candidate.confirmed.drop <= most
    else:
        assert speedup is not None
        proven, likely = candidate.speedup - candidate.margin >= speedup, candidate.speedup >= speedup
    return PROVEN if proven else LIKELY if likely else None


def is_faster(candidate: Candidate) -> bool:
    """Say whether a candidate is faster than the model, beyond the margin."""
    return candidate.speedup - candidate.margin > 1


def choose(
    candidates: Sequence[Candidate], most: float | None, speedup: float | None, strict: bool
) -> tuple[Candidate | None, str]:
    """Return the candidate to publish and how sure it is: `PROVEN` or `LIKELY`; or the `NEAREST` one, which is not to be published.

    A candidate that is no faster than the model is none. A drop that is only likely is as good as a proven one, unless `strict`: the
    model in INT8 is nearly always proven, and would keep every student from being chosen.

    Args:
        most: points that may be lost, or None. speedup: that is asked for, or None.
        strict: only what is proven is published.
    """
    rated = [(each, sure) for each in candidates if (sure := meets(each, most, speedup)) is not None]
    if most is not None:
        best, far = (lambda each: -each.speedup), (lambda each: each.confirmed.drop)
        accepted = [(PROVEN,)] if strict else [(PROVEN, LIKELY)]
    else:
        # By dev, because the confirmation rows are to choose nothing.
        best, far = (lambda each: each.drop), (lambda each: -each.speedup)
        accepted = [(PROVEN,)] if strict else [(PROVEN,), (LIKELY,)]
    for kinds in accepted:
        if found := [(each, rate) for each, rate in rated if rate in kinds]:
            return min(found, key=lambda each: best(each[0]))
    faster = [each for each in candidates if is_faster(each)]
    return (min(faster, key=far) if faster else None), NEAREST
