"""`adtp-run` for vision towers: pictures in, and a vector of each out."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..errors import InputError, check_int, flag_name
from ..io import written_whole
from .console import print_json

TAKEN = ("out", "texts", "image", "batch_size", "threads", "target", "out_file", "kept", "json")
"""Options of adtp-run that go with vision towers."""


def encodes(out: Path) -> bool:
    """Whether OUT holds a vision tower; anything else is for others to judge."""
    from ..artifacts.manifest import read_manifest
    from ..contract import HEAD_IMAGES

    try:
        return read_manifest(out).checkpoint.get("head") == HEAD_IMAGES
    except InputError:
        return False


def command(options: argparse.Namespace, default: Callable[[str], Any]) -> int:
    """Print the vector of each picture, with --kept also which tokens stay; or write all vectors to a file.

    Args:
        default: of an option.
    """
    import numpy as np

    from ..inference.images import ImageEncoder

    for name, value in vars(options).items():
        if name not in TAKEN and value != default(name):
            raise InputError(
                f"{flag_name(name)} does not go with vision towers, such as that of {options.out}; leave it out"
            )
    check_int("--batch-size", options.batch_size, 1)
    images = [*(options.image or ()), *options.texts]
    if not images:
        raise InputError(f"there is no picture; type: adtp-run {options.out} --image FILE")
    if options.kept and options.out_file is not None:
        raise InputError("--kept prints tokens, and --out has no place for them")
    encoder = ImageEncoder(options.out, options.threads, options.target)
    if options.out_file is not None:
        path = Path(options.out_file)
        vectors = encoder.encode_images(images, batch_size=options.batch_size)
        try:
            with written_whole(path) as partial, partial.open("wb") as file:
                np.save(file, vectors)
        except OSError as error:
            raise InputError(f"--out: {path} cannot be written ({error.strerror}); name a place with room") from error
        return 0
    for begin in range(0, len(images), options.batch_size):
        batch = images[begin : begin + options.batch_size]
        places = encoder.encode_tokens(batch).places if options.kept else [None] * len(batch)
        for image, vector, own in zip(batch, encoder.encode_images(batch), places):
            kept = {} if own is None else {"kept": own.tolist()}
            print_json({"image": image, "vector": vector.tolist(), **kept}, indent=None)
    return 0
