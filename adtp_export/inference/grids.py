"""Pictures that stay whole: a grid of patches of any size, and positions of three axes.

Source: Wang et al., Qwen2-VL (arXiv 2409.12191), and its processor in transformers 5.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from ..contract import MOST_PATCHES
from ..errors import InputError, quoted
from .pixels import kernel_of, normalized, resized

LEAST_PIXELS, MOST_PIXELS = 56 * 56, 28 * 28 * 1280
"""Of a picture, where the settings do not say."""
COLORS = {
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
"""How colors are shifted, where the settings do not say: as for CLIP."""
LONGEST = 200
"""Times that a picture may be as long as it is wide, or the reverse."""
AXES = 3
"""Time, row and column."""


def patches_of(
    picture: np.ndarray, settings: Mapping[str, Any], layout: Mapping[str, Any]
) -> tuple[np.ndarray, tuple[int, int]]:
    """Cut a picture ``(height, width, 3) uint8`` into patches.

    Args:
        settings: of `preprocessor_config.json`. layout: as `Vision.settings` says.

    Returns:
        ``(P, 3 * temporal * patch * patch) fp32``, the patches of a token one after the other, and rows and columns of patches.

    Raises:
        InputError: a setting or a picture that is not accepted.
    """
    settings = {**COLORS, **settings}
    patch, merge, temporal = layout["patch"], layout["merge"], layout["temporal"]
    for name, own in (("patch_size", patch), ("merge_size", merge), ("temporal_patch_size", temporal)):
        if (given := settings.get(name, own)) != own:
            raise InputError(f"preprocessor_config.json: got {name} {quoted(given)}; the model has {own}")
    kernel = kernel_of(settings)
    if settings.get("do_resize", True):
        height, width = fitting(picture.shape[0], picture.shape[1], patch * merge, *_limits(settings))
        picture = resized(picture, height, width, kernel)
    height, width = picture.shape[:2]
    if height % (patch * merge) or width % (patch * merge) or max(height, width) > MOST_PATCHES * patch:
        raise InputError(
            f"preprocessor_config.json makes a picture of {height} x {width}; the model takes multiples of {patch * merge}, up to "
            f"{MOST_PATCHES * patch}"
        )
    rows, columns = height // patch, width // patch
    cut = normalized(picture, settings).reshape(3, rows // merge, merge, patch, columns // merge, merge, patch)
    # One picture stands for all frames of a patch.
    frames = np.repeat(cut.transpose(1, 4, 2, 5, 0, 3, 6)[:, :, :, :, :, None], temporal, axis=5)
    return np.ascontiguousarray(frames.reshape(rows * columns, -1)), (rows, columns)


def _limits(settings: Mapping[str, Any]) -> tuple[int, int]:
    """Return the fewest and the most pixels of a picture, as older and newer settings have them."""
    edges = {"min_pixels", "max_pixels", "shortest_edge", "longest_edge"}
    size, found = settings.get("size") or {}, []
    if not isinstance(size, Mapping) or not edges.issuperset(name for name in size if size[name] is not None):
        raise InputError(
            f"preprocessor_config.json: got size {quoted(size)}; accepted are shortest_edge and longest_edge, which are the fewest and the "
            "most pixels of a whole picture"
        )
    for name, edge, default in (
        ("min_pixels", "shortest_edge", LEAST_PIXELS),
        ("max_pixels", "longest_edge", MOST_PIXELS),
    ):
        value = next(
            (each for each in (settings.get(name), size.get(edge), size.get(name)) if each is not None), default
        )
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise InputError(
                f"preprocessor_config.json: got {name} {quoted(value)}; accepted are integers from 1 on, such as {default}"
            )
        found.append(value)
    return found[0], found[1]


def fitting(height: int, width: int, factor: int, least: int, most: int) -> tuple[int, int]:
    """Return the height and the width, multiples of `factor`, of as many pixels as are accepted, with about the ratio that they had."""
    if max(height, width) > LONGEST * min(height, width):
        raise InputError(
            f"got a picture of {height} x {width}; accepted are sides that differ by up to {LONGEST} times"
        )
    sides = [round(side / factor) * factor for side in (height, width)]
    if sides[0] * sides[1] > most:
        shrink = math.sqrt(height * width / most)
        sides = [max(factor, math.floor(side / shrink / factor) * factor) for side in (height, width)]
    elif sides[0] * sides[1] < least:
        grow = math.sqrt(least / (height * width))
        sides = [math.ceil(side * grow / factor) * factor for side in (height, width)]
    return sides[0], sides[1]


def patch_places(rows: int, columns: int, merge: int) -> np.ndarray:
    """Return row and column of each patch, ``(rows * columns, 2) int64``, in the order of `patches_of`."""
    places = np.stack(np.meshgrid(np.arange(rows), np.arange(columns), indexing="ij"), -1)
    blocks = places.reshape(rows // merge, merge, columns // merge, merge, 2)
    return np.ascontiguousarray(blocks.transpose(0, 2, 1, 3, 4).reshape(-1, 2))


def positions_of(parts: Iterable[int | tuple[int, int]]) -> np.ndarray:
    """Return the positions ``(T, 3) int64`` of a prompt.

    Args:
        parts: tokens of text, or rows and columns of the tokens of a picture. Text goes on behind the longer side of a picture.
    """
    found, start = [np.zeros((0, AXES), dtype=np.int64)], 0
    for part in parts:
        if isinstance(part, int):
            found.append(np.repeat(np.arange(start, start + part)[:, None], AXES, axis=1))
            start += part
        else:
            place = np.indices((1, *part)).reshape(AXES, -1).T
            found.append(place + start)
            start += max(part)
    return np.concatenate(found)
