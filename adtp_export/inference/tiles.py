"""Pictures as tiles of a vision tower's size, and their tokens as they stand in a prompt.

Sources: the processors of Idefics3, SmolVLM, LLaVA-NeXT and LLaVA-OneVision in transformers 5, and `pack_image_features` of the last two.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..contract import ANYRES, GRID, TILES
from ..errors import InputError, quoted
from .grids import patch_places, patches_of
from .pixels import LANCZOS, kernel_of, normalized, pixel_values, resized, size_of, wanted_size

FAKE, WHOLE = "<fake_token_around_image>", "<global-img>"
"""What Idefics3 and SmolVLM write around tiles, and before the whole picture."""
LARGEST = 4096
"""Pixels that their processors make a side of at most."""


@dataclass(frozen=True)
class Prepared:
    """A picture: tiles ``(tiles, 3, side, side) fp32``; or patches of a whole one ``(P, values)``, with their places ``(P, 2) int64``.

    written: what stands in the prompt for its image token: that token once for each of the parts that `arranged` makes of
    ``(tiles, tokens, H)``, each ``(n, H)``. A whole picture is one part ``(rows, columns, H)``.
    """

    tiles: np.ndarray
    written: str
    arranged: Callable[[np.ndarray], Sequence[np.ndarray]]
    places: np.ndarray | None = None


def prepared(
    picture: np.ndarray, settings: Mapping[str, Any], layout: Mapping[str, Any], side: int, marker: str
) -> Prepared:
    """Prepare a picture ``(height, width, 3) uint8``.

    Args:
        settings: of `preprocessor_config.json`. layout: as `Vision.settings` says. side: of a tile. marker: the image token, as text.

    Raises:
        InputError: a setting that is not accepted.
    """
    if layout["layout"] == TILES:
        return _with_text_between(picture, settings, side, marker)
    if layout["layout"] == GRID:
        return _whole(picture, settings, layout, marker)
    if layout["layout"] == ANYRES:
        return _without_borders(picture, settings, layout, side, marker)
    return Prepared(pixel_values(picture, settings, side)[None], marker, list)


def _whole(picture: np.ndarray, settings: Mapping[str, Any], layout: Mapping[str, Any], marker: str) -> Prepared:
    patches, (rows, columns) = patches_of(picture, settings, layout)
    merge = layout["merge"]
    shape = (rows // merge, columns // merge, -1)
    return Prepared(patches, marker, lambda found: [found.reshape(shape)], patch_places(rows, columns, merge))


def _with_text_between(picture: np.ndarray, settings: Mapping[str, Any], side: int, marker: str) -> Prepared:
    kernel, tile = kernel_of(settings, LANCZOS), {"longest_edge": side}
    if (edge := size_of(settings, "max_image_size", tile)) != tile:
        raise InputError(
            f"preprocessor_config.json: got max_image_size {quoted(edge)}; the model takes tiles of {side}"
        )
    if settings.get("do_resize", True):
        size = size_of(settings, "size", {"longest_edge": 4 * side})
        picture = resized(picture, *_by_longest_edge(picture, size), kernel)
    rows = columns = 0
    if settings.get("do_image_splitting", True):
        picture = resized(picture, *_whole_tiles(picture, side), kernel)
        if max(picture.shape[:2]) > side:
            rows, columns = picture.shape[0] // side, picture.shape[1] // side
    tiles = _cut(picture, side) if rows else []
    tiles.append(resized(picture, side, side, kernel))
    lines = [
        "".join(f"{FAKE}<row_{row + 1}_col_{column + 1}>{marker}" for column in range(columns)) + "\n"
        for row in range(rows)
    ]
    written = "".join([*lines, "\n" if rows else "", FAKE, WHOLE, marker, FAKE])
    return Prepared(np.stack([normalized(tile, settings) for tile in tiles]), written, list)


def _by_longest_edge(picture: np.ndarray, size: Mapping[str, int]) -> tuple[int, int]:
    height, width = picture.shape[:2]
    if {"height", "width"} <= size.keys():
        return size["height"], size["width"]
    if (longest := size.get("longest_edge")) is None:
        raise InputError(
            f"preprocessor_config.json: got size {quoted(size)}; accepted is longest_edge, or height and width"
        )
    ratio = width / height
    if width >= height:
        width, height = longest, int(longest / ratio)
        height += height % 2
    else:
        height, width = longest, int(longest * ratio)
        width += width % 2
    height, width = max(height, 1), max(width, 1)
    ratio = width / height
    if width >= height and width > LARGEST:
        width, height = LARGEST, int(LARGEST / ratio)
    elif height > width and height > LARGEST:
        height, width = LARGEST, int(LARGEST * ratio)
    return max(height, 1), max(width, 1)


def _whole_tiles(picture: np.ndarray, side: int) -> tuple[int, int]:
    """Return the height and the width that whole tiles have: the longer one is rounded up, and the other follows and is, too."""
    height, width = picture.shape[:2]
    ratio = width / height
    if width >= height:
        width = math.ceil(width / side) * side
        height = math.ceil(int(width / ratio) / side) * side
    else:
        height = math.ceil(height / side) * side
        width = math.ceil(int(height * ratio) / side) * side
    return max(height, side), max(width, side)


def _cut(picture: np.ndarray, side: int) -> list[np.ndarray]:
    """Cut a picture into tiles, row by row."""
    height, width = picture.shape[:2]
    return [picture[y : y + side, x : x + side] for y in range(0, height, side) for x in range(0, width, side)]


def _without_borders(
    picture: np.ndarray, settings: Mapping[str, Any], layout: Mapping[str, Any], side: int, marker: str
) -> Prepared:
    kernel, size = kernel_of(settings), picture.shape[:2]
    height, width = _best_resolution(size, _pinpoints(settings, layout, side))
    inner = _fitting(size, (height, width))
    top, left = (height - inner[0]) // 2, (width - inner[1]) // 2
    canvas = np.zeros((height, width, 3), dtype=np.uint8)
    canvas[top : top + inner[0], left : left + inner[1]] = resized(picture, *inner, kernel)
    tiles = [resized(picture, *wanted_size(settings, side)[1], kernel), *_cut(canvas, side)]
    values = np.stack([pixel_values(tile, {**settings, "do_pad": False}, side) for tile in tiles])
    grid = (height // side, width // side)
    return Prepared(
        values, marker, functools.partial(_in_rows, grid=grid, size=(size[0], size[1]), most=layout["most"])
    )


def _pinpoints(settings: Mapping[str, Any], layout: Mapping[str, Any], side: int) -> Sequence[Sequence[int]]:
    found: Any = settings.get("image_grid_pinpoints") or layout["pinpoints"]
    pairs = found if isinstance(found, (list, tuple)) else [found]
    for pair in pairs:
        numbers = pair if isinstance(pair, (list, tuple)) else []
        if len(numbers) != 2 or not all(isinstance(each, int) and each > 0 and each % side == 0 for each in numbers):
            raise InputError(
                f"image_grid_pinpoints: got {quoted(pair)}; accepted are pairs of a height and a width, multiples of {side}"
            )
    if not pairs:
        raise InputError(
            f"image_grid_pinpoints: got none; accepted are pairs such as [{side}, {2 * side}], a height and a width"
        )
    return pairs


def _best_resolution(size: Sequence[int], pinpoints: Sequence[Sequence[int]]) -> tuple[int, int]:
    """Choose what shows most of a picture's pixels, and of these what wastes least."""

    def value(target: Sequence[int]) -> tuple[int, int]:
        scale = min(target[1] / size[1], target[0] / size[0])
        shown = min(int(size[1] * scale) * int(size[0] * scale), size[0] * size[1])
        return shown, shown - target[0] * target[1]

    height, width = max(pinpoints, key=value)
    return height, width


