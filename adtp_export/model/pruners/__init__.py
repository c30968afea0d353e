"""Ways to choose tokens, one per file. A pruner sees the states at its site and answers with a rule of `model.selection`."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from ...errors import InputError, did_you_mean, quoted
from ..selection import Rule
from ..sequences import outside_autocast


class Seen(NamedTuple):
    """What a pruner may look at: padded states with S columns, or packed ones with T rows.

    states: ``(B, S, H)`` or ``(T, H)``. read: ``(B, H)``, the state of the token that knows most of its sequence: the first one alive, or,
    in models that keep another token beside it (`PrunedEncoder.keeps_last`), that one. lengths: ``(B,) int64``, tokens alive now;
    at_input: the same before the first site. received: ``(B, S)`` or ``(T,)``, the attention that each token received in the last
    attention executed, summed over heads and live queries, without its own where the pruner reads it `from_others`; in causal models
    divided by the number of these queries, for few of them see the end of a text; None unless the pruner `reads_received`.
    """

    states: Tensor
    read: Tensor
    lengths: Tensor
    at_input: Tensor
    received: Tensor | None


@dataclass(frozen=True)
class PrunerSettings:
    """The fields of a method inside ``pruning``; each method has its own subclass."""

    def check(self, sites: list[str]) -> None:
        """Raises InputError where the values are out of range, or do not fit the sites."""

    @classmethod
    def read(cls, method: str, fields: Mapping[str, Any]) -> PrunerSettings:
        """Make settings from the fields of a configuration.

        Raises:
            InputError: an unknown field.
        """
        known = [field.name for field in dataclasses.fields(cls)]
        for name in fields:
            if name not in known:
                accepted = ", ".join(known) or "none"
                raise InputError(
                    f"pruning.{name}: the method {quoted(method)} has no such field; accepted are {accepted}{did_you_mean(name, known)}"
                )
        needed = [f.name for f in dataclasses.fields(cls) if f.default is f.default_factory is dataclasses.MISSING]
        for name in needed:
            if name not in fields:
                raise InputError(f"pruning.{name} is missing; the method {quoted(method)} needs it")
        return cls(**{name: list(value) if isinstance(value, tuple) else value for name, value in fields.items()})


class Pruner(nn.Module, ABC):
    """One site of a method: its weights, and the decision they make.

    Args:
        settings: of the method, an instance of `Settings`.
        site: such as ``"0.ffn"``; index: its place among the sites.
        hidden_size: H; heads: N.
    """

    Settings: ClassVar[type[PrunerSettings]] = PrunerSettings
    reads_received: bool = False
    """Whether `Seen.received` is wanted; it costs a few percent of the attention before the site."""

    from_others: bool = False
    """Whether `Seen.received` is to leave out what a token gives itself. All sites of a model answer alike."""

    keeps_first: bool = True
    """Whether the first token of a text always stays, as heads that read it and causal models need."""

    restores_entered: bool = False
    """What a dropped token answers with where a head reads all tokens: the state with which it entered the layer that dropped it, or,
    by default, the one that reached its cut."""

    longest: int | None = None
    """Tokens of the longest text that it decides about; None: any."""

    earliest: ClassVar[tuple[str, str] | None] = None
    """A site that is too early for the method, and why."""

    def most_kept(self, tokens: int, texts: int, at_input: int) -> int:
        """Return how many of `tokens` in `texts`, which had `at_input` before the first site, may stay at most; all, unless a pruner knows
        better.
        """
        return tokens

    def restore_buffers(self) -> None:
        """Compute anew what is in no checkpoint: transformers loads models without it."""

    @abstractmethod
    def forward(self, seen: Seen) -> Rule:
        """Decide which tokens stay."""


def in_fp32(module: nn.Module, x: Tensor) -> Tensor:
    """Run a predictor in fp32 at least, whatever the precision of the rest: a flipped decision changes behaviour."""
    with outside_autocast(x):
        if x.dtype not in (torch.float16, torch.bfloat16):
            result: Tensor = module(x)
            return result
        weights = {name: weight.float() for name, weight in module.named_parameters()}
        return torch.func.functional_call(module, weights, (x.float(),))
