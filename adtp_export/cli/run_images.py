"""`adtp-run` for vision towers: pictures in, and a vector of each out."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..errors import InputError, check_int, flag_name, typed
from .console import check_place, print_json, write_npy

TAKEN = ("out", "texts", "image", "batch_size", "threads", "target", "out_file", "kept", "json")
"""Options of adtp-run that go with vision towers."""


def command(options: argparse.Namespace, default: Callable[[str], Any]) -> int:
    """Print the vector of each picture, with --kept also which tokens stay; or write all vectors to a file.

    Args:
        default: of an option.
    """
    from ..inference.images import ImageEncoder, unit

    for name, value in vars(options).items():
        if name not in TAKEN and value != default(name):
            raise InputError(
                f"{flag_name(name)} does not go with vision towers, such as that of {options.out}; leave it out"
            )
    check_int("--batch-size", options.batch_size, 1)
    images = [*(options.image or ()), *options.texts]
    if not images:
        raise InputError(f"there is no picture; type: adtp-run {typed(options.out)} --image FILE")
    if options.kept and options.out_file is not None:
        raise InputError("--kept prints tokens, and --out has no place for them")
    if options.out_file is not None:
        check_place("--out", path := Path(options.out_file), ".npy")
    encoder = ImageEncoder(options.out, options.threads, options.target)
    if options.out_file is not None:
        write_npy(path, encoder.encode_images(images, batch_size=options.batch_size))
        return 0
    if options.kept:
        encoder.check_keeps()
    named = iter(images)
    for vectors, kept in encoder.stream(images, batch_size=options.batch_size):
        places = kept.places if kept is not None and options.kept else [None] * len(vectors)
        for vector, own, image in zip(unit(vectors), places, named):
            fields = {} if own is None else {"kept": own.tolist()}
            print_json({"image": image, "vector": vector.tolist(), **fields}, indent=None)
    return 0
