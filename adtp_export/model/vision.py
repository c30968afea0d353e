"""What turns pictures into image tokens, for each class of vision-language models that is accepted: transformers' own modules."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..contract import ANYRES, GRID, MOST_PATCHES, SQUARE, TILES
from ..errors import InputError, quoted
from .backbones.base import RmsNorm
from .positions import AxialRotary, frequencies

TOWERS = {"clip_vision_model": 1, "siglip_vision_model": 0}
"""Towers of LLaVA's kinds, and how many tokens these have before those of patches."""
VISION_THETA = 10_000.0
"""The base of the frequencies that turn patches by row and column in Qwen2-VL."""
MIDDLING = 16
"""Tokens along a side of a picture of middling size."""


class Vision(nn.Module):
    """Tiles ``(tiles, 3, side, side)`` to image tokens ``(tiles, tokens, H)``.

    Args:
        model: transformers'; its modules are shared.
    """

    layout: ClassVar[str] = SQUARE
    """How a picture becomes tiles, and where their tokens go in the prompt; see `contract`."""
    language: ClassVar[str] = "language_model"
    """The attribute that has the language model."""

    @classmethod
    @abstractmethod
    def tokens(cls, config: Any, path: Path) -> int:
        """Return how many tokens a tile has; raises InputError for a configuration that is not accepted."""

    @classmethod
    def settings(cls, config: Any) -> dict[str, Any]:
        """Return what the layout needs to know of the model."""
        return {"layout": cls.layout}

    @abstractmethod
    def forward(self, pixel_values: Tensor) -> Tensor:
        """Turn tiles into image tokens."""


class Llava(Vision):
    """A picture is one tile."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        own, config = model.model, model.config
        self.tower, self.projector = own.vision_tower, own.multi_modal_projector
        self.feature_layers = feature_layers(config.vision_feature_layer, config.vision_config.num_hidden_layers)
        self.leaves_first_out = config.vision_feature_select_strategy == "default"

    @classmethod
    def tokens(cls, config: Any, path: Path) -> int:
        vision = config.vision_config
        if vision.model_type not in TOWERS:
            raise InputError(
                f"{path}: vision_config.model_type is {quoted(vision.model_type)}; accepted are {', '.join(TOWERS)}"
            )
        feature_layers(config.vision_feature_layer, vision.num_hidden_layers, path)
        side = patches_of(vision, path)
        return side**2 + TOWERS[vision.model_type] - (config.vision_feature_select_strategy == "default")

    def forward(self, pixel_values: Tensor) -> Tensor:
        states = self.tower(pixel_values, output_hidden_states=True).hidden_states
        result: Tensor = self.projector(selected(states, self.feature_layers, self.leaves_first_out))
        return result


class LlavaNext(Llava):
    """LLaVA-NeXT: the whole picture small, and tiles of it large. One more token a tile: what ends a row of patches."""

    layout = ANYRES

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.newline = model.model.image_newline

    @classmethod
    def tokens(cls, config: Any, path: Path) -> int:
        found = super().tokens(config, path)
        if found != patches_of(config.vision_config, path) ** 2:
            strategy, kind = config.vision_feature_select_strategy, config.vision_config.model_type
            raise InputError(
                f"{path}: vision_feature_select_strategy is {quoted(strategy)} with {quoted(kind)}; accepted are 'default' with CLIP and "
                "'full' with SigLIP, which leave a square of patches"
            )
        return found

    @classmethod
    def settings(cls, config: Any) -> dict[str, Any]:
        """Pinpoints: heights and widths to choose from. most: tiles whose tokens a picture may have; None: any number."""
        pinpoints = [list(each) for each in config.image_grid_pinpoints]
        return {**super().settings(config), "pinpoints": pinpoints, "most": cls.most_tiles(config)}

    @classmethod
    def most_tiles(cls, config: Any) -> int | None:
        """Return of how many tiles a picture's tokens are at most; more are made smaller."""
        return None

    def forward(self, pixel_values: Tensor) -> Tensor:
        features = super().forward(pixel_values)
        return torch.cat([features, self.newline.expand(features.shape[0], 1, -1)], 1)


class LlavaOnevision(LlavaNext):
    """LLaVA-OneVision."""

    @classmethod
    def tokens(cls, config: Any, path: Path) -> int:
        cls.most_tiles(config, path)
        return super().tokens(config, path)

    @classmethod
    def most_tiles(cls, config: Any, path: Path | str = "config.json") -> int | None:
        name, _, number = str(config.vision_aspect_ratio).rpartition("_")
        if name != "anyres_max" or not number.isdecimal() or not int(number):
            raise InputError(
                f"{path}: vision_aspect_ratio is {quoted(config.vision_aspect_ratio)}; accepted are such as 'anyres_max_9'"
            )
        return int(number)


