"""Attention that depends on positions: rotary embeddings, biases by distance, and products with distances. A position is a token's
place in its text."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import linear


def to_precision(network: nn.Module, dtype: torch.dtype) -> None:
    """Convert the weights of a network, and leave the frequencies of rotary embeddings in fp32, as transformers does when it loads one."""
    kept = {name: buffer for name, buffer in network.named_buffers() if name.endswith("inv_freq")}
    nn.Module.to(network, dtype)  # transformers' own hides what it takes
    for name, buffer in kept.items():
        owner, _, own = name.rpartition(".")
        setattr(network.get_submodule(owner), own, buffer)


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
        cos, sin = (self.rows(table, positions).unsqueeze(-2) for table in tables)
        first, second = (x.float() if self.rounds else x.to(precise)).chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)

    def rows(self, table: Tensor, positions: Tensor) -> Tensor:
        """Return the rows ``(..., D/2)`` of a table for positions."""
        return nn.functional.embedding(positions, table)


class AxialRotary(Rotary):
    """The same for positions of several axes, ``(n, axes) int64``: each axis turns a section of the pairs. Positions ``(n,)`` are those of
    text without pictures, the same along all axes.

    Args:
        sections: pairs of each axis, in order; they add up to D/2.

    Source: Wang et al., Qwen2-VL (arXiv 2409.12191), multimodal rotary positions.
    """

    def __init__(self, inverse: Tensor, length: int, sections: Sequence[int], factor: float = 1.0) -> None:
        super().__init__(inverse, length, factor)
        self.sections = tuple(sections)

    def rows(self, table: Tensor, positions: Tensor) -> Tensor:
        found = super().rows(table, positions)
        if positions.dim() == 1:
            return found
        return torch.cat([part[..., axis, :] for axis, part in enumerate(found.split(self.sections, -1))], -1)


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


class Buckets(nn.Module):
    """One module for all layers, so that a graph has the buckets once.

    Args:
        buckets: ``(2P-1,) int32``, rising: those of the distances 1 - P to P - 1 from key to query. Farther ones are like the last.
    """

    buckets: Tensor

    def __init__(self, buckets: Tensor) -> None:
        super().__init__()
        self.register_buffer("buckets", buckets, persistent=False)

    def forward(self, distances: Tensor) -> Tensor:
        """Return the bucket of each distance from key to query, int64."""
        middle = len(self.buckets) // 2
        return self.buckets.to(distances.device)[(distances + middle).clamp(0, 2 * middle)].long()


class DistanceProducts(nn.Module):
    """Products of queries and keys with distances, which are states of their own: one row of embeddings for each bucket.

    Args:
        embeddings: gives the rows ``(R, H)``, of R buckets. keys, queries: project them; None: the other side has no such product.
        dropout: of the rows, in training.

    Source: He et al., DeBERTa (ICLR 2021), section 3.1.
    """

    def __init__(
        self,
        embeddings: nn.Module,
        keys: nn.Linear | None,
        queries: nn.Linear | None,
        heads: int,
        buckets: Buckets,
        dropout: nn.Module,
    ) -> None:
        super().__init__()
        self.embeddings, self.keys, self.queries, self.heads, self.buckets = embeddings, keys, queries, heads, buckets
        self.dropout = dropout

    def columns(self, rows: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return what queries and what keys are multiplied by, ``(H, R)`` each; zeros where there is no product.

        Args:
            rows: ``(R, H)`` in place of the embeddings.
        """
        rows = self.embeddings() if rows is None else rows
        found = [None if side is None else linear(rows, side.weight, side.bias).T for side in (self.keys, self.queries)]
        some = next(each for each in found if each is not None)
        first, second = (torch.zeros_like(some) if each is None else each for each in found)
        return first, second

    def forward(self, q: Tensor, k: Tensor, distances: Tensor) -> Tensor:
        """Return the products' sum for each pair, ``(B, N, L, L)``.

        Args:
            q, k: ``(B, N, L, D)``. distances: from query to key, ``(L, L)`` or ``(B, L, L) int64``.
        """
        bucket = self.buckets(-distances)
        bucket = (bucket if bucket.dim() == 2 else bucket[:, None]).expand(*q.shape[:3], q.shape[2])
        tables = self.columns(self.dropout(self.embeddings()))
        of_queries, of_keys = (
            x @ table.unflatten(0, (self.heads, -1)) for x, table in zip((q, k), tables, strict=True)
        )
        return of_queries.gather(3, bucket) + of_keys.gather(3, bucket.transpose(2, 3)).transpose(2, 3)

    def constant(self) -> DistanceColumns:
        """Return what `ragged_attention_disentangled` takes, of the weights as they are now."""
        return DistanceColumns(*self.columns(), self.buckets)


class DistanceColumns(nn.Module):
    """``(H, R)`` twice, and buckets ``(2P-1,) int32``, as `ragged_attention_disentangled` takes them."""

    def __init__(self, keys: Tensor, queries: Tensor, buckets: Buckets) -> None:
        super().__init__()
        self.keys, self.queries = (nn.Parameter(t.detach().contiguous(), requires_grad=False) for t in (keys, queries))
        self.buckets = buckets

    def forward(self, like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return them where `like` is and in its type; buckets stay integers."""
        keys, queries = (at(t, like.device, like.dtype) for t in (self.keys, self.queries))
        return keys, queries, at(self.buckets.buckets, like.device, torch.int32)


class DistanceTable(nn.Module):
    """``(2P-1, N)``, as `ragged_attention_relative` takes it."""

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.table = nn.Parameter(table, requires_grad=False)

    def forward(self) -> Tensor:
        return self.table
