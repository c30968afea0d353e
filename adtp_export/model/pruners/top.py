"""ToP: tokens are ranked by the attention that they received in the layer before, and masks that were learned say which ranks stay.

Ranks fall into bins, equally many in each. The original computes a rank's bin in fp32, where it sometimes is one lower than in
exact arithmetic; which tokens stay depends on that.

Source: Li et al., Constraint-aware and Ranking-distilled Token Pruning (ToP), KDD 2023 (arXiv 2306.14393), section 4; code at
github.com/microsoft/Moonlit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ...errors import InputError, quoted
from ..selection import KeepRanks
from . import Pruner, PrunerSettings, Seen

MAX_BINS = 1000
FEW = 32
"""From so many tokens on, fp32 does not see the 1e-6 that the original adds to their number."""


@dataclass(frozen=True)
class TopSettings(PrunerSettings):
    """bins: a text of 0 and 1 per site; which bins of ranks stay, the highest scores first."""

    bins: Sequence[str]

    def check(self, sites: list[str]) -> None:
        accepted = f"accepted is a list of texts of 0 and 1, up to {MAX_BINS} long, one per site"
        if not isinstance(self.bins, list) or len(self.bins) != len(sites):
            raise InputError(f"pruning.bins: got {quoted(self.bins)} for {len(sites)} sites; {accepted}")
        for kept in self.bins:
            if not isinstance(kept, str) or not 1 <= len(kept) <= MAX_BINS or set(kept) - {"0", "1"}:
                raise InputError(f"pruning.bins: got {quoted(kept)}; {accepted}")
        for site in sites:
            if not site.endswith(".attention") or site.startswith("0."):
                raise InputError(
                    f"pruning.sites: got {quoted(site)}; ToP ranks tokens by what they received in the layer before, so accepted are "
                    "'i.attention' from 1 on"
                )


class TopPruner(Pruner):
    """A mask over bins of ranks; it is no weight, so that checkpoints cannot contradict their settings."""

    Settings = TopSettings
    reads_received = True

    table: Tensor

    def __init__(self, settings: TopSettings, site: str, index: int, hidden_size: int, heads: int) -> None:
        super().__init__()
        self.bins = settings.bins[index]
        self.table = nn.Buffer(torch.zeros((FEW + 1) * len(self.bins) * 2, dtype=torch.bool), persistent=False)
        self.restore_buffers()

    def restore_buffers(self) -> None:
        kept = torch.tensor([bin == "1" for bin in self.bins])
        self.table.copy_(kept[bins_in_fp32(len(self.bins))].flatten())

    def forward(self, seen: Seen) -> KeepRanks:
        """Rank by attention received; the first token, which always stays, has no rank."""
        assert seen.received is not None
        return KeepRanks(seen.received, self.keeps)

    def keeps(self, others: Tensor, rank: Tensor) -> Tensor:
        """Say whether ranks ``(B, R)`` of as many tokens ``(B, 1)`` stay; see `KeepRanks`."""
        scaled = rank * len(self.bins)
        place = scaled // others
        divides = (scaled == place * others).to(torch.int64)
        entry = (others.clamp(max=FEW) * len(self.bins) + place) * 2 + divides
        return self.table.index_select(0, entry.flatten()).view(entry.shape)


def bins_in_fp32(bins: int) -> Tensor:
    """Tell the original's bins, ``(FEW + 1, bins, 2) int64``: of n tokens (the last row: of `FEW` and more), of a rank r whose exact
    bin is k, where ``r * bins / n`` is not exactly k, and where it is.

    Where it is not, it is at least 1 / n away from a whole number. That is more than fp32 is off with up to `MAX_BINS` bins and
    8,000 tokens, so both arithmetics agree. Where it is, ``r / n`` is ``k / bins``. The quotient that fp32 gives for it depends on
    that fraction alone, as soon as fp32 rounds n + 1e-6 to n.
    """
    others = torch.cat([torch.arange(FEW), torch.tensor([FEW * bins])])[:, None]
    exact = torch.arange(bins).expand(len(others), -1)
    computed = bin_in_fp32(exact * others // bins, others, bins)
    return torch.stack([exact, torch.where(exact * others % bins == 0, computed, exact)], dim=-1)


def bin_in_fp32(rank: Tensor, others: Tensor, bins: int) -> Tensor:
    """Compute the bin of a rank as the original does, in fp32; int64 in and out."""
    return ((rank / (others.float() + 1e-6)).clamp(0.0, 1.0) * bins).long()
