"""Engines for packed inputs, seen as what all others are: engines that take rectangles."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import numpy as np

from ..contract import ATTENTION_MASK, CU_SEQLENS, INPUT_IDS, KEPT_SITE, OVERFLOW, TOKEN_TYPE_IDS
from ..data.tokenize import Batch
from ..errors import InputError
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


class OverflowingError(Exception):
    """More tokens stay than an engine of fixed sizes has room for. Nobody but `StaticEngines` sees it."""


class FixedEngine(PackedEngine):
    """An engine for exactly `tokens` rows and `texts` texts: dead rows and empty texts fill what is left."""

    def __init__(self, engine: Engine, tokens: int, texts: int) -> None:
        super().__init__(engine)
        self.tokens, self.texts, self.rows_run = tokens, texts, 0
        self.outputs = tuple(name for name in engine.outputs if name != OVERFLOW)

    def run(self, batch: Batch, wanted: Sequence[str] | None = None) -> dict[str, np.ndarray]:
        found = super().run(batch, wanted)
        self.rows_run += len(batch[INPUT_IDS])
        return found

    def run_packed(
        self, arrays: Batch, lengths: np.ndarray, wanted: Sequence[str] | None = None
    ) -> dict[str, np.ndarray]:
        texts, tokens = len(lengths), int(lengths.sum())
        filled = {name: np.pad(array, (0, self.tokens - tokens)) for name, array in arrays.items()}
        filled[CU_SEQLENS] = np.pad(bounds(lengths), (0, self.texts - texts), "edge")
        further = [OVERFLOW] if OVERFLOW in self.engine.outputs else []
        found = self.engine.run(filled, [*(wanted or self.outputs), *further])
        if further and found.pop(OVERFLOW).any():
            raise OverflowingError
        return {name: values[: tokens if len(values) == self.tokens else texts] for name, values in found.items()}


class StaticEngines:
    """Engines of several fixed sizes as one. Each batch runs in the smallest that it fits; one that fits none runs in parts.

    Where more tokens stay than an engine has room for, the next larger one takes the batch, or the largest one takes halves of it.
    """

    def __init__(self, engines: Sequence[FixedEngine]) -> None:
        self.engines = sorted(engines, key=lambda engine: (engine.tokens, engine.texts))
        self.inputs, self.outputs = self.engines[0].inputs, self.engines[0].outputs

    def run(self, batch: Batch, wanted: Sequence[str] | None = None) -> dict[str, np.ndarray]:
        """Run a right-padded batch.

        Raises:
            InputError: a text is longer than the largest size.
        """
        found, begin = [], 0
        lengths = batch[ATTENTION_MASK].sum(1).clip(1)
        most_tokens, most_texts = max(e.tokens for e in self.engines), max(e.texts for e in self.engines)
        while begin < len(lengths):
            fits = np.cumsum(lengths[begin : begin + most_texts]) <= most_tokens
            end = begin + int(fits.sum())
            if end == begin:
                raise InputError(f"input_ids: got a row of {lengths[begin]} tokens; accepted are at most {most_tokens}")
            found.append(
                self._run({name: array[begin:end] for name, array in batch.items()}, lengths[begin:end], wanted)
            )
            begin = end
        return found[0] if len(found) == 1 else _joined(found)

    def _run(self, batch: Batch, lengths: np.ndarray, wanted: Sequence[str] | None) -> dict[str, np.ndarray]:
        texts, tokens = len(lengths), int(lengths.sum())
        for engine in self.engines:
            if texts <= engine.texts and tokens <= engine.tokens:
                try:
                    return engine.run(batch, wanted)
                except OverflowingError:
                    continue
        if texts == 1:
            raise InputError(
                f"input_ids: of a row of {tokens} tokens more stay than this target has room for; take another target, such as "
                "one without fixed sizes"
            )
        return self._halved(batch, lengths, wanted)

    def _halved(self, batch: Batch, lengths: np.ndarray, wanted: Sequence[str] | None) -> dict[str, np.ndarray]:
        half = len(lengths) // 2
        parts = (slice(half), slice(half, None))
        return _joined(
            [self._run({name: array[part] for name, array in batch.items()}, lengths[part], wanted) for part in parts]
        )


class Judged(StaticEngines):
    """The same as a verdict on the smallest size runs them: batches are halved until that size takes them, or a text is alone.

    own ``(B,) bool``: which rows of the last batch it took; the others ran in a larger size.
    """

    def __init__(self, engines: Sequence[FixedEngine]) -> None:
        super().__init__(engines)
        self.own = np.zeros(0, bool)

    def run(self, batch: Batch, wanted: Sequence[str] | None = None) -> dict[str, np.ndarray]:
        self.own = np.zeros(0, bool)
        return super().run(batch, wanted)

    def _run(self, batch: Batch, lengths: np.ndarray, wanted: Sequence[str] | None) -> dict[str, np.ndarray]:
        smallest, texts = self.engines[0], len(lengths)
        if texts <= smallest.texts and lengths.sum() <= smallest.tokens:
            with contextlib.suppress(OverflowingError):
                found = smallest.run(batch, wanted)
                self.own = np.append(self.own, np.ones(texts, bool))
                return found
        if texts > 1:
            return self._halved(batch, lengths, wanted)
        self.own = np.append(self.own, False)
        return super()._run(batch, lengths, wanted)


def _joined(found: Sequence[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    return {name: np.concatenate([part[name] for part in found]) for name in found[0]}


def as_padded(engine: Engine, size: tuple[int, int] | None = None) -> Engine:
    """Return an engine that takes rectangles, whichever inputs its file has; size: tokens and texts, where these are fixed."""
    if size is not None:
        return StaticEngines([FixedEngine(engine, *size)])
    return PackedEngine(engine) if CU_SEQLENS in engine.inputs else engine
