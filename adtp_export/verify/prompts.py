"""Prompts to compare on: token ids and pictures drawn at random, always the same ones."""

from __future__ import annotations

import numpy as np
import torch

from ..contract import INPUT_IDS, INPUTS_EMBEDS, PIXEL_VALUES, TILES
from ..model.decoder import Decoder
from .oracle import dtype_of
from .pictures import draw_pictures, failure_of_features
from .prefill import Prompt, Run

LENGTHS = (1, 17, 40, 64)
"""Tokens of prompts."""
AROUND_IMAGES = ((1, 3), (9, 21))
"""Tokens before an image and behind it."""
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
        return [Prompt(text(n), torch.zeros(n, dtype=torch.bool)) for n in LENGTHS if n <= room]
    prompts = []
    tiles = decoder.vision()(_pictures(decoder))
    for number, (before, behind) in enumerate(AROUND_IMAGES):
        # Where text stands between tiles, the last prompt has two of them.
        parts = [(text(before), False), (tiles[number], True)]
        if decoder.pictures["layout"] == TILES and number:
            parts += [(text(BETWEEN_TILES), False), (tiles[0], True)]
        parts.append((text(behind), False))
        states = torch.cat([part for part, _ in parts])
        if len(states) <= room:
            prompts.append(Prompt(states, torch.cat([torch.full((len(part),), own) for part, own in parts])))
    return prompts


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
    pictures = _pictures(decoder)
    found = vision({PIXEL_VALUES: pictures.numpy()})
    return failure_of_features(decoder.vision(), found, pictures, precision, decoder.kept_tokens)
