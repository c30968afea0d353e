"""Models that generate text, with images or without: transformers' own modules, and the stages at which image tokens leave."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.utils import logging

from ..errors import InputError, ellipsize, quoted
from . import registry
from .backbones.base import Backbone
from .checkpoint import read_config, weight_files
from .image_choice import read_kept
from .image_pruners import DIVPRUNE, Stage, read_stages
from .image_tokens import spread_over
from .plain import architectures

VISION = ("llava",)
"""Model types with images."""
TEXT_ALONE = "ForCausalLM"
"""What the names of the classes end with that read text alone."""
LEAST_TEXT = 8
"""Tokens that a model must have room for beside an image."""


def generates(raw: Mapping[str, Any]) -> bool:
    """Whether a `config.json` is that of a model that generates text: its class says so, or it reads images."""
    names, kind = architectures(raw), raw.get("model_type")
    decoder = isinstance(kind, str) and kind in registry.BACKBONES and registry.backbone(kind).generates
    return kind in VISION or (decoder and bool(names) and all(name.endswith(TEXT_ALONE) for name in names))


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """A model in fp32, described.

    model: transformers'. backbone: of its language model. stages: where image tokens leave. image_token: the id that stands where an
    image token goes, and image_tokens: how many an image has; None and 0 where the model reads text alone. kept_tokens: how many of these
    stay before the language model reads any; 0: all.
    """

    directory: Path
    raw_config: Mapping[str, Any]
    model: Any
    backbone: Backbone
    stages: tuple[Stage, ...] = ()
    image_token: int | None = None
    image_tokens: int = 0
    kept_tokens: int = 0

    def copy(self, dtype: torch.dtype = torch.float32) -> Decoder:
        """Return the same with weights of its own, in a precision."""
        model = copy.deepcopy(self.model).to(dtype)
        language = model.model.language_model if self.image_token is not None else model
        return dataclasses.replace(self, model=model, backbone=type(self.backbone)(language))

    @property
    def embeddings(self) -> nn.Module:
        """From ids to the states before layer 0."""
        module: nn.Module = self.model.get_input_embeddings()
        return module

    @property
    def head(self) -> nn.Module:
        """From states to logits."""
        module: nn.Module = self.model.get_output_embeddings()
        return module

    @property
    def hidden_size(self) -> int:
        """H."""
        return int(self.backbone.config.hidden_size)

    @property
    def first_layers(self) -> tuple[int, ...]:
        """The layers at which another set of tokens enters: 0 and those of the stages."""
        return (0, *(stage.layer for stage in self.stages))

    @property
    def max_tokens(self) -> int:
        """Tokens of the longest text, what is generated included."""
        return self.backbone.max_tokens(self.backbone.config)

    @property
    def image_size(self) -> int:
        """Pixels along a side of the pictures that the model takes; 0 where it reads text alone."""
        return 0 if self.image_token is None else int(self.model.config.vision_config.image_size)

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        """The tokens that end a text: of `generation_config.json`, or else of the configuration, defaults included."""
        found = self.model.generation_config.eos_token_id
        if found is None and not (self.directory / "generation_config.json").is_file():
            found = self.backbone.config.eos_token_id
        return () if found is None else (found,) if isinstance(found, int) else tuple(found)

    @functools.cached_property
    def spread(self) -> Tensor:
        """As of `SeenImage`: pictures are squares."""
        return spread_over(round(self.image_tokens**0.5))


def load_decoder(directory: Path, pruning: Mapping[str, Any] | None = None) -> Decoder:
    """Load a model in fp32.

    Args:
        pruning: `method` and `stages`; None: the field `pruning` of `config.json`, or no stages.

    Raises:
        InputError: anything missing, malformed or not accepted; the message names it.
    """
    raw = read_config(directory)
    path = directory / "config.json"
    weight_files(directory, allow_pickle=False)
    pruning = raw.get("pruning") if pruning is None else pruning
    has_images = raw["model_type"] in VISION
    config = _configuration(raw, path, has_images)
    text = config.get_text_config()
    family = registry.backbone(text.model_type)
    if not family.generates:
        raise InputError(
            f"{path}: text_config.model_type is {quoted(text.model_type)}; accepted are decoders such as llama and qwen2"
        )
    family.check(text)
    if not family.causal(text):
        raise InputError(f"{path}: is_causal is false; accepted are models in which no token sees later ones")
    if pruning is not None and not has_images:
        raise InputError(
            f"{path}: image tokens leave by pruning, and a {quoted(raw['model_type'])} model reads text alone; leave it out"
        )
    count = _image_tokens(config, path) if has_images else 0
    if count + LEAST_TEXT > family.max_tokens(text):
        raise InputError(
            f"{path}: an image has {count} tokens, and the model reads {family.max_tokens(text)}; accepted are models with room for text"
        )
    before = pruning is not None and pruning.get("method") == DIVPRUNE
    stages = read_stages(pruning, text.num_hidden_layers, count) if pruning is not None and not before else ()
    model = _model(directory, config, AutoModelForImageTextToText if has_images else AutoModelForCausalLM)
    language = model.model.language_model if has_images else model
    return Decoder(
        directory=directory,
        raw_config=raw,
        model=model,
        backbone=family(language),
        stages=stages,
        image_token=config.image_token_index if has_images else None,
        image_tokens=count,
        kept_tokens=read_kept(pruning, count) if pruning is not None and before else 0,
    )


def _configuration(raw: Mapping[str, Any], path: Path, has_images: bool) -> Any:
    """Make transformers' configuration, in the terms of the version that is installed."""
    fields = {name: value for name, value in raw.items() if name != "pruning"}
    try:
        inner = fields["text_config"] if has_images else fields
        readable = registry.backbone(inner["model_type"]).readable(inner)
        return AutoConfig.for_model(**({**fields, "text_config": readable} if has_images else readable))
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    except Exception as error:  # transformers validates the fields it owns, with exceptions of its own
        raise InputError(f"{path} does not describe a model: {ellipsize(repr(error))}") from error


