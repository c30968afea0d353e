"""How many tokens each layer keeps, as systems write it down whose checkpoints do not say: `--length-config`."""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import TypeAlias

from ..errors import InputError, ellipsize, quoted
from ..io import JSON_BYTES, read_document

Given: TypeAlias = str | PathLike[str] | Sequence[int]

_NUMBERS = r"-?\d{1,9}(?:\s*,\s*-?\d{1,9})*\s*,?"
_BARE = re.compile(rf"\s*(?:{_NUMBERS}|\(\s*{_NUMBERS}\s*\)|\[\s*{_NUMBERS}\s*\])\s*")
_IN_BRACKETS = re.compile(rf"\(\s*{_NUMBERS}\s*\)|\[\s*{_NUMBERS}\s*\]")
_ACCEPTED = "accepted is one number per layer, such as 40,30,24,16,11,6, or a file that holds such a list"


def read_lengths(given: Given, layers: int) -> list[int]:
    """Read the most tokens that stay after the attention of each layer.

    Args:
        given: numbers, text with commas, or a file that holds one list: ``(40, 30)``, or a line such as ``Retention Configuration
            :[40, 30]``. Nothing of a file is run.
        layers: of the model.

    Raises:
        InputError: no list, several ones in a file, another number of lengths, one below 1, or one above that before it.
    """
    lengths = _listed(given)
    if len(lengths) != layers:
        raise InputError(f"--length-config: got {len(lengths)} lengths, and the model has {layers} layers; {_ACCEPTED}")
    for before, length in zip([None, *lengths], lengths):
        if length < 1:
            raise InputError(f"--length-config: got the length {length}; accepted is at least 1")
        if before is not None and length > before:
            raise InputError(
                f"--length-config: got {length} after {before}; accepted are lengths that never grow, for dropped tokens do not come back"
            )
    return lengths


def sites_of(lengths: Sequence[int], longest: int) -> dict[str, int]:
    """Return the sites that can drop anything, and the tokens that stay there.

    A layer whose length is no less than one before it, or than the longest text, keeps all that come to it. A site there would
    select every token, so leaving it out changes nothing.
    """
    found: dict[str, int] = {}
    for layer, length in enumerate(lengths):
        if length < longest:
            found[f"{layer}.ffn"] = longest = length
    return found


def taken_for(directory: Path, what: str, lengths: Sequence[int], sites: Mapping[str, int]) -> str:
    """Say what a directory was taken for, and what its layers keep."""
    off = len(lengths) - len(sites)
    kept = f"{directory.name} was taken for {what}. Its layers keep at most {', '.join(map(str, lengths))} tokens"
    return kept + (f"; {off} of them drop nothing" if off else "")


def about_padding(name: str) -> str:
    """Say how answers of a system differ from the original's."""
    return (
        f"in {name} padding gives attention, too, so that what stays depends on how far a text was padded. Here a text is answered as "
        "the original answers it without padding"
    )


def _listed(given: Given) -> list[int]:
    if isinstance(given, str) and _BARE.fullmatch(given):
        return _numbers(given)
    if isinstance(given, str | PathLike):
        return _in_file(Path(given))
    try:
        if any(isinstance(value, bool) for value in given):
            raise TypeError
        return [operator.index(value) for value in given]
    except TypeError:
        raise InputError(f"--length-config: got {quoted(given)}; {_ACCEPTED}") from None


def _in_file(path: Path) -> list[int]:
    try:
        text = read_document(path, JSON_BYTES)
    except FileNotFoundError:
        raise InputError(
            f"--length-config: got {quoted(str(path))}, which is no list and no file; {_ACCEPTED}"
        ) from None
    except InputError as error:
        raise InputError(f"--length-config: {error}") from error
    except (OSError, ValueError) as error:
        raise InputError(f"--length-config: {path} cannot be read: {ellipsize(str(error))}; {_ACCEPTED}") from error
    found = [text] if _BARE.fullmatch(text) else _IN_BRACKETS.findall(text)
    lists = list(dict.fromkeys(tuple(_numbers(one)) for one in found))
    if len(lists) != 1:
        raise InputError(
            f"--length-config: {path} holds {len(lists) or 'no'} lists of whole numbers; accepted is one, in brackets. Or type the "
            "lengths: --length-config 40,30,24,16,11,6"
        )
    return list(lists[0])


def _numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"-?\d+", text)]
