"""A schedule whose student is trained to work at any length: whole, at its own schedule, and at one between them.

Source: Kim and Cho, Length-Adaptive Transformer, ACL 2021 (arXiv 2010.07003), section 3: LengthDrop with the sandwich rule and in-place
distillation. Tokens are ordered by the attention that they receive, as in Goyal et al., PoWER-BERT, ICML 2020.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor

from ...model.pruners.schedule import SchedulePruner
from ...model.selection import PERMILLE
from ..settings import TrainOptions
from .base import Method


class Sandwich(Method):
    """A student of a fixed schedule. The whole one learns the task, the shorter ones learn the whole one's answers."""

    @staticmethod
    def pruning(settings: TrainOptions) -> dict[str, Any]:
        ratios = [round(ratio, 3) for ratio in settings.target_retention]
        return {"method": "schedule", "ratios": ratios, "order": "received", "min_tokens": settings.min_tokens}

    @property
    def leaves_weights_out(self) -> bool:
        return True

    @contextlib.contextmanager
    def ratios(self, permille: list[int]) -> Iterator[None]:
        """Have the sites keep so many of each thousand tokens for the time of a block."""
        pruners = [cast(SchedulePruner, pruner) for pruner in self.student.pruners.values()]
        try:
            for pruner, value in zip(pruners, permille, strict=True):
                pruner.permille.fill_(value)
            yield
        finally:
            for pruner in pruners:
                pruner.restore_buffers()

    def forward(self, teacher_logits: Tensor, **batch: Tensor) -> dict[str, Tensor]:
        """Compute the loss of a right-padded batch; see `Method`. That of the three lengths is their mean."""
        wanted = [round(PERMILLE * ratio) for ratio in self.settings.target_retention]
        between = [int(torch.randint(low, PERMILLE + 1, ())) for low in wanted]
        with self.ratios([PERMILLE] * len(wanted)):
            whole, _ = self.through_cuts(batch)
        terms = self.task_terms(whole, batch, teacher_logits)
        losses = [self.weighted(terms)]
        for permille in (wanted, between):
            with self.ratios(permille):
                answer, _ = self.through_cuts(batch)
            losses.append(self.objective.logit_loss(answer, whole.detach(), batch, self.settings.temperature))
        return {"loss": torch.stack(losses).mean(), **{name: value.detach() for name, value in terms.items()}}
