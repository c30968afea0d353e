"""Compare any engine with the oracle and say whether it holds.

Logits must lie within a small multiple of the error that PyTorch itself makes in the target's precision. A kept token
that differs is excused, and listed, only where the fp64 margin of that decision is below its error bound; its row then
leaves the logit comparison, because from there on a different (equally right) set of tokens is computed on.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..engines import Engine
from ..records import ExcusedFlip, Parity
from .oracle import OracleBatch, OracleRun, accuracy, agreement


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
    diffs: list[np.ndarray] = []
    agreeing: list[np.ndarray] = []
    answered: list[np.ndarray] = []
    flips: list[ExcusedFlip] = []
    failures: list[str] = []
    both = either = row0 = 0
    tolerance = oracle.multiple * oracle.logit_error
    for done, expected in enumerate(oracle.batches, start=1):
        result = engine.run(expected.batch)
        logits = result["logits"]
        answers = [logits]
        if debug is not None:
            result = debug.run(expected.batch)
            answers.append(result["logits"])
            if exact_debug and not np.array_equal(result["logits"], logits, equal_nan=True):
                failures.append("the graph with debug outputs answers differently from the file")
        kept_site = result["kept_site"]
        real = expected.kept_site >= 0
        for i in range(len(oracle.sites)):
            a, b = (kept_site > i) & real, (expected.kept_site > i) & real
            both, either = both + int((a & b).sum()), either + int((a | b).sum())
        flipped = (kept_site != expected.kept_site).any(1)
        for row in map(int, np.flatnonzero(flipped)):
            flip = _judge(oracle, expected, kept_site, row)
            flips.append(ExcusedFlip(row0 + row, flip.site, flip.margin, flip.bound))
            if flip.margin >= flip.bound:
                failures.append(
                    f"kept tokens differ first at site {flip.site} (row {row0 + row}: the decision has a margin of "
                    f"{flip.margin:.3g}, its error bound is {flip.bound:.3g})"
                )
        off = np.max([np.abs(answer - expected.reference) for answer in answers], axis=0)
        if not np.isfinite(off).all():
            failures.append("logits are not finite")
        off = np.where(np.isfinite(off), off, np.inf)
        if not flipped.all() and (worst := float(off[~flipped].max())) > tolerance:
            bad = int(np.flatnonzero(~flipped)[off[~flipped].max(1).argmax()])
            failures.append(
                f"logits differ by {worst:.3g} in row {row0 + bad}, allowed are {tolerance:.3g}; "
                "every site kept the same tokens there"
            )
        diffs.append(np.abs(logits - expected.logits)[~flipped])
        answered.append(logits)
        agreeing.append(agreement(logits, expected.logits, oracle.problem_type))
        row0 += len(logits)
        progress(done, len(oracle.batches))
    diff = np.concatenate(diffs)
    if not len(diff):
        failures.append("every row keeps other tokens than the oracle, so no logits could be compared")
        diff = np.full((1, 1), np.inf)
    more = f" (and {len(failures) - 1} more findings)" if len(failures) > 1 else ""
    return Parity(
        rows=oracle.rows,
        max_abs_logit_diff=float(diff.max()),
        mean_abs_logit_diff=float(diff.mean()),
        prediction_agreement=float(np.concatenate(agreeing).mean()),
        kept_token_agreement=both / either if either else 1.0,
        tolerance=tolerance,
        accuracy=accuracy(np.concatenate(answered), oracle.labels),
        excused_flips=() if failures else tuple(flips),
        failure=failures[0] + more if failures else None,
    )


def _judge(oracle: OracleRun, expected: OracleBatch, kept_site: np.ndarray, row: int) -> ExcusedFlip:
    """Find the first site at which a row diverges, with the margin and the error bound of its decision."""
    a, b = kept_site[row], expected.kept_site[row]
    first = int(np.minimum(a, b)[a != b].min())
    if first < 0 or first >= len(oracle.sites):  # padding taken for a token, or the other way round
        return ExcusedFlip(row, "unpadding", np.inf, 0.0)
    # Another count comes from another ratio; the same count with other tokens, from the saliency scores.
    kind = 0 if (a > first).sum() != (b > first).sum() else 1
    bound = oracle.multiple * max(oracle.decision_errors[first, kind], expected.errors[first, kind, row])
    return ExcusedFlip(row, oracle.sites[first], float(expected.margins[first, kind, row]), float(bound))
