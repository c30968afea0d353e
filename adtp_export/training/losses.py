"""The terms of the loss: ``L = (1 - alpha) L_CE + alpha L_logit + beta L_IG + gamma (L_ARP + L_TSP)``.

Source: AD-TP, NeurIPS 2025. What the paper leaves open is said where it is decided.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div, mse_loss, softplus

from ..model.pruners.adtp import candidate_counts
from ..model.selection import ranks

SALIENCY_FLOOR = 0.01


class Ratios(NamedTuple):
    """What a site may keep: candidate ratios in 1/1000, ascending, the last 1000; the floor of kept tokens; and how many always stay, of
    each text ``(B,)`` where texts may have fewer than that."""

    permille: Sequence[int]
    min_tokens: int
    anchors: int | Tensor = 1

    @classmethod
    def of(cls, pruner: Any, anchors: int | Tensor = 1) -> Ratios:
        """Read them off a pruner that chooses between ratios."""
        return cls(pruner.permille, pruner.min_tokens, anchors)

    def counts(self, live: Tensor) -> Tensor:
        """Tokens that each candidate keeps, ``(B, C) int64``, of ``live (B,) int64``."""
        return candidate_counts(live, self.permille, self.min_tokens)


def logit_loss(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """L_logit: KL divergence of softened answers times temperature squared (Hinton et al. 2015); squared error in regression.

    Args:
        student, teacher: ``(B, C)`` logits.
    """
    if student.shape[1] == 1:
        return mse_loss(student, teacher)
    soft = (teacher / temperature).softmax(1)
    return kl_div((student / temperature).log_softmax(1), soft, reduction="batchmean") * temperature**2


def attribution_loss(student: Tensor, teacher: Tensor) -> Tensor:
    """L_IG: squared distance of two attributions ``(B, S)`` whose rows have length 1; between 0 and 2, mean over rows."""
    return (student - teacher).square().sum(1).mean()


def saliency_target(attribution: Tensor, candidates: Tensor) -> Tensor:
    """What the saliency predictor is to say, ``(B, S)``: log of the attribution relative to the mean over candidates.

    The logarithm keeps the order, and gives tokens of small attribution, among which the cut falls, as much weight as
    large ones; relative values do not depend on the length of the text. Floored at 1% of the mean.

    Args:
        attribution: ``(B, S)``, non-negative.
        candidates: ``(B, S) bool``, tokens that compete: live, without those that always stay.
    """
    held = attribution * candidates
    mean = held.sum(1, keepdim=True) / candidates.sum(1, keepdim=True).clamp(min=1)
    return (held / mean.clamp(min=1e-12)).clamp(min=SALIENCY_FLOOR).log()


def saliency_loss(saliency: Tensor, attribution: Tensor, candidates: Tensor) -> Tensor:
    """L_TSP: mean squared error over candidates ``(B, S) bool``."""
    if not candidates.any():
        return saliency.sum() * 0
    return mse_loss(saliency[candidates], saliency_target(attribution, candidates)[candidates])


def ratio_label(attribution: Tensor, candidates: Tensor, ratios: Ratios, share: float) -> Tensor:
    """The ratio that the ratio predictor is to pick, ``(B,) int64`` into the candidate list.

    It is the smallest candidate whose tokens, those that always stay and those of highest attribution, hold `share` of the attribution
    of all that compete. So a text whose answer hangs on few words is cut harder than one that spreads it, at the same share of
    explanation lost; the paper leaves the rule open. `share_for_retention` gives the share for a wanted mean retention.

    Args:
        attribution: ``(B, S)``, non-negative.
        candidates: ``(B, S) bool``, live tokens without those that always stay.
        share: between 0 and 1.
    """
    held = (attribution * candidates).sort(dim=1, descending=True).values.cumsum(1)
    missing = held < share * held[:, -1:] * (1 - 1e-6)
    live = candidates.sum(1) + ratios.anchors
    needed = (ratios.anchors + 1 + missing.sum(1)).minimum(live)  # up to the one that reaches the share
    return (ratios.counts(live) < needed[:, None]).sum(1)


def ratio_loss(choice: Tensor, attribution: Tensor, candidates: Tensor, ratios: Ratios, share: float) -> Tensor:
    """L_ARP: cross-entropy of ``choice (B, C)``, the scores of the candidate ratios, against `ratio_label`."""
    return cross_entropy(choice, ratio_label(attribution, candidates, ratios, share))


def retention(labels: Tensor, candidates: Tensor, ratios: Ratios) -> float:
    """Mean retention that ratios `labels (B,)` give: kept tokens of all rows over live tokens of all rows."""
    live = candidates.sum(1) + ratios.anchors
    kept = ratios.counts(live).gather(1, labels[:, None])
    return (kept.sum() / live.sum()).item()


def share_for_retention(attribution: Tensor, candidates: Tensor, ratios: Ratios, wanted: float) -> float:
    """Find by bisection the share of attribution at which `ratio_label` keeps `wanted` of the tokens."""
    low, high = 0.0, 1.0
    for _ in range(20):
        middle = (low + high) / 2
        if retention(ratio_label(attribution, candidates, ratios, middle), candidates, ratios) < wanted:
            low = middle
        else:
            high = middle
    return high


def rank_loss(received: Tensor, teacher: Tensor, candidates: Tensor) -> Tensor:
    """L_rank: pairs of tokens that are not in the teacher's order, each weighted by what exchanging them does to the NDCG.

    A token's relevance falls linearly with its rank at the teacher. Scores are logarithms of attention: their differences do not depend
    on the length of a text or the number of heads.

    Args:
        received, teacher: attention that tokens received, ``(B, S)``.
        candidates: ``(B, S) bool``, tokens that compete.

    Source: ToP, KDD 2023, section 4.2; Burges, From RankNet to LambdaRank to LambdaMART, MSR-TR-2010-82, section 4.
    """
    count = candidates.sum(1, keepdim=True).clamp(min=1)
    relevance = 1 - ranks(teacher, candidates) / count
    discount = 1 / (2.0 + ranks(received.detach(), candidates)).log2()
    best = (relevance / (2.0 + ranks(teacher, candidates)).log2() * candidates).sum(1).clamp(min=1e-6)
    scores = received.clamp(min=1e-9).log()
    pairs = candidates[:, :, None] & candidates[:, None, :] & (relevance[:, :, None] > relevance[:, None, :])
    gains = (relevance[:, :, None] - relevance[:, None, :]) * (discount[:, :, None] - discount[:, None, :]).abs()
    wrong = softplus(scores[:, None, :] - scores[:, :, None])
    return ((gains * wrong * pairs).sum((1, 2)) / best).mean()
