"""From the activations of calibration data to one range: a streaming histogram, and four ways to read it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from ..errors import InputError, did_you_mean, quoted

BINS = 4096
"""Of a histogram at its finest: entropy compares it with 128 levels, so each level has 32."""

CANDIDATES = 200
"""Ranges that `mse` and `entropy` choose from, evenly spaced up to the largest value seen."""


class Histogram:
    """Magnitudes of a tensor seen part by part, in `BINS` bins from 0 to a power of two.

    Where a larger value comes, neighbouring bins are joined until it fits. Bins of all histograms lie on the same dyadic
    grid, so the order and the size of the parts change nothing. `channels (K,)` is the largest magnitude in each channel, the
    last axis.
    """

    def __init__(self) -> None:
        self.counts = np.zeros(BINS, np.int64)
        self.limit = 2.0**-24
        self.low, self.high = np.inf, -np.inf
        self.channels = np.zeros(1, np.float32)

    def add(self, values: Tensor) -> None:
        """Count the elements of a floating tensor ``(..., K)``.

        Raises:
            InputError: a value is not finite.
        """
        if not values.numel():
            return
        values = values.detach().float()
        low, high = (float(v) for v in torch.aminmax(values))
        if not np.isfinite([low, high]).all():
            raise InputError("the student's activations are not finite; is the checkpoint sound?")
        self.low, self.high = min(self.low, low), max(self.high, high)
        while self.largest >= self.limit:
            self.counts = np.concatenate([self.counts.reshape(-1, 2).sum(1), np.zeros(BINS // 2, np.int64)])
            self.limit *= 2
        self.channels = np.maximum(self.channels, values.abs().flatten(0, -2).amax(0).numpy())
        bins = (values.abs().flatten() * (BINS / self.limit)).long()  # exact: both are powers of two
        self.counts += torch.bincount(bins, minlength=BINS).numpy()

    @property
    def largest(self) -> float:
        """Largest magnitude."""
        return max(abs(self.low), abs(self.high))

    @property
    def edges(self) -> np.ndarray:
        """Upper edges of the bins, ``(BINS,)``."""
        return np.arange(1, BINS + 1) * (self.limit / BINS)


Observer = Callable[[Histogram, np.ndarray], float]
"""Takes a histogram and the magnitudes that the format can hold, ascending from 0 to 1; returns the range's end."""


def minmax(seen: Histogram, levels: np.ndarray) -> float:
    """Nothing is clipped."""
    return seen.largest


def percentile(share: float) -> Observer:
    """The smallest range that holds `share` percent of all values."""

    def observe(seen: Histogram, levels: np.ndarray) -> float:
        inside = np.cumsum(seen.counts)
        return min(seen.largest, float(seen.edges[np.searchsorted(inside, share / 100 * inside[-1])]))

    return observe


def mse(seen: Histogram, levels: np.ndarray) -> float:
    """The range with the least squared error of rounding and clipping together."""
    centers = seen.edges - seen.limit / BINS / 2
    middles = (levels[1:] + levels[:-1]) / 2

    def error(end: float) -> float:
        rounded = levels[np.searchsorted(middles, np.minimum(centers / end, 1))] * end
        return float((seen.counts * (rounded - centers) ** 2).sum())

    return min(_candidates(seen), key=error)


def entropy(seen: Histogram, levels: np.ndarray) -> float:
    """The range whose levels lose the least information (Kullback-Leibler divergence, as TensorRT calibrated).

    Source: Migacz, 8-bit inference with TensorRT (GTC 2017).
    """
    middles = (levels[1:] + levels[:-1]) / 2

    def divergence(end: float) -> float:
        width = max(1, int(np.ceil(end / seen.limit * BINS)))
        counts = seen.counts[:width].astype(np.float64)
        clipped = counts.copy()
        clipped[-1] += seen.counts[width:].sum()
        level = np.searchsorted(middles, (np.arange(width) + 0.5) / width)
        used = counts > 0
        share = np.bincount(level, counts, len(levels)) / np.maximum(np.bincount(level, used, len(levels)), 1)
        p, q = clipped, np.where(used, share[level], 0.0)
        p, q = p / p.sum(), q / max(q.sum(), 1.0)
        both = (p > 0) & (q > 0)
        lost = p[(p > 0) & ~both].sum()  # what is clipped into an empty bin, at the cost of a factor of e^9
        return float((p[both] * np.log(p[both] / q[both])).sum() + 9.0 * lost)

    return min(_candidates(seen), key=divergence)


def _candidates(seen: Histogram) -> list[float]:
    """Range ends, the largest first: of equally good ones that clips least."""
    return [seen.largest * i / CANDIDATES for i in range(CANDIDATES, CANDIDATES // 20, -1)]


def observer(text: str) -> Observer:
    """Return an observer by name: ``minmax``, ``mse``, ``entropy``, ``percentile:99.99``.

    Raises:
        InputError: an unknown name, or a percentile outside (0, 100].
    """
    name, _, share = text.partition(":")
    known: dict[str, Observer] = {"minmax": minmax, "mse": mse, "entropy": entropy}
    if name in known and not share:
        return known[name]
    try:
        if name == "percentile" and 0 < float(share) <= 100:
            return percentile(float(share))
    except ValueError:
        pass
    raise InputError(
        f"observer: got {quoted(text)}; accepted are minmax, mse, entropy and percentile:P with P up to 100"
        f"{did_you_mean(name, [*known, 'percentile:99.99'])}"
    )
