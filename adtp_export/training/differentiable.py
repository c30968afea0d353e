"""Attention on packed states with gradients: the packed student computes kept tokens alone, in training too."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from ..model.backbones.base import AttentionParts
from ..model.padded import attention_received, by_head, near, scores
from ..model.sequences import Packed, pack, rows_of
from .dropout import dropped_product


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
        if isinstance(parts.dropout, nn.Dropout):
            context = dropped_product(probabilities, v, parts.dropout.p * parts.dropout.training)
        else:
            context = parts.dropout(probabilities) @ v
        context = context.transpose(1, 2).reshape(batch * longest, -1)
        states = parts.output(rows_of(context.index_select(0, cells), wanted), rows_of(x, wanted))
        if self.wanted is None:
            return states, None
        received = attention_received(probabilities, live, self.wanted, near(parts, positions))
        return states, received.flatten().index_select(0, cells)
