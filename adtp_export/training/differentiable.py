"""Attention on packed states with gradients: the packed student computes kept tokens alone, in training too."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from ..model.backbones.base import AttentionParts
from ..model.padded import attention_received, by_head, near, scores
from ..model.sequences import Packed, pack, rows_of


class DifferentiableAttention(nn.Module):
    """Attention sublayer on packed states with gradients of any order, for L_IG is a loss on gradients.

    Args:
        wanted: also say what attention each token received, ``(T,)`` in fp32 at least, as the packed model does.
    """

    def __init__(self, parts: AttentionParts, wanted: str | None) -> None:
        super().__init__()
        self.parts, self.wanted = parts, wanted

    def forward(self, tokens: Packed, wanted: Tensor | None) -> tuple[Tensor, Tensor | None]:
        parts, x = self.parts, tokens.states
        weights, biases = ([getattr(p, name) for p in parts.projections] for name in ("weight", "bias"))
        qkv = linear(parts.before(x), torch.cat(weights), None if biases[0] is None else torch.cat(biases))
        lengths = tokens.cu_seqlens.diff()
        batch, longest = len(lengths), int(lengths.max())
        cells = pack(lengths, longest)[1]
        padded = qkv.new_zeros(batch * longest, qkv.shape[1]).index_copy(0, cells, qkv)
        positions = cells.new_zeros(batch * longest).index_copy(0, cells, tokens.positions).view(batch, longest)
        q, k, v = by_head(parts, padded.view(batch, longest, -1), positions)
        live = torch.arange(longest, device=x.device) < lengths[:, None]
        probabilities = scores(parts, q, k, live, positions).softmax(-1)
        context = weighted(parts.dropout, probabilities, v).transpose(1, 2).reshape(batch * longest, -1)
        states = parts.output(rows_of(context.index_select(0, cells), wanted), rows_of(x, wanted))
        if self.wanted is None:
            return states, None
        received = attention_received(probabilities, live, self.wanted, near(parts, positions))
        return states, received.flatten().index_select(0, cells)


LEVELS = 2**16
"""Of the random numbers that say what drops out: rates are rounded to multiples of one part in so many."""


def weighted(dropout: nn.Module, probabilities: Tensor, v: Tensor) -> Tensor:
    """Return ``dropout(probabilities) @ v``, ``(B, N, S, D)``, for probabilities ``(B, N, S, S)``.

    On a CPU PyTorch draws one number for each probability, at a time, which takes longer than all else of attention in training. Here 64
    random bits serve four of them.
    """
    dropping = isinstance(dropout, nn.Dropout) and dropout.training and probabilities.device.type == "cpu"
    below = round(dropout.p * LEVELS) if dropping else 0
    if not 0 < below < LEVELS:
        result: Tensor = dropout(probabilities) @ v
        return result
    bits = torch.empty(-(-probabilities.numel() // 4), dtype=torch.int64).random_(-(2**63), None)
    drawn = bits.view(torch.int16)[: probabilities.numel()].view_as(probabilities)
    kept = torch.where(drawn >= below - LEVELS // 2, probabilities, 0)
    return (kept @ v) * (LEVELS / (LEVELS - below))
