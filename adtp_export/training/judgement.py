"""What a student does on a set of texts: how right it is, and what it keeps."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..model.flops import Shape, encoder_flops


@dataclass
class Judgement:
    """What a student does on a set of texts.

    quality: as the objective gives it. alive: per site boundary ``(rows,)`` tokens, first the whole texts. ranks:
    per supervision ("teacher", "student", "joint") Spearman correlation within each text, mean over texts, and pooled over all
    tokens; mse: of saliency against its target.
    """

    quality: dict[str, float]
    alive: list[np.ndarray]
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

    def flops_reduction(self, shape: Shape, sites: list[str], padded: int, teacher: Shape) -> dict[str, float]:
        """FLOPs of the same encoder without cuts, padded to `padded` and packed, and of the packed teacher, over those of the student."""
        whole, student = self.alive[0], encoder_flops(shape, self.alive, sites)
        return {
            "padded": encoder_flops(shape, [np.maximum(whole, padded)]) / student,
            "packed": encoder_flops(shape, [whole]) / student,
            "teacher": encoder_flops(teacher, [whole]) / student,
        }
