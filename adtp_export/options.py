"""Options, written once: the fields of a frozen dataclass, with a default and what `option` says of each.

The function that takes them gets its signature and docstring from there (`takes`), its command the parser and `--help`
(`cli.parsing`), and docs/options.md its tables. Choices and ranges are checked when the dataclass is made.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import numbers
import os
import types
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, ParamSpec, TypeVar, get_args, get_origin, get_type_hints, overload

from .errors import InputError, did_you_mean, flag_name, quoted

PathLike = str | os.PathLike[str]

Fields = ParamSpec("Fields")
Made = TypeVar("Made")
Result = TypeVar("Result")


class Range(NamedTuple):
    """Numbers that an option takes, both ends included, and how a message says so."""

    low: float
    high: float
    told: str


SHARE = Range(0, 1, "from 0 to 1")
POSITIVE, NOT_NEGATIVE = Range(1e-12, 1e38, "above 0"), Range(0, 1e38, "0 or more")


def at_least(low: int) -> Range:
    """Return the range of integers from `low` on."""
    return Range(low, 2**31, f"at least {low}")


COUNT = at_least(1)


def about(
    help: str,
    group: str = "",
    *,
    metavar: str | None = None,
    choices: Sequence[str] = (),
    within: Range | None = None,
    flag: str | None = None,
) -> dict[str, Any]:
    """Return the metadata of a field that is an option; a field without it is for Python alone.

    Args:
        help: what ``--help``, the docstring and the tables say.
        group: heading that ``--help`` lists it under.
        metavar: stands for the value in ``--help``; default: by type.
        choices: the only values that are accepted.
        within: the only numbers that are accepted.
        flag: what is typed; default: ``--name``, and nothing for positional fields.
    """
    return {"help": help, "group": group, "metavar": metavar, "choices": choices, "within": within, "flag": flag}


def option(default: Any, help: str, group: str = "", **more: Any) -> Any:
    """Return a field that is an option; the arguments are those of `about`. Positional ones are written with `field` itself,
    because type checkers look for ``kw_only=False`` there."""
    return field(default=default, metadata=about(help, group, **more))


class Option(NamedTuple):
    """An option of a dataclass.

    kind: bool, int, float, str, Path, or list for one that is given several times. types: of values in Python. positional: has no flag on
    the command line.
    """

    name: str
    flag: str
    kind: type
    types: tuple[type, ...]
    positional: bool
    default: Any
    help: str
    group: str
    metavar: str | None
    choices: Sequence[str]
    within: Range | None

    @property
    def required(self) -> bool:
        return self.default is MISSING

    @property
    def full_help(self) -> str:
        """The help, and the default where there is one to be told."""
        shown = not isinstance(self.default, bool) and self.default not in (None, MISSING, "", ())
        default = ",".join(self.default) if isinstance(self.default, tuple) else self.default
        told = f"{default:g}" if isinstance(default, float) else default
        return f"{self.help} (default: {told})" if shown else self.help


def options_of(options: type) -> tuple[Option, ...]:
    """Return the options of a dataclass in the order of its fields."""
    hints = get_type_hints(options)
    return tuple(
        Option(
            name=known.name,
            kind=_kind(hints[known.name]),
            types=_types(hints[known.name]),
            positional=not known.kw_only and known.metadata["flag"] is None,
            default=known.default,
            **{**known.metadata, "flag": known.metadata["flag"] or flag_name(known.name)},
        )
        for known in dataclasses.fields(options)
        if known.metadata
    )


def _kind(hint: Any) -> type:
    """Return what a value on the command line becomes. One of several types is text: a list with commas, for example."""
    kinds = [kind for kind in _alternatives(hint) if kind is not type(None)]
    if kinds == list(get_args(PathLike)):
        return Path
    if len(kinds) > 1:
        return str
    return list if get_origin(kinds[0]) is Sequence else kinds[0]


def _types(hint: Any) -> tuple[type, ...]:
    return tuple(get_origin(kind) or kind for kind in _alternatives(hint))


def _alternatives(hint: Any) -> Sequence[Any]:
    return get_args(hint) if isinstance(hint, types.UnionType) else [hint]


@dataclass(frozen=True, kw_only=True)
class Options:
    """Base of dataclasses of options.

    Raises:
        InputError: a value that is not accepted, or options that contradict one another; the message names the flag.
    """

    def __post_init__(self) -> None:
        for each in options_of(type(self)):
            _check_value(each, getattr(self, each.name))
        self.check()

    def check(self) -> None:
        """Raises InputError where options contradict one another."""


def _check_value(known: Option, value: Any) -> None:
    if value is None:
        if known.default is not None and not known.required:
            raise InputError(f"{known.flag}: got nothing; its default is {known.default!r}")
    elif known.choices and value not in known.choices:
        hint = did_you_mean(str(value), known.choices)
        raise InputError(f"{known.flag}: got {quoted(value)}; accepted are {', '.join(known.choices)}{hint}")
    elif known.kind is bool and not isinstance(value, bool):
        raise InputError(f"{known.flag}: got {quoted(value)}; accepted are True and False")
    elif known.within is not None:
        accepted = (int,) if known.kind is int else (int, float)
        number = isinstance(value, accepted) and not isinstance(value, bool)
        if not number or not known.within.low <= value <= known.within.high:
            raise InputError(f"{known.flag}: got {quoted(value)}; accepted is {known.within.told}")
    elif not any(_is(value, kind) for kind in known.types):
        told = " or ".join(_TOLD.get(kind, kind.__name__) for kind in known.types if kind is not type(None))
        raise InputError(f"{known.flag}: got {quoted(value)} ({type(value).__name__}); accepted is {told}")


_TOLD = {str: "text", os.PathLike: "a path", Sequence: "a list", int: "an integer", float: "a number"}
"""Types, as messages say them."""


def _is(value: Any, kind: type) -> bool:
    """Say whether a value is of a type, as callers see it: text is no list, truth is no number, and numpy's numbers are numbers."""
    if kind in (int, float):
        return isinstance(value, numbers.Integral if kind is int else numbers.Real) and not isinstance(value, bool)
    return isinstance(value, kind) and not (kind is Sequence and isinstance(value, str))


