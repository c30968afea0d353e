"""The oracle's answers, and how far they can be trusted: the fp32 student beside itself in fp64.

The distance between the two is the rounding error of fp32 on exactly these rows and weights. Every tolerance
in `verify.parity` is a multiple of it, so none is typed in. For targets of lower precision it is the distance of the
plain PyTorch student in that precision.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ..errors import VerificationError
from ..model.student import AdtpBertForSequenceClassification, AdtpSequenceClassifierOutput, SiteDecision
from ..text import Batch

MULTIPLE = 8.0
"""A target may be this many times as far from fp64 as the fp32 oracle is: other kernels sum in other orders.
The same factor bounds decisions. FlashAttention's tests do the same with a factor of 2 on single kernels;
here errors of whole networks meet, of which the oracle is one draw."""

TYPED_MULTIPLE = 3.0
"""The same for lower precisions, where weights and states are rounded alike in PyTorch and in a target, and only the order
of sums differs."""

REGRESSION_TOLERANCE = 0.01
"""Regression rows agree when they differ by at most this much: the definition of the figure, not a verdict."""

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class OracleBatch:
    """Answers for one batch of B rows, S wide.

    logits ``(B, num_labels)``: fp32, the answer. reference ``(B, num_labels)``: fp64 where it keeps the same tokens,
    else fp32. kept_site ``(B, S)``. margins ``(sites, 2, B)``: how clear the choice of a ratio and the choice of tokens
    are in fp64, infinite where there was nothing to choose. errors ``(sites, 2, B)``: error of the scores behind, in the
    precision that is judged. exact: everything in fp64. rounded ``(B, num_labels)``: PyTorch's answer in that precision.
    """

    batch: Batch
    logits: np.ndarray
    reference: np.ndarray
    kept_site: np.ndarray
    margins: np.ndarray
    errors: np.ndarray
    exact: AdtpSequenceClassifierOutput
    rounded: np.ndarray


@dataclass(frozen=True)
class OracleRun:
    """The oracle on all batches.

    logit_error: largest error of a logit in the precision that is judged, absolute. decision_errors ``(sites, 2)``: the
    same for the ratio and the saliency scores of each site. Each is floored at one rounding of the largest value: a lucky
    row is no bound. multiple: how many times these a target may be off. labels ``(rows,) int64``: true classes, where known.
    """

    sites: tuple[str, ...]
    problem_type: str | None
    batches: tuple[OracleBatch, ...]
    logit_error: float
    decision_errors: np.ndarray
    retention: dict[str, dict[str, float]]
    multiple: float = MULTIPLE
    labels: np.ndarray | None = None

    @property
    def rows(self) -> int:
        return sum(len(b.logits) for b in self.batches)

    @property
    def logits(self) -> np.ndarray:
        """The fp32 student's answers, ``(rows, num_labels)``."""
        return np.concatenate([b.logits for b in self.batches])

    @property
    def accuracy(self) -> float | None:
        """Share of rows that the fp32 student classifies right; None where labels are not known."""
        return accuracy(self.logits, self.labels)

    @property
    def points_lost(self) -> float:
        """What the precision that is judged costs the PyTorch student: see `points_lost`."""
        rounded = np.concatenate([b.rounded for b in self.batches])
        agreeing = float(agreement(rounded, self.logits, self.problem_type).mean())
        return points_lost(self.accuracy, accuracy(rounded, self.labels), agreeing)


def accuracy(logits: np.ndarray, labels: np.ndarray | None) -> float | None:
    """Share of rows of ``logits (rows, num_labels)`` whose largest one is that of the label."""
    return None if labels is None else float((logits.argmax(1) == labels).mean())


def points_lost(before: float | None, after: float | None, agreeing: float) -> float:
    """Percentage points of accuracy lost; where labels are not known, of predictions changed, which is no less."""
    return 100 * (before - after if before is not None and after is not None else 1 - agreeing)


def agreement(logits: np.ndarray, expected: np.ndarray, problem_type: str | None) -> np.ndarray:
    """Say of each row of ``(rows, num_labels)`` whether the prediction is the same; regression: within the tolerance."""
    if problem_type == "regression" or logits.shape[1] == 1:
        return (np.abs(logits - expected) <= REGRESSION_TOLERANCE).all(1)
    if problem_type == "multi_label_classification":
        return ((logits > 0) == (expected > 0)).all(1)
    return np.equal(logits.argmax(1), expected.argmax(1))