def _fitting(size: Sequence[int], target: tuple[int, int]) -> tuple[int, int]:
    """Return the height and the width that a picture has inside a target."""
    by_width, by_height = target[1] / size[1], target[0] / size[0]
    if by_width < by_height:
        return min(math.ceil(size[0] * by_width), target[0]), target[1]
    return target[0], min(math.ceil(size[1] * by_height), target[1])


def _in_rows(
    features: np.ndarray, grid: tuple[int, int], size: tuple[int, int], most: int | None
) -> Sequence[np.ndarray]:
    """Lay out ``(tiles, tokens + 1, H)``: the whole picture, and then the rows of its tiles without borders, each with what ends a row."""
    whole, tiles, end = features[0, :-1], features[1:, :-1], features[0, -1]
    side = math.isqrt(len(whole))
    patches = tiles.reshape(*grid, side, side, -1).transpose(0, 2, 1, 3, 4).reshape(grid[0] * side, grid[1] * side, -1)
    rows, columns = patches.shape[:2]
    if size[1] / size[0] > columns / rows:
        border = (rows - int(round(size[0] * (columns / size[1]), 7))) // 2
        patches = patches[border : rows - border]
    else:
        border = (columns - int(round(size[1] * (rows / size[0]), 7))) // 2
        patches = patches[:, border : columns - border]
    rows, columns = patches.shape[:2]
    if most is not None and (ratio := math.sqrt(rows * columns / (most * side**2))) > 1.1:
        patches = _interpolated(_interpolated(patches, int(rows // ratio), 0), int(columns // ratio), 1)
    ends = np.broadcast_to(end, (len(patches), 1, len(end)))
    return [np.concatenate([whole, np.concatenate([patches, ends], 1).reshape(-1, len(end))])]


def _interpolated(values: np.ndarray, after: int, axis: int) -> np.ndarray:
    """Interpolate linearly along an axis, as torch's `interpolate` does without `align_corners`."""
    before = values.shape[axis]
    place = np.maximum((np.arange(after) + 0.5) * (before / after) - 0.5, 0)
    low = np.minimum(place.astype(np.int64), before - 1)
    share = (place - low).astype(values.dtype).reshape([-1 if i == axis else 1 for i in range(values.ndim)])
    high = np.minimum(low + 1, before - 1)
    result: np.ndarray = values.take(low, axis) * (1 - share) + values.take(high, axis) * share
    return result
