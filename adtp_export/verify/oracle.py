"""The oracle's answers, and how far they can be trusted: the fp32 student beside itself in fp64.

The distance between the two is the rounding error of fp32 on exactly these rows and weights. Every tolerance
in `verify.parity` is a multiple of it, so none is typed in.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ..model.student import AdtpBertForSequenceClassification, SiteDecision
from ..text import Batch

MULTIPLE = 8.0
"""A target may be this many times as far from fp64 as the fp32 oracle is: other kernels sum in other orders.
The same factor bounds decisions. FlashAttention's tests do the same with a factor of 2 on single kernels;
here errors of whole networks meet, of which the oracle is one draw."""


@dataclass(frozen=True)
class OracleBatch:
    """Answers for one batch of B rows, S wide.

    logits ``(B, num_labels)``: fp32, the answer. reference ``(B, num_labels)``: fp64 where it keeps the same tokens,
    else fp32. kept_site ``(B, S)``. margins ``(sites, 2, B)``: how clear the choice of a ratio and the choice of tokens
    are in fp64, infinite where there was nothing to choose. errors ``(sites, 2, B)``: fp32 error of the scores behind.
    """

    batch: Batch
    logits: np.ndarray
    reference: np.ndarray
    kept_site: np.ndarray
    margins: np.ndarray
    errors: np.ndarray


@dataclass(frozen=True)
class OracleRun:
    """The oracle on all batches.

    logit_error: largest fp32 error of a logit, absolute. decision_errors ``(sites, 2)``: the same for the ratio and the
    saliency scores of each site. Each is floored at one fp32 rounding of the largest value: a lucky row is no bound.
    """

    sites: tuple[str, ...]
    problem_type: str | None
    batches: tuple[OracleBatch, ...]
    logit_error: float
    decision_errors: np.ndarray
    retention: dict[str, dict[str, float]]

    @property
    def rows(self) -> int:
        return sum(len(b.logits) for b in self.batches)


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
    logit_errors: list[float] = []
    decision_errors = np.zeros((len(sites), 2))
    kept: list[list[np.ndarray]] = [[] for _ in sites]
    live: list[list[np.ndarray]] = [[] for _ in sites]
    for done, batch in enumerate(batches, start=1):
        tensors = {name: torch.from_numpy(array) for name, array in batch.items()}
        with torch.inference_mode():
            single, exact = student(**tensors), double(**tensors)
        # Once the kept tokens differ, fp32 and fp64 run different networks: such rows say nothing about rounding.
        same = (single.kept_site == exact.kept_site).all(1).numpy()
        margins, errors = np.zeros((2, len(sites), 2, len(same)))
        for i, (a, b) in enumerate(zip(single.decisions, exact.decisions)):
            margins[i], errors[i] = _margins(b), _errors(a, b)
            largest = [float(b.ratio_logits.abs().max()), float(b.saliency[b.live].abs().max())]
            seen = [np.array(largest) * np.finfo(np.float32).eps, errors[i][:, same].max(1, initial=0)]
            decision_errors[i] = np.max([decision_errors[i], *seen], axis=0)
            live[i].append(a.live.sum(1).numpy())
            kept[i].append(a.count.numpy())
        logits, logits64 = single.logits.numpy(), exact.logits.numpy()
        if same.any():
            logit_errors.append(float(np.abs(logits - logits64)[same].max()))
        logit_errors.append(float(np.abs(logits64).max() * np.finfo(np.float32).eps))
        reference = np.where(same[:, None], logits64, logits)
        results.append(OracleBatch(batch, logits, reference, single.kept_site.numpy(), margins, errors))
        progress(done, len(batches))
    retention = {}
    for site, n, k in zip(sites, map(np.concatenate, live), map(np.concatenate, kept)):
        retention[site] = {"mean_ratio": float((k / n).mean()), "mean_kept_tokens": float(k.mean())}
    return OracleRun(
        sites=sites,
        problem_type=student.config.problem_type,
        batches=tuple(results),
        logit_error=max(logit_errors),
        decision_errors=decision_errors,
        retention=retention,
    )


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


def _errors(single: SiteDecision, exact: SiteDecision) -> np.ndarray:
    """Return ``(2, B)`` fp32 errors of the ratio and the saliency scores."""
    ratio = (single.ratio_logits - exact.ratio_logits).abs().amax(1)
    saliency = (single.saliency - exact.saliency).abs().masked_fill(~exact.live, 0).amax(1)
    return torch.stack([ratio, saliency]).numpy()
