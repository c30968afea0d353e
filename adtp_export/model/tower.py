"""Vision towers as models of their own, CLIP's and SigLIP's: a vector of each picture, and with DivPrune the tokens that stay."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import transformers
from torch import Tensor, nn
from transformers import AutoConfig

from ..errors import InputError, did_you_mean, ellipsize, quoted
from .checkpoint import read_config
from .decoder import load_model
from .image_choice import Diverse, read_kept
from .image_pruners import DIVPRUNE
from .plain import architectures
from .vision import TOWERS, feature_layers, patches_of, selected
from .weights import weight_files

CLASSES: Mapping[str, tuple[str, ...]] = {
    "clip": ("CLIPModel",),
    "clip_vision_model": ("CLIPVisionModelWithProjection", "CLIPVisionModel"),
    "siglip": ("SiglipModel",),
    "siglip_vision_model": ("SiglipVisionModel",),
}
"""Model types, and the classes of transformers that are accepted for each."""
_TEXTS = "it reads texts; accepted is the directory that has the vision tower, too"
_NAFLEX = (
    "it takes pictures of any shape as lists of patches (NaFlex); accepted are those of a fixed resolution, whose type is "
    "'siglip'"
)
UNFIT = {
    **dict.fromkeys(("clip_text_model", "siglip_text_model", "siglip2_text_model"), _TEXTS),
    **dict.fromkeys(("siglip2", "siglip2_vision_model"), _NAFLEX),
    "xclip": f"it reads videos; accepted are {', '.join(CLASSES)}",
}
"""Why models of these types are not accepted, and what is."""
LAYER, STRATEGY = "vision_feature_layer", "vision_feature_select_strategy"
"""Settings of DivPrune that are named as LLaVA names them."""
CLIP, SIGLIP = {LAYER: -2, STRATEGY: "default"}, {LAYER: -1, STRATEGY: "full"}
"""What they are by default: as in LLaVA-1.5, and as in LLaVA-OneVision."""


def is_tower(raw: Mapping[str, Any], path: Path) -> bool:
    """Whether a `config.json` is that of a vision tower, or has one beside a model of texts.

    Raises:
        InputError: it is of a kind that is not accepted.
    """
    kind = raw.get("model_type")
    if not isinstance(kind, str):
        return False
    if why := UNFIT.get(kind):
        raise InputError(f"{path}: model_type is {quoted(kind)}, and {why}")
    if kind not in CLASSES:
        return False
    names = architectures(raw)
    if len(names) != 1 or names[0] not in CLASSES[kind]:
        raise InputError(
            f"{path}: architectures is {quoted(list(names))}; accepted for {quoted(kind)} is {' or '.join(CLASSES[kind])}"
        )
    return True


@dataclass(frozen=True, kw_only=True)
class Tower:
    """A model in fp32, described.

    model: transformers'. kept_tokens: how many tokens of a picture stay; 0: none are asked for. feature_layers and leaves_first_out:
    which states these are, see `vision.selected`.
    """

    directory: Path
    raw_config: Mapping[str, Any]
    model: Any
    kept_tokens: int = 0
    feature_layers: tuple[int, ...] = ()
    leaves_first_out: bool = False

    @property
    def vision(self) -> Any:
        """Transformers' tower: a part of the model, or the model itself."""
        return getattr(self.model, "vision_model", self.model)

    @property
    def config(self) -> Any:
        """Of the tower."""
        return getattr(self.model.config, "vision_config", self.model.config)

    @property
    def size(self) -> int:
        """Numbers of a picture's vector."""
        projection = getattr(self.model, "visual_projection", None)
        return int(self.config.hidden_size if projection is None else projection.out_features)

    def network(self) -> nn.Module:
        """Return what is exported; it shares the weights."""
        return EmbeddedDiverse(WithTokens(self), self.kept_tokens) if self.kept_tokens else Embedded(self)


class Embedded(nn.Module):
    """Pictures ``(images, 3, side, side)`` to vectors ``(images, D)``: what transformers' `get_image_features` gives, `image_embeds` of a
    tower with a projection, and `pooler_output` of one without."""

    def __init__(self, tower: Tower) -> None:
        super().__init__()
        self.tower, self.projection = tower.vision, getattr(tower.model, "visual_projection", None)
        self.feature_layers, self.leaves_first_out = tower.feature_layers, tower.leaves_first_out

    def forward(self, pixel_values: Tensor) -> Any:
        return self.projected(self.tower(pixel_values).pooler_output)

    def projected(self, pooled: Tensor) -> Tensor:
        """Return what a picture's vector is."""
        result: Tensor = pooled if self.projection is None else self.projection(pooled)
        return result

    def both(self, pixel_values: Tensor) -> tuple[Tensor, Tensor]:
        """Return vectors, and the features of tokens ``(images, n, H)``, of one run."""
        found = self.tower(pixel_values, output_hidden_states=True)
        tokens = selected(found.hidden_states, self.feature_layers, self.leaves_first_out)
        return self.projected(found.pooler_output), tokens


