"""How a model that generates text chooses its next token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..errors import InputError, check_int, quoted


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are chosen: the likeliest where temperature is 0; else drawn from the likeliest that have `top_p` together.

    repetition_penalty: makes tokens that are there already less likely (above 1), as `penalized` does; None: as the checkpoint says.

    Raises:
        InputError: a value out of range.
    """

    max_new_tokens: int = 64
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    repetition_penalty: float | None = None

    def __post_init__(self) -> None:
        check_int("max_new_tokens", self.max_new_tokens, 1)
        check_int("seed", self.seed, 0)
        if not _is_number(self.temperature) or not 0 <= self.temperature <= 100:
            raise InputError(f"temperature: got {quoted(self.temperature)}; accepted are numbers from 0 to 100")
        if not _is_number(self.top_p) or not 0 < self.top_p <= 1:
            raise InputError(f"top_p: got {quoted(self.top_p)}; accepted are numbers above 0, to 1")
        penalty = self.repetition_penalty
        if penalty is not None and (not _is_number(penalty) or not 0 < penalty <= 100):
            raise InputError(f"repetition_penalty: got {quoted(penalty)}; accepted are numbers above 0, to 100")

    def generators(self, prompts: int, first: int = 0) -> list[np.random.Generator]:
        """Return what draws for each prompt. It depends on the seed and the prompt's number alone, which is `first` for the first one."""
        return [np.random.default_rng([self.seed, number]) for number in range(first, first + prompts)]

    def choose(self, logits: np.ndarray, generators: Sequence[np.random.Generator]) -> np.ndarray:
        """Choose a token of each row of ``(B, V)``, by a generator of its own."""
        if self.temperature == 0:
            return logits.argmax(1)
        # The greatest is 0, so that no temperature makes two of them infinite.
        with np.errstate(over="ignore"):
            scaled = (logits - logits.max(1, keepdims=True)).astype(np.float64) / self.temperature
        return np.array([self._drawn(row, generator) for row, generator in zip(scaled, generators, strict=True)])

    def _drawn(self, logits: np.ndarray, generator: np.random.Generator) -> int:
        order = np.argsort(-logits, kind="stable")
        shares = np.exp(logits[order])
        shares /= shares.sum()
        shares[np.cumsum(shares) - shares >= self.top_p] = 0
        return int(order[generator.choice(len(order), p=shares / shares.sum())])


def penalized(logits: np.ndarray, there: np.ndarray, penalty: float) -> np.ndarray:
    """Divide logits ``(B, V)`` of tokens that are there already, ``(B, V) bool``, by the penalty; multiply negative ones with it.

    Source: Keskar et al., CTRL (arXiv 1909.05858), as transformers has it.
    """
    return np.where(there, np.where(logits < 0, logits * penalty, logits / penalty), logits) if penalty != 1 else logits


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
