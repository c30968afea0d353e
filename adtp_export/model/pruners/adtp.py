"""AD-TP's retainer: a ratio predictor reads [CLS], or the last token of causal models, and picks how many tokens stay; a saliency
predictor picks which.

Source: AD-TP, NeurIPS 2025. Rounding and the protection of [CLS], which the paper leaves open, follow checkpoint format 1
(`docs/design.md`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ...errors import InputError, check_int, quoted
from ..selection import PERMILLE, KeepBest, kept_count
from . import Pruner, PrunerSettings, Seen, in_fp32


@dataclass(frozen=True)
class AdtpSettings(PrunerSettings):
    """retention_ratios: candidates, ascending multiples of 0.001 in (0, 1], the last 1.0. saliency_hidden_size: width of the
    saliency predictor. min_tokens: floor of kept tokens per sequence."""

    retention_ratios: Sequence[float]
    saliency_hidden_size: int = 96
    min_tokens: int = 1

    def check(self, sites: list[str]) -> None:
        ratios_in_permille(self.retention_ratios)
        check_int("saliency_hidden_size", self.saliency_hidden_size, 1)
        check_int("min_tokens", self.min_tokens, 1)


class AdtpPruner(Pruner):
    """The retainer of a site; in checkpoints of format 1 its weights are under ``retainers``."""

    Settings = AdtpSettings
    earliest = (
        "0.attention",
        "at the raw embedding the [CLS] state is the same for every input, so a retainer there cannot adapt to the text. "
        "The earliest site is '0.ffn'",
    )

    def __init__(self, settings: AdtpSettings, site: str, index: int, hidden_size: int, heads: int) -> None:
        super().__init__()
        self.ratio_predictor = nn.Linear(hidden_size, len(settings.retention_ratios))
        self.saliency_predictor = saliency_predictor(hidden_size, settings.saliency_hidden_size)
        self.min_tokens = settings.min_tokens
        self.permille = ratios_in_permille(settings.retention_ratios)

    def forward(self, seen: Seen) -> KeepBest:
        """Choose the ratio of the highest score, the lowest index on ties, and order tokens by saliency."""
        choice = in_fp32(self.ratio_predictor, seen.read)
        count = self.count(choice.argmax(1), seen.lengths)
        order = in_fp32(self.saliency_predictor, seen.states).squeeze(-1)
        return KeepBest(order, count, choice, candidate_counts(seen.lengths, self.permille, self.min_tokens))

    @property
    def predictors(self) -> tuple[nn.Linear, nn.Sequential]:
        """That of ratios, and that of saliency."""
        return self.ratio_predictor, self.saliency_predictor

    def count(self, chosen: Tensor, lengths: Tensor) -> Tensor:
        """Tokens to keep, ``(B,) int64``, for ``chosen (B,) int64`` candidates and live tokens ``lengths (B,)``."""
        permille = torch.tensor(self.permille, device=lengths.device)
        return kept_count(lengths, permille.index_select(0, chosen), self.min_tokens)


def candidate_counts(lengths: Tensor, permille: Sequence[int], min_tokens: int) -> Tensor:
    """Return how many tokens each candidate keeps, ``(B, C) int64``, of live tokens ``lengths (B,)``."""
    return kept_count(lengths[:, None], torch.tensor(permille, device=lengths.device), min_tokens)


def saliency_predictor(hidden_size: int, width: int) -> nn.Sequential:
    """Scores tokens: ``(..., H)`` to ``(..., 1)``."""
    return nn.Sequential(nn.Linear(hidden_size, width), nn.ReLU(), nn.Linear(width, 1))


def ratios_in_permille(ratios: Sequence[float]) -> list[int]:
    """Return the candidate ratios as integers in 1/1000, the only form in which they enter arithmetic.

    Raises:
        InputError: no list, empty, not ascending, outside (0, 1], not multiples of 0.001, or the last is not 1.0.
    """
    if not isinstance(ratios, (list, tuple)):
        raise InputError(f"retention_ratios must be a list, got {quoted(ratios)}")
    rule = "retention_ratios must be distinct ascending multiples of 0.001 in (0, 1] that end with 1.0"
    if not ratios or not all(isinstance(r, (int, float)) and 0 < r <= 1 for r in ratios):
        raise InputError(f"{rule}, got {quoted(ratios)}")
    permille = [round(PERMILLE * r) for r in ratios]
    for ratio, q in zip(ratios, permille):
        if abs(PERMILLE * ratio - q) > 1e-6:
            raise InputError(f"{rule}, got {quoted(ratio)} in {quoted(list(ratios))}")
    if any(a >= b for a, b in zip(permille, permille[1:])) or permille[-1] != PERMILLE:
        raise InputError(f"{rule}, got {quoted(list(ratios))}")
    return permille
