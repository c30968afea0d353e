"""Pictures as a vision tower takes them, without a library of images: resized, cut to a square, and normalized.

The settings are those of transformers' `preprocessor_config.json`; a picture is resized as Pillow does it, with bicubic weights that widen
where it shrinks.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import InputError, MissingDependencyError, ellipsize, needs_extras, quoted

BICUBIC = 3
"""Pillow's number for it, which transformers' settings have."""


def read_picture(picture: object) -> np.ndarray:
    """Return ``(height, width, 3) uint8`` of an array of that shape, of a Pillow image, or of a file; `.npy` holds such an array.

    Raises:
        InputError: it is none of these, or the file cannot be read.
        MissingDependencyError: a file needs Pillow.
    """
    if isinstance(picture, (str, os.PathLike)):
        path = Path(picture)
        try:
            picture = np.load(path, allow_pickle=False) if path.suffix == ".npy" else _opened(path)
        except MissingDependencyError:
            raise
        except Exception as error:  # Pillow raises many kinds for damaged files
            raise InputError(f"{path} is no picture that can be read: {ellipsize(str(error))}") from error
    elif hasattr(picture, "convert"):
        picture = picture.convert("RGB")
    array = np.asarray(picture)
    if array.ndim != 3 or array.shape[2] != 3 or array.dtype != np.uint8 or 0 in array.shape:
        raise InputError(
            f"got a picture of the shape {array.shape} and the type {array.dtype}; accepted are arrays (height, width, 3) of uint8, and "
            "files. A video is several pictures; give one of them"
        )
    return array


def _opened(path: Path) -> np.ndarray:
    """Read a file, turned as its camera says."""
    with needs_extras(f"reading {path.name}"):
        from PIL import Image, ImageOps
    with Image.open(path) as opened:
        return np.asarray(ImageOps.exif_transpose(opened).convert("RGB"))


def pixel_values(picture: np.ndarray, settings: Mapping[str, Any], side: int) -> np.ndarray:
    """Make ``(3, side, side) fp32`` of a picture ``(height, width, 3) uint8``.

    Args:
        settings: of `preprocessor_config.json`.

    Raises:
        InputError: a setting is not one of CLIP's or SigLIP's processors.
    """
    if (resample := settings.get("resample", BICUBIC)) != BICUBIC:
        raise InputError(f"preprocessor_config.json: got resample {quoted(resample)}; accepted is {BICUBIC}, bicubic")
    if settings.get("do_pad"):
        raise InputError("preprocessor_config.json: got do_pad true; accepted is false: pictures are cut to a square")
    if settings.get("do_resize", True):
        wanted = settings.get("size", {"shortest_edge": side})
        wanted = {"shortest_edge": wanted} if isinstance(wanted, int) else wanted
        height, width = picture.shape[:2]
        if (shortest := wanted.get("shortest_edge")) is not None:
            short, long = sorted((height, width))
            other = int(shortest * long / short)
            size = (shortest, other) if height <= width else (other, shortest)
        elif {"height", "width"} <= wanted.keys():
            size = (wanted["height"], wanted["width"])
        else:
            raise InputError(
                f"preprocessor_config.json: got size {quoted(dict(wanted))}; accepted is shortest_edge, or height and width"
            )
        picture = resized(picture, *size)
    height, width = picture.shape[:2]
    if min(height, width) < side or (not settings.get("do_center_crop", True) and (height, width) != (side, side)):
        raise InputError(
            f"preprocessor_config.json makes pictures of {height} x {width}; the model takes {side} x {side}"
        )
    top, left = (height - side) // 2, (width - side) // 2
    values = picture[top : top + side, left : left + side].astype(np.float32)
    if settings.get("do_rescale", True):
        values *= settings.get("rescale_factor", 1 / 255)
    if not settings.get("do_normalize", True):
        return np.ascontiguousarray(values.transpose(2, 0, 1))
    mean, std = (np.asarray(settings.get(name, 0.5), dtype=np.float32) for name in ("image_mean", "image_std"))
    normalized: np.ndarray = ((values - mean) / std).transpose(2, 0, 1)
    return np.ascontiguousarray(normalized)


def resized(picture: np.ndarray, height: int, width: int) -> np.ndarray:
    """Resize ``(h, w, 3) uint8`` by bicubic weights, along rows and then along columns, each rounded to uint8 as Pillow does."""
    across = _rounded(np.einsum("ow,hwc->hoc", _weights(picture.shape[1], width), picture))
    return _rounded(np.einsum("oh,hwc->owc", _weights(across.shape[0], height), across))


def _rounded(values: np.ndarray) -> np.ndarray:
    return np.clip(np.floor(values + 0.5), 0, 255).astype(np.uint8)


def _weights(before: int, after: int) -> np.ndarray:
    """Return what each of the new places takes of each old one, ``(after, before)``; rows add up to 1."""
    scale = before / after
    reach = max(scale, 1.0)
    center = (np.arange(after) + 0.5) * scale
    distance = np.abs((np.arange(before) + 0.5 - center[:, None]) / reach)
    near = (1.5 * distance - 2.5) * distance * distance + 1  # Keys' cubic with a = -0.5
    far = ((-0.5 * distance + 2.5) * distance - 4) * distance + 2
    weights = np.where(distance < 1, near, np.where(distance < 2, far, 0.0))
    total: np.ndarray = weights / weights.sum(1, keepdims=True)
    return total
