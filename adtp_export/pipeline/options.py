"""Options of a function as one frozen dataclass, which its callers see as keywords."""

from __future__ import annotations

import dataclasses
import inspect
import os
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from ..errors import InputError, did_you_mean, quoted

PathLike = str | os.PathLike[str]

Function = TypeVar("Function", bound=Callable[..., Any])
Options = TypeVar("Options")


def read_options(options: type[Options], given: Mapping[str, Any]) -> Options:
    """Make a dataclass of keywords.

    Raises:
        InputError: a keyword that it has no field for.
    """
    known = [field.name for field in dataclasses.fields(options)]  # type: ignore[arg-type]
    for name in given:
        if name not in known:
            hint = did_you_mean(name, known)
            raise InputError(f"got the unknown option {quoted(name)}{hint}; accepted are {', '.join(known)}")
    return options(**given)


def with_options(options: type) -> Callable[[Function], Function]:
    """Show the fields of a dataclass as keywords of a function that takes ``**options``.

    The function makes the dataclass of what it is given with `read_options`. Its signature names every field with its
    default, and its docstring ends with that of the dataclass; `help` and editors read both.
    """

    def decorate(function: Function) -> Function:
        own = inspect.signature(function)
        positional, keywords = [], []
        for parameter in own.parameters.values():
            if parameter.kind is inspect.Parameter.KEYWORD_ONLY:
                keywords.append(parameter)
            elif parameter.kind is not inspect.Parameter.VAR_KEYWORD:
                positional.append(parameter)
        function.__signature__ = own.replace(parameters=[*positional, *_keywords(options), *keywords])  # type: ignore[attr-defined]
        function.__doc__ = f"{inspect.getdoc(function)}\n\n{inspect.getdoc(options)}"
        return function

    return decorate


def _keywords(options: type) -> list[inspect.Parameter]:
    keywords = []
    for field in dataclasses.fields(options):
        default = field.default
        if default is dataclasses.MISSING:
            made = field.default_factory
            default = inspect.Parameter.empty if made is dataclasses.MISSING else made()
        keywords.append(
            inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=field.type)
        )
    return keywords
