"""A plan that also says which rows stay at each cut."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from ..plan import OUTPUT, WORKSPACE, Argument, Bucket, Plan, Pointer
from ..shipped import kernel

_CHOSEN = ("rows", "new_cu_seqlens")
"""Arguments of what chooses at a cut: the rows that stay, ``(T,) int32``, and where texts begin then, ``(B+1,) int32``."""


def cuts(plan: Plan) -> int:
    """Count the cuts that a plan launches."""
    return sum(1 for _ in _places(plan.buckets[0])) // len(_CHOSEN)


def with_kept_rows(plan: Plan) -> Plan:
    """Return the same plan with two more outputs for each cut, those that `_CHOSEN` names. In the workspace nobody gives their room
    back, so from their launch on nothing else lies there."""
    return Plan(plan.weights, tuple(map(_opened, plan.buckets)))


def kept_site(live: np.ndarray, chosen: Sequence[tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
    """Say what became of each token: ``(B, S) int32``, the index of the cut that dropped it, their number if it stayed, -1 for padding.

    Args:
        live: ``(B, S) bool``: which tokens are no padding; a text without any has its first one all the same.
        chosen: of each cut the rows that stay and where texts begin then, as the plan's outputs have them.
    """
    live = live.copy()
    live[:, 0] = True
    found = np.where(live, 0, -1).astype(np.int32)
    places = np.flatnonzero(live)
    for rows, bounds in chosen:
        places = places[rows[: bounds[len(live)]]]
        found.flat[places] += 1
    return found


def _places(bucket: Bucket) -> Iterator[tuple[int, Pointer, int]]:
    """Yield of rows and bounds of each cut which launch writes them, where they lie, and their bytes."""
    for i, launch in enumerate(bucket.launches):
        names = list(kernel(launch.variant).types)
        if set(_CHOSEN) <= set(names):
            for name, count in zip(_CHOSEN, (bucket.tokens, bucket.texts + 1)):
                place = launch.arguments[names.index(name)]
                assert isinstance(place, Pointer)
                assert place.place == WORKSPACE
                yield i, place, 4 * count


def _opened(bucket: Bucket) -> Bucket:
    places, first = list(_places(bucket)), len(bucket.outputs)

    def moved(argument: Argument, launch: int) -> Argument:
        if isinstance(argument, Pointer) and argument.place == WORKSPACE:
            for i, (written, place, size) in enumerate(places):
                if launch >= written and 0 <= argument.offset - place.offset < size:
                    return Pointer(OUTPUT, argument.offset - place.offset, first + i)
        return argument

    launches = tuple(
        replace(launch, arguments=tuple(moved(argument, i) for argument in launch.arguments))
        for i, launch in enumerate(bucket.launches)
    )
    return replace(bucket, outputs=(*bucket.outputs, *(size for *_, size in places)), launches=launches)
