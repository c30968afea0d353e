"""What stands between states and vectors, as configurations list it: dense layers, and length 1 between them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..errors import InputError, check_int, quoted

ACTIVATIONS = ("tanh", "none", "relu", "gelu", "silu", "sigmoid")
NORMALIZE = "normalize"


def projection(fields: Any) -> tuple[int, int, bool, str] | str:
    """Return one projection of the head "embedding"; raises InputError for what cannot be."""
    if fields == NORMALIZE:
        return NORMALIZE
    told = isinstance(fields, (list, tuple)) and len(fields) == 4
    if not told or not isinstance(fields[2], bool) or fields[3] not in ACTIVATIONS:
        raise InputError(
            f"embedding.projections: got {quoted(fields)}; accepted are {NORMALIZE!r} and [inputs, outputs, bias, activation], such as "
            f'[384, 256, true, "tanh"], with the activations {", ".join(ACTIVATIONS)}'
        )
    for size in fields[:2]:
        check_int("embedding.projections", size, 1)
    return (*fields,)


def token_projection(fields: Any) -> tuple[int, int, bool, str, bool] | str:
    """Return one projection of the head "vectors": the same, and whether its input is added to what it gives."""
    if fields == NORMALIZE:
        return NORMALIZE
    told = isinstance(fields, (list, tuple)) and len(fields) == 5 and isinstance(fields[2], bool)
    if not told or fields[3] not in ACTIVATIONS or not isinstance(fields[4], bool):
        raise InputError(
            f"vectors.projections: got {quoted(fields)}; accepted are {NORMALIZE!r} and [inputs, outputs, bias, activation, residual], "
            f'such as [768, 128, false, "none", false], with the activations {", ".join(ACTIVATIONS)}'
        )
    for size in fields[:2]:
        check_int("vectors.projections", size, 1)
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
