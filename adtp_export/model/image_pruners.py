"""Which image tokens of a prompt leave inside a decoder: methods without weights, each a list of stages.

A stage decides before a layer, by what the prompt's last token asks the image tokens (`Seen.asked`) and by their states. How many stay
follows from how many there are. Text always stays.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ..errors import InputError, check_int, did_you_mean, quoted
from ..io import read_json
from .image_tokens import Distances, add_farthest, best, best_early_first


class SeenImage(NamedTuple):
    """What a stage may look at, in rectangles ``(B, n)`` as of `image_tokens`.

    asked: ``(B, n)``, what the query of the prompt's last token gives each key, mean over heads: scaled products, or probabilities.
    states: ``(B, n, H)``. live: ``(B, n) bool``. counts, at_input: ``(B,) int64``, image tokens now and before the first stage.
    spread: ``(n,) int64``, the turn of each place where places are spread over a picture (`spread_over`).
    """

    asked: Tensor
    states: Tensor
    live: Tensor
    counts: Tensor
    at_input: Tensor
    spread: Tensor


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Image tokens that leave before a layer, counted from 0."""

    layer: int

    softmax: ClassVar[bool] = True
    """Whether `SeenImage.asked` has probabilities."""
    own_layer: ClassVar[bool] = False
    """Whether this layer is asked, or the one before."""
    renumbers: ClassVar[bool] = False
    """Whether those that stay get positions without gaps."""

    def check(self) -> None:
        """Raises InputError for values out of range."""

    @abstractmethod
    def left(self, count: int, at_input: int) -> int:
        """Return how many of `count` image tokens stay, of a prompt that had `at_input`."""

    @abstractmethod
    def copies(self, seen: SeenImage) -> Tensor:
        """Say how often each token is to follow, ``(B, n) int64``: 0, 1 or 2."""


def floor_of(share: float, count: Tensor) -> Tensor:
    """Return ``int(share * n)`` of ``count (B,) int64`` as Python computes it."""
    return (count.to(torch.float64) * share).to(torch.int64)


@dataclass(frozen=True, kw_only=True)
class BtpStage(Stage):
    """A stage of Balanced Token Pruning.

    divisor: k = n // divisor of n image tokens stay; 0: none. Of these the share `attended` by what is asked, out of `surplus` times as
    many (all_candidates: all of these stay); the share `diverse` far from one another; `spatial` of each tile spread over it; what room
    is left by distance from all these. twice: a token that is chosen by attention and for diversity follows twice, as in the authors'
    code.

    Source: Li et al., Balanced Token Pruning (NeurIPS 2025), and its code for LLaVA.
    """

    divisor: int
    attended: float = 0.0
    surplus: float = 1.0
    diverse: float = 0.0
    spatial: int = 0
    twice: bool = False
    all_candidates: bool = False

    softmax = False

    def check(self) -> None:
        check_int("pruning.stages.divisor", self.divisor, 0)
        check_int("pruning.stages.spatial", self.spatial, 0)
        for name in ("attended", "diverse"):
            check_share(f"pruning.stages.{name}", getattr(self, name))
        for name in ("twice", "all_candidates"):
            if not isinstance(value := getattr(self, name), bool):
                raise InputError(f"pruning.stages.{name}: got {quoted(value)}; accepted are true and false")
        if self.attended + self.diverse > 1:
            raise InputError(
                f"pruning.stages: got attended {self.attended} and diverse {self.diverse}; accepted is a sum of at most 1"
            )
        if not isinstance(self.surplus, (int, float)) or not 1 <= self.surplus < math.inf:
            raise InputError(f"pruning.stages.surplus: got {quoted(self.surplus)}; accepted are numbers from 1 on")
        if self.all_candidates and self.attended * self.surplus + self.diverse > 1:
            raise InputError(
                f"pruning.stages: got attended {self.attended} times surplus {self.surplus} with all_candidates, and diverse "
                f"{self.diverse}; accepted is a sum of at most 1"
            )

    def left(self, count: int, at_input: int) -> int:
        return count // self.divisor if self.divisor else 0

    def copies(self, seen: SeenImage) -> Tensor:
        if self.divisor == 0:
            return torch.zeros_like(seen.live, dtype=torch.int64)
        keep = seen.counts // self.divisor
        of_best = floor_of(self.attended, keep)
        candidates = floor_of(self.surplus, of_best)
        of_best = candidates if self.all_candidates else of_best
        attended = best_early_first(seen.asked, seen.live, of_best, candidates, keep)
        if self.attended == 1:
            return attended.to(torch.int64)
        distances = Distances.of(seen.states, seen.live)
        nothing = torch.zeros_like(seen.live)
        diverse = add_farthest(None, seen.live, distances, floor_of(self.diverse, keep)) if self.diverse else nothing
        both = attended & diverse if self.twice else nothing
        picked = attended | diverse
        room = keep - picked.sum(1) - both.sum(1)
        if self.spatial:
            on_grid = seen.live & ~picked & (seen.spread < self.spatial)
            picked = picked | best(-seen.spread.to(seen.asked.dtype).expand_as(on_grid), on_grid, room)
            room = keep - picked.sum(1) - both.sum(1)
        return add_farthest(picked, seen.live, distances, room).to(torch.int64) + both.to(torch.int64)


