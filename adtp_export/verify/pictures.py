"""Pictures to compare on, and what a file of a vision tower makes of them beside what PyTorch does."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import numpy as np
import torch
from torch import nn

from ..artifacts.records import Parity
from ..contract import IMAGE_EMBEDS, IMAGE_FEATURES, IMAGE_KEPT, PIXEL_VALUES
from ..inference.answers.embedding import agreement, nearness
from ..model.sequences import at_least_fp32
from ..model.tower import Embedded, Tokens, Tower
from .oracle import dtype_of
from .plain_choice import far
from .prefill import Run, overflow
from .rounding import errors_of_network, multiple_of

PICTURES = 4
"""That a tower is compared on."""


def draw_pictures(side: int, count: int) -> torch.Tensor:
    """Draw pictures ``(count, 3, side, side)`` from -1 to 1, always the same ones."""
    return torch.rand(count, 3, side, side, generator=torch.Generator().manual_seed(1)) * 2 - 1


@torch.no_grad()
def compare_tower(tower: Tower, run: Run, precision: str = "fp32") -> Parity:
    """Compare a file of a tower with PyTorch: the vectors of pictures, and of tokens which stay and their features.

    Args:
        tower: in fp32. run: of the file. precision: of the file.
    """
    pictures = draw_pictures(tower.config.image_size, PICTURES)
    exact, error = errors_of_network(Embedded(tower), pictures, dtype_of(precision))
    found = run({PIXEL_VALUES: pictures.numpy()})
    vectors, tolerance = found[IMAGE_EMBEDS].astype(np.float64), multiple_of(precision) * error
    off = np.abs(vectors - exact)
    failure = None
    if not np.isfinite(error):
        failure = f"PyTorch overflows in {precision} on random pictures, so no file can be compared with it; leave {precision} out"
    elif not off.max() <= tolerance:
        failure = (
            f"vectors of pictures differ by {off.max():.2e}; accepted is {tolerance:.2e}, from rounding in {precision}"
        )
    elif tower.kept_tokens:
        failure = failure_of_features(Tokens(tower), found, pictures, precision, tower.kept_tokens)
    alike = _alike(Tokens(tower), found[IMAGE_KEPT], pictures) if tower.kept_tokens else 1.0
    return Parity(
        rows=PICTURES,
        rows_compared=PICTURES,
        max_abs_logit_diff=float(off.max()),
        mean_abs_logit_diff=float(off.mean()),
        prediction_agreement=float(agreement(vectors, exact).mean()),
        kept_token_agreement=alike,
        tolerance=float(tolerance),
        answers={"smallest_cosine": float(nearness(vectors, exact).min())},
        failure=failure,
    )


@torch.no_grad()
def failure_of_features(
    features: nn.Module, found: Mapping[str, np.ndarray], pictures: torch.Tensor, precision: str, kept_tokens: int = 0
) -> str | None:
    """Say what is wrong with the image tokens that a file makes of pictures; None: nothing.

    Args:
        features: PyTorch's, from pictures to all tokens. kept_tokens: how many DivPrune leaves of these; 0: all.
    """
    exact, error = errors_of_network(features, pictures, dtype_of(precision))
    if not np.isfinite(error):
        return overflow(precision)
    if kept_tokens:
        kept = found[IMAGE_KEPT]
        if failure := _other_choice(features, kept, pictures, precision, kept_tokens):
            return failure
        exact = np.take_along_axis(exact, kept[:, :, None], 1)
    off = np.abs(found[IMAGE_FEATURES] - exact).max()
    return (
        None
        if off <= multiple_of(precision) * error
        else f"features of pictures differ by {off:.2e}, and {precision} by {error:.2e}"
    )


def _alike(features: nn.Module, kept: np.ndarray, pictures: torch.Tensor) -> float:
    """Return of which share of the pictures the same tokens stay as fp64 chooses."""
    distances = copy.deepcopy(_Distances(features)).double()(pictures.double())
    chosen = [sorted(far([], kept.shape[1], own)[0]) for own in distances.numpy()]
    return float((np.array(chosen) == kept).all(1).mean())


def _other_choice(
    features: nn.Module, kept: np.ndarray, pictures: torch.Tensor, precision: str, kept_tokens: int
) -> str | None:
    """Say which picture keeps other tokens than fp64 chooses, where no rounding explains it."""
    distances, error = errors_of_network(_Distances(features), pictures, dtype_of(precision))
    bound = multiple_of(precision) * error
    if (
        kept.shape != (len(pictures), kept_tokens)
        or kept.min() < 0
        or kept.max() >= distances.shape[1]
        or (np.diff(kept) <= 0).any()
    ):
        return f"image tokens that stay are not {kept_tokens} of each picture, in order"
    for number, (own, found) in enumerate(zip(distances, kept)):
        places, margin = far([], kept_tokens, own)
        if sorted(places) == found.tolist():
            continue
        if not margin < bound:
            return f"picture {number} keeps other image tokens, and that choice is clear ({margin:.2e})"
        if not (uneven := unevenness(own, found)) < 2 * bound:  # of two distances, each off by as much
            return f"picture {number} keeps image tokens that no rounding explains ({uneven:.2e} is accepted up to {2 * bound:.2e})"
    return None


def unevenness(distances: np.ndarray, kept: np.ndarray) -> float:
    """Return by how much tokens break what is true of those that are picked one after the other, each the farthest from those before.

    The first is the one whose nearest other is farthest. Of the tokens that are left, none is farther from all of them than they are from
    one another (Gonzalez, Clustering to minimize the maximum intercluster distance, 1985).

    Args:
        distances: ``(n, n)``, symmetric. kept: ``(m,) int64``, m < n, all different.
    """
    apart = distances + np.diag(np.full(len(distances), np.inf))
    alone = apart.min(1)
    left = np.delete(apart[:, kept].min(1), kept).max()
    return float(max(alone.max() - alone[kept].max(), left - apart[np.ix_(kept, kept)].min(initial=np.inf)))


class _Distances(nn.Module):
    """Distances between the image tokens of each picture, ``(images, n, n)``."""

    def __init__(self, features: nn.Module) -> None:
        super().__init__()
        self.features = features

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        precise = at_least_fp32(self.features(pixel_values))
        unit = precise / torch.linalg.vector_norm(precise, dim=-1, keepdim=True)
        return 1 - unit @ unit.transpose(1, 2)
