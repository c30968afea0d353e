"""The choices of `model.image_pruners` once more, for one prompt and in plain loops, with how clear each is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from torch import Tensor

from ..model.image_pruners import BtpStage, FastVStage, Stage


@dataclass(frozen=True)
class Choice:
    """How often each of n image tokens follows, and what decided: scores ``(n,)``, and distances ``(n, n)`` where these did.

    margin: how far the closest choice was from falling the other way; infinite where there was none.
    """

    copies: np.ndarray
    margin: float
    scores: np.ndarray
    distances: np.ndarray | None = None

    @property
    def size(self) -> float:
        """The largest magnitude of what decided."""
        return max(float(np.abs(each).max(initial=0)) for each in (self.scores, self.distances) if each is not None)

    def error_of(self, other: Choice) -> float:
        """Return by how much what decided differs, at most."""
        pairs = ((self.scores, other.scores), (self.distances, other.distances))
        return max(float(np.abs(a - b).max(initial=0)) for a, b in pairs if a is not None and b is not None)


def choose(stage: Stage, asked: Tensor, states: Tensor, at_input: int, spread: Tensor) -> Choice:
    """Choose among n tokens: ``asked (n,)``, ``states (n, H)``; the prompt had `at_input` of them."""
    scores = asked.double().numpy()
    if isinstance(stage, BtpStage):
        return _btp(stage, scores, states.double().numpy(), spread.numpy())
    assert isinstance(stage, FastVStage)
    picked, margin = _best(scores, list(range(len(scores))), min(int(at_input * stage.keep), len(scores)))
    return Choice(_copies(len(scores), picked), margin, scores)


class Settled(NamedTuple):
    """What no rounding changes in a choice of n image tokens.

    sure: those that follow ``(n,) bool``. possible: these, and all that may. copies: how often one may follow, at most.
    """

    sure: np.ndarray
    possible: np.ndarray
    copies: int = 1


def settled(stage: Stage, scores: np.ndarray, at_input: int, off: float) -> Settled:
    """Say which of n image tokens follow, and which may, however ``scores (n,)`` are off by up to `off` each. Tokens that distances choose
    may be any.

    Args:
        at_input: image tokens that the prompt had.
    """
    others = ~np.eye(len(scores), dtype=bool)
    apart = scores[None] - scores[:, None]
    may_lead, leads = others & (apart >= -2 * off), others & (apart > 2 * off)  # the second token of a pair the first
    if isinstance(stage, FastVStage):
        count = stage.left(len(scores), at_input)
        return Settled(may_lead.sum(1) < count, leads.sum(1) < count)
    assert isinstance(stage, BtpStage)
    if stage.divisor == 0:
        return Settled(np.zeros(len(scores), bool), np.zeros(len(scores), bool))
    keep = len(scores) // stage.divisor
    count = int(keep * stage.attended)
    candidates = int(count * stage.surplus)
    sure, possible = may_lead.sum(1) < candidates, leads.sum(1) < candidates
    if not stage.all_candidates:
        early = np.arange(len(scores)) < keep
        alike = early == early[:, None]
        most, least = (np.where(early, 0, min(count, int((early & those).sum()))) for those in (possible, sure))
        behind = (leads & sure & alike).sum(1) + least  # surely chosen before a token
        sure = sure & ((may_lead & alike).sum(1) + most < count)
        possible = possible & (behind < count)
    return Settled(sure, possible | (stage.attended < 1), 1 + stage.twice)


def _btp(stage: BtpStage, scores: np.ndarray, states: np.ndarray, spread: np.ndarray) -> Choice:
    n = len(scores)
    if stage.divisor == 0:
        return Choice(np.zeros(n, dtype=np.int64), np.inf, scores)
    keep = n // stage.divisor
    count = int(keep * stage.attended)
    candidates, of_candidates = _best(scores, list(range(n)), int(count * stage.surplus))
    count = len(candidates) if stage.all_candidates else count
    early = [place for place in candidates if place < keep]
    late = [place for place in candidates if place >= keep]
    attended, among_early = _best(scores, early, min(count, len(early)))
    further, among_late = _best(scores, late, count - len(attended)) if count > len(attended) else ([], np.inf)
    attended = [*attended, *further]
    margin = min(of_candidates, among_early, among_late)
    if stage.attended == 1:
        return Choice(_copies(n, attended), margin, scores)
    unit = states / np.linalg.norm(states, axis=1, keepdims=True)
    distances = 1 - unit @ unit.T
    diverse, closest = far([], int(keep * stage.diverse), distances)
    twice = [place for place in attended if place in diverse] if stage.twice else []
    picked = list(dict.fromkeys([*attended, *diverse]))
    room = keep - len(picked) - len(twice)
    turn = spread[np.arange(n) % len(spread)]
    on_grid = [p for p in np.argsort(turn, kind="stable").tolist() if turn[p] < stage.spatial and p not in picked]
    picked += on_grid[:room]
    rest, closer = far(picked, keep - len(picked) - len(twice), distances)
    return Choice(_copies(n, [*picked, *rest, *twice]), min(margin, closest, closer), scores, distances)


def _copies(n: int, picked: list[int]) -> np.ndarray:
    return np.bincount(np.array(picked, dtype=np.int64), minlength=n)


def _best(scores: np.ndarray, places: list[int], count: int) -> tuple[list[int], float]:
    """Return the `count` places of highest score, the best first, and their lead over the next."""
    ranked = sorted(places, key=lambda place: (-scores[place], place))
    if not 0 < count < len(ranked):
        return ranked[:count], np.inf
    return ranked[:count], float(scores[ranked[count - 1]] - scores[ranked[count]])


def far(picked: list[int], count: int, distances: np.ndarray) -> tuple[list[int], float]:
    """Pick so many places, each the one whose nearest of those picked is farthest; return them, and the smallest lead."""
    found: list[int] = []
    margin = np.inf
    for _ in range(count):
        known = [*picked, *found]
        off = distances + np.diag(np.full(len(distances), np.inf))
        nearest = off[:, known].min(1) if known else off.min(1)
        nearest[known] = -np.inf
        place = int(nearest.argmax())
        if np.isfinite(second := np.delete(nearest, place).max(initial=-np.inf)):
            margin = min(margin, float(nearest[place] - second))
        found.append(place)
    return found, margin
