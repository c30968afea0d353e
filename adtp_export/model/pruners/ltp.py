"""Learned Token Pruning: tokens that receive too little attention leave before the feed-forward of a layer.

A token's score is the attention it receives in the layer, averaged over heads and over N queries. N is the padded length of
the original's evaluation: its thresholds were learned for that, so they mean something else for another N.

Source: Kim et al., Learned Token Pruning for Transformers, KDD 2022 (arXiv 2107.00910), section 3.2; their code divides by
the padded length. There [CLS] may fall below a threshold, and attends to nothing from then on; here it stays.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ...errors import InputError, at_least, shown
from ..selection import KeepAbove
from . import Pruner, PrunerSettings, Seen


@dataclass(frozen=True)
class LtpSettings(PrunerSettings):
    """padded_length: what scores are divided by, beside the number of heads. first_may_fall: it did so where this was trained."""

    padded_length: int
    first_may_fall: bool = False

    def check(self, sites: list[str]) -> None:
        at_least("padded_length", self.padded_length, 1)
        for site in sites:
            if not site.endswith(".ffn"):
                raise InputError(
                    f"pruning.sites: got {shown(site)}; LTP drops tokens after a layer's attention, so accepted are 'i.ffn'"
                )


class LtpPruner(Pruner):
    """A learned threshold; scores are averages over heads and `padded_length` queries, whatever the batch's length."""

    Settings = LtpSettings
    reads_received = True

    threshold: Tensor

    def __init__(self, settings: LtpSettings, site: str, index: int, hidden_size: int, heads: int) -> None:
        super().__init__()
        self.threshold = nn.Parameter(torch.zeros(()))
        self.queries, self.first_may_fall = heads * settings.padded_length, settings.first_may_fall

    def forward(self, seen: Seen) -> KeepAbove:
        """Keep what receives at least the threshold on average."""
        assert seen.received is not None
        return KeepAbove(seen.received / self.queries, self.threshold, first_may_fall=self.first_may_fall)
