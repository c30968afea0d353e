"""What a head's output means, in numpy: answers of one run, and how two runs or a run and its labels compare.

Each head has a module with the same functions: `answers`, `agreement`, `accuracy`, `points_lost` and `quality`.
"""

from __future__ import annotations

from types import ModuleType

from ..errors import InputError, did_you_mean, shown
from . import sequence

SEQUENCE = "sequence"
HEADS: dict[str, ModuleType] = {SEQUENCE: sequence}


def for_head(name: str) -> ModuleType:
    """Return the module of a head.

    Raises:
        InputError: there is no such head.
    """
    if name not in HEADS:
        raise InputError(f"head: got {shown(name)}; accepted are {', '.join(HEADS)}{did_you_mean(name, HEADS)}")
    return HEADS[name]