def check_share(name: str, value: object) -> None:
    """Raises InputError unless a value is a number from 0 to 1."""
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value <= 1:
        raise InputError(f"{name}: got {quoted(value)}; accepted are numbers from 0 to 1")


@dataclass(frozen=True, kw_only=True)
class FastVStage(Stage):
    """A stage of FastV: the share `keep` of the prompt's image tokens stays, those that are asked most.

    Source: Chen et al., FastV (ECCV 2024).
    """

    keep: float

    def check(self) -> None:
        check_share("pruning.stages.keep", self.keep)

    def left(self, count: int, at_input: int) -> int:
        return min(int(at_input * self.keep), count)

    def copies(self, seen: SeenImage) -> Tensor:
        keep = torch.minimum(floor_of(self.keep, seen.at_input), seen.counts)
        return best(seen.asked, seen.live, keep).to(torch.int64)


@dataclass(frozen=True, kw_only=True)
class PyramidDropStage(FastVStage):
    """A stage of PyramidDrop: the same, by the queries and keys of the layer that follows; then positions are numbered anew.

    Source: Xing et al., PyramidDrop (CVPR 2025).
    """

    own_layer = True
    renumbers = True


DIVPRUNE = "divprune"
"""The method of `image_choice`, which has no stages."""


@dataclass(frozen=True, kw_only=True)
class BtpQwenStage(BtpStage):
    """A stage as their code for Qwen2.5-VL has it: tokens are asked by probabilities."""

    softmax = True


METHODS: dict[str, type[Stage]] = {
    "btp": BtpStage,
    "btp-qwen": BtpQwenStage,
    "fastv": FastVStage,
    "pyramiddrop": PyramidDropStage,
}

NAMES = (*METHODS, DIVPRUNE)
"""Of all methods for image tokens."""

PRESETS: dict[str, list[dict[str, Any]]] = {
    "btp": [
        {"layer": 3, "divisor": 2, "attended": 0.3, "surplus": 3.7, "diverse": 0.3, "spatial": 144},
        {"layer": 6, "divisor": 2, "attended": 0.9, "surplus": 1.5, "diverse": 0.1},
        {"layer": 14, "divisor": 3, "attended": 1.0, "surplus": 1.2},
        {"layer": 22, "divisor": 0},
    ],
    "btp-qwen": [
        {"layer": 3, "divisor": 2, "attended": 0.1, "surplus": 1.2, "all_candidates": True},
        {"layer": 6, "divisor": 2, "attended": 0.4},
        {"layer": 15, "divisor": 2, "attended": 1.0, "surplus": 1.2},
    ],
    "fastv": [{"layer": 2, "keep": 0.5}],
    "pyramiddrop": [{"layer": 8, "keep": 0.5}, {"layer": 16, "keep": 0.25}, {"layer": 24, "keep": 0.125}],
}
"""What the authors publish for LLaVA-1.5-7B: 576 image tokens, 32 layers; btp-qwen for Qwen2.5-VL-7B: 28 layers.

The code for Qwen has one stage more, which drops all image tokens before layer 22. The paper keeps an eighth, and so it is here: without
them, questions about text in pictures are hardly answered at all.
"""


