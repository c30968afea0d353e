"""Transkimmer: before each layer a small predictor says of every token whether it stays.

The original adds Gumbel noise to the predictor's two scores, in evaluation too; here the larger one decides.

Source: Guan et al., Transkimmer: Transformer Learns to Layer-wise Skim, ACL 2022 (arXiv 2205.07324), section 3; code at
github.com/ChandlerGuan/Transkimmer.
"""

from __future__ import annotations

import torch
from torch import nn

from ..selection import KeepAbove
from . import Pruner, PrunerSettings, Seen, in_fp32


class TranskimmerPruner(Pruner):
    """A predictor with two scores per token: that it goes, and that it stays. Its modules have the original's numbers."""

    def __init__(self, settings: PrunerSettings, site: str, index: int, hidden_size: int, heads: int) -> None:
        super().__init__()
        self.predictor = nn.Sequential(
            nn.LayerNorm(hidden_size, eps=1e-5),
            nn.Linear(hidden_size, hidden_size),
            nn.LayerNorm(hidden_size, eps=1e-5),
            nn.GELU(),
            nn.Linear(hidden_size, 2),
        )

    def forward(self, seen: Seen) -> KeepAbove:
        """Keep the tokens whose second score is the larger; where both are equal, the token goes."""
        goes, stays = in_fp32(self.predictor, seen.states).unbind(-1)
        order = stays - goes
        return KeepAbove(order, torch.tensor(torch.finfo(order.dtype).tiny, dtype=order.dtype, device=order.device))
