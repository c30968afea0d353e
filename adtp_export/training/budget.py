"""The budget of a student: the share of FLOPs that it is to take, and how much it may keep for that."""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from ..errors import InputError, quoted
from ..model.flops import Shape, row_flops
from ..model.selection import PERMILLE, kept_count
from .method_table import METHODS
from .settings import FLOPS, TrainOptions

LEAST_LEFT = 4
"""Tokens that a budget has to leave to a text in the mean, with [CLS] and [SEP]: below, students answer by chance."""


def flops_share(shape: Shape, alive: Sequence[Any], sites: Sequence[str]) -> Any:
    """Return the FLOPs of the encoder with cuts over those without, both packed.

    Args:
        alive: ``(rows,)`` tokens before the first and after each site, in fp64: arrays, or tensors, whose gradients pass through.
    """
    return row_flops(shape, alive, sites).sum() / row_flops(shape, alive[:1]).sum()


def meeting(
    flops: float,
    shape: Shape,
    sites: Sequence[str],
    lengths: Sequence[int],
    keep: Callable[[int, np.ndarray], list],
    earlier: Sequence[str] = (),
) -> int:
    """Return the largest q in 1/1000 with which the FLOPs are met.

    Args:
        flops: the share wanted.
        lengths: of the texts.
        keep: takes q and the lengths ``(rows,)``, and returns the tokens after each site; they grow with q.
        earlier: sites that a message may advise.

    Raises:
        InputError: even with q = 1 more FLOPs are left.
    """
    whole = np.asarray(lengths)

    def share(q: int) -> float:
        return float(flops_share(shape, [count.astype(np.float64) for count in (whole, *keep(q, whole))], sites))

    if (least := share(1)) > flops:
        instead = f", or earlier sites as --prune-sites, from {earlier[0]} on" if earlier else ""
        enough = math.ceil(1000 * least) / 1000
        raise InputError(
            f"--flops: got {flops:g}; cuts at {', '.join(sites) or 'no site'} leave at least {enough:.3f} of the FLOPs. Give more{instead}"
        )
    return bisect.bisect_right(range(PERMILLE + 1), flops, lo=1, key=share) - 1


def check_tokens_left(settings: TrainOptions, flops: float, shape: Shape, lengths: Sequence[int]) -> None:
    """See that a budget leaves texts enough tokens, at best: where the first site drops all that are dropped.

    Args:
        shape: of the student's encoder. lengths: of the dev rows.

    Raises:
        InputError: it leaves fewer than `LEAST_LEFT` in the mean.
    """
    whole = np.asarray(lengths)

    def keep(q: int, alive: np.ndarray) -> list[np.ndarray]:
        return [kept_count(torch.from_numpy(alive), q, 1).numpy()]

    def left(site: str) -> float:
        return float(keep(meeting(flops, shape, [site], lengths, keep), whole)[0].mean())

    first = settings.sites[0]
    if whole.mean() <= LEAST_LEFT or (found := left(first)) >= LEAST_LEFT:
        return
    able = [site for site in _earlier(settings, shape) if left(site) >= LEAST_LEFT]
    instead = f", or an earlier site as --prune-sites: {', '.join(able)}" if able else ""
    enough = bisect.bisect_left(range(PERMILLE), LEAST_LEFT, lo=1, key=lambda q: keep(q, whole)[0].mean())
    alive = [count.astype(np.float64) for count in (whole, *keep(enough, whole))]
    least = math.ceil(100 * float(flops_share(shape, alive, [first]))) / 100
    raise InputError(
        f"--flops: got {flops:g}; with a first cut at {first} it leaves {found:.1f} of {whole.mean():.1f} tokens to all layers after it, "
        f"and accepted are at least {LEAST_LEFT}. Give {least:g} or more{instead}"
    )


def _earlier(settings: TrainOptions, shape: Shape) -> list[str]:
    """Return the sites at which a method cuts by default, as far as they come before all that are asked for."""
    order = [f"{layer}.{sublayer}" for layer in range(shape.layers) for sublayer in ("attention", "ffn")]
    known = METHODS[settings.method].sites(shape.layers)
    return [site for site in order[: min(map(order.index, settings.sites), default=0)] if site in known]


def with_budget(settings: TrainOptions, shape: Shape, lengths: Sequence[int]) -> TrainOptions:
    """Resolve what a student may keep: its share of FLOPs, or the retention at each site that follows from it.

    Methods that keep a given share of the tokens keep the same one at each site. Adaptive students choose around it, and texts of
    different lengths count differently, so their FLOPs are met roughly.

    Args:
        shape: of the student's encoder. lengths: of the dev rows.

    Raises:
        InputError: the cuts cannot save so much, or only with too few tokens left, or a retention is given that does not follow.
    """
    if not METHODS[settings.method].cuts:
        return settings
    given = METHODS[settings.method].settings
    if settings.flops is None and "retention" in given and (settings.retention or settings.method != "schedule"):
        return settings
    flops, sites, earlier = settings.flops or FLOPS, settings.sites, _earlier(settings, shape)
    if "retention" not in given:
        if not sites:
            raise InputError(f"--prune-sites: got none; --method {settings.method} needs at least one, such as 0.ffn")
        meeting(flops, shape, sites, lengths, lambda q, n: [np.ones_like(n)] * len(sites), earlier)
        check_tokens_left(settings, flops, shape, lengths)
        return dataclasses.replace(settings, flops=flops)

    def keep(q: int, alive: np.ndarray) -> list[np.ndarray]:
        counts = [torch.from_numpy(alive)]
        for _ in sites:
            counts.append(kept_count(counts[-1], q, settings.min_tokens))
        return [count.numpy() for count in counts[1:]]

    retention = f"{meeting(flops, shape, sites, lengths, keep, earlier) / PERMILLE:g}"
    if sites:
        check_tokens_left(settings, flops, shape, lengths)
    if settings.retention not in (None, retention):
        raise InputError(
            f"--retention: got {quoted(settings.retention)} with --flops {flops:g}, for which it would be {retention}; give one of them"
        )
    return dataclasses.replace(settings, flops=flops, retention=retention)
