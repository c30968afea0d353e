"""What is known of each method before it is imported; read without torch, because options and their help come from it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

ATTRIBUTION, RECEIVED, ANSWERS = "attribution", "received", "answers"
"""What a teacher is asked: its answers alone, or also what it says of each token of a text."""


class Facts(NamedTuple):
    """What is known of a method before it is imported.

    module, name: of its class. sites: by default, given the number of layers. terms: of its loss, which ``--ablate`` leaves out.
    settings: those that not all methods have. view: what the teacher is asked.
    """

    module: str
    name: str
    sites: Callable[[int], list[str]]
    terms: tuple[str, ...]
    settings: tuple[str, ...]
    view: str = ANSWERS

    @property
    def cuts(self) -> bool:
        """Whether students of the method drop tokens."""
        return bool(self.sites(2))


def _first(layers: int) -> list[str]:
    return ["0.ffn"]


def _nowhere(layers: int) -> list[str]:
    return []


def _every_ffn(layers: int) -> list[str]:
    return [f"{i}.ffn" for i in range(layers)]


def _every_attention(layers: int) -> list[str]:
    return [f"{i}.attention" for i in range(layers)]


def _later_attention(layers: int) -> list[str]:
    return _every_attention(layers)[1:]


_RATE = "retainer_learning_rate"
_PRUNERS = (
    "retention",
    "saliency_hidden_size",
    "min_tokens",
    "beta",
    "ig_steps",
    "teacher_dimensions",
    "attribution",
    "cut_warmup",
    _RATE,
)
_TASK = ("ce", "logit")
_MASK = ("mask", "mask_share", "mask_weight")

METHODS = {
    "adtp": Facts(
        "adtp", "Distillation", _first, (*_TASK, "ig", "arp", "tsp"),
        (*_PRUNERS, "retention_ratios", "ratio", "teacher_forced_share", "gamma", "kappa", *_MASK),
        ATTRIBUTION,
    ),
    "random": Facts("adtp", "Distillation", _first, (*_TASK, "ig"), (*_PRUNERS, *_MASK), ATTRIBUTION),
    "schedule": Facts("schedule", "Sandwich", _every_ffn, _TASK, ("retention", "min_tokens")),
    "ltp": Facts("ltp", "LearnedThresholds", _every_ffn, _TASK, (_RATE,)),
    "top": Facts("top", "RankMasks", _later_attention, (*_TASK, "rank"), ("gamma", _RATE), RECEIVED),
    "transkimmer": Facts("transkimmer", "Skimming", _every_attention, _TASK, (_RATE,)),
    "layers": Facts("layers", "Layers", _nowhere, _TASK, (*_MASK, "attribution", "ig_steps", "teacher_dimensions")),
}  # fmt: skip
"""``--method`` -> what is known of it."""
