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
from typing import Any

import numpy as np
import torch
from torch import nn

from ..answers.sequence import accuracy, agreement, points_lost, quality
from ..contract import ATTENTION_MASK
from ..errors import VerificationError
from ..model.encoder import PrunedEncoder
from ..text import Batch

MULTIPLE = 8.0
"""A target may be this many times as far from fp64 as the fp32 oracle is: other kernels sum in other orders.
The same factor bounds decisions. FlashAttention's tests do the same with a factor of 2 on single kernels;
here errors of whole networks meet, of which the oracle is one draw."""

TYPED_MULTIPLE = 3.0
"""The same for lower precisions, where weights and states are rounded alike in PyTorch and in a target, and only the order
of sums differs."""

PrunedOutput = Any
"""What a model of `model.heads` returns: logits, kept_site, decisions."""

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class OracleBatch:
    """Answers for one batch of B rows, S wide.

    logits ``(B, num_labels)``: fp32, the answer. reference ``(B, num_labels)``: fp64 where it keeps the same tokens,
    else fp32. kept_site ``(B, S)``. margins ``(sites, 2, B)``: how clear it is in fp64 how many tokens stay, and which,
    infinite where there was nothing to choose. errors ``(sites, 2, B)``: error of the scores that decide these, in the
    precision that is judged. exact: everything in fp64. rounded ``(B, num_labels)``: PyTorch's answer in that precision.
    """

    batch: Batch
    logits: np.ndarray
    reference: np.ndarray
    kept_site: np.ndarray
    margins: np.ndarray
    errors: np.ndarray
    exact: PrunedOutput
    rounded: np.ndarray


@dataclass(frozen=True, kw_only=True)
class OracleRun:
    """The oracle on all batches.

    logit_error: largest error of a logit in the precision that is judged, absolute. decision_errors ``(sites, 2)``: the
    same for the two decisions of each site, how many and which. Each is floored at one rounding of the largest value: a lucky
    row is no bound. multiple: how many times these a target may be off. labels ``(rows,)``: true classes,
    or numbers in regression, where known.
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
    def tolerance(self) -> float:
        """By how much a logit may be off, absolute."""
        return self.multiple * self.logit_error

    @property
    def rows(self) -> int:
        return sum(len(b.logits) for b in self.batches)

    @property
    def logits(self) -> np.ndarray:
        """The fp32 student's answers, ``(rows, num_labels)``."""
        return np.concatenate([b.logits for b in self.batches])

    @property
    def accuracy(self) -> float | None:
        """Share of rows that the fp32 student classifies right; None where classes are not known."""
        return accuracy(self.logits, self.labels)

    @property
    def quality(self) -> dict[str, float]:
        """Measures of the fp32 student, see `answers.sequence.quality`; none where labels are not known."""
        return {} if self.labels is None else quality(self.logits, self.labels)

    @property
    def points_lost(self) -> float:
        """What the precision that is judged costs the PyTorch student: see `answers.sequence.points_lost`."""
        rounded = np.concatenate([b.rounded for b in self.batches])
        agreeing = float(agreement(rounded, self.logits, self.problem_type).mean())
        return points_lost(self.accuracy, accuracy(rounded, self.labels), agreeing)


def run_oracle(
    student: PrunedEncoder,
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
    sites = student.site_names
    results: list[OracleBatch] = []
    errors: list[_Errors] = []
    for done, batch in enumerate(batches, start=1):
        single, exact = _run(student, batch), _run(double, batch)
        errors.append(_errors(single, exact, torch.float32))
        same = torch.eq(single.kept_site, exact.kept_site).all(1).numpy()
        logits, logits64 = single.logits.numpy(), exact.logits.numpy()
        reference = np.where(same[:, None], logits64, logits)
        margins = np.array([d.rule.margins(d.live).numpy() for d in exact.decisions]).reshape(len(sites), 2, len(same))
        results.append(
            OracleBatch(
                batch=batch,
                logits=logits,
                reference=reference,
                kept_site=single.kept_site.numpy(),
                margins=margins,
                errors=errors[-1].by_row,
                exact=exact,
                rounded=logits,
            )
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


def typed(student: PrunedEncoder, precision: str) -> PrunedEncoder:
    """Return a copy of the student with weights and states in "fp16" or "bf16", and its pruners in fp32."""
    copied = copy.deepcopy(student)
    nn.Module.to(copied, DTYPES[precision])  # transformers' own hides what it takes
    for kept, original in zip(copied.pruners.values(), student.pruners.values()):
        kept.load_state_dict(original.state_dict(), assign=True)
    return copied


def for_precision(
    oracle: OracleRun,
    rounded: PrunedEncoder,
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
    dtype = next(rounded.get_input_embeddings().parameters()).dtype
    errors, batches = [], []
    for done, expected in enumerate(oracle.batches, start=1):
        answer = _run(rounded, expected.batch)
        errors.append(_errors(answer, expected.exact, dtype))
        batches.append(dataclasses.replace(expected, errors=errors[-1].by_row, rounded=answer.logits.float().numpy()))
        progress(done, len(oracle.batches))
    if not all(np.isfinite([e.logits, *e.decisions.flat]).all() for e in errors):
        raise VerificationError(
            f"the PyTorch student overflows in {precision} on this text, so no file can be compared with it. bf16 has fp32's range; "
            "type: --precision bf16"
        )
    return dataclasses.replace(
        oracle,
        batches=tuple(batches),
        logit_error=max(e.logits for e in errors),
        decision_errors=np.max([e.decisions for e in errors], axis=0),
        multiple=TYPED_MULTIPLE,
    )


def _run(student: PrunedEncoder, batch: Batch) -> PrunedOutput:
    with torch.inference_mode():
        inputs = {name: torch.from_numpy(array) for name, array in batch.items()}
        if student.site_names:
            answer: PrunedOutput = student(**inputs)
            return answer
        plain = student.dense(**inputs, return_dict=True)  # without sites, transformers' own forward is the definition
        plain.kept_site, plain.decisions = torch.where(inputs[ATTENTION_MASK].bool(), 0, -1).int(), ()
        return plain


@dataclass(frozen=True)
class _Errors:
    """Errors on one batch: of logits, of decisions ``(sites, 2)``, of decisions by row ``(sites, 2, B)``."""

    logits: float
    decisions: np.ndarray
    by_row: np.ndarray


def _errors(rounded: PrunedOutput, exact: PrunedOutput, dtype: torch.dtype) -> _Errors:
    """How far a run is from fp64. From the site on at which a row's tokens part, the two run different networks, and the
    row says nothing about rounding."""
    unit = torch.finfo(dtype).eps
    a, b = rounded.kept_site, exact.kept_site
    # The site at which a row parts: there, scores still compare.
    parted = torch.where(a != b, torch.minimum(a, b), len(exact.decisions)).amin(1)
    by_row = torch.zeros(len(exact.decisions), 2, len(b), dtype=torch.float64)
    floor = torch.zeros(len(exact.decisions), 2, dtype=torch.float64)
    for i, (low, high) in enumerate(zip(rounded.decisions, exact.decisions)):
        by_row[i] = low.rule.errors(high.rule, high.live).masked_fill(parted < i, 0)
        floor[i] = unit * high.rule.sizes(high.live)
    alike = parted == len(exact.decisions)
    logits = (rounded.logits.double() - exact.logits)[alike].abs()
    largest = np.max([float(logits.max()) if len(logits) else 0.0, unit * float(exact.logits.abs().max())])
    return _Errors(float(largest), torch.maximum(by_row.amax(2), floor).numpy(), by_row.numpy())
