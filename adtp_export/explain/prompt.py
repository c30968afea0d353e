"""Attention flow from the tokens of a prompt to one of them in a model that generates text.

The last token of a prompt is the one that the next token is read off. Attention is computed by the padded loop, whatever kernels the
model's files run with: a kernel does not give its weights away.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..errors import InputError, check_int
from ..model.backbones.base import Backbone
from ..model.decoder import Decoder
from ..model.padded import run_padded
from .flow import capacities, flows
from .merged_layers import FEWEST, merge


def prompt_flow(
    decoder: Decoder,
    ids: Sequence[int],
    token: int = -1,
    merge_layers: int | None = None,
    watch: Callable[[Sequence[int]], Iterable[int]] = iter,
) -> np.ndarray:
    """Return the maximum flow from each token of a text to one of them after the last layer, ``(n,)`` in fp64.

    Args:
        decoder: of any family that generates text; nothing leaves on the way.
        ids: n tokens without padding, none of an image.
        token: the index of the token that is explained, from -n to n - 1; -1: what follows the text. Tokens behind it have a flow of 0.
        merge_layers: merge layers until so many are left, 3 or more, which takes less time for long texts and is not exact; None: do not.
        watch: takes the tokens, and gives them back one by one while their flows are computed, to show progress.

    Raises:
        InputError: the text is empty or too long, has an image token or an id that the model does not know, there is no such token, or the
            layers cannot be merged into so few.
    """
    if merge_layers is not None:
        check_int("merge_layers", merge_layers, FEWEST)
    tokens, vocabulary = len(ids), int(decoder.backbone.config.vocab_size)
    if not 1 <= tokens <= decoder.max_tokens:
        raise InputError(f"ids: got {tokens} tokens; the model reads 1 to {decoder.max_tokens}, so give a shorter text")
    if (unknown := next((i for i in ids if not 0 <= i < vocabulary), None)) is not None:
        raise InputError(f"ids: got {unknown}; accepted are 0 to {vocabulary - 1}")
    if decoder.image_token in ids:
        raise InputError(
            f"ids: got {decoder.image_token}, which stands for a picture; accepted are texts alone, so leave it out"
        )
    if not -tokens <= token < tokens:
        raise InputError(f"token: got {token}; the text has {tokens} tokens, so accepted are {-tokens} to {tokens - 1}")
    place = token % tokens
    layers = attended(decoder.backbone, ids[: place + 1])
    if merge_layers is not None:
        layers = merge(layers, merge_layers)
    found = flows(layers, np.full(place + 1, len(layers)), watch(range(place + 1)), [place])
    return np.concatenate([found, np.zeros(tokens - place - 1)])


def attended(backbone: Backbone, ids: Sequence[int]) -> list[np.ndarray]:
    """Return the capacities ``(n, n)`` of each layer for a text of n tokens; nothing leaves on the way."""
    layers, text = _Capacities(), torch.tensor([ids])
    with torch.no_grad():
        live = torch.ones_like(text, dtype=torch.bool)
        run_padded(backbone, nn.ModuleDict(), text, torch.zeros_like(text), live, layers)
    return layers


class _Capacities(list[Any]):
    """Takes the attention of each layer and keeps its capacities: all heads of all layers would take gigabytes."""

    def append(self, weights: Tensor) -> None:
        super().append(capacities(weights[0].numpy()))
