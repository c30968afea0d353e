"""What a student does on a set of texts: how right it is, and what it keeps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from ..model.flops import Shape, encoder_flops


@dataclass(kw_only=True)
class Judgement:
    """What a student does on a set of texts, in their order.

    quality: as the objective gives it. answers: of each row, as in `objectives`. alive: per site boundary ``(rows,)`` tokens, first
    the whole texts. chosen: per site whose pruner chooses between ratios ``(rows,)`` the one that each text keeps. ranks:
    per supervision ("teacher", "student", "joint") Spearman correlation within each text, mean over texts, and pooled over all
    tokens; mse: of saliency against its target.
    """

    quality: dict[str, float]
    answers: list[Tensor]
    alive: list[np.ndarray]
    chosen: dict[str, np.ndarray]
    ranks: dict[str, dict[str, float | None]]

    @property
    def kept(self) -> list[float]:
        """Per site, tokens left of those that came to it."""
        alive = [int(count.sum()) for count in self.alive]
        return [after / before for before, after in zip(alive, alive[1:])]

    @property
    def retention(self) -> list[float]:
        """Per site, tokens left of all tokens of the texts."""
        return [float(kept.sum() / self.alive[0].sum()) for kept in self.alive[1:]]

    @property
    def ratios(self) -> dict[str, dict[str, float]]:
        """Per site whose pruner chooses between ratios, the share of the texts that keep each."""
        return {site: ratio_shares(chosen) for site, chosen in self.chosen.items()}

    def flops_reduction(self, shape: Shape, sites: list[str], padded: int, teacher: Shape) -> dict[str, float]:
        """FLOPs of the same encoder without cuts, padded to `padded` and packed, and of the packed teacher, over those of the student."""
        whole, student = self.alive[0], encoder_flops(shape, self.alive, sites)
        return {
            "padded": encoder_flops(shape, [np.maximum(whole, padded)]) / student,
            "packed": encoder_flops(shape, [whole]) / student,
            "teacher": encoder_flops(teacher, [whole]) / student,
        }


ONE_RATIO = 0.95
"""Share of the texts from which on a student keeps one ratio, whatever it was trained to choose."""


def ratio_shares(chosen: np.ndarray) -> dict[str, float]:
    """Return the share of ``(rows,)`` ratios that each of them has, in ascending order."""
    return {f"{ratio:g}": count / len(chosen) for ratio, count in sorted(Counter(chosen.tolist()).items())}


def one_ratio(ratios: Mapping[str, Mapping[str, float]]) -> dict[str, str]:
    """Return the sites of `Judgement.ratios` at which nearly all texts keep the same ratio, each with that ratio."""
    most = {site: max(shares, key=shares.__getitem__) for site, shares in ratios.items()}
    return {site: ratio for site, ratio in most.items() if ratios[site][ratio] >= ONE_RATIO}
