"""What a model answers with, one head per file: transformers' model classes for each task, with tokens dropped inside.

A head that answers for all tokens gets those that were dropped, too, with the state that reached their cut or the layer's own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .. import registry

if TYPE_CHECKING:
    from ..encoder import PrunedEncoder
    from ..padded import Decision


@dataclass
class Kept:
    """What a model's output says of its tokens, beside transformers' own fields.

    kept_site ``(B, S) int32``: index of the site that dropped the token, the number of sites if it stayed, -1 for padding.
    decisions: one `Decision` per site.
    """

    kept_site: Tensor | None = None
    decisions: tuple[Decision, ...] | None = None


def head_class(name: object) -> type[PrunedEncoder]:
    """Return the model class of a head, a key of `registry.HEADS`; raises InputError for an unknown one."""
    return registry.load(registry.HEADS, name, "head")


def pooled(states: Tensor, live: Tensor, pooling: str) -> Tensor:
    """Pool states ``(B, S, H)`` over ``live (B, S) bool`` to ``(B, H)``: the "first", the "last", their "mean", or their "max"."""
    if pooling == "first":
        return states[:, 0]
    if pooling == "last":
        columns = torch.arange(live.shape[1], device=live.device)
        return states[torch.arange(len(states), device=live.device), (columns * live).argmax(1)]
    if pooling == "max":
        return states.masked_fill(~live[:, :, None], -torch.inf).amax(1)
    return (states * live[:, :, None]).sum(1) / live.sum(1, keepdim=True)
