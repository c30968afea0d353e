"""Dropout of attention probabilities on a CPU.

PyTorch draws one number for each probability there, one after the other, which takes longer than all else of attention in training. Here
64 random bits serve four of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

LEVELS = 2**16
"""Of the random numbers that say what drops out: rates are rounded to multiples of one part in so many."""
SDPA, NAME = "sdpa", "adtp_training"
"""Names of attention implementations in transformers: its usual one, and `attend`."""


def dropped_product(probabilities: Tensor, v: Tensor, rate: float) -> Tensor:
    """Return ``dropout(probabilities) @ v``, ``(B, N, S, D)``, for probabilities ``(B, N, S, S)``; gradients of any order are right."""
    below = round(rate * LEVELS)
    if probabilities.device.type != "cpu" or not 0 < below < LEVELS:
        return nn.functional.dropout(probabilities, rate) @ v
    bits = torch.empty(-(-probabilities.numel() // 4), dtype=torch.int64).random_(-(2**63), None)
    drawn = bits.view(torch.int16)[: probabilities.numel()].view_as(probabilities)
    kept = torch.where(drawn >= below - LEVELS // 2, probabilities.to(v.dtype), 0)
    return (kept @ v) * (LEVELS / (LEVELS - below))


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """Attend as transformers' `sdpa_attention_forward` does, which is called wherever nothing drops out on a CPU."""
    said = more.get("is_causal")
    causal = attention_mask is None and (getattr(module, "is_causal", True) if said is None else said)
    other = more.get("position_bias") is not None or more.get("cache") is not None or query.shape[1] != key.shape[1]
    if not dropout or query.device.type != "cpu" or causal or other:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **more)
    scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if attention_mask is not None:
        if attention_mask.dtype == torch.bool:  # no infinity: a padded query may see nothing, and must not become NaN
            none = torch.zeros_like(attention_mask, dtype=scores.dtype)
            attention_mask = none.masked_fill(~attention_mask, torch.finfo(scores.dtype).min)
        scores = scores + attention_mask
    return dropped_product(scores.softmax(-1), value, dropout).transpose(1, 2).contiguous(), None


@contextlib.contextmanager
def quick_dropout(model: PreTrainedModel) -> Iterator[None]:
    """Have a model use `attend` in a block, where it would use SDPA on a CPU. With transformers 4 most models stay as they are."""
    if model.config._attn_implementation != SDPA or next(model.parameters()).device.type != "cpu":
        yield
        return
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    model.set_attn_implementation(NAME)
    try:
        yield
    finally:
        model.set_attn_implementation(SDPA)
