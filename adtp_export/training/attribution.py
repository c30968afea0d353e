"""What a student is told about its tokens: the kinds of attribution that `--attribution` offers."""

from __future__ import annotations

import torch
from torch import Tensor

from ..explain.gradients import token_attribution, unit
from ..model.selection import competing
from .settings import GRADIENT_DIFFERENCE

MIN_SPREAD = 1e-6
"""Of values that are scaled; where they differ by less, rounding alone would be scaled up."""


def of_tokens(kind: str, gradients: Tensor, live: Tensor, dimensions: int | None = None) -> Tensor:
    """Reduce what `integrated_gradients` gives, ``(B, S, H)``, to tokens ``(B, S)``.

    Args:
        kind: one of `settings.ATTRIBUTIONS`.
        live: ``(B, S) bool``.
        dimensions: as in `token_attribution`; gradient norms are of all dimensions.

    Returns:
        Integrated gradients: rows of length 1. Gradient difference: norms of gradients, scaled to 0 to 1 among the tokens that
        compete, 0 elsewhere.
    """
    if kind == GRADIENT_DIFFERENCE:
        return scaled(gradients.square().sum(-1).clamp(min=1e-24).sqrt(), competing(live))
    return token_attribution(gradients, live, dimensions)


def supervision(kind: str, teacher: Tensor, student: Tensor, live: Tensor, kappa: float) -> Tensor:
    """Join two attributions ``(B, S)`` to what the pruners are to learn.

    Integrated gradients: ``(1 - kappa) teacher + kappa student``, rows of length 1. Gradient difference: the teacher's minus the
    student's, scaled to 0 to 1 among the tokens that compete. It is lowest for what misleads the student: what the student looks at
    and the teacher does not.

    Source: Guo et al., Learning to Focus (LeaF, NeurIPS 2025), detection of confounding tokens, for the difference; AD-TP, NeurIPS 2025,
    for the other.
    """
    if kind == GRADIENT_DIFFERENCE:
        return scaled(teacher - student, competing(live))
    return unit((1 - kappa) * teacher + kappa * student)


def scaled(values: Tensor, among: Tensor) -> Tensor:
    """Scale each row of ``(B, S)`` to 0 to 1 among the tokens ``(B, S) bool``; 0 elsewhere, and where all are the same."""
    low = values.masked_fill(~among, torch.inf).amin(1, keepdim=True)
    high = values.masked_fill(~among, -torch.inf).amax(1, keepdim=True)
    known = among.any(1, keepdim=True)
    spread = torch.where(known, high - low, 1).clamp(min=MIN_SPREAD)
    return ((values - torch.where(known, low, 0)) / spread).masked_fill(~among, 0)
