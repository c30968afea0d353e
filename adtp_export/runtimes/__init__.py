"""Runtimes, one module each: `installed()` and an engine class that runs a batch. `targets.specs` has the table of those
that serve, `targets.choice` takes one, and `inference` answers with it.

An engine has ``inputs`` (names), ``outputs`` (names) and ``run(batch, wanted) -> {name: array}``. Optional runtimes
are imported inside their own room only, when first needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from ..data.tokenize import Batch


class Engine(Protocol):
    """A loaded model. `run` takes int64 ``(B, S)`` arrays by name and returns arrays by name: all, or at least those that are `wanted`."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    def run(self, batch: Batch, wanted: Sequence[str] | None = None) -> dict[str, np.ndarray]: ...
