"""How many points of quality a lower precision costs, and how sure that is.

The loss is a difference of two measures on the same texts. Texts are few, so it has a margin: t times its standard error, by
leaving out one of at most 20 groups of texts at a time (the jackknife of Quenouille and Tukey), with Student's t at 95%,
one-sided. Where nothing was lost in n texts, up to 3 / n may still be (the rule of three), so a margin is never smaller.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import stdtrit

from .metrics import Outputs, TaskMetric

GROUPS = 20
"""Of texts, of which one at a time is left out, at most."""
NOTHING_LOST = 300
"""Points that may be lost, divided by the texts of which none lost anything."""


@dataclass(frozen=True)
class Loss:
    """Percentage points lost, see `TaskMetric.points_lost`; t times the standard error of that; and the texts that both rest on."""

    points: float
    spread: float
    texts: int

    @property
    def margin(self) -> float:
        """Of the points, one-sided 95%."""
        return max(self.spread, NOTHING_LOST / self.texts)

    def exceeds(self, limit: float) -> bool:
        """Say whether these texts show that more than `limit` points are lost."""
        return self.points - self.margin > limit

    def holds(self, limit: float) -> bool:
        """Say whether these texts show that no more than `limit` points are lost."""
        return self.points + self.margin <= limit

    def texts_for(self, limit: float) -> int | None:
        """Return how many texts it takes to show that no more than `limit` points are lost, if more of them lose as many, and the spread
        falls with their square root; None where no number can."""
        if not limit or self.points >= limit:
            return None
        room = limit - max(self.points, 0)
        return max(math.ceil(NOTHING_LOST / room), math.ceil(self.texts * (self.spread / room) ** 2))


def lost(metric: TaskMetric, before: Sequence[Outputs], after: Sequence[Outputs]) -> Loss:
    """Compare answers, row by row, with those of the oracle: `before`."""
    owners = metric.owners_of(len(before))
    texts = int(owners.max()) + 1
    points = _points(metric, before, after)
    groups = min(GROUPS, texts)
    if groups < 2:  # one text has no error, and shows nothing: 300 points are more than any measure loses
        return Loss(points, 0.0, texts)
    without = []
    for group in range(groups):
        stays = np.arange(texts) % groups != group
        rows = np.flatnonzero(stays[owners]).tolist()
        without.append(_points(metric.part(stays), [before[i] for i in rows], [after[i] for i in rows]))
    error = math.sqrt((groups - 1) / groups * float(np.square(np.subtract(without, np.mean(without))).sum()))
    return Loss(points, float(stdtrit(groups - 1, 0.95)) * error, texts)


def _points(metric: TaskMetric, before: Sequence[Outputs], after: Sequence[Outputs]) -> float:
    return metric.points_lost(metric.quality(before), metric.quality(after), metric.agreement_with(after, before))