def _model(directory: Path, config: Any, kind: Any) -> Any:
    """Load weights in fp32; raises InputError where these are not those of the configuration."""
    shows = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model, found = kind.from_pretrained(
            directory,
            config=config,
            dtype=torch.float32,
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
        )
    except Exception as error:  # of many kinds
        raise InputError(f"{directory}: the weights cannot be loaded: {ellipsize(str(error))}") from error
    finally:
        if shows:
            logging.enable_progress_bar()
    for told in ("missing_keys", "mismatched_keys"):
        if names := sorted(map(str, found[told])):
            raise InputError(f"{directory}: the weights do not match config.json: {told} {', '.join(names[:4])}")
    if broken := [name for name, weight in model.named_parameters() if not torch.isfinite(weight).all()]:
        raise InputError(f"{directory}: NaN or infinite weights in {', '.join(broken[:4])}")
    return model.eval().requires_grad_(False)


def _image_tokens(config: Any, path: Path) -> int:
    """Return how many tokens an image has; raises InputError for a picture that is no square of patches."""
    vision = config.vision_config
    side, patch = vision.image_size, vision.patch_size
    if not isinstance(side, int) or not isinstance(patch, int) or side < patch:
        raise InputError(
            f"{path}: vision_config has image_size {quoted(side)} and patch_size {quoted(patch)}; accepted are integers"
        )
    return int((side // patch) ** 2) + (config.vision_feature_select_strategy == "full")


class Vision(nn.Module):
    """Pictures to image tokens: transformers' tower and projector."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        own, config = decoder.model.model, decoder.model.config
        self.tower, self.projector = own.vision_tower, own.multi_modal_projector
        layer = config.vision_feature_layer
        self.feature_layers = [layer] if isinstance(layer, int) else list(layer)
        self.leaves_first_out = config.vision_feature_select_strategy == "default"

    def forward(self, pixel_values: Tensor) -> Tensor:
        """Turn ``pixel_values (images, 3, side, side)`` into features ``(images, tokens, H)``."""
        states = self.tower(pixel_values, output_hidden_states=True).hidden_states
        chosen = [states[i][:, 1:] if self.leaves_first_out else states[i] for i in self.feature_layers]
        result: Tensor = self.projector(torch.cat(chosen, -1))
        return result
