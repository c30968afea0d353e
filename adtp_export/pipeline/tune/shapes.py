"""Shapes of students, how long each takes by the table of times, and which of them are worth training.

A time depends on a shape and not on weights, so untrained exports are timed first, and retentions follow from the times.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np

from ...contract import HEAD_SEQUENCE
from .options import FP32

RETENTIONS = (0.6, 0.4, 0.25, 0.12)
"""Retentions that are timed, descending. No student keeps less than the last one."""
LEVELS = (2 / 3, 1 / 2, 1 / 3)
"""Shares of the layers: the time of a dense student of so many is a level, at which all kinds of shapes are compared."""
AHEAD = 1.04
"""How much faster than asked a shape should be by the table, because its own times will differ by some percent."""
ROUNDED = 1 + 1e-9
"""What quotients of times may be off by, so that a shape is as fast as itself."""


@dataclass(frozen=True)
class Arm:
    """A shape. site: where tokens are dropped, "" where none are. retention: the share that stays there; 1 without a site."""

    layers: int
    site: str = ""
    retention: float = 1.0

    @property
    def settings(self) -> dict[str, Any]:
        """What `training.settings.TrainOptions` says of a student of this shape."""
        kind: dict[str, Any] = {"method": "layers", "retention": None, "ratio": "adaptive"}
        if self.site:
            kind = {"method": "adtp", "retention": f"{self.retention:g}", "ratio": "static"}
        return {**kind, "layers": self.layers, "prune_sites": self.site}

    def __str__(self) -> str:
        layers = f"{self.layers} layer{'s' * (self.layers > 1)}"
        return f"{layers}, {self.retention:.1%} of the tokens from {self.site} on" if self.site else layers


class Level(NamedTuple):
    """Shapes of one speed, which are compared with each other."""

    speedup: float
    arms: tuple[Arm, ...]


def site_of(head: str, layers: int) -> str:
    """Return where students cut: at once where the first token answers, in the middle where each token or each place does."""
    return "0.ffn" if head == HEAD_SEQUENCE else f"{max(1, layers // 2)}.attention"


def depths(layers: int) -> list[int]:
    """Return the numbers of layers that students have, descending: all, and those of `LEVELS`. With one layer nothing is cut."""
    return sorted({layers, *(max(1, round(share * layers)) for share in LEVELS)}, reverse=True)


@dataclass(frozen=True)
class Time:
    """Of one export: the median of a batch, in ms."""

    arm: Arm
    precision: str
    ms: float


class Table:
    """Times of untrained exports.

    Args:
        times: of dense students of some depths, and of those that cut at some retentions; in fp32 and perhaps other precisions.
    """

    def __init__(self, times: Iterable[Time]) -> None:
        self.times = tuple(times)
        self.layers = max(time.arm.layers for time in self.times)

    @property
    def dense(self) -> Arm:
        """The model itself."""
        return Arm(self.layers)

    @property
    def cuts(self) -> dict[int, str]:
        """The site of each depth at which students cut."""
        return {time.arm.layers: time.arm.site for time in self.times if time.arm.site}

    def _curve(self, layers: int, precision: str) -> tuple[list[float], list[float]]:
        """Return retentions, ascending, and ms of a depth. Noise may turn neighbours around, and more tokens never take less time."""
        points = sorted(
            (time.arm.retention, time.ms)
            for time in self.times
            if (time.arm.layers, time.precision) == (layers, precision)
        )
        return [at for at, _ in points], np.maximum.accumulate([ms for _, ms in points]).tolist()

    def ms(self, arm: Arm, precision: str) -> float:
        """Return the time of a shape; between retentions that were timed it is interpolated."""
        return float(np.interp(arm.retention, *self._curve(arm.layers, precision)))

    def speedup(self, arm: Arm, precision: str) -> float:
        """Return how many times as fast as the model in fp32."""
        return self.ms(self.dense, FP32) / self.ms(arm, precision)

    def fastest(self, arm: Arm, precisions: Sequence[str]) -> float:
        """Return the speedup in the fastest precision."""
        return max(self.speedup(arm, precision) for precision in precisions)

    def shape_for(self, layers: int, speedup: float, precisions: Sequence[str]) -> Arm | None:
        """Return the shape of a depth that keeps most tokens at a speed; None where the smallest retention is slower."""
        ms = self.ms(self.dense, FP32) / speedup * ROUNDED
        shares = []
        for precision in precisions:
            at, times = self._curve(layers, precision)
            if times[0] <= ms:
                shares.append(float(np.interp(ms, times, at)))
        if not shares:
            return None
        if (share := round(max(shares), 3)) >= 1:
            return Arm(layers)
        return Arm(layers, self.cuts[layers], share)

    def to_json(self) -> list[dict[str, Any]]:
        return [{**asdict(time.arm), "precision": time.precision, "ms": time.ms} for time in self.times]

    @classmethod
    def of(cls, rows: Iterable[dict[str, Any]]) -> Table:
        return cls(
            Time(Arm(row["layers"], row["site"], row["retention"]), row["precision"], float(row["ms"])) for row in rows
        )


def levels(table: Table, speedup: float | None, precisions: Sequence[str]) -> list[Level]:
    """Return what is to be tried, the slowest level first.

    Args:
        speedup: the one that is asked for; None: the levels are the speeds of fewer layers.

    Returns:
        No level where no shape is so fast.
    """
    asked = [table.fastest(Arm(layers), precisions) for layers in depths(table.layers)[1:]]
    if speedup is not None:
        most = fastest_of(table, precisions)[1]
        asked = [min(speedup * AHEAD, most)] if speedup <= most else []
    found = list[Level]()
    seen = {table.dense}  # times are noisy: one student may be the best of two speeds, and races at one
    for each in sorted(asked):
        made = [table.shape_for(layers, each, precisions) for layers in depths(table.layers)]
        arms = _without_shallower([arm for arm in dict.fromkeys(made) if arm is not None and arm not in seen])
        seen.update(arms)
        if arms:
            found.append(Level(each, arms))
    return found


def _without_shallower(arms: Sequence[Arm]) -> tuple[Arm, ...]:
    """Leave out whole students with fewer layers than another whole one: they are faster than asked, and no better."""
    whole = [arm.layers for arm in arms if not arm.site]
    return tuple(arm for arm in arms if arm.site or arm.layers == max(whole))


def fastest_of(table: Table, precisions: Sequence[str]) -> tuple[Arm, float]:
    """Return the fastest shape of the table, and its speedup."""
    arm = max((time.arm for time in table.times), key=lambda arm: table.fastest(arm, precisions))
    return arm, table.fastest(arm, precisions)
