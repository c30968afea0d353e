"""The student that most benchmarks time: BERT-base's width, 6 layers, random weights, one cut whose share is forced."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from adtp_export.benchmarking.contenders import Architecture

SHAPE, LAYERS, FULL = "bert-base", 6, 12
SITES, RETENTION = ("0.ffn",), 0.29


def architecture(layers: int = LAYERS) -> Architecture:
    """Return the sizes of it, and of dense BERT beside it."""
    from adtp_export.benchmarking.contenders import Architecture, named_shape

    return Architecture(named_shape(SHAPE, layers))
