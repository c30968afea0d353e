"""Pictures to vectors with an exported vision tower, on ONNX Runtime.

Needs numpy and ONNX Runtime; neither torch nor transformers is imported.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..artifacts.checks import check_arguments, check_target, checked_file, checked_model, find_file
from ..artifacts.manifest import open_settled
from ..artifacts.records import Manifest
from ..contract import DEFAULT_PICTURES, HEAD_IMAGES, IMAGE_EMBEDS, IMAGE_FEATURES, IMAGE_KEPT, PIXEL_VALUES
from ..errors import InputError, check_int
from ..io import read_json
from ..runtimes.onnxruntime import OnnxRuntimeEngine
from .pixels import find_settings, pixel_values, read_picture, require_settings


class Kept(NamedTuple):
    """Tokens of pictures that stay: their features ``(images, kept, H) fp32`` and their places ``(images, kept) int64``, in order.

    Places count from 0 among the tokens that the choice was made of: without the class token, unless the export was told to keep it.
    """

    features: np.ndarray
    places: np.ndarray


class ImageEncoder:
    """An output directory of a vision tower.

    Args:
        directory: what `export` wrote. threads: of the CPU, 0 for one on each core that may be used. target: a name in its manifest; by
            default fp32.

    Raises:
        InputError: it is no such directory, is damaged, or has no such target.
        MissingDependencyError: ONNX Runtime is not installed.
    """

    def __init__(self, directory: str | os.PathLike[str], threads: int = 0, target: str | None = None) -> None:
        check_arguments(directory, target, threads)
        self.directory, self._threads = Path(directory).absolute(), threads
        open_settled(self.directory, functools.partial(self._open, target))

    def _open(self, target: str | None, manifest: Manifest) -> None:
        self.manifest = manifest
        if self.manifest.checkpoint.get("head") != HEAD_IMAGES:
            raise InputError(
                f"{self.directory} holds no vision tower; type: adtp_export.load({str(self.directory)!r}), or adtp-run where the model "
                "generates text"
            )
        targets = self.manifest.targets
        self.target = next(iter(targets)) if target is None else target
        check_target(self.target, targets, self.directory)
        config = read_json(checked_file(self.directory, self.manifest, "config.json"))
        try:
            own = config["adtp"]
            self._side, self.vector_size, self.kept_tokens = own["image_size"], own["vector_size"], own["kept_tokens"]
        except (KeyError, TypeError) as error:
            raise InputError(
                f"{self.directory} is damaged (config.json has no {error}); export again with --force"
            ) from error
        path = checked_model(self.directory, self.manifest, targets[self.target].file)
        self._engine = OnnxRuntimeEngine(path, self._threads)
        self._settings = find_settings(functools.partial(find_file, self.directory, self.manifest))

    def encode_images(
        self, images: Sequence[object], *, normalize: bool = True, batch_size: int = DEFAULT_PICTURES
    ) -> np.ndarray:
        """Return a vector for each picture, ``(N, D) fp32``.

        Args:
            images: files, Pillow images, or arrays ``(height, width, 3) uint8``. normalize: to length 1, as CLIP and SigLIP do before they
                compare a picture with a text; without it the vectors are those of transformers' `get_image_features`.

        Raises:
            InputError: a picture that cannot be read, or no list of them.
            MissingDependencyError: a file needs Pillow.
        """
        found = [vectors for vectors, _ in self.stream(images, batch_size=batch_size)]
        vectors = np.concatenate(found) if found else np.zeros((0, self.vector_size), np.float32)
        return unit(vectors) if normalize else vectors

    def encode_tokens(self, images: Sequence[object], *, batch_size: int = DEFAULT_PICTURES) -> Kept:
        """Return the tokens of pictures that DivPrune leaves, as a projector of LLaVA's kind reads them; arguments and errors are those of
        `encode_images`."""
        self.check_keeps()
        found = [kept for _, kept in self.stream(images, batch_size=batch_size) if kept is not None]
        if not found:
            raise InputError("images: got none; accepted is at least one picture")
        return Kept(*map(np.concatenate, zip(*found)))

    def check_keeps(self) -> None:
        """Raises InputError unless the export has tokens that stay."""
        if not self.kept_tokens:
            raise InputError(
                f"{self.directory} gives a vector for each picture alone; for tokens export again with --pruning divprune"
            )

    def stream(
        self, images: Sequence[object], *, batch_size: int = DEFAULT_PICTURES
    ) -> Iterator[tuple[np.ndarray, Kept | None]]:
        """Yield for each batch its vectors, not normalized, and the tokens that stay, if the export has these.

        Each picture is read once. Arguments and errors are those of `encode_images`.
        """
        check_int("batch_size", batch_size, 1)
        one = hasattr(images, "convert") or getattr(images, "ndim", 1) in (0, 2, 3)
        if one or isinstance(images, (str, bytes, os.PathLike)):
            raise InputError(
                f"images: got {type(images).__name__} alone; accepted is a list of pictures, such as [image]"
            )
        if isinstance(images, Mapping) or not hasattr(images, "__getitem__"):
            raise InputError(f"images: got {type(images).__name__}; accepted is a list of pictures")
        settings = require_settings(self._settings, self.directory, " and export again")
        for begin in range(0, len(images), batch_size):
            pictures = [
                pixel_values(read_picture(each), settings, self._side) for each in images[begin : begin + batch_size]
            ]
            found = self._engine.run({PIXEL_VALUES: np.stack(pictures)})
            kept = Kept(found[IMAGE_FEATURES], found[IMAGE_KEPT]) if self.kept_tokens else None
            yield found[IMAGE_EMBEDS], kept


def unit(vectors: np.ndarray) -> np.ndarray:
    """Return ``(N, D)`` with the length 1; zeros stay zeros."""
    length = np.linalg.norm(vectors, axis=1, keepdims=True)
    result: np.ndarray = vectors / np.where(length > 0, length, 1)
    return result


def encode_images(
    directory: str | os.PathLike[str],
    images: Sequence[object],
    *,
    normalize: bool = True,
    threads: int = 0,
    target: str | None = None,
) -> np.ndarray:
    """Return a vector for each picture with an exported vision tower, ``(N, D) fp32``.

    See `ImageEncoder` for what is open once and asked often, and its `encode_images` for arguments and errors.
    """
    return ImageEncoder(directory, threads, target).encode_images(images, normalize=normalize)
