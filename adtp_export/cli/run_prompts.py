"""`adtp-run` for models that generate text: prompts in, with pictures or without, and text out while it comes."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..errors import InputError, check_int, flag_name, printable
from .parsing import Parser

TAKEN = ("out", "texts", "text", "file", "format", "text_column", "batch_size", "threads", "target")
"""Options of adtp-run that also go with a model that generates text."""
OPTIONS = ("image", "chat", "max_new_tokens", "temperature", "top_p", "seed")


def add_generation(parser: Parser) -> None:
    group = parser.add_argument_group("generation")
    group.add_argument(
        "--image",
        metavar="F",
        action="append",
        help="picture of the prompt, once for each --text; it goes where the prompt has the model's image token",
    )
    group.add_argument(
        "--chat",
        action="store_true",
        default=None,
        help="the text is what a user says, with the picture before it; the model's chat template makes the prompt",
    )
    group.add_argument(
        "--max-new-tokens", metavar="N", type=int, help="maximum number of tokens to generate (default: 64)"
    )
    group.add_argument(
        "--temperature",
        metavar="X",
        type=float,
        help="0 takes the likeliest token; higher values draw more freely (default: 0)",
    )
    group.add_argument(
        "--top-p",
        metavar="P",
        type=float,
        help="draw from the likeliest tokens that have this share together (default: 1)",
    )
    group.add_argument("--seed", metavar="N", type=int, help="seed of the draws (default: 0)")


def asked(options: argparse.Namespace) -> dict[str, Any]:
    """Return the options of generation that are given."""
    return {name: value for name in OPTIONS if (value := getattr(options, name)) is not None}


def generates(out: Path) -> bool:
    """Whether OUT holds a model that generates text; anything else is for others to judge."""
    from ..artifacts.manifest import read_manifest
    from ..contract import HEAD_TEXT

    try:
        return read_manifest(out).checkpoint.get("head") == HEAD_TEXT
    except InputError:
        return False


def command(options: argparse.Namespace, texts: list[Any], default: Callable[[str], Any]) -> int:
    """Print what follows each prompt; that of a single one while it comes.

    Args:
        default: of an option.
    """
    from ..inference.generation import Generator, Sampling, whole

    for name, value in vars(options).items():
        if name not in (*TAKEN, *OPTIONS, "text_pair") and value != default(name):
            typed = "--out" if name == "out_file" else flag_name(name)
            raise InputError(
                f"{typed} does not go with models that generate text, such as that of {options.out}; leave it out"
            )
    check_int("--batch-size", options.batch_size, 1)
    if pair := next((text for text in texts if not isinstance(text, str)), None):
        raise InputError(f"got the pair {pair!r}; accepted are prompts, so leave --text-pair out")
    given = asked(options)
    images, chat = given.pop("image", None), given.pop("chat", False)
    if images is not None and len(images) != len(texts):
        raise InputError(f"--image: got {len(images)} for {len(texts)} texts; accepted is one for each text, or none")
    generator, sampling = Generator(options.out, options.threads, options.target), Sampling(**given)
    prompts = [said(text, images is not None) for text in texts] if chat else texts
    if len(texts) == 1:
        for (piece,) in generator.stream(images, prompts, sampling):
            sys.stdout.write(printable(piece))
            sys.stdout.flush()
        print()
        return 0
    from .console import print_json

    for begin in range(0, len(texts), options.batch_size):
        batch = slice(begin, begin + options.batch_size)
        own = None if images is None else images[batch]
        for text, found in zip(texts[batch], whole(generator.stream(own, prompts[batch], sampling), len(texts[batch]))):
            print_json({"text": text, "generated": found}, indent=None)
    return 0


def said(text: str, with_image: bool) -> list[dict[str, Any]]:
    """Return a text as the message of a user."""
    image = [{"type": "image"}] if with_image else []
    return [{"role": "user", "content": [*image, {"type": "text", "text": text}]}]


def refuse(options: argparse.Namespace) -> None:
    """Raises InputError where options of generation are given for a model that does not generate text."""
    for name in asked(options):
        raise InputError(
            f"{flag_name(name)} is for models that generate text, and {options.out} holds none; leave it out"
        )
