"""Pictures as a vision tower takes them, without a library of images: resized, cut to a square, and normalized.

The settings are those of transformers' `preprocessor_config.json`; a picture is resized as Pillow does it, with weights that widen where it
shrinks.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import InputError, MissingDependencyError, ellipsize, needs_extras, quoted
from ..io import read_json

LANCZOS, BILINEAR, BICUBIC = 1, 2, 3
"""Pillow's numbers for them, which transformers' settings have."""
SETTINGS, _OF_PROCESSOR = "preprocessor_config.json", "processor_config.json"
MOST_PIXELS = 178_956_970
"""Of a picture: Pillow opens no larger one, and none is made by resizing."""


def find_settings(find: Callable[[str], Path | None]) -> dict[str, Any] | None:
    """Read how a checkpoint prepares pictures: from a file of its own, or, as newer versions of transformers save it, from the processor's.

    Args:
        find: from the name of a file to its path; None where there is none.

    Returns:
        None where neither file has any settings.
    """
    for name in (SETTINGS, _OF_PROCESSOR):
        if (path := find(name)) is not None:
            found = read_json(path)
            if name == _OF_PROCESSOR and isinstance(found, dict):
                found = found.get("image_processor")
            if isinstance(found, dict):
                return found
    return None


def require_settings(found: dict[str, Any] | None, home: Path, then: str = "") -> dict[str, Any]:
    """Return settings; raises InputError for None. home, then: where the files should be, and what follows in the message."""
    if found is None:
        raise InputError(f"{home} has no {SETTINGS}; put it beside the checkpoint{then}")
    return found


def read_picture(picture: object) -> np.ndarray:
    """Return ``(height, width, 3) uint8`` of an array of that shape, of a Pillow image, or of a file; `.npy` holds such an array.

    Raises:
        InputError: it is none of these, or the file cannot be read.
        MissingDependencyError: a file needs Pillow.
    """
    name = str(picture) if isinstance(picture, (str, os.PathLike)) else "what was given"
    try:
        if isinstance(picture, (str, os.PathLike)):
            path = Path(picture)
            picture = np.load(path, allow_pickle=False) if path.suffix.lower() == ".npy" else _opened(path)
        elif hasattr(picture, "convert"):
            picture = _on_white(picture, name)
        array = np.asarray(picture)
    except (InputError, MissingDependencyError):
        raise
    except Exception as error:  # Pillow raises many kinds for damaged files
        raise InputError(f"{name} is no picture that can be read: {ellipsize(str(error))}") from error
    if array.ndim != 3 or array.shape[2] != 3 or array.dtype != np.uint8 or 0 in array.shape:
        raise InputError(
            f"{name} is a picture of the shape {array.shape} and the type {array.dtype}; accepted are arrays (height, width, 3) of uint8, "
            "and files. A video is several pictures; give one of them"
        )
    return array


def _opened(path: Path) -> np.ndarray:
    """Read a file, turned as its camera says."""
    with needs_extras(f"reading {path.name}"):
        from PIL import Image, ImageOps
    with Image.open(path) as opened:
        return _on_white(ImageOps.exif_transpose(opened), str(path))


def _on_white(picture: Any, name: str) -> np.ndarray:
    """Turn a Pillow image into ``(height, width, 3) uint8``; white is behind what is transparent, as in transformers.

    Raises:
        InputError: its pixels have more than 8 bits. Pillow, and so transformers, would make all above 255 white.
    """
    if picture.mode.startswith(("I", "F")):
        raise InputError(
            f"{name} has gray levels of more than 8 bits (Pillow's mode {picture.mode}); accepted are 8 bits. Scale its levels to 0 to 255 "
            "and save it again"
        )
    if "A" not in picture.getbands() and picture.info.get("transparency") is None:
        return np.asarray(picture.convert("RGB"))
    from PIL import Image

    own = picture.convert("RGBA")
    return np.asarray(Image.alpha_composite(Image.new("RGBA", own.size, "white"), own).convert("RGB"))


def pixel_values(picture: np.ndarray, settings: Mapping[str, Any], side: int) -> np.ndarray:
    """Make ``(3, side, side) fp32`` of a picture ``(height, width, 3) uint8``.

    Args:
        settings: of `preprocessor_config.json`.

    Raises:
        InputError: a setting is not one of CLIP's or SigLIP's processors.
    """
    kernel = kernel_of(settings)
    if settings.get("do_pad"):
        raise InputError("preprocessor_config.json: got do_pad true; accepted is false: pictures are cut to a square")
    if settings.get("do_resize", True):
        height, width = picture.shape[:2]
        shortest, size = wanted_size(settings, side)
        if shortest:
            short, long = sorted((height, width))
            other = int(size[0] * long / short)
            size = (size[0], other) if height <= width else (other, size[0])
        picture = resized(picture, *size, kernel)
    tile = _cut(picture, settings, side)
    if settings.get("do_normalize", True) and not {"image_mean", "image_std"} <= settings.keys():
        raise InputError(
            "preprocessor_config.json has no image_mean and image_std, and processors have different ones; write those of the "
            "checkpoint into its file, and export again"
        )
    return normalized(tile, settings)


def wanted_size(settings: Mapping[str, Any], side: int) -> tuple[bool, tuple[int, int]]:
    """Return whether pictures are resized to a shortest edge, and this one twice; or else a height and a width."""
    size = size_of(settings, "size", {"shortest_edge": side})
    if size.keys() == {"shortest_edge"}:
        return True, (size["shortest_edge"],) * 2
    if size.keys() == {"height", "width"}:
        return False, (size["height"], size["width"])
    raise InputError(
        f"preprocessor_config.json: got size {quoted(size)}; accepted is shortest_edge alone, or height and width"
    )


def _cut(picture: np.ndarray, settings: Mapping[str, Any], side: int) -> np.ndarray:
    """Return the middle of a picture, ``(side, side, 3)``; raises InputError where the settings make pictures of another size."""
    made = height, width = picture.shape[:2]
    size, crop = settings.get("size"), settings.get("crop_size")
    square = isinstance(size, Mapping) and size.get("height") is not None  # SigLIP's processor cuts nothing
    if settings.get("do_center_crop", crop is not None or not square):
        edges = size_of({} if crop is None else settings, "crop_size", {"height": side, "width": side})
        edge = edges.get("shortest_edge", 0)
        made = min(height, edges.get("height", edge)), min(width, edges.get("width", edge))
    if made != (side, side):
        raise InputError(
            f"preprocessor_config.json makes pictures of {made[0]} x {made[1]}; the model takes {side} x {side}"
        )
    top, left = (height - side) // 2, (width - side) // 2
    return picture[top : top + side, left : left + side]


def size_of(settings: Mapping[str, Any], name: str, default: Mapping[str, int]) -> dict[str, int]:
    """Return a setting that has pixels by name; a number alone is a shortest edge. Raises InputError for anything else."""
    given = settings.get(name, default)
    size = given if isinstance(given, Mapping) else {"shortest_edge": given}
    found = {edge: pixels for edge, pixels in size.items() if pixels is not None}
    if not found or any(not isinstance(each, int) or isinstance(each, bool) or each < 1 for each in found.values()):
        raise InputError(
            f"preprocessor_config.json: got {name} {quoted(given)}; accepted are integers from 1 on, such as {default}"
        )
    return found


def _numbers(settings: Mapping[str, Any], name: str, default: float, dtype: type = np.float32) -> np.ndarray:
    """Return a setting that has a number, or one for each color; raises InputError for anything else, and for a division by 0."""
    given = settings.get(name, default)
    found = list(given) if isinstance(given, (list, tuple)) else [given]
    fit = all(isinstance(each, (int, float)) and math.isfinite(each) for each in found) and len(found) in (1, 3)
    if not fit or (name == "image_std" and 0 in found):
        raise InputError(
            f"preprocessor_config.json: got {name} {quoted(given)}; accepted is a number, or three; image_std is not 0"
        )
    return np.asarray(found, dtype=dtype)


def _mean_and_std(settings: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    return _numbers(settings, "image_mean", 0.5), _numbers(settings, "image_std", 0.5)


def kernel_of(settings: Mapping[str, Any], default: int = BICUBIC) -> int:
    """Return the number of what weighs pixels; raises InputError for one that is not accepted."""
    kernel = settings.get("resample", default)
    if type(kernel) is not int or kernel not in _KERNELS:
        raise InputError(
            f"preprocessor_config.json: got resample {quoted(kernel)}; accepted are {BICUBIC}, bicubic, {BILINEAR}, bilinear, and "
            f"{LANCZOS}, Lanczos"
        )
    return kernel


def normalized(picture: np.ndarray, settings: Mapping[str, Any]) -> np.ndarray:
    """Turn ``(height, width, 3) uint8`` into ``(3, height, width) fp32``, scaled and shifted as the settings say.

    Products are rounded as those of transformers' processors, which scale in fp64 and then shift in fp32.
    """
    values = picture.astype(np.float32)
    if settings.get("do_rescale", True):
        factor = _numbers(settings, "rescale_factor", 1 / 255, np.float64)
        values = (picture * factor).astype(np.float32)
    if not settings.get("do_normalize", True):
        return np.ascontiguousarray(values.transpose(2, 0, 1))
    mean, std = _mean_and_std(settings)
    result: np.ndarray = ((values - mean) / std).transpose(2, 0, 1)
    return np.ascontiguousarray(result)


def denormalized(values: np.ndarray, settings: Mapping[str, Any]) -> np.ndarray:
    """Turn ``(3, height, width) fp32`` back into ``(height, width, 3) uint8``: what `normalized` was given."""
    picture = values.transpose(1, 2, 0).astype(np.float64)
    if settings.get("do_normalize", True):
        mean, std = _mean_and_std(settings)
        picture = picture * std + mean
    if settings.get("do_rescale", True):
        picture /= _numbers(settings, "rescale_factor", 1 / 255)
    return np.clip(np.rint(picture), 0, 255).astype(np.uint8)


def resized(picture: np.ndarray, height: int, width: int, kernel: int = BICUBIC) -> np.ndarray:
    """Resize ``(h, w, 3) uint8`` along rows and along columns, each rounded to uint8: bit by bit what Pillow 13 does.

    Where Pillow is installed, it does so itself, many times faster. Columns come first where these lose many more pixels. Pillow 10 to 12
    begin with the rows there, too, unless the height is more than 100 times the width; other values are then rounded.

    Raises:
        InputError: the result would have more than `MOST_PIXELS`, as of a picture that is one pixel wide.
    """
    if height * width > MOST_PIXELS:
        raise InputError(
            f"a picture of {picture.shape[0]} x {picture.shape[1]} pixels is resized to {height} x {width}; accepted are results of up to "
            f"{MOST_PIXELS:,} pixels. Cut off a part of its longer side"
        )
    with contextlib.suppress(ImportError):
        from PIL import Image

        return np.asarray(Image.fromarray(picture).resize((width, height), kernel))
    if picture.shape[0] - height > max(0, 2 * (picture.shape[1] - width)):
        return _resized_rows(_resized_columns(picture, height, kernel), width, kernel)
    return _resized_columns(_resized_rows(picture, width, kernel), height, kernel)


def _resized_columns(picture: np.ndarray, after: int, kernel: int) -> np.ndarray:
    return _resized_rows(picture.transpose(1, 0, 2), after, kernel).transpose(1, 0, 2)


def _resized_rows(picture: np.ndarray, after: int, kernel: int) -> np.ndarray:
    before = picture.shape[1]
    first, weights = _taps(before, after, kernel)
    total = np.zeros((picture.shape[0], after, picture.shape[2]))
    for tap in range(weights.shape[1]):
        total += picture[:, np.clip(first + tap, 0, before - 1)] * weights[:, tap, None]
    return np.clip(np.floor(total + 0.5), 0, 255).astype(np.uint8)


def _taps(before: int, after: int, kernel: int) -> tuple[np.ndarray, np.ndarray]:
    """Return from which old place on each of the new ones takes how much, ``(after,)`` and ``(after, taps)``; rows add up to 1."""
    function, support = _KERNELS[kernel]
    scale = before / after
    widened = max(scale, 1.0)
    center = (np.arange(after) + 0.5) * scale
    first = np.floor(center - support * widened).astype(np.int64)
    place = first[:, None] + np.arange(math.ceil(2 * support * widened) + 2)
    distance = np.abs((place + 0.5 - center[:, None]) * (1 / widened))
    inside = (place >= 0) & (place < before) & (distance < support)
    weights = np.where(inside, function(distance), 0.0)
    weights /= weights.sum(1, keepdims=True)
    # Pillow has 22 bits for them. So sums are exact, in any order.
    return first, np.trunc(weights * 2**22 + np.copysign(0.5, weights)) / 2**22


def _cubic(distance: np.ndarray) -> np.ndarray:
    """Keys' cubic with a = -0.5."""
    near = (1.5 * distance - 2.5) * distance * distance + 1
    far = ((-0.5 * distance + 2.5) * distance - 4) * distance + 2
    return np.where(distance < 1, near, far)


_KERNELS = {
    LANCZOS: (lambda distance: np.sinc(distance) * np.sinc(distance / 3), 3),
    BILINEAR: (lambda distance: 1 - distance, 1),
    BICUBIC: (_cubic, 2),
}
"""Weight by distance, and how far that reaches."""