class WithTokens(Embedded):
    """The same, and the features of all tokens."""

    def forward(self, pixel_values: Tensor) -> tuple[Tensor, Tensor]:
        return self.both(pixel_values)


class Tokens(Embedded):
    """The features of all tokens alone."""

    def forward(self, pixel_values: Tensor) -> Tensor:
        return self.both(pixel_values)[1]


class EmbeddedDiverse(Diverse):
    """Vectors of pictures, and what `Diverse` gives of their tokens."""

    def forward(self, pixel_values: Tensor) -> Any:
        embeds, tokens = self.features(pixel_values)
        return (embeds, *self.choose(tokens))


def load_tower(directory: Path, pruning: Mapping[str, Any] | None = None, *, allow_pickle: bool = False) -> Tower:
    """Load a model in fp32.

    Args:
        pruning: `method`, which is DivPrune, and its settings; None: the field `pruning` of `config.json`, or none. allow_pickle: as
            `export` has it.

    Raises:
        InputError: anything missing, malformed or not accepted; the message names it.
    """
    raw, path = read_config(directory), directory / "config.json"
    is_tower(raw, path)
    weight_files(directory, allow_pickle)
    pruning = raw.get("pruning") if pruning is None else pruning
    try:
        config = AutoConfig.for_model(**{name: value for name, value in raw.items() if name != "pruning"})
    except Exception as error:  # transformers validates the fields it owns, with exceptions of its own
        raise InputError(f"{path} does not describe a model: {ellipsize(repr(error))}") from error
    vision = getattr(config, "vision_config", config)
    if (channels := vision.num_channels) != 3:
        raise InputError(f"{path}: num_channels is {quoted(channels)}; accepted are pictures of 3 colors")
    if not getattr(vision, "vision_use_head", True):
        raise InputError(
            f"{path}: vision_use_head is false, so there is no vector of a picture; accepted are towers that pool their states"
        )
    kept, layers, leaves_first_out = _what_stays(pruning, vision, path)
    model = load_model(directory, config, getattr(transformers, architectures(raw)[0]), allow_pickle)
    return Tower(
        directory=directory,
        raw_config=raw,
        model=model,
        kept_tokens=kept,
        feature_layers=layers,
        leaves_first_out=leaves_first_out,
    )


def _what_stays(pruning: Any, vision: Any, path: Path) -> tuple[int, tuple[int, ...], bool]:
    """Read settings of pruning; return `kept_tokens`, `feature_layers` and `leaves_first_out` of a `Tower`."""
    patches = patches_of(vision, path) ** 2
    if pruning is None:
        return 0, (), False
    if not isinstance(pruning, Mapping):
        raise InputError(f"{path}: pruning is {quoted(pruning)}; accepted is an object with method and its settings")
    if (method := pruning.get("method")) != DIVPRUNE:
        raise InputError(
            f"pruning.method: got {quoted(method)}; accepted for a vision tower alone is {DIVPRUNE}: the others ask a language model"
        )
    class_tokens = TOWERS[vision.model_type]
    accepted = {"method": DIVPRUNE, "keep": None, **(CLIP if class_tokens else SIGLIP)}
    if unknown := next((name for name in pruning if name not in accepted), None):
        raise InputError(
            f"pruning: got the field {quoted(unknown)}; accepted for {DIVPRUNE} of a vision tower are {', '.join(accepted)}"
            f"{did_you_mean(unknown, list(accepted))}"
        )
    strategies = ("default", "full") if class_tokens else ("full",)
    if (strategy := pruning.get(STRATEGY, accepted[STRATEGY])) not in strategies:
        why = "" if class_tokens else f": a {vision.model_type} has no class token that default would leave out"
        raise InputError(f"pruning.{STRATEGY}: got {quoted(strategy)}; accepted is {' or '.join(strategies)}{why}")
    layers = feature_layers(pruning.get(LAYER, accepted[LAYER]), vision.num_hidden_layers, "pruning")
    count = patches + class_tokens - (strategy == "default")
    own = {name: value for name, value in pruning.items() if name not in (LAYER, STRATEGY)}
    return read_kept(own, count), tuple(layers), strategy == "default"
