"""Parsers of commands, made of the dataclasses of options that the functions behind them take."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from ..contract import __version__
from ..errors import InputError, flag_name, printable
from ..options import Option, options_of

METAVARS = {int: "N", float: "X", str: "TEXT", Path: "PATH", list: "TEXT"}


class Parser(argparse.ArgumentParser):
    """A parser that shows what was typed as it can be shown."""

    def error(self, message: str) -> NoReturn:
        super().error(printable(message))


def parser_of(*options: type, prog: str, description: str, epilog: str | None = None, json: str) -> Parser:
    """Return a parser of dataclasses of options. What is not typed is left out of what it reads: it has its default.

    Args:
        json: what ``--json`` prints on stdout.
    """
    parser = Parser(prog=prog, description=description, epilog=epilog, argument_default=argparse.SUPPRESS)
    groups: dict[str, argparse._ArgumentGroup | Parser] = {"": parser}
    for known in (known for each in options for known in options_of(each)):
        if known.group not in groups:
            groups[known.group] = parser.add_argument_group(known.group)
        _add(groups[known.group], known)
    parser.add_argument("--json", action="store_true", default=False, help=f"print {json} on stdout")
    add_version(parser)
    return parser


def add_version(parser: Parser) -> None:
    parser.add_argument("--version", action="version", version=f"{parser.prog} {__version__}")


def _add(group: argparse._ArgumentGroup | Parser, known: Option) -> None:
    more: dict[str, Any] = {"help": known.full_help.replace("%", "%%")}
    if known.kind is bool:
        more["action"] = "store_true"
    else:
        more["metavar"] = known.metavar or (f"{{{','.join(known.choices)}}}" if known.choices else METAVARS[known.kind])
        more |= {"action": "append", "type": Path} if known.kind is list else {"type": known.kind}
    if known.positional:
        more |= {} if known.required else {"nargs": "?", "default": None}  # argparse takes SUPPRESS there for a text
        group.add_argument(known.name, **more)
    else:
        group.add_argument(known.flag, dest=known.name, required=known.required, **more)


def read(parser: Parser, words: Sequence[str] | None = None) -> tuple[bool, dict[str, Any]]:
    """Read a command line, by default this process's: whether it has ``--json``, and the options that were typed."""
    typed = vars(parser.parse_args(words))
    return typed.pop("json"), {name: value for name, value in typed.items() if value is not None}


def named_as_typed(command: Callable[[argparse.Namespace], int], options: argparse.Namespace) -> int:
    """Run a command. Messages name its options as they are typed; those of the functions behind it name arguments: ``batch_size``."""
    try:
        return command(options)
    except InputError as error:
        name, colon, told = str(error).removeprefix("windows.").partition(":")
        if colon and name in vars(options) and name not in ("out", "texts"):  # which have no flag
            raise InputError(f"{flag_name(name)}:{told}") from error
        raise


def is_given(value: object) -> bool:
    """Whether an option that is None or False by default was given; 0 was."""
    return value is not None and value is not False
