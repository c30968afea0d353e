"""ToP: masks over bins of ranks, and a switch per site, are learned as hard-concrete variables; then they are made zeros and ones.

Source: Li et al., Constraint-aware and Ranking-distilled Token Pruning, KDD 2023 (arXiv 2306.14393), section 4; hard-concrete variables
as in Louizos et al., Learning Sparse Neural Networks through L0 Regularization, ICLR 2018.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from ...model.encoder import PrunedEncoder
from ...model.packed import PackedStudent
from ...model.pruners import Pruner, Seen
from ...model.pruners.top import TopPruner, bin_in_fp32
from ...model.selection import PERMILLE, ranks
from ..budget import meeting
from ..data import Examples
from ..differentiable import DifferentiableAttention
from ..losses import rank_loss
from ..settings import TrainOptions
from .gated import Gated, Opened

BINS = 20
TEMPERATURE, LOW, HIGH = 2 / 3, -0.1, 1.1
"""Of hard-concrete variables: samples are stretched from LOW to HIGH, and cut to 0 to 1."""
OPEN, UNDECIDED = 3.0, 0.0
"""Where the logits of bins and of switches begin."""
STEP = 10
"""How much faster than weights of pruners they are learned."""


class RankMasks(Gated):
    """ToP. A token stays where its site is switched off, or its bin of ranks is kept.

    The loss has the Lagrangian of the FLOPs that are expected to be left, and the ranking of tokens is distilled: the order of what
    they receive before each site follows that in the teacher's last layer.

    Args:
        lengths: of the dev rows, on which the budget is met exactly. How many tokens stay depends on the length of a text alone.
    """

    def __init__(self, student: PrunedEncoder, settings: TrainOptions, lengths: Sequence[int]) -> None:
        super().__init__(student, settings)
        sites = len(student.site_names)
        self.bins = nn.ParameterList(nn.Parameter(torch.full((BINS,), OPEN)) for _ in range(sites))
        self.switches = nn.Parameter(torch.full((sites,), UNDECIDED))
        self.lengths, self.sizes = list(lengths), bin_sizes(max(lengths))
        self._drawn: list[Tensor] = []
        self._settled: Tensor | None = None

    @classmethod
    def of(cls, student: PrunedEncoder, settings: TrainOptions, parts: Mapping[str, Examples]) -> RankMasks:
        return cls(student, settings, parts["dev"].lengths)

    @staticmethod
    def pruning(settings: TrainOptions) -> dict[str, Any]:
        return {"method": "top", "bins": ["1" * BINS] * len(settings.sites)}

    def rates(self) -> dict[nn.Parameter, float]:
        return dict.fromkeys([*self.bins, self.switches], self.settings.retainer_learning_rate * STEP)

    def through_gates(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, list[Opened]]:
        """Draw one mask per site for all texts of the batch, and pass."""
        self._drawn = [1 - sample(on) * (1 - sample(kept)) for on, kept in zip(self.switches, self.bins)]
        return super().through_gates(batch)

    def open(self, number: int, pruner: Pruner, seen: Seen, others: Tensor) -> tuple[Tensor, Tensor]:
        assert seen.received is not None
        count = others.sum(1).clamp(min=1)[:, None]
        place = bin_in_fp32(torch.minimum(ranks(seen.received, others), count - 1), count, BINS)
        gate = self._drawn[number][place]
        return gate.to(seen.states.dtype), gate >= 0.5

    def own_terms(self, sites: Sequence[Opened], attribution: Tensor | None) -> dict[str, Tensor]:
        if self.weights["rank"] == 0:
            return {}
        assert attribution is not None
        losses = []
        for site in sites:
            assert site.received is not None
            losses.append(rank_loss(site.received, attribution, site.came))
        return {"rank": torch.stack(losses).mean()}

    def stays(self) -> Tensor:
        """Return how likely each bin of each site is kept, ``(sites, BINS)``."""
        on, kept = likely(self.switches), likely(torch.stack([*self.bins]))
        return 1 - on[:, None] * (1 - kept)

    def flops_left(self, sites: Sequence[Opened], lengths: Tensor) -> Tensor:
        """Return the share of FLOPs that is expected to be left, with gradients."""
        alive = [lengths.double()]
        for share in self.stays().mean(1):
            others = self.others(alive[-1])
            alive.append(alive[-1] - others + others * share)
        return self.share(alive)

    def openness(self, sites: Sequence[Opened], lengths: Tensor) -> Tensor:
        return self.flops_left(sites, lengths)

    def margins(self, pruner: Pruner, seen: Seen) -> Tensor:
        raise NotImplementedError("masks have no bar")

    def raise_bar(self, pruner: Pruner, amount: float) -> None:
        raise NotImplementedError("masks have no bar")

    def prepare(self, examples: Examples) -> None:
        """Masks meet the budget by themselves."""

    def through_cuts(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, list[Tensor]]:
        stays = self.stays().detach()
        if self._settled is None or not torch.equal(stays, self._settled):
            self.settle()
            self._settled = stays
        return super().through_cuts(batch)

    def settle(self) -> None:
        """Make zeros and ones of the masks: the bins that are kept most likely, over all sites, as many as the budget allows.

        Among equals, low ranks go first.
        """
        stays = self.stays().detach().double().cpu() - 1e-6 * torch.arange(BINS)
        order = stays.flatten().argsort(descending=True, stable=True)

        def masks(q: int) -> np.ndarray:
            kept = torch.zeros(len(order), dtype=torch.bool)
            kept[order[: q * len(order) // PERMILLE]] = True
            return kept.view(stays.shape).numpy()

        def keep(q: int, lengths: np.ndarray) -> list[np.ndarray]:
            alive = [lengths]
            for kept in masks(q):
                others = np.maximum(alive[-1] - self.anchors, 0)
                alive.append(alive[-1] - others + (self.sizes[others] * kept).sum(1))
            return alive[1:]

        names = self.student.site_names
        found = masks(meeting(self.budget, self.shape, names, self.lengths, keep))
        texts = ["".join("01"[int(kept)] for kept in mask) for mask in found]
        for pruner, text in zip(self.student.pruners.values(), texts):
            cast(TopPruner, pruner).bins = text
            cast(TopPruner, pruner).restore_buffers()
        self.student.config.pruning["bins"] = texts

    def finish(self) -> None:
        """Leave out sites at which all tokens stay."""
        self.settle()
        student, pruning = self.student, self.student.config.pruning
        kept = [(site, bins) for site, bins in zip(student.config.sites, pruning["bins"]) if "0" in bins]
        for key in set(student.pruners) - {site.key for site, _ in kept}:
            del student.pruners[key]
        student.config.pruning = pruning | {
            "sites": [str(site) for site, _ in kept],
            "bins": [bins for _, bins in kept],
        }
        self._packed = (self.objective.prepare(PackedStudent(student, DifferentiableAttention, self.cut)),)
        self._settled = self.stays().detach()


def sample(logits: Tensor) -> Tensor:
    """Draw hard-concrete variables, each between 0 and 1, and often one of both."""
    noise = torch.rand_like(logits).clamp(1e-6, 1 - 1e-6)
    drawn = ((noise.log() - (-noise).log1p() + logits) / TEMPERATURE).sigmoid()
    return (drawn * (HIGH - LOW) + LOW).clamp(0, 1)


def likely(logits: Tensor) -> Tensor:
    """Return the probability that such a variable is above 0."""
    return (logits - TEMPERATURE * math.log(-LOW / HIGH)).sigmoid()


def bin_sizes(longest: int) -> np.ndarray:
    """Count how many ranks fall into each bin, ``(longest, BINS)``: row n is for n tokens besides those that always stay."""
    sizes = np.zeros((longest, BINS), dtype=np.int64)
    for others in range(1, longest):
        places = bin_in_fp32(torch.arange(others), torch.tensor(others), BINS)
        sizes[others] = torch.bincount(places, minlength=BINS)[:BINS].numpy()
    return sizes
