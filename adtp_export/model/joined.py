"""Products that are computed as one: query, key and value; gates and values. Their weights share memory with the parts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor, nn

from .backbones.base import FeedForwardParts, GatedPair
from .sequences import rows_of


def joined(projections: tuple[nn.Linear, ...], name: str) -> nn.Parameter | None:
    """Join the weights or biases of projections, where they have them. Those that do not learn become slices of the joined tensor: a
    large model has no room for each weight twice.
    """
    parts = [getattr(p, name) for p in projections]
    if parts[0] is None:
        return None
    whole = nn.Parameter(_neighbours(parts), requires_grad=False)
    if not any(part.requires_grad for part in parts):
        for projection, part in zip(projections, whole.detach().split([len(part) for part in parts])):
            setattr(projection, name, nn.Parameter(part, requires_grad=False))
    return whole


def _neighbours(parts: Sequence[Tensor]) -> Tensor:
    """Return tensors one after the other, as a view where they lie so in memory: as slices that `joined` made."""
    first, ends = parts[0].detach(), accumulate(part.numel() for part in parts)
    memory = first.untyped_storage().data_ptr()
    starts = (first.storage_offset() + end for end in (0, *ends))
    if all(
        part.is_contiguous() and (part.untyped_storage().data_ptr(), part.storage_offset()) == (memory, start)
        for part, start in zip(parts, starts)
    ):
        return first.as_strided((sum(map(len, parts)), *first.shape[1:]), first.stride())
    return torch.cat([part.detach() for part in parts])


class PackedFeedForward(nn.Module):
    """Feed-forward sublayer on packed states; of these the rows `wanted (B,)` are worked on, or all where it is None."""

    def __init__(self, parts: FeedForwardParts) -> None:
        super().__init__()
        self.before = parts.before
        self.intermediate = (
            JoinedGates(parts.intermediate) if isinstance(parts.intermediate, GatedPair) else parts.intermediate
        )
        self.output = parts.output

    def forward(self, x: Tensor, wanted: Tensor | None) -> Tensor:
        x = rows_of(x, wanted)
        result: Tensor = self.output(self.intermediate(self.before(x)), x)
        return result


class JoinedGates(nn.Module):
    """A `GatedPair` as one matrix product."""

    def __init__(self, own: GatedPair) -> None:
        super().__init__()
        self.dense, self.activation = nn.Linear(1, 1, device="meta"), own.activation
        for name in ("weight", "bias"):
            setattr(self.dense, name, joined((own.gates, own.values), name))

    def forward(self, x: Tensor) -> Tensor:
        gates, values = self.dense(x).chunk(2, dim=-1)
        result: Tensor = self.activation(gates) * values
        return result
