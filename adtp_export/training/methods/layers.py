"""Fewer layers, and all tokens: the dense student that pruning has to beat.

It learns by the task loss of all methods, so that the comparison is one of shapes.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..settings import TrainOptions
from .base import Method
from .masking import with_masks


class Layers(Method):
    """A student without cuts; ``--layers`` says how many of the teacher's layers it has."""

    @staticmethod
    def pruning(settings: TrainOptions) -> dict[str, Any]:
        return {}

    def forward(self, teacher_logits: Tensor, **batch: Tensor) -> dict[str, Tensor]:
        """Compute the loss of a right-padded batch; see `Method`."""
        answer, _ = self.through_cuts(batch)
        terms = self.task_terms(answer, batch, teacher_logits)
        loss = with_masks(self, self.weighted(terms), batch, answer, teacher_logits)
        return {"loss": loss, **{name: value.detach() for name, value in terms.items()}}
