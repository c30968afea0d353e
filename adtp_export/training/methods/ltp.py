"""LTP: a threshold per site is learned through soft gates, then fixed, and the rest of the student is trained on.

Source: Kim et al., Learned Token Pruning for Transformers, KDD 2022 (arXiv 2107.00910), sections 3.3 and 3.4.
"""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor, nn

from ...model.pruners import Pruner, Seen
from ...model.pruners.ltp import LtpPruner
from ...model.selection import KeepAbove
from ..settings import TrainOptions
from .gated import Gated

SOFTNESS = 0.1
"""Temperature of the gates, in mean scores: tokens of a text give each other 1 / `padded_length` on average, whatever its length."""
STEP = 5
"""How much faster than other weights of pruners thresholds are learned, in mean scores, too."""


class LearnedThresholds(Gated):
    """LTP. Thresholds begin at 0, where all tokens stay.

    The regularizer is the mean gate, as in the paper. Its weight is found by the controller, and not by trial.
    """

    @staticmethod
    def pruning(settings: TrainOptions) -> dict[str, Any]:
        return {"method": "ltp", "padded_length": settings.max_tokens}

    @property
    def mean_score(self) -> float:
        return 1 / cast(int, self.settings.max_tokens)

    def rates(self) -> dict[nn.Parameter, float]:
        rate = self.settings.retainer_learning_rate * STEP * self.mean_score
        return dict.fromkeys(self.student.pruners.parameters(), rate)

    def margins(self, pruner: Pruner, seen: Seen) -> Tensor:
        rule = cast(LtpPruner, pruner)(seen)
        assert isinstance(rule, KeepAbove)
        return rule.order - rule.threshold

    def raise_bar(self, pruner: Pruner, amount: float) -> None:
        cast(LtpPruner, pruner).threshold += amount

    def open(self, number: int, pruner: Pruner, seen: Seen, others: Tensor) -> tuple[Tensor, Tensor]:
        above = self.margins(pruner, seen)
        return (above / (SOFTNESS * self.mean_score)).sigmoid().to(seen.states.dtype), above >= 0
