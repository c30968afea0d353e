"""Compare any engine with the oracle and say whether it holds.

Logits must lie within a small multiple of the error that PyTorch itself makes in the target's precision. A kept token
that differs is excused, and listed, only where the fp64 margin of that decision is below its error bound; its row then
leaves the logit comparison, because from there on a different (equally right) set of tokens is computed on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from ..answers.sequence import accuracy, agreement, quality
from ..contract import KEPT_SITE, LOGITS
from ..engines import Engine
from ..records import ExcusedFlip, Parity
from .oracle import OracleBatch, OracleRun


@dataclass(frozen=True, kw_only=True)
class _Compared:
    """One batch of B rows: the engine's logits ``(B, num_labels)``, their absolute differences to the fp32 oracle in rows
    that keep the same tokens, how many kept tokens both have and either has, and what failed."""

    logits: np.ndarray
    diffs: np.ndarray
    both: int
    either: int
    flips: tuple[ExcusedFlip, ...]
    failures: tuple[str, ...]


def compare(
    oracle: OracleRun,
    engine: Engine,
    debug: Engine | None = None,
    exact_debug: bool = True,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Parity:
    """Run an engine on the oracle's batches.

    Args:
        engine: has the output ``logits``, and ``kept_site`` unless `debug` brings it.
        debug: the same graph with the output ``kept_site``.
        exact_debug: its logits must equal the engine's to the bit; otherwise they are compared like the engine's.
        progress: called with (batches done, batches in all).

    Returns:
        The figures; `failure` is None when everything holds, else one sentence.
    """
    compared: list[_Compared] = []
    row0 = 0
    for done, expected in enumerate(oracle.batches, start=1):
        results = [e.run(expected.batch) for e in (engine, debug) if e is not None]
        compared.append(_compare_batch(oracle, expected, results, exact_debug, row0))
        row0 += len(expected.logits)
        progress(done, len(oracle.batches))
    failures = [failure for batch in compared for failure in batch.failures]
    diff = np.concatenate([batch.diffs for batch in compared])
    if not len(diff):
        failures.append("every row keeps other tokens than the oracle, so no logits could be compared")
        diff = np.full((1, 1), np.inf)
    more = f" (and {len(failures) - 1} more findings)" if len(failures) > 1 else ""
    both, either = (sum(getattr(batch, name) for batch in compared) for name in ("both", "either"))
    logits = np.concatenate([batch.logits for batch in compared])
    return Parity(
        rows=oracle.rows,
        max_abs_logit_diff=float(diff.max()),
        mean_abs_logit_diff=float(diff.mean()),
        prediction_agreement=float(agreement(logits, oracle.logits, oracle.problem_type).mean()),
        kept_token_agreement=both / either if either else 1.0,
        tolerance=oracle.tolerance,
        accuracy=accuracy(logits, oracle.labels),
        quality={} if oracle.labels is None else quality(logits, oracle.labels),
        excused_flips=() if failures else tuple(flip for batch in compared for flip in batch.flips),
        failure=failures[0] + more if failures else None,
    )


def _compare_batch(
    oracle: OracleRun, expected: OracleBatch, results: list[dict[str, np.ndarray]], exact_debug: bool, row0: int
) -> _Compared:
    """Compare the outputs of an engine, and of its debug form where there is one; `row0` is the first row's number."""
    logits, kept_site = results[0][LOGITS], results[-1][KEPT_SITE]
    failures: list[str] = []
    if exact_debug and not np.array_equal(results[-1][LOGITS], logits, equal_nan=True):
        failures.append("the graph with debug outputs answers differently from the file")
    real = expected.kept_site >= 0
    kept = [((kept_site > i) & real, (expected.kept_site > i) & real) for i in range(len(oracle.sites))]
    flipped = (kept_site != expected.kept_site).any(1)
    flips = [_judge(oracle, expected, kept_site, row, row0) for row in map(int, np.flatnonzero(flipped))]
    failures += [
        f"kept tokens differ first at site {flip.site} (row {flip.row}: the decision has a margin of "
        f"{flip.margin:.3g}, its error bound is {flip.bound:.3g})"
        for flip in flips
        if flip.margin >= flip.bound
    ]
    failures += _logit_failures(oracle, expected, [result[LOGITS] for result in results], ~flipped, row0)
    return _Compared(
        logits=logits,
        diffs=np.abs(logits - expected.logits)[~flipped],
        both=sum(int((a & b).sum()) for a, b in kept),
        either=sum(int((a | b).sum()) for a, b in kept),
        flips=tuple(flips),
        failures=tuple(failures),
    )


def _logit_failures(
    oracle: OracleRun, expected: OracleBatch, answers: Iterable[np.ndarray], alike: np.ndarray, row0: int
) -> list[str]:
    """Say what is wrong with answers ``(B, num_labels)``; rows not in ``alike (B,) bool`` keep other tokens."""
    off = np.max([np.abs(answer - expected.reference) for answer in answers], axis=0)
    failures = [] if np.isfinite(off).all() else ["logits are not finite"]
    off = np.where(np.isfinite(off), off, np.inf)
    if alike.any() and (worst := float(off[alike].max())) > oracle.tolerance:
        bad = int(np.flatnonzero(alike)[off[alike].max(1).argmax()])
        failures.append(
            f"logits differ by {worst:.3g} in row {row0 + bad}, allowed are {oracle.tolerance:.3g}; "
            "every site kept the same tokens there"
        )
    return failures


def _judge(oracle: OracleRun, expected: OracleBatch, kept_site: np.ndarray, row: int, row0: int) -> ExcusedFlip:
    """Find the first site at which a row diverges, with the margin and the error bound of its decision."""
    a, b = kept_site[row], expected.kept_site[row]
    first = int(np.minimum(a, b)[a != b].min())
    if first < 0 or first >= len(oracle.sites):  # padding taken for a token, or the other way round
        return ExcusedFlip(row0 + row, "unpadding", np.inf, 0.0)
    # Another count comes from the first decision of a rule; the same count with other tokens, from the second.
    kind = 0 if (a > first).sum() != (b > first).sum() else 1
    bound = oracle.multiple * max(oracle.decision_errors[first, kind], expected.errors[first, kind, row])
    return ExcusedFlip(row0 + row, oracle.sites[first], float(expected.margins[first, kind, row]), float(bound))
