"""Prompts to compare on: token ids and pictures drawn at random, always the same ones."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from ..contract import GRID, INPUT_IDS, INPUTS_EMBEDS, PATCH_PLACES, PIXEL_VALUES, TILES
from ..inference.grids import patch_places, positions_of
from ..model.decoder import Decoder
from ..model.vision import values_of
from .oracle import dtype_of
from .pictures import draw_pictures, failure_of_features
from .prefill import Prompt, Run
from .random_ids import LONGEST, LONGEST_FLOPS

LENGTHS = (1, 17, 40, 64)
"""Tokens of prompts."""
SECOND_BLOCK = 130
"""Tokens of one more: kernels take 64 or 128 at a time."""
AROUND_IMAGES = ((1, 3), (9, 21))
"""Tokens before an image and behind it."""
GRIDS = ((2, 3), (5, 1))
"""Rows and columns of the tokens of pictures that stay whole."""
BETWEEN_TILES = 2
"""Tokens between two tiles of an image."""


@torch.no_grad()
def draw_prompts(decoder: Decoder, steps: int) -> list[Prompt]:
    """Draw prompts that leave room for so many tokens behind them; each has an image where the model takes one."""
    generator = torch.Generator().manual_seed(0)
    room = decoder.max_tokens - steps
    vocabulary = decoder.backbone.config.vocab_size

    def text(length: int) -> torch.Tensor:
        states: torch.Tensor = decoder.embeddings(torch.randint(vocabulary, (length,), generator=generator))
        return states

    if decoder.image_token is None:
        lengths = [n for n in (*LENGTHS, longest(decoder, room)) if 0 < n <= room]
        return [Prompt(text(n), torch.zeros(n, dtype=torch.bool)) for n in lengths]
    prompts = []
    whole = decoder.pictures["layout"] == GRID
    found = [network(pictures) for network, pictures in _towers(decoder)]
    tiles = found if whole else list(found[0])
    for number, (before, behind) in enumerate(AROUND_IMAGES):
        # Where text stands between tiles, the last prompt has two of them.
        parts = [(text(before), False), (tiles[number], True)]
        if decoder.pictures["layout"] == TILES and number:
            parts += [(text(BETWEEN_TILES), False), (tiles[0], True)]
        parts.append((text(behind), False))
        states = torch.cat([part for part, _ in parts])
        if len(states) <= room:
            image = torch.cat([torch.full((len(part),), own) for part, own in parts])
            placed = torch.from_numpy(positions_of([before, GRIDS[number], behind])) if whole else None
            prompts.append(Prompt(states, image, placed))
    return prompts


def longest(decoder: Decoder, room: int) -> int:
    """Return a length that is longer than one block of the kernels. Where attention has windows, it is as much longer than the widest one
    that the bounds of `random_ids` leave room for; it is 0 where they leave none.
    """
    backbone = decoder.backbone
    reaches = {backbone.attention(i).reach[0] for i in range(backbone.num_layers)}
    flops_of_token = 2 * sum(weight.numel() for weight in decoder.model.parameters())
    most = min(room, LONGEST, int(LONGEST_FLOPS / flops_of_token))
    return max((n for n in (SECOND_BLOCK + max(reach, 0) for reach in reaches) if n <= most), default=0)


class WholePicture(nn.Module):
    """A tower that reads one picture: from its patches ``(P, values)`` to image tokens ``(n, H)``."""

    def __init__(self, vision: nn.Module, places: torch.Tensor) -> None:
        super().__init__()
        self.vision, self.places = vision, places

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.vision(pixel_values, self.places)
        return found


def _towers(decoder: Decoder) -> list[tuple[nn.Module, torch.Tensor]]:
    """Return what makes image tokens, each with pictures that it takes."""
    vision = decoder.vision()
    if decoder.pictures["layout"] != GRID:
        return [(vision, _pictures(decoder))]
    merge, values = decoder.pictures["merge"], values_of(decoder.pictures)
    towers: list[tuple[nn.Module, torch.Tensor]] = []
    for number, (rows, columns) in enumerate(GRIDS):
        places = torch.from_numpy(patch_places(rows * merge, columns * merge, merge))
        generator = torch.Generator().manual_seed(number + 1)
        pixels = torch.rand(len(places), values, generator=generator) * 2 - 1
        towers.append((WholePicture(vision, places), pixels))
    return towers


def _pictures(decoder: Decoder) -> torch.Tensor:
    return draw_pictures(decoder.model.config.vision_config.image_size, len(AROUND_IMAGES))


@torch.no_grad()
def failure_before_prefill(decoder: Decoder, embed: Run, vision: Run | None, precision: str = "fp32") -> str | None:
    """Say what is wrong with the states that come from ids, which have to be equal, and from pictures; None: nothing."""
    ids = torch.arange(decoder.backbone.config.vocab_size)
    dtype = dtype_of(precision)
    if not np.array_equal(
        embed({INPUT_IDS: ids.numpy()})[INPUTS_EMBEDS], decoder.embeddings(ids).to(dtype).float().numpy()
    ):
        return "the embeddings of tokens differ"
    if vision is None:
        return None
    for network, pictures in _towers(decoder):
        feed = {PIXEL_VALUES: pictures.numpy()}
        if isinstance(network, WholePicture):
            feed[PATCH_PLACES] = network.places.numpy()
        if failure := failure_of_features(network, vision(feed), pictures, precision, decoder.kept_tokens):
            return failure
    return None
