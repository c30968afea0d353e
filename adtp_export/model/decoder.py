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

from ..contract import ANYRES, GRID, SQUARE
from ..errors import InputError, ellipsize, quoted
from . import registry
from .backbones.base import Backbone
from .checkpoint import read_config
from .image_choice import read_kept
from .image_pruners import DIVPRUNE, Stage, read_stages
from .image_tokens import spread_over
from .plain import architectures
from .positions import to_precision
from .vision import KINDS, Vision, language_model
from .weights import no_bars, weight_files

TEXT_ALONE = "ForCausalLM"
"""What the names of the classes end with that read text alone."""
WITH_IMAGES = "ForConditionalGeneration"
"""What the names of classes end with that read images."""
_CROSS = "it attends to images by cross-attention"
UNFIT = {
    "qwen3_vl": "image tokens enter several of its layers",
    **dict.fromkeys(("mllama", "idefics"), _CROSS),
    **dict.fromkeys(("video_llava", "llava_next_video", "video_llama_3"), "it reads videos"),
}
"""Why models of these types are not accepted."""
LEAST_TEXT = 8
"""Tokens that a model must have room for beside an image."""


def generates(raw: Mapping[str, Any]) -> bool:
    """Whether a `config.json` is that of a model that generates text: its class says so, or it reads images."""
    names, kind = architectures(raw), raw.get("model_type")
    decoder = isinstance(kind, str) and kind in registry.BACKBONES and registry.backbone(kind).generates
    return kind in KINDS or (decoder and bool(names) and all(name.endswith(TEXT_ALONE) for name in names))


def check_images(raw: Mapping[str, Any], path: Path) -> None:
    """Raises InputError for the configuration of a model that reads images and generates text, of a kind that is not accepted."""
    kind = raw.get("model_type")
    generating = any(name.endswith(WITH_IMAGES) for name in architectures(raw))
    if kind not in KINDS and generating and isinstance(raw.get("vision_config"), Mapping):
        why = f", and {UNFIT[kind]}" if kind in UNFIT else ""
        raise InputError(
            f"{path}: model_type is {quoted(kind)}{why}; accepted models that read images and generate text are {', '.join(KINDS)}. "
            "To export its language model alone, save that as a checkpoint of its own, such as a LlamaForCausalLM"
        )


CAP = "final_logit_softcapping"
"""The field of a configuration that has the cap."""


