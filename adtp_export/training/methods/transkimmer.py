"""Transkimmer: a predictor before each layer says of every token whether it stays; it is trained through samples of what it says.

Source: Guan et al., Transkimmer: Transformer Learns to Layer-wise Skim, ACL 2022 (arXiv 2205.07324), sections 3.2 and 3.3.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import gumbel_softmax

from ...model.encoder import PrunedEncoder
from ...model.pruners import Pruner, Seen, in_fp32
from ...model.pruners.transkimmer import TranskimmerPruner
from ..settings import TrainOptions
from .gated import RAMP, Gated

KEEPING = 1.5
"""Biases of both scores begin this far from 0, for staying; 5 in the original, which trains for many more steps."""


class Skimming(Gated):
    """Transkimmer. Gates are sampled with Gumbel noise, hard on the way forward and soft on the way back.

    The skim loss is the mean share of tokens kept, over sites; its weight is found by the controller. There is no noise in evaluation.
    """

    settles = False
    final_from = RAMP

    def __init__(self, student: PrunedEncoder, settings: TrainOptions) -> None:
        super().__init__(student, settings)
        with torch.no_grad():
            for pruner in self.student.pruners.values():
                _bias(pruner).copy_(torch.tensor([-KEEPING, KEEPING]))

    def margins(self, pruner: Pruner, seen: Seen) -> Tensor:
        goes, stays = in_fp32(cast(TranskimmerPruner, pruner).predictor, seen.states).unbind(-1)
        return stays - goes

    def raise_bar(self, pruner: Pruner, amount: float) -> None:
        bias = _bias(pruner)
        bias += amount / 2 * bias.new_tensor([1, -1])

    @staticmethod
    def pruning(settings: TrainOptions) -> dict[str, Any]:
        return {"method": "transkimmer"}

    def open(self, number: int, pruner: Pruner, seen: Seen, others: Tensor) -> tuple[Tensor, Tensor]:
        said = in_fp32(cast(TranskimmerPruner, pruner).predictor, seen.states)
        gate = gumbel_softmax(said, hard=True)[..., 1]
        return gate.to(seen.states.dtype), said[..., 1] > said[..., 0]


def _bias(pruner: nn.Module) -> Tensor:
    """Return the bias ``(2,)`` of both scores of a site."""
    return cast(nn.Linear, cast(TranskimmerPruner, pruner).predictor[-1]).bias
