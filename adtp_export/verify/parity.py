"""Compare any engine with the oracle and say whether it holds.

The docstring of `verify.rounding` states the rule for outputs and for kept tokens. Besides, padding must be exactly 0. Rows with
excused flips leave the comparison of outputs, and so do rows that another file answered in the target's place; `rows_wanted` says
how many have to be left.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from ..artifacts.records import ExcusedFlip, OutputParity, Parity
from ..contract import KEPT_SITE, OUTPUTS, SEQUENCE
from ..runtimes import Engine
from . import flips
from .metrics import AGREEMENT, Outputs
from .oracle import OracleBatch, OracleRun

ENOUGH = 32
"""Rows that have to be compared at least, where there are twice as many."""


def rows_wanted(rows: int, own: int) -> int:
    """Say how many rows have to be compared for a verdict: half of those that a target answers, and at least `ENOUGH` or half of all.

    Args:
        rows: of the oracle.
        own: those that the target answered itself.
    """
    return max(math.ceil(own / 2), min(ENOUGH, math.ceil(rows / 2)))


@dataclass(frozen=True)
class _Differences:
    """Absolute differences of one output to the fp32 oracle: the largest, their sum, and how many there are."""

    largest: float
    total: float
    count: int


@dataclass(frozen=True, kw_only=True)
class _Compared:
    """One batch of B rows: the engine's answers, row by row; how many rows are its own and keep the same tokens, and differences of
    each output in these; by how much the debug form differs in rows that keep the same tokens; how many kept tokens both have and
    either has, and what failed."""

    answers: Sequence[Outputs]
    rows: int
    diffs: dict[str, _Differences]
    debug_diff: float
    both: int
    either: int
    flips: tuple[ExcusedFlip, ...]
    failures: tuple[str, ...]


def compare(
    oracle: OracleRun,
    engine: Engine,
    debug: Engine | None = None,
    exact_debug: bool = True,
    own: Callable[[], np.ndarray] | None = None,
) -> Parity:
    """Return the figures alone of `judged`."""
    return judged(oracle, engine, debug, exact_debug, own=own)[0]


def judged(
    oracle: OracleRun,
    engine: Engine,
    debug: Engine | None = None,
    exact_debug: bool = True,
    progress: Callable[[int, int], None] = lambda done, total: None,
    own: Callable[[], np.ndarray] | None = None,
) -> tuple[Parity, list[Outputs]]:
    """Run an engine on the oracle's batches.

    Args:
        engine: has the outputs of the head, and ``kept_site`` unless `debug` brings it.
        debug: the same graph with the output ``kept_site``.
        exact_debug: its outputs must equal the engine's to the bit; otherwise they are compared like the engine's. Whether one more
            output leaves all bits alone is up to a runtime and a processor.
        progress: called with (batches done, batches in all).
        own: asked after each batch which of its rows ``(B,) bool`` the engine itself answered; by default all.

    Returns:
        The figures, where `failure` is None when everything holds, else one sentence; and the engine's answers to texts, row by row.
    """
    compared: list[_Compared] = []
    row0 = 0
    batches = [(part, batch) for part in oracle.parts for batch in part.batches]
    for done, (part, expected) in enumerate(batches, start=1):
        results = [e.run(expected.batch) for e in (engine, debug) if e is not None]
        mine = own() if own else np.ones(len(expected.kept_site), bool)
        compared.append(_compare_batch(part, expected, results, mine, row0))
        row0 += len(expected.kept_site)
        progress(done, len(batches))
    return _figures(oracle, compared, exact_debug)


def _figures(oracle: OracleRun, compared: Sequence[_Compared], exact_debug: bool) -> tuple[Parity, list[Outputs]]:
    failures = [failure for batch in compared for failure in batch.failures]
    debug_diff = max(batch.debug_diff for batch in compared)
    if exact_debug and debug_diff:
        failures.insert(0, "the graph with debug outputs answers differently from the file")
    texts = compared[: len(oracle.batches)]
    outputs = {name: _joined([batch.diffs[name] for batch in texts], tol) for name, tol in oracle.tolerances.items()}
    first, *others = outputs.values()
    rows_compared = sum(batch.rows for batch in compared)
    if not sum(batch.rows for batch in texts):
        what = next(iter(outputs))
        failures.append(
            f"every row that it answered keeps other tokens than the oracle, so no {what} could be compared"
        )
    more = f" (and {len(failures) - 1} more findings)" if len(failures) > 1 else ""
    both, either = (sum(getattr(batch, name) for batch in texts) for name in ("both", "either"))
    answers = [row for batch in texts for row in batch.answers]
    agreement = oracle.metric.agreement_with(answers, oracle.answers)
    quality = oracle.metric.quality(answers)
    parity = Parity(
        rows=oracle.rows,
        rows_compared=rows_compared,
        max_abs_logit_diff=first.max_abs_diff,
        mean_abs_logit_diff=first.mean_abs_diff,
        prediction_agreement=agreement.pop(AGREEMENT),
        kept_token_agreement=both / either if either else 1.0,
        tolerance=first.tolerance,
        accuracy=quality.get("accuracy"),
        quality=quality,
        excused_flips=() if failures else tuple(flip for batch in compared for flip in batch.flips),
        failure=failures[0] + more if failures else None,
        debug_diff=debug_diff,
        outputs=outputs if others else {},
        answers=agreement,
    )
    return parity, answers


def _joined(parts: Sequence[_Differences], tolerance: float) -> OutputParity:
    count = sum(part.count for part in parts)
    if not count:
        return OutputParity(np.inf, np.inf, tolerance)
    largest = float(np.max([part.largest for part in parts]))
    return OutputParity(largest, sum(part.total for part in parts) / count, tolerance)


def _compare_batch(
    oracle: OracleRun, expected: OracleBatch, results: list[dict[str, np.ndarray]], own: np.ndarray, row0: int
) -> _Compared:
    """Compare the outputs of an engine, and of its debug form where there is one, in rows that are its own; `row0` is the first row's
    number."""
    kept_site = results[-1][KEPT_SITE]
    names = list(oracle.tolerances)
    failures: list[str] = []
    real = expected.kept_site >= 0
    kept = [((kept_site > i) & real, (expected.kept_site > i) & real) for i in range(len(oracle.sites))]
    flipped = (kept_site != expected.kept_site).any(1)
    found = [flips.judge(oracle, expected, kept_site[row], row, row0) for row in map(int, np.flatnonzero(flipped))]
    failures += [
        f"kept tokens differ first at site {flip.site} (row {flip.row}: that is clear by "
        f"{flip.margin:.3g}, and the error bound is {flip.bound:.3g})"
        for flip in found
        if not flip.margin < flip.bound  # nor is a NaN
    ]
    for name in names:
        failures += _failures(oracle, expected, name, [result[name] for result in results], ~flipped, row0)
    alike = own & ~flipped
    return _Compared(
        answers=oracle.metric.rows(results[0], expected.kept_site),
        rows=int(alike.sum()),
        diffs={name: _differences(oracle, expected, name, results[0][name], alike) for name in names},
        debug_diff=max(_largest_difference(results[0][name][~flipped], results[-1][name][~flipped]) for name in names),
        both=sum(int((a & b).sum()) for a, b in kept),
        either=sum(int((a | b).sum()) for a, b in kept),
        flips=tuple(found),
        failures=tuple(failures),
    )


def _largest_difference(a: np.ndarray, b: np.ndarray) -> float:
    """Return by how much two answers differ at most; not at all where both are the same infinity, or no number."""
    alike = (a == b) | (np.isnan(a) & np.isnan(b))
    return float(np.nan_to_num(np.abs(a[~alike] - b[~alike]), nan=np.inf).max(initial=0))


def _per_token(oracle: OracleRun, name: str) -> bool:
    return SEQUENCE in OUTPUTS[oracle.metric.head][name]


def _differences(
    oracle: OracleRun, expected: OracleBatch, name: str, answer: np.ndarray, alike: np.ndarray
) -> _Differences:
    """Measure an output in rows ``alike (B,) bool``; of outputs for each token, only live ones count."""
    off = np.abs(answer - expected.outputs[name])
    off = off[alike[:, None] & (expected.kept_site >= 0)] if _per_token(oracle, name) else off[alike]
    return _Differences(float(off.max(initial=0)), float(off.sum(dtype=np.float64)), off.size)


def _failures(
    oracle: OracleRun, expected: OracleBatch, name: str, answers: Iterable[np.ndarray], alike: np.ndarray, row0: int
) -> list[str]:
    """Say what is wrong with an output ``(B, ...)``; rows not in ``alike (B,) bool`` keep other tokens."""
    answers = list(answers)
    failures = [] if all(np.isfinite(answer).all() for answer in answers) else [f"{name}: not all values are finite"]
    off = np.max([np.abs(answer - expected.references[name]) for answer in answers], axis=0)
    off = np.where(np.isfinite(off), off, np.inf)
    if _per_token(oracle, name):
        padding = expected.kept_site < 0
        off = off.reshape(*padding.shape, -1).max(2)
        spoiled = padding & np.any([(a != 0).reshape(*padding.shape, -1).any(2) for a in answers], axis=0)
        if spoiled.any():
            failures.append(f"{name}: not 0 in the padding of row {row0 + int(np.argwhere(spoiled)[0, 0])}")
    if alike.any() and (worst := float(off[alike].max())) > oracle.tolerances[name]:
        bad = int(np.flatnonzero(alike)[off[alike].reshape(alike.sum(), -1).max(1).argmax()])
        column = f", token {off[bad].argmax()}" if _per_token(oracle, name) else ""
        failures.append(
            f"{name}: off by {worst:.3g} in row {row0 + bad}{column}, allowed are {oracle.tolerances[name]:.3g}; "
            "every site kept the same tokens there"
        )
    return failures
