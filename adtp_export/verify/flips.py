"""Rows that keep other tokens than the oracle: whether rounding explains it. `verify.rounding` states the rule."""

from __future__ import annotations

import functools

import numpy as np
from torch import Tensor

from ..artifacts.records import ExcusedFlip, Parity
from ..model.padded import Decision
from ..model.selection import KeepAbove, KeepAboveShare, KeepBest, KeepRanks, Rule
from .oracle import OracleBatch, OracleRun


def judge(oracle: OracleRun, expected: OracleBatch, kept_site: np.ndarray, row: int, row0: int) -> ExcusedFlip:
    """Return the first site at which a row parts from the oracle, with what rounding would have to explain there, and its bound.

    Args:
        kept_site: of the row in the target, ``(S,)``. row: its number in the batch, whose first row is `row0`.
    """
    own = expected.kept_site[row]
    first = int(np.minimum(kept_site, own)[kept_site != own].min())
    if first < 0 or first >= len(oracle.sites):  # padding taken for a token, or the other way round
        return ExcusedFlip(row0 + row, "unpadding", np.inf, 0.0)
    # Another count comes from the first decision of a rule; the same count with other tokens, from the second.
    kind = 0 if (kept_site > first).sum() != (own > first).sum() else 1
    turned = [(float(expected.margins[first, kind, row]), kind)]
    exact = expected.exact.kept_site[row].numpy()
    if np.array_equal(np.minimum(exact, first), np.minimum(own, first)):  # else fp64 decides among other tokens there
        decision, kept = expected.exact.decisions[first], kept_site > first
        turned += [(behind, 0)] if (behind := lead(decision, row, kept)) > 0 else []
        turned += [(off, 1)] if (off := apart(decision, row, own >= first, kept)) > 0 else []
    flips = [
        ExcusedFlip(
            row0 + row, oracle.sites[first], margin, float(oracle.multiple * oracle.decision_errors[first, which])
        )
        for margin, which in turned
    ]
    return next((flip for flip in flips if not flip.margin < flip.bound), flips[0])  # nor is a NaN


def lead(decision: Decision, row: int, kept: np.ndarray) -> float:
    """Return how far the candidate that was chosen leads those that keep as many as ``kept (S,) bool`` of a row; 0 without candidates."""
    rule = decision.rule
    if not isinstance(rule, KeepBest) or rule.choice is None or rule.counts is None:
        return 0.0
    choice = rule.choice[row].numpy()
    as_many = rule.counts[row].numpy() == (kept & decision.live[row].numpy()).sum()
    return float(choice.max() - choice[as_many].max(initial=-np.inf))


def apart(decision: Decision, row: int, alive: np.ndarray, kept: np.ndarray) -> float:
    """Return by how much scores would have to be off, at least, so that exactly the tokens ``kept (S,) bool`` of a row stay.

    A near-tie at the border explains two tokens that changed places there, and no others. Infinite where a token fell that always stays.

    Args:
        alive: ``(S,) bool``, all that were there before: those that may be dropped, and others that only ask.
    """
    rule, live = decision.rule, decision.live
    competes = rule.competing(live)[row].numpy()
    if (alive & ~competes & ~kept).any():
        return np.inf
    return _apart(rule, live, row, competes, kept & competes)


@functools.singledispatch
def _apart(rule: Rule, live: Tensor, row: int, competes: np.ndarray, kept: np.ndarray) -> float:
    raise TypeError(f"no such rule: {type(rule).__name__}")


@_apart.register
def _best(rule: KeepBest, live: Tensor, row: int, competes: np.ndarray, kept: np.ndarray) -> float:
    """Half of what is between the best token that fell and the worst that stayed, however many did: both may be off."""
    order = rule.order[row].numpy()
    return float(max(0.0, order[competes & ~kept].max(initial=-np.inf) - order[kept].min(initial=np.inf))) / 2


@_apart.register
def _above(rule: KeepAbove, live: Tensor, row: int, competes: np.ndarray, kept: np.ndarray) -> float:
    """The token that is on the wrong side of the threshold, and farthest from it."""
    over = (rule.order[row] - rule.threshold).numpy()
    return float(np.abs(over[competes & (kept != (over >= 0))]).max(initial=0))


@_apart.register
def _above_share(rule: KeepAboveShare, live: Tensor, row: int, competes: np.ndarray, kept: np.ndarray) -> float:
    return _above(rule.of_threshold(live), live, row, competes, kept)


@_apart.register
def _ranks(rule: KeepRanks, live: Tensor, row: int, competes: np.ndarray, kept: np.ndarray) -> float:
    """Of each token that fell or stayed wrongly, half of how far the nearest rank is at which it would not; of these the largest."""
    order, stays = rule.order[row].numpy(), rule.padded(live)[row].numpy()
    wrong = np.flatnonzero(competes & (kept != stays))
    off = [np.abs(order[competes & (stays == kept[i])] - order[i]).min(initial=np.inf) for i in wrong]
    return float(max(off, default=0)) / 2


def excused(parity: Parity, what: str = "row") -> str:
    """Say how many rows, or what they are called, keep other tokens than the oracle, and why that is excused in the first of them."""
    flip, count = parity.excused_flips[0], len(parity.excused_flips)
    return (
        f"{count} of {parity.rows} {what}s keep other tokens, because a decision was too close to call: in {what} {flip.row} at site "
        f"{flip.site} its margin is {flip.margin:.2e}, below the rounding error of {flip.bound:.2e}"
        + ("; manifest.json lists them" if count > 1 else "")
    )