class Capped(nn.Module):
    """A head whose logits stay within ``(-cap, cap)``: ``cap * tanh(logits / cap)``, as Gemma's may."""

    def __init__(self, own: nn.Module, cap: float) -> None:
        super().__init__()
        self.own, self.cap = own, cap

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = torch.tanh(self.own(x) / self.cap) * self.cap
        return result


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """A model in fp32, described.

    model: transformers'. backbone: of its language model. stages: where image tokens leave. image_token: the id that stands where an
    image token goes, and image_tokens: how many a tile of a picture has; None and 0 where the model reads text alone. kept_tokens: how many
    of these stay before the language model reads any; 0: all.
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
        model = copy.deepcopy(self.model)
        to_precision(model, dtype)
        return dataclasses.replace(self, model=model, backbone=type(self.backbone)(language_model(model)))

    @property
    def embeddings(self) -> nn.Module:
        """From ids to the states before layer 0."""
        module: nn.Module = self.model.get_input_embeddings()
        return module

    @property
    def head(self) -> nn.Module:
        """From states to logits. transformers caps those of Gemma alone, and not where it reads pictures."""
        module: nn.Module = self.model.get_output_embeddings()
        cap = getattr(self.model.config, CAP, None) if self.model.config.model_type == "gemma3_text" else None
        return module if cap is None else Capped(module, cap)

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
        """Pixels along a side of the pictures that the model takes; 0 where it reads text alone, or pictures of any size."""
        vision = None if self.image_token is None else self.model.config.vision_config
        return int(getattr(vision, "image_size", 0))

    @property
    def pictures(self) -> dict[str, Any]:
        """What `generate` needs to know to prepare pictures; nothing where the model reads text alone."""
        return {} if self.image_token is None else KINDS[self.model.config.model_type].settings(self.model.config)

    def vision(self) -> Vision:
        """Return what makes image tokens of pictures; it shares the weights."""
        return KINDS[self.model.config.model_type](self.model)

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        """The tokens that end a text: of `generation_config.json`, or else of the configuration, defaults included."""
        found = self.model.generation_config.eos_token_id
        if found is None and not (self.directory / "generation_config.json").is_file():
            found = self.backbone.config.eos_token_id
        return () if found is None else (found,) if isinstance(found, int) else tuple(found)

    @property
    def repetition_penalty(self) -> float:
        """Of `generation_config.json`; 1 for none."""
        return float(self.model.generation_config.repetition_penalty or 1)

    @functools.cached_property
    def spread(self) -> Tensor:
        """As of `SeenImage`: tiles are squares."""
        return spread_over(round(self.image_tokens**0.5))


def load_decoder(directory: Path, pruning: Mapping[str, Any] | None = None, *, allow_pickle: bool = False) -> Decoder:
    """Load a model in fp32.

    Args:
        pruning: `method` and its settings; None: the field `pruning` of `config.json`, or none. allow_pickle: as `export` has it.

    Raises:
        InputError: anything missing, malformed or not accepted; the message names it.
    """
    raw = read_config(directory)
    path = directory / "config.json"
    weight_files(directory, allow_pickle)
    pruning = raw.get("pruning") if pruning is None else pruning
    has_images = raw["model_type"] in KINDS
    config = _configuration(raw, path, has_images)
    text = config.get_text_config()
    family = registry.language_model(text.model_type)
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
    count = _tokens_of_a_tile(config, path) if has_images else 0
    if count + LEAST_TEXT > family.max_tokens(text):
        raise InputError(
            f"{path}: an image has {count} tokens, and the model reads {family.max_tokens(text)}; accepted are models with room for text"
        )
    stages, kept = _what_leaves(pruning, raw, path, text.num_hidden_layers, count) if pruning is not None else ((), 0)
    kind = AutoModelForImageTextToText if has_images else AutoModelForCausalLM
    model = load_model(directory, config, kind, allow_pickle)
    return Decoder(
        directory=directory,
        raw_config=raw,
        model=model,
        backbone=family(language_model(model)),
        stages=stages,
        image_token=config.image_token_id if has_images else None,
        image_tokens=count,
        kept_tokens=kept,
    )


def _what_leaves(
    pruning: Any, raw: Mapping[str, Any], path: Path, layers: int, count: int
) -> tuple[tuple[Stage, ...], int]:
    """Read settings of pruning for a model of so many layers and image tokens; return `stages` and `kept_tokens` of a `Decoder`."""
    if not isinstance(pruning, Mapping):
        raise InputError(f"{path}: pruning is {quoted(pruning)}; accepted is an object with method and its settings")
    layout = KINDS[raw["model_type"]].layout
    if pruning.get("method") == DIVPRUNE:
        if layout != SQUARE:
            shape = "any size" if layout == GRID else "several tiles"
            raise InputError(
                f"{path}: {DIVPRUNE} chooses among the tokens of one tile, and pictures of a {quoted(raw['model_type'])} model have "
                f"{shape}; accepted are stages, such as those of btp-qwen"
            )
        return (), read_kept(pruning, count)
    stages = read_stages(pruning, layers, count)
    if layout in (ANYRES, GRID) and any(getattr(stage, "spatial", 0) for stage in stages):
        raise InputError(
            f"pruning.stages: got spatial, and image tokens of a {quoted(raw['model_type'])} model are no squares; accepted is spatial 0, "
            "as in --pruning btp-qwen"
        )
    return stages, 0


def _tokens_of_a_tile(config: Any, path: Path) -> int:
    """Count a tile's image tokens; raises InputError for a model with images that is not accepted."""
    token, size = config.image_token_id, config.get_text_config().vocab_size
    if not 0 <= token < size:
        raise InputError(f"{path}: the image token is {token}; accepted are those of the vocabulary, 0 to {size - 1}")
    return KINDS[config.model_type].tokens(config, path)


def _configuration(raw: Mapping[str, Any], path: Path, has_images: bool) -> Any:
    """Make transformers' configuration, in the terms of the version that is installed."""
    fields = {name: value for name, value in raw.items() if name != "pruning"}
    try:
        nested = has_images and "text_config" in fields  # older ones of Qwen2-VL are flat
        inner = fields["text_config"] if nested else fields
        if nested and "model_type" not in inner:
            inner = {"model_type": AutoConfig.for_model(raw["model_type"]).get_text_config().model_type, **inner}
        kind = f"{inner['model_type']}_text" if has_images and not nested else inner["model_type"]
        readable = registry.language_model(kind).readable(inner)
        return AutoConfig.for_model(**({**fields, "text_config": readable} if nested else readable))
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    except Exception as error:  # transformers validates the fields it owns, with exceptions of its own
        raise InputError(f"{path} does not describe a model: {ellipsize(repr(error))}") from error


def load_model(directory: Path, config: Any, kind: Any, allow_pickle: bool = False) -> Any:
    """Load weights in fp32; raises InputError where these are not those of the configuration."""
    try:
        with no_bars():
            model, found = kind.from_pretrained(
                directory,
                config=config,
                dtype=torch.float32,
                use_safetensors=None if allow_pickle else True,
                local_files_only=True,
                output_loading_info=True,
            )
    except Exception as error:  # of many kinds
        raise InputError(f"{directory}: the weights cannot be loaded: {ellipsize(str(error))}") from error
    for told in ("missing_keys", "mismatched_keys"):
        if names := sorted(map(str, found[told])):
            raise InputError(f"{directory}: the weights do not match config.json: {told} {', '.join(names[:4])}")
    if broken := [name for name, weight in model.named_parameters() if not torch.isfinite(weight).all()]:
        raise InputError(f"{directory}: NaN or infinite weights in {', '.join(broken[:4])}")
    return model.eval().requires_grad_(False)
