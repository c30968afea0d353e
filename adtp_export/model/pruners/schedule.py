"""A schedule fixed in advance: each site keeps a given share of the tokens, or a given number of them.

Which tokens is one of three orders. A learned saliency predictor makes the static ablation of AD-TP, and what retention sweeps
time. The attention that tokens received, "received", is what Length-Adaptive Transformer goes by. "received-from-others" leaves
out what a token gives itself, as PoWER-BERT does.

Length-Adaptive Transformer protects [CLS] for classification (`keep_first`) and not for questions. A head that reads all tokens
gives a dropped one the state with which it entered its last layer (`restore: "layer"`).

Source: Goyal et al., PoWER-BERT (ICML 2020), section 3.2; their code leaves the diagonal out. Kim and Cho, Length-Adaptive
Transformer (ACL 2021), section 3 (drop and restore), and the code at github.com/clovaai/length-adaptive-transformer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import InputError, check_int, quoted
from ..selection import PERMILLE, KeepBest, kept_count
from . import Pruner, PrunerSettings, Seen, in_fp32
from .adtp import saliency_predictor

SALIENCY, RECEIVED, FROM_OTHERS = "saliency", "received", "received-from-others"
ORDERS = (SALIENCY, RECEIVED, FROM_OTHERS)
CUT, LAYER = "cut", "layer"


@dataclass(frozen=True, kw_only=True)
class ScheduleSettings(PrunerSettings):
    """One of `ratios` (multiples of 0.001 in (0, 1]) and `lengths` (tokens), one value per site.

    order: of `ORDERS`. saliency_hidden_size: width of the saliency predictor. min_tokens: floor of kept tokens. keep_first: whether
    the first token always stays, which heads that read it need. restore: the state that a dropped token answers with where the head
    reads all: that at the "cut", or that with which it entered the "layer".
    """

    ratios: Sequence[float] | None = None
    lengths: Sequence[int] | None = None
    order: str = SALIENCY
    saliency_hidden_size: int = 96
    min_tokens: int = 1
    keep_first: bool = True
    restore: str = CUT

    def check(self, sites: list[str]) -> None:
        if (self.ratios is None) == (self.lengths is None):
            raise InputError("pruning: a schedule has either ratios or lengths, one value per site; give one of them")
        name = "ratios" if self.lengths is None else "lengths"
        given: Any = getattr(self, name)
        if not isinstance(given, list) or len(given) != len(sites):
            raise InputError(
                f"pruning.{name}: got {quoted(given)} for {len(sites)} sites; give a list with one value per site"
            )
        for value in given:
            if name == "lengths":
                check_int("pruning.lengths", value, 1)
            elif not isinstance(value, (int, float)) or not _is_permille(value):
                raise InputError(
                    f"pruning.ratios: got {quoted(value)}; accepted are multiples of 0.001 above 0, up to 1"
                )
        for field, choices in (("order", ORDERS), ("restore", (CUT, LAYER))):
            if getattr(self, field) not in choices:
                raise InputError(
                    f"pruning.{field}: got {quoted(getattr(self, field))}; accepted are {', '.join(choices)}"
                )
        if not isinstance(self.keep_first, bool):
            raise InputError(f"pruning.keep_first: got {quoted(self.keep_first)}; accepted are true, false")
        if self.order != SALIENCY and "0.attention" in sites:
            raise InputError(
                "pruning.sites: got '0.attention'; no token has received attention there. Begin at '0.ffn'"
            )
        check_int("saliency_hidden_size", self.saliency_hidden_size, 1)
        check_int("min_tokens", self.min_tokens, 1)


class SchedulePruner(Pruner):
    """Only ``order: saliency`` has weights; a ratio is no weight, so that checkpoints cannot contradict their settings."""

    Settings = ScheduleSettings

    permille: Tensor

    def __init__(self, settings: ScheduleSettings, site: str, index: int, hidden_size: int, heads: int) -> None:
        super().__init__()
        self.reads_received, self.from_others = settings.order != SALIENCY, settings.order == FROM_OTHERS
        self.keeps_first, self.restores_entered = settings.keep_first, settings.restore == LAYER
        if not self.reads_received:
            self.saliency_predictor = saliency_predictor(hidden_size, settings.saliency_hidden_size)
        self.min_tokens = settings.min_tokens
        self.length = settings.lengths[index] if settings.lengths is not None else None
        # A buffer stays a named constant of the graph, which measurements turn into an input.
        self.ratio = 1.0 if settings.ratios is None else settings.ratios[index]
        self.permille = nn.Buffer(torch.zeros((), dtype=torch.int64), persistent=False)
        self.restore_buffers()

    def restore_buffers(self) -> None:
        self.permille.fill_(round(PERMILLE * self.ratio))

    def most_kept(self, tokens: int, texts: int, at_input: int) -> int:
        """A text keeps its share, rounded up, or `min_tokens`."""
        if self.length is not None:
            return texts * max(self.length, self.min_tokens)
        return -(-tokens * round(PERMILLE * self.ratio) // PERMILLE) + texts * max(1, self.min_tokens)

    def forward(self, seen: Seen) -> KeepBest:
        """Keep as many as the schedule says; a text that is shorter keeps all."""
        if self.length is None:
            count = kept_count(seen.lengths, self.permille, self.min_tokens)
        else:
            count = seen.lengths.clamp(max=max(self.length, self.min_tokens))
        order = seen.received if self.reads_received else in_fp32(self.saliency_predictor, seen.states).squeeze(-1)
        assert order is not None
        return KeepBest(order, count, keep_first=self.keeps_first)


def _is_permille(value: float) -> bool:
    return 0 < value <= 1 and abs(PERMILLE * value - round(PERMILLE * value)) <= 1e-6
