"""At which layers image tokens should leave: where a model changes their states most, as pictures show it.

Source: Li et al., Balanced Token Pruning (NeurIPS 2025): stages stand where the cosine between the image states of neighbouring layers
drops. The published code has no calibration, so what counts as a drop (`drops`) is our reading.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .decoder import Decoder
from .vision import language_model


class Drop(NamedTuple):
    """A fall of the cosine, whose lowest layer stands before `layer`. depth: the cosine at the last peak, less the lowest one."""

    layer: int
    depth: float


@torch.no_grad()
def image_cosines(decoder: Decoder, states: Tensor, image: Tensor) -> Tensor:
    """Read a prompt without pruning; return how little each layer but the last turns image states, ``(layers - 1,) fp64``.

    Args:
        states: ``(T, H) fp32``, of a prompt. image: ``(T,) bool``, with at least one token of an image.

    Returns:
        The cosine between the states of an image token before a layer and after it, mean over image tokens.
    """
    model = language_model(decoder.model)
    found = model(inputs_embeds=states[None], output_hidden_states=True, use_cache=False).hidden_states
    rows = [each[0, image].double() for each in found[:-1]]  # transformers normalizes the last ones
    return torch.stack([torch.cosine_similarity(a, b, dim=-1).mean() for a, b in zip(rows, rows[1:])])


def drops(cosines: Sequence[float]) -> list[Drop]:
    """Find the layers whose cosine is lower than at the layer before, and no higher than at the one after; in order.

    The first layer and the last one that was measured have no neighbour on one side, and so no drop.
    """
    found, peak = [], float("-inf")
    for i in range(1, len(cosines) - 1):
        peak = max(peak, cosines[i - 1])
        if cosines[i - 1] > cosines[i] <= cosines[i + 1]:
            found.append(Drop(i + 1, peak - cosines[i]))
            peak = cosines[i]
    return found


def most_drops(layers: int) -> int:
    """Return how many drops a model of so many layers can have: of two layers side by side only one is the lowest."""
    return max(layers - 2, 0) // 2


def deepest(found: Sequence[Drop], count: int) -> list[int]:
    """Return the layers of the deepest drops, in order; of two that are as deep the earlier one."""
    return sorted(each.layer for each in sorted(found, key=lambda each: (-each.depth, each.layer))[:count])
