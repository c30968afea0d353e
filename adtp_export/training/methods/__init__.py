"""Ways to train a student that drops tokens, one file per method: its loss, and what it teaches the pruners of its name."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, cast

from ..method_table import METHODS

if TYPE_CHECKING:
    from .base import Method


def for_method(name: str) -> type[Method]:
    """Return the class of a method, a key of `METHODS`."""
    facts = METHODS[name]
    return cast("type[Method]", getattr(importlib.import_module(f".{facts.module}", __package__), facts.name))