def run_oracle(
    student: AdtpBertForSequenceClassification,
    batches: Sequence[Batch],
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> OracleRun:
    """Run the student in fp32 and fp64 on right-padded batches.

    Args:
        student: weights in fp32, eval mode.
        batches: int64 arrays by input name.
        progress: called with (batches done, batches in all).
    """
    double = copy.deepcopy(student).double()
    sites = tuple(str(site) for site in student.config.sites)
    results: list[OracleBatch] = []
    errors: list[_Errors] = []
    for done, batch in enumerate(batches, start=1):
        single, exact = _run(student, batch), _run(double, batch)
        errors.append(_errors(single, exact, torch.float32))
        same = torch.eq(single.kept_site, exact.kept_site).all(1).numpy()
        logits, logits64 = single.logits.numpy(), exact.logits.numpy()
        reference = np.where(same[:, None], logits64, logits)
        margins = np.array([_margins(decision) for decision in exact.decisions]).reshape(len(sites), 2, len(same))
        results.append(
            OracleBatch(batch, logits, reference, single.kept_site.numpy(), margins, errors[-1].by_row, exact, logits)
        )
        progress(done, len(batches))
    retention = {}
    for i, site in enumerate(sites):
        n = np.concatenate([(r.kept_site >= i).sum(1) for r in results])
        k = np.concatenate([(r.kept_site > i).sum(1) for r in results])
        retention[site] = {"mean_ratio": float((k / n).mean()), "mean_kept_tokens": float(k.mean())}
    return OracleRun(
        sites=sites,
        problem_type=student.config.problem_type,
        batches=tuple(results),
        logit_error=max(e.logits for e in errors),
        decision_errors=np.max([e.decisions for e in errors], axis=0),
        retention=retention,
    )


def typed(student: AdtpBertForSequenceClassification, precision: str) -> AdtpBertForSequenceClassification:
    """Return a copy of the student with weights and states in "fp16" or "bf16", and its retainers in fp32."""
    copied = copy.deepcopy(student).to(DTYPES[precision])
    for kept, original in zip(copied.bert.encoder.retainers.values(), student.bert.encoder.retainers.values()):
        kept.load_state_dict(original.state_dict(), assign=True)
    return copied


def for_precision(
    oracle: OracleRun,
    rounded: AdtpBertForSequenceClassification,
    precision: str,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> OracleRun:
    """Return the same answers with the error bounds of a lower precision: what PyTorch itself is off in it.

    Args:
        rounded: the student in that precision: `typed`, or simulated with quantized weights and activations.
        precision: its name, for messages.

    Raises:
        VerificationError: that student's answers are not finite.
    """
    dtype = rounded.bert.embeddings.word_embeddings.weight.dtype
    errors, batches = [], []
    for done, expected in enumerate(oracle.batches, start=1):
        answer = _run(rounded, expected.batch)
        errors.append(_errors(answer, expected.exact, dtype))
        batches.append(dataclasses.replace(expected, errors=errors[-1].by_row, rounded=answer.logits.float().numpy()))
        progress(done, len(oracle.batches))
    if not all(np.isfinite([e.logits, *e.decisions.flat]).all() for e in errors):
        raise VerificationError(
            f"in {precision} the PyTorch student itself overflows on this text, so nothing can be judged by it; bf16 has fp32's "
            "range, type: --precision bf16"
        )
    return dataclasses.replace(
        oracle,
        batches=tuple(batches),
        logit_error=max(e.logits for e in errors),
        decision_errors=np.max([e.decisions for e in errors], axis=0),
        multiple=TYPED_MULTIPLE,
    )


def _run(student: AdtpBertForSequenceClassification, batch: Batch) -> AdtpSequenceClassifierOutput:
    with torch.inference_mode():
        return student(**{name: torch.from_numpy(array) for name, array in batch.items()})


@dataclass(frozen=True)
class _Errors:
    """Errors on one batch: of logits, of decisions ``(sites, 2)``, of decisions by row ``(sites, 2, B)``."""

    logits: float
    decisions: np.ndarray
    by_row: np.ndarray


def _errors(rounded: AdtpSequenceClassifierOutput, exact: AdtpSequenceClassifierOutput, dtype: torch.dtype) -> _Errors:
    """How far a run is from fp64. From the site on at which a row's tokens part, the two run different networks, and the
    row says nothing about rounding."""
    unit = torch.finfo(dtype).eps
    a, b = rounded.kept_site, exact.kept_site
    # The site at which a row parts: there, scores still compare.
    parted = torch.where(a != b, torch.minimum(a, b), len(exact.decisions)).amin(1)
    by_row = torch.zeros(len(exact.decisions), 2, len(b), dtype=torch.float64)
    floor = torch.zeros(len(exact.decisions), 2, dtype=torch.float64)
    for i, (low, high) in enumerate(zip(rounded.decisions, exact.decisions)):
        ratio = (low.ratio_logits - high.ratio_logits).abs().amax(1)
        saliency = (low.saliency - high.saliency).abs().masked_fill(~high.live, 0).amax(1)
        by_row[i] = torch.stack([ratio, saliency]).masked_fill(parted < i, 0)
        floor[i] = unit * torch.stack([high.ratio_logits.abs().max(), high.saliency[high.live].abs().max()])
    alike = parted == len(exact.decisions)
    logits = (rounded.logits.double() - exact.logits)[alike].abs()
    largest = np.max([float(logits.max()) if len(logits) else 0.0, unit * float(exact.logits.abs().max())])
    return _Errors(float(largest), torch.maximum(by_row.amax(2), floor).numpy(), by_row.numpy())


def _margins(decision: SiteDecision) -> np.ndarray:
    """Return ``(2, B)`` margins: of the best ratio over the next, and of the last kept over the first dropped token."""
    top = decision.ratio_logits.topk(min(2, decision.ratio_logits.shape[1]), dim=1).values
    ratio = top[:, 0] - top[:, 1] if top.shape[1] == 2 else torch.full_like(top[:, 0], torch.inf)
    others = decision.saliency.masked_fill(~decision.live, -torch.inf)[:, 1:].sort(dim=1, descending=True).values
    ranked = torch.nn.functional.pad(others, (1, 1), value=torch.inf)  # column j: the score of rank j; [CLS] is rank 0
    ranked[:, -1] = -torch.inf
    last_kept = ranked.gather(1, decision.count[:, None] - 1)[:, 0]
    first_dropped = ranked.gather(1, decision.count[:, None])[:, 0]
    saliency = torch.where(torch.isinf(last_kept) | torch.isinf(first_dropped), torch.inf, last_kept - first_dropped)
    return torch.stack([ratio, saliency]).numpy()
