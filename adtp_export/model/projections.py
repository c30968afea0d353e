"""What stands between states and vectors, as configurations list it: dense layers, and length 1 between them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..errors import InputError, check_int, quoted

ACTIVATIONS = ("tanh", "none", "relu", "gelu", "silu", "sigmoid")
NORMALIZE = "normalize"


def projection(fields: Any) -> Any:
    """Return one projection of the head "embedding", ``(int, int, bool, str)`` or `NORMALIZE`; raises InputError for what cannot be."""
    return _read("embedding", fields, "[inputs, outputs, bias, activation]", '[384, 256, true, "tanh"]')


def token_projection(fields: Any) -> Any:
    """Return one projection of the head "vectors": the same, and whether its input is added to what it gives, ``bool``."""
    return _read("vectors", fields, "[inputs, outputs, bias, activation, residual]", '[768, 128, false, "none", false]')


def _read(head: str, fields: Any, form: str, example: str) -> tuple[Any, ...] | str:
    if fields == NORMALIZE:
        return NORMALIZE
    told = isinstance(fields, (list, tuple)) and len(fields) == form.count(",") + 1
    if not told or not all(isinstance(flag, bool) for flag in fields[2::2]) or fields[3] not in ACTIVATIONS:
        raise InputError(
            f"{head}.projections: got {quoted(fields)}; accepted are {NORMALIZE!r} and {form}, such as {example}, with the activations "
            f"{', '.join(ACTIVATIONS)}"
        )
    for size in fields[:2]:
        check_int(f"{head}.projections", size, 1)
    return (*fields,)


def check_widths(field: str, projections: Sequence[Any], hidden_size: int) -> None:
    """Raises InputError where a projection of a field does not take what comes before it."""
    width = hidden_size
    for inputs, outputs, *_ in _dense(projections):
        if inputs != width:
            raise InputError(f"{field}: got one of {inputs} inputs after {width} outputs; give what fits")
        width = outputs


def dimension(projections: Sequence[Any], hidden_size: int) -> int:
    """Return the length of a vector behind projections."""
    return int([hidden_size, *(outputs for _, outputs, *_ in _dense(projections))][-1])


def _dense(projections: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return those projections that are dense layers."""
    return [each for each in projections if each != NORMALIZE]