class Idefics3(Vision):
    """Idefics3 and SmolVLM: tiles of the picture, with text between them, and the whole picture small."""

    layout = TILES
    language = "text_model"
    positions: Tensor

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.tower, self.connector = model.model.vision_model, model.model.connector
        self.register_buffer("positions", self._positions(), persistent=False)

    @classmethod
    def tokens(cls, config: Any, path: Path) -> int:
        side, scale = patches_of(config.vision_config, path), config.scale_factor
        if not isinstance(scale, int) or scale < 1 or side % scale:
            raise InputError(
                f"{path}: got scale_factor {quoted(scale)} for {side} patches along a side; accepted are integers that divide them"
            )
        return (side // scale) ** 2

    @torch.no_grad()
    def _positions(self) -> Tensor:
        """Return where the patches of a whole tile are, ``(1, patches) int64``, as the tower itself says."""
        embeddings, found = self.tower.embeddings, []
        handle = embeddings.position_embedding.register_forward_pre_hook(lambda module, given: found.append(given[0]))
        weight, side = embeddings.patch_embedding.weight, embeddings.image_size
        patches = embeddings.num_patches_per_side
        try:
            whole = torch.ones(1, patches, patches, dtype=torch.bool, device=weight.device)
            embeddings(weight.new_zeros(1, weight.shape[1], side, side), whole)
        finally:
            handle.remove()
        positions: Tensor = found[0]
        return positions

    def forward(self, pixel_values: Tensor) -> Tensor:
        embeddings = self.tower.embeddings
        patches = embeddings.patch_embedding(pixel_values).flatten(2).transpose(1, 2)
        # No part of a tile is padding, so there is no mask.
        states = self.tower.encoder(
            inputs_embeds=patches + embeddings.position_embedding(self.positions), attention_mask=None
        ).last_hidden_state
        result: Tensor = self.connector(self.tower.post_layernorm(states))
        return result


class Qwen2Vl(Vision):
    """Qwen2-VL: a picture is a grid of patches of any size, and a square of these becomes one token."""

    layout = GRID

    def __init__(self, model: Any) -> None:
        super().__init__()
        own, config = model.model.visual, model.config.vision_config
        weight = own.patch_embed.proj.weight.detach().flatten(1)  # what is convolved is one patch
        self.patch = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
        self.patch.weight = nn.Parameter(weight, requires_grad=False)
        half = weight.shape[0] // config.num_heads // 2
        base = (getattr(config, "rope_parameters", None) or {}).get("rope_theta", VISION_THETA)
        inverse = frequencies(base, half)
        rotate = AxialRotary(torch.cat([inverse, inverse]), MOST_PATCHES, (half // 2, half // 2))
        self.blocks = nn.ModuleList(GridBlock(block, config.num_heads, rotate) for block in own.blocks)
        self.norm, self.merger, self.merge = _norm(own.merger.ln_q), own.merger.mlp, config.spatial_merge_size
        self.window = 0
        self.whole: frozenset[int] = frozenset()

    @classmethod
    def tokens(cls, config: Any, path: Path) -> int:
        """Return the tokens of a picture of middling size: others have others."""
        vision = config.vision_config
        for name in ("patch_size", "spatial_merge_size", "temporal_patch_size", "num_heads"):
            if not isinstance(value := getattr(vision, name), int) or value < 1:
                raise InputError(f"{path}: vision_config.{name} is {quoted(value)}; accepted are integers from 1 on")
        width = getattr(vision, "embed_dim", None) or vision.hidden_size
        if width % (4 * vision.num_heads):
            raise InputError(
                f"{path}: vision_config has {width} coordinates and {vision.num_heads} heads; accepted are heads of a multiple of 4"
            )
        return min(MIDDLING, math.isqrt(config.get_text_config().max_position_embeddings) // 2) ** 2

    @classmethod
    def settings(cls, config: Any) -> dict[str, Any]:
        """patch: pixels along a side. merge: patches along a side of a token. temporal: frames that a patch has. video_token: an id."""
        vision = config.vision_config
        sizes = {"patch": "patch_size", "merge": "spatial_merge_size", "temporal": "temporal_patch_size"}
        found = {name: getattr(vision, field) for name, field in sizes.items()}
        return {**super().settings(config), **found, "video_token": config.video_token_id}

    def forward(self, pixel_values: Tensor, patch_places: Tensor) -> Tensor:  # type: ignore[override]
        """Turn the patches ``(P, 3 * temporal * patch * patch)`` of a picture into image tokens ``(P / merge**2, H)``.

        Args:
            patch_places: row and column of each, ``(P, 2) int64``; those of a token follow one another.
        """
        x, seen = self.patch(pixel_values), None
        if self.window:
            window = patch_places // self.window
            others = (window[:, None] != window[None]).any(-1)
            seen = torch.zeros_like(others, dtype=x.dtype).masked_fill(others, -torch.inf)
        for i, block in enumerate(self.blocks):
            x = block(x, patch_places, None if i in self.whole else seen)
        result: Tensor = self.merger(self.norm(x).reshape(-1, self.merge**2 * x.shape[1]))
        return result


class Qwen25Vl(Qwen2Vl):
    """Qwen2.5-VL: in most layers patches see those of their own window alone."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        config = model.config.vision_config
        self.window = config.window_size // self.merge // config.patch_size * self.merge
        self.whole = frozenset(config.fullatt_block_indexes)

    @classmethod
    def tokens(cls, config: Any, path: Path) -> int:
        found, vision = super().tokens(config, path), config.vision_config
        least = vision.spatial_merge_size * vision.patch_size
        if not isinstance(vision.window_size, int) or vision.window_size < least:
            raise InputError(
                f"{path}: vision_config.window_size is {quoted(vision.window_size)}; accepted are integers from {least} on"
            )
        return found


class GridBlock(nn.Module):
    """A layer of a tower whose patches have rows and columns."""

    def __init__(self, own: Any, heads: int, rotate: AxialRotary) -> None:
        super().__init__()
        self.before, self.attention = _norm(own.norm1), GridAttention(own.attn, heads, rotate)
        self.before_ffn, self.ffn = _norm(own.norm2), own.mlp

    def forward(self, x: Tensor, places: Tensor, seen: Tensor | None) -> Tensor:
        x = x + self.attention(self.before(x), places, seen)
        result: Tensor = x + self.ffn(self.before_ffn(x))
        return result


class GridAttention(nn.Module):
    """Attention among patches. The name of `rotate` keeps its nodes in fp32 (`contract.ROTATE`)."""

    def __init__(self, own: Any, heads: int, rotate: AxialRotary) -> None:
        super().__init__()
        self.qkv, self.proj, self.heads, self.rotate = own.qkv, own.proj, heads, rotate

    def forward(self, x: Tensor, places: Tensor, seen: Tensor | None) -> Tensor:
        """Mix states ``(P, H)``; seen: ``(P, P)``, what is added to scores, None: nothing."""
        q, k, v = self.qkv(x).unflatten(1, (3, self.heads, -1)).unbind(1)
        q, k, v = (t.transpose(0, 1)[None] for t in (self.rotate(q, places), self.rotate(k, places), v))
        context = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        result: Tensor = self.proj(context[0].transpose(0, 1).flatten(1))
        return result


def _norm(own: Any) -> nn.Module:
    """Return a norm as it is, or one of root mean squares in our form."""
    return own if isinstance(own, nn.LayerNorm) else RmsNorm(own, own.variance_epsilon)


KINDS: Mapping[str, type[Vision]] = {
    "llava": Llava,
    "llava_next": LlavaNext,
    "llava_onevision": LlavaOnevision,
    "idefics3": Idefics3,
    "smolvlm": Idefics3,
    "qwen2_vl": Qwen2Vl,
    "qwen2_5_vl": Qwen25Vl,
}
"""Model types with images."""


def feature_layers(chosen: Any, layers: int, path: Path | str = "config.json") -> list[int]:
    """Return the layers whose states are features, 0 for what enters the first; raises InputError for one that a tower does not have."""
    listed = chosen if isinstance(chosen, (list, tuple)) else [chosen]
    fit = all(isinstance(each, int) and -layers <= each + 1 <= layers + 1 for each in listed)
    if not listed or not fit:
        raise InputError(
            f"{path}: vision_feature_layer is {quoted(chosen)}; the vision tower has {layers} layers, and accepted are "
            f"{-layers - 1} to {layers}"
        )
    return list(listed)


def selected(states: Sequence[Tensor], layers: Sequence[int], leaves_first_out: bool) -> Tensor:
    """Return of states ``(tiles, n, H)`` of each layer those that LLaVA reads, side by side; perhaps without the class token."""
    return torch.cat([states[i][:, 1:] if leaves_first_out else states[i] for i in layers], -1)


def values_of(layout: Mapping[str, Any]) -> int:
    """Return how many values a patch of a picture that stays whole has, by `Vision.settings`."""
    values: int = 3 * layout["temporal"] * layout["patch"] ** 2
    return values


def patches_of(vision: Any, path: Path) -> int:
    """Return the patches along a side of a tile; raises InputError for a tile that is no square of patches."""
    side, patch = vision.image_size, vision.patch_size
    if not isinstance(side, int) or not isinstance(patch, int) or side < patch or patch < 1:
        raise InputError(
            f"{path}: vision_config has image_size {quoted(side)} and patch_size {quoted(patch)}; accepted are integers"
        )
    return side // patch


def language_model(model: Any) -> Any:
    """Return what reads text in transformers' model: of one with images a part, and else the model itself."""
    kind = KINDS.get(model.config.model_type)
    return model if kind is None else getattr(model.model, kind.language)