def read_method(given: object, raw: Mapping[str, Any]) -> dict[str, Any]:
    """Read what `--pruning` names: a file with settings, or a method. Its settings are those of a checkpoint's `config.json`, where these
    are of that method, or else as published.

    Args:
        raw: the fields of `config.json`.

    Raises:
        InputError: it is neither, or the file holds something else.
    """
    if (name := str(given)) in NAMES:
        own = raw.get("pruning")
        return dict(own) if isinstance(own, Mapping) and own.get("method") == name else {"method": name}
    if not Path(name).is_file():
        raise InputError(
            f"--pruning: got {quoted(name)}; accepted are {', '.join(NAMES)}, and JSON files with method and its settings"
            f"{did_you_mean(name, NAMES)}"
        )
    found = read_json(Path(name))
    if not isinstance(found, dict):
        raise InputError(f"{given} holds {type(found).__name__}; accepted is an object with method and its settings")
    return found


def read_stages(fields_given: Mapping[str, Any], layers: int, image_tokens: int) -> tuple[Stage, ...]:
    """Read `method` and `stages` of a configuration; without stages, those of `PRESETS`.

    Args:
        layers: of the model. image_tokens: of an image.

    Raises:
        InputError: a name, a field or a value that is not accepted, or a stage that leaves nothing where it should keep some.
    """
    method = fields_given.get("method")
    if not isinstance(method, str) or method not in METHODS:
        hint = did_you_mean(str(method), NAMES)
        raise InputError(
            f"pruning.method: got {quoted(method)}; accepted for image tokens are {', '.join(NAMES)}{hint}"
        )
    if unknown := next((name for name in fields_given if name not in ("method", "stages")), None):
        raise InputError(f"pruning: got the field {quoted(unknown)}; accepted are method and stages")
    listed = fields_given.get("stages", PRESETS[method])
    if not isinstance(listed, list) or not listed or not all(isinstance(each, Mapping) for each in listed):
        raise InputError(
            f"pruning.stages: got {quoted(listed)}; accepted is a list of objects such as {PRESETS[method][0]}"
        )
    stages = tuple(_stage(METHODS[method], each) for each in listed)
    _check_order(stages, layers)
    _check_counts(stages, image_tokens)
    return stages


def _stage(kind: type[Stage], given: Mapping[str, Any]) -> Stage:
    known = [field.name for field in fields(kind)]
    for name in given:
        if name not in known:
            raise InputError(
                f"pruning.stages: got the field {quoted(name)}; accepted are {', '.join(known)}{did_you_mean(name, known)}"
            )
    try:
        stage = kind(**given)
    except TypeError as error:
        raise InputError(
            f"pruning.stages: got {quoted(dict(given))}; accepted are the fields {', '.join(known)}"
        ) from error
    stage.check()
    return stage


def _check_order(stages: tuple[Stage, ...], layers: int) -> None:
    before = 0
    for stage in stages:
        check_int("pruning.stages.layer", stage.layer, 1)
        if stage.layer >= layers:
            raise InputError(
                f"pruning.stages: got layer {stage.layer} in a model of {layers} layers; accepted are 1 to {layers - 1}, counted from 0"
            )
        if stage.layer <= before:
            raise InputError(
                f"pruning.stages: got layer {stage.layer} after layer {before}; list each layer once, in order"
            )
        before = stage.layer


def _check_counts(stages: tuple[Stage, ...], image_tokens: int) -> None:
    count = image_tokens
    for number, stage in enumerate(stages):
        if count == 0:
            raise InputError(f"pruning.stages: no image token is left before layer {stage.layer}; leave that stage out")
        left = stage.left(count, image_tokens)
        if left == 0 and not (isinstance(stage, BtpStage) and stage.divisor == 0):
            raise InputError(
                f"pruning.stages: of {count} image tokens none stays before layer {stage.layer}; accepted are shares that keep at least "
                "one (a divisor of 0 drops all)"
            )
        if isinstance(stage, BtpStage):
            _check_shares(stage, left)
            if stage.spatial and (number or math.isqrt(image_tokens) ** 2 != image_tokens):
                raise InputError(
                    f"pruning.stages: got spatial {stage.spatial} before layer {stage.layer}, where the {count} image tokens are no whole "
                    "square of patches; accepted is spatial in the first stage alone, and of a square"
                )
        count = left


def _check_shares(stage: BtpStage, left: int) -> None:
    """Raises InputError for a share that is none of the tokens that stay."""
    for name in ("attended", "diverse"):
        share = getattr(stage, name)
        if left and share and not int(left * share):
            raise InputError(
                f"pruning.stages.{name}: got {share} before layer {stage.layer}; that is none of {left} image tokens. Accepted are 0, and "
                f"shares from {1 / left:.2g} on"
            )
