"""Prompts to compare on: token ids and pictures drawn at random, always the same ones."""

from __future__ import annotations

import torch

from ..model.decoder import Decoder, Vision
from .prefill import Prompt

LENGTHS = (1, 17, 40, 64)
"""Tokens of prompts."""
AROUND_IMAGES = ((1, 3), (9, 21))
"""Tokens before an image and behind it."""


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
    side = decoder.model.config.vision_config.image_size
    pictures = torch.rand(len(AROUND_IMAGES), 3, side, side, generator=generator) * 2 - 1
    prompts = []
    for (before, behind), features in zip(AROUND_IMAGES, Vision(decoder)(pictures)):
        states = torch.cat([text(before), features, text(behind)])
        image = torch.zeros(len(states), dtype=torch.bool)
        image[before : before + len(features)] = True
        if len(states) <= room:
            prompts.append(Prompt(states, image))
    return prompts
