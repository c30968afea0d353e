"""Attention that depends on positions: rotary embeddings, and biases by distance. A position is a token's place in its text."""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn


class Rotary(nn.Module):
    """Turn queries and keys by angles that grow with the position, in fp32 at least.

    Args:
        inverse: frequencies, ``(D/2,) fp32``: a token at position p turns pair i by ``p * inverse[i]``. length: positions are below it.
        factor: of what is turned. rounds: round what is turned to fp32, as some families do.

    Source: Su et al., RoFormer (arXiv 2104.09864), in the form of transformers: coordinate i is paired with i + D/2.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, inverse: Tensor, length: int, factor: float = 1.0, rounds: bool = False) -> None:
        super().__init__()
        cos, sin = _tables(tuple(inverse.tolist()), length, factor)
        self.rounds = rounds
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """Turn ``x (..., N, D)`` by ``positions (...) int64``; the result has the dtype of `x`."""
        precise = (
            x.dtype if x.dtype == torch.float64 else torch.float32
        )  # of the angles; x is rounded, as in transformers
        tables = (at(table, x.device, precise) for table in (self.cos, self.sin))
        cos, sin = (nn.functional.embedding(positions, table).unsqueeze(-2) for table in tables)
        first, second = (x.float() if self.rounds else x.to(precise)).chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


def at(table: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return a table in that form. Where it has it, a trace sees the table itself, and a graph has it by its name."""
    return table if (table.device, table.dtype) == (device, dtype) else table.to(device, dtype)


def frequencies(theta: float, head_size: int) -> Tensor:
    """Return the inverse frequencies ``(head_size / 2,) fp32`` of a base."""
    with torch.device("cpu"):
        exponents = torch.arange(0, head_size, 2, dtype=torch.float32) / head_size
        return 1.0 / theta**exponents


@functools.lru_cache(maxsize=8)
def _tables(inverse: tuple[float, ...], length: int, factor: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines, each ``(length, D/2) fp32``. They outlive the call, so no mode of the caller may mark them."""
    with torch.inference_mode(False), torch.device("cpu"):
        angles = torch.arange(length, dtype=torch.float32)[:, None] * torch.tensor(inverse, dtype=torch.float32)
        return angles.cos() * factor, angles.sin() * factor


class DistanceBias(nn.Module):
    """Biases of scores by the distance from query to key and by head; distances share weights in buckets.

    Args:
        weight: ``(buckets, N)``. buckets: ``(2P-1,) int64``, those of the distances 1 - P to P - 1.

    Source: Raffel et al., T5 (JMLR 2020), section 2.1.
    """

    buckets: Tensor

    def __init__(self, weight: nn.Embedding, buckets: Tensor) -> None:
        super().__init__()
        self.weight = weight
        self.register_buffer("buckets", buckets, persistent=False)

    def table(self) -> Tensor:
        """Return the bias of each distance and head, ``(2P-1, N)``."""
        result: Tensor = self.weight(self.buckets.to(self.weight.weight.device))
        return result

    def forward(self, distances: Tensor) -> Tensor:
        """Return the biases ``(..., N, L, L)`` of ``distances (..., L, L) int64``."""
        return self.table()[distances + len(self.buckets) // 2].movedim(-1, -3)


class DistanceTable(nn.Module):
    """``(2P-1, N)``, as `ragged_attention_relative` takes it."""

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.table = nn.Parameter(table, requires_grad=False)

    def forward(self) -> Tensor:
        return self.table
