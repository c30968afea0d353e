"""Image tokens that leave before a language model reads any: those that stay lie far from one another, and are as many in each picture."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import InputError, did_you_mean, quoted
from .image_pruners import DIVPRUNE, check_share
from .image_tokens import Distances, add_farthest
from .sequences import top_k

KEEP = 0.098
"""The share of a picture's tokens that the authors keep."""


def read_kept(given: Mapping[str, Any], image_tokens: int) -> int:
    """Read `keep` of a configuration whose method is DivPrune; return how many of so many image tokens stay.

    Raises:
        InputError: another field, no share, or one that keeps none.
    """
    if unknown := next((name for name in given if name not in ("method", "keep")), None):
        hint = did_you_mean(unknown, ["keep"])
        raise InputError(f"pruning: got the field {quoted(unknown)}; accepted for {DIVPRUNE} are method and keep{hint}")
    check_share("pruning.keep", share := given.get("keep", KEEP))
    if not (kept := round(image_tokens * share)):  # as the authors' code does
        least = math.ceil(1000 / image_tokens) / 1000
        raise InputError(
            f"pruning.keep: got {share}; that is none of {image_tokens} image tokens. Accepted are shares from {least} on"
        )
    return kept


class Diverse(nn.Module):
    """Features of pictures, of which so many stay: the one whose nearest neighbour is farthest, and then always the one that is farthest
    from those before it. Distance is by the cosine.

    Args:
        features: from pictures to ``(images, n, H)``.

    Source: Alvar et al., DivPrune (CVPR 2025), section 3.
    """

    def __init__(self, features: nn.Module, keep: int) -> None:
        super().__init__()
        self.features, self.image_cuts = features, FarthestTokens(keep)

    def forward(self, pixel_values: Tensor) -> tuple[Tensor, Tensor]:
        """Return the features ``(images, keep, H)`` that stay, in order, and their places ``(images, keep) int64``."""
        return self.choose(self.features(pixel_values))

    def choose(self, found: Tensor) -> tuple[Tensor, Tensor]:
        """Return of features ``(images, n, H)`` what `forward` does."""
        kept = self.image_cuts(found)
        rows = torch.arange(found.shape[0], device=found.device)
        return found[rows[:, None], kept], kept


class FarthestTokens(nn.Module):
    """A module, so that its nodes are called `contract.IMAGE_CUTS` and stay in fp32."""

    def __init__(self, keep: int) -> None:
        super().__init__()
        self.keep = keep

    def forward(self, features: Tensor) -> Tensor:
        """Return the places ``(images, keep) int64`` of features ``(images, n, H)`` that stay."""
        live = torch.ones_like(features[:, :, 0], dtype=torch.bool)
        count = live.sum(1).clamp(max=self.keep)
        picked = add_farthest(None, live, Distances.of(features, live), count)
        place = torch.arange(features.shape[1], device=features.device)
        order = torch.where(picked, place, features.shape[1])
        return top_k(order, self.keep, largest=False)[0]