def listed(value: str | Sequence[Any] | None) -> tuple[str, ...]:
    """Return the items of a list, given as one or as text with commas."""
    items = value.split(",") if isinstance(value, str) else map(str, value or ())
    return tuple(item.strip() for item in items)


@overload
def takes(
    options: Callable[Fields, Made],
) -> Callable[[Callable[[Made], Result]], Callable[Fields, Result]]: ...
@overload
def takes(options: type[Made], rest: type) -> Callable[[Callable[..., Result]], Callable[..., Result]]: ...
def takes(options: Any, rest: type | None = None) -> Any:
    """Turn a function of a dataclass of options into one of its fields, which signature and docstring list.

    Type checkers see the fields, too. With `rest`, the fields of a second dataclass are passed on as keywords, as they were given, and
    type checkers take any keyword.
    """
    classes = (options, *([rest] if rest else ()))
    shown = [parameter for each in classes for parameter in inspect.signature(each).parameters.values()]
    names = [parameter.name for parameter in shown]
    own = inspect.signature(options).parameters

    def decorate(function: Callable[..., Result]) -> Callable[..., Result]:
        signature = inspect.signature(function).replace(parameters=shown)

        @functools.wraps(function)
        def call(*arguments: Any, **keywords: Any) -> Result:
            for name in keywords:
                if name not in names:
                    hint = did_you_mean(name, names)
                    raise InputError(
                        f"{function.__name__}: got the unknown option {quoted(name)}{hint}; accepted are {', '.join(names)}"
                    )
            given = signature.bind(*arguments, **keywords).arguments
            made = options(**{name: value for name, value in given.items() if name in own})
            return function(made, **{name: value for name, value in given.items() if name not in own})

        call.__signature__ = signature  # type: ignore[attr-defined]
        call.__doc__ = f"{inspect.getdoc(function)}\n\n{describe(*classes)}"
        return call

    return decorate


def describe(*classes: type) -> str:
    """Return the part of a docstring that lists options."""
    return "\n".join(
        ["Options:", *(f"    {known.name}: {known.full_help}" for each in classes for known in options_of(each))]
    )


@dataclass(frozen=True, kw_only=True)
class ReadOptions(Options):
    """What a checkpoint may need to be read."""

    # An option is one paragraph, which a formatter would take apart.
    # fmt: off
    allow_pickle: bool = option(False,
        "also load weights from pickle files such as pytorch_model.bin, which can run arbitrary code; by default only safetensors "
        "are read", "checkpoint")
    padded_length: int | None = option(None,
        "for LTP checkpoints: the length to which LTP padded texts when it was evaluated, usually 128",
        "checkpoint", metavar="N")
    length_config: PathLike | Sequence[int] | None = option(None,
        "for Length-Adaptive Transformer and PoWER-BERT checkpoints: the number of tokens that each layer keeps, such as 40,30,24, or "
        "a file with such a list", "checkpoint", metavar="LIST")
    head: str | None = option(None,
        "the model's head, where its directory does not say it: sequence, tokens, spans, embedding, sparse, masked, vectors or hybrid",
        "checkpoint", metavar="NAME")
    # fmt: on
