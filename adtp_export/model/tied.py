"""Weights that are one tensor under several names: the decoder of a masked-language head is mostly the table of token embeddings.

Files hold such a tensor once, under either name. Where they hold two that differ, both stay, as in transformers 5.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn


def shared(model: nn.Module) -> list[list[str]]:
    """Return the names of each parameter that has several."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [each for each in names.values() if len(each) > 1]


def complete(stored: dict[str, Tensor], groups: Iterable[Sequence[str]]) -> None:
    """Give weights of a file all their names, in place."""
    for names in groups:
        if known := [name for name in names if name in stored]:
            stored |= {name: stored[known[0]] for name in names if name not in stored}


def load(model: nn.Module, weights: dict[str, Tensor], groups: Iterable[Sequence[str]]) -> None:
    """Give a model its weights, and make those one again that have several names, and are equal."""
    model.load_state_dict(weights, assign=True)
    for first, *others in groups:
        own = model.get_parameter(first)
        for name in others:
            place, _, last = name.rpartition(".")
            if torch.equal(model.get_parameter(name), own):
                setattr(model.get_submodule(place), last, own)
