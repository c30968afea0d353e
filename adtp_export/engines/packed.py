"""Engines for packed inputs, seen as what all others are: engines that take rectangles."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..contract import ATTENTION_MASK, CU_SEQLENS, INPUT_IDS, KEPT_SITE, TOKEN_TYPE_IDS
from ..text import Batch
from . import Engine


class PackedEngine:
    """An engine that takes `contract.PACKED_INPUTS`. Here it takes right-padded ``(B, S)`` batches: padding is left out on the way
    in, and zeros (-1 in `kept_site`) on the way out. As everywhere, a row without live tokens counts as one token.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine, self.outputs = engine, engine.outputs
        types = [name for name in engine.inputs if name == TOKEN_TYPE_IDS]
        self.inputs: tuple[str, ...] = (INPUT_IDS, ATTENTION_MASK, *types)
        self._of_tokens: dict[str, bool] | None = None

    def run(self, batch: Batch, wanted: Sequence[str] | None = None) -> dict[str, np.ndarray]:
        lengths = batch[ATTENTION_MASK].sum(1).clip(1)
        live = np.arange(batch[INPUT_IDS].shape[1]) < lengths[:, None]
        arrays = {name: batch[name][live] for name in self.inputs if name != ATTENTION_MASK}
        found = self.run_packed(arrays, lengths, wanted)
        return {name: self._spread(name, values, live) for name, values in found.items()}

    def run_packed(
        self, arrays: Batch, lengths: np.ndarray, wanted: Sequence[str] | None = None
    ) -> dict[str, np.ndarray]:
        """Run texts of ``lengths (B,)``, at least 1 each: int64 ``(T,)`` arrays by name, one text after the other.

        Returns:
            Arrays by name, ``(B, ...)`` or ``(T, ...)``.
        """
        return self.engine.run({**arrays, CU_SEQLENS: bounds(lengths)}, wanted)

    def _spread(self, name: str, values: np.ndarray, live: np.ndarray) -> np.ndarray:
        """Spread an output over ``live (B, S) bool`` where it has a row for each token."""
        texts, tokens = len(live), int(live.sum())
        if not (len(values) == tokens and (tokens != texts or self._is_of_tokens(name))):
            return values
        spread = np.full((*live.shape, *values.shape[1:]), -1 if name == KEPT_SITE else 0, values.dtype)
        spread[live] = values
        return spread

    def _is_of_tokens(self, name: str) -> bool:
        """Say whether an output has a row for each token, and not for each text: asked where these are as many."""
        if self._of_tokens is None:
            arrays = {name: np.zeros(2, np.int64) for name in self.inputs if name != ATTENTION_MASK}
            found = self.run_packed(arrays, np.array([2]))
            self._of_tokens = {name: len(values) == 2 for name, values in found.items()}
        return self._of_tokens[name]


def bounds(lengths: np.ndarray) -> np.ndarray:
    """Return where texts begin and end in a packed batch, ``(B+1,) int32``."""
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


def as_padded(engine: Engine) -> Engine:
    """Return an engine that takes rectangles, whichever inputs its file has."""
    return PackedEngine(engine) if CU_SEQLENS in engine.inputs else engine
