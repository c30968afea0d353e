"""Learned Token Pruning: tokens that receive too little attention leave before the feed-forward of a layer.

A token's score is the attention it receives in the layer. Its code has three ways to go on from there:

- `absolute_threshold`, which the paper trains: the score, averaged over heads and over N queries, has to reach a learned threshold.
  N is the padded length of the original's evaluation: thresholds were learned for that, so they mean something else for another N.
- `threshold`: the score has to reach a given share of the largest score in the text.
- `topk`: a given rate of the text's first length stays, the highest scores. This is SpAtten's cascade (arXiv 2012.09852).

Source: Kim et al., Learned Token Pruning for Transformers, KDD 2022 (arXiv 2107.00910), section 3.2; code at
github.com/kssteven418/LTP. There [CLS] may leave, and attends to nothing from then on; here it stays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ...errors import InputError, check_int, quoted
from ..selection import KeepAbove, KeepAboveShare, KeepBest, Rule
from . import Pruner, PrunerSettings, Seen

ABSOLUTE, SHARE, TOPK = "absolute_threshold", "threshold", "topk"
MODES = (ABSOLUTE, SHARE, TOPK)
MAX_TOKENS = 8192
"""Tokens of the longest text whose number of survivors is known, for any rate."""


@dataclass(frozen=True)
class LtpSettings(PrunerSettings):
    """mode: of `MODES`. padded_length: what scores are divided by beside the number of heads, in `absolute_threshold`. rates: shares
    of the tokens that stay, one per site, in `topk`. first_may_fall: the first token had to reach it, too, where this was trained.
    """

    padded_length: int | None = None
    first_may_fall: bool = False
    mode: str = ABSOLUTE
    rates: Sequence[float] | None = None

    def check(self, sites: list[str]) -> None:
        if self.mode not in MODES:
            raise InputError(f"pruning.mode: got {quoted(self.mode)}; accepted are {', '.join(MODES)}")
        for field, mode in (("padded_length", ABSOLUTE), ("rates", TOPK)):
            if getattr(self, field) is not None and self.mode != mode:
                raise InputError(
                    f"pruning.{field} is for the mode {mode!r}, and this one is {self.mode!r}; leave it out"
                )
        if self.mode == ABSOLUTE and self.padded_length is None:
            raise InputError(f"pruning.padded_length is missing; the method 'ltp' needs it in the mode {ABSOLUTE!r}")
        if self.mode == ABSOLUTE:
            check_int("padded_length", self.padded_length, 1)
        if self.mode == TOPK:
            self._check_rates(sites)
        for site in sites:
            if not site.endswith(".ffn"):
                raise InputError(
                    f"pruning.sites: got {quoted(site)}; LTP drops tokens after a layer's attention, so accepted are 'i.ffn'"
                )

    def _check_rates(self, sites: list[str]) -> None:
        rates = self.rates
        if not isinstance(rates, list) or len(rates) != len(sites) or not all(_is_rate(rate) for rate in rates):
            raise InputError(
                f"pruning.rates: got {quoted(rates)} for {len(sites)} sites; accepted is a list of numbers above 0, up to 1, one per site"
            )


class LtpPruner(Pruner):
    """A threshold, which is a weight, or a rate, which is none: checkpoints cannot contradict their settings."""

    Settings = LtpSettings
    reads_received = True

    threshold: Tensor
    counts: Tensor

    def __init__(self, settings: LtpSettings, site: str, index: int, hidden_size: int, heads: int) -> None:
        super().__init__()
        self.mode, self.first_may_fall = settings.mode, settings.first_may_fall
        if settings.rates is None:
            self.threshold = nn.Parameter(torch.zeros(()))
            self.queries = heads * (settings.padded_length or 1)
        else:
            self.rate = settings.rates[index]
            self.longest = MAX_TOKENS
            self.counts = nn.Buffer(torch.zeros(MAX_TOKENS + 1, dtype=torch.int64), persistent=False)
            self.restore_buffers()

    def restore_buffers(self) -> None:
        if self.mode == TOPK:
            self.counts.copy_(counts_in_fp32(self.rate))

    def most_kept(self, tokens: int, texts: int, at_input: int) -> int:
        """A text keeps a rate of its first length, rounded, which is at most half a token more, or one token."""
        return tokens if self.mode != TOPK else min(tokens, int(at_input * self.rate) + 2 * texts)

    def forward(self, seen: Seen) -> Rule:
        """Keep what receives enough; see the modes above."""
        assert seen.received is not None
        if self.mode == TOPK:
            count = self.counts.index_select(0, seen.at_input.clamp(max=MAX_TOKENS))
            return _BestOfAll(seen.received, torch.minimum(count, seen.lengths))
        if self.mode == SHARE:
            return KeepAboveShare(seen.received, self.threshold, self.first_may_fall)
        return KeepAbove(seen.received / self.queries, self.threshold, first_may_fall=self.first_may_fall)


class _BestOfAll(KeepBest):
    """In the original the first token competes like all others; here it stays, and takes the place of another."""

    def first_falls(self) -> Tensor:
        return (self.order > self.order[:, :1]).sum(1) >= self.count


def counts_in_fp32(rate: float) -> Tensor:
    """Tell how many of n tokens stay, ``(MAX_TOKENS + 1,) int64`` for n from 0 on: at least 1, and else what the original computes in
    fp32. It rounds halves to even, and a product that is close to a half may become one.
    """
    return torch.round(torch.arange(MAX_TOKENS + 1) * rate).long().clamp(min=1)


def _is_rate(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value <= 1
