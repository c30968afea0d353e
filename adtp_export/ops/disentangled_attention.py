"""`adtp::ragged_attention_disentangled`, DeBERTa's attention over packed sequences, as a torch custom op: the reference for all others."""

from __future__ import annotations

import torch
from torch import Tensor

from .ragged_attention import bounds_of, check, check_positions, check_rising, empty_received, sequences, with_received


@torch.library.custom_op("adtp::ragged_attention_disentangled", mutates_args=())
def ragged_attention_disentangled(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    positions: Tensor,
    distance_keys: Tensor,
    distance_queries: Tensor,
    buckets: Tensor,
    num_heads: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Attend as `ragged_attention_received` does, with two products more in a score, which depend on how far apart two tokens are.

    Args: those of `ragged_attention`, and
        positions: ``(T,) int32``, not negative, rising in each sequence; gaps are where tokens were dropped.
        distance_keys, distance_queries: ``(H, R)`` in the dtype of `q`; head i owns rows ``i*D`` to ``(i+1)*D``. With x the bucket of two
            tokens, the query is multiplied by column x of the first, and the key by column x of the second.
        buckets: ``(2P-1,) int32``, rising, 0 to R - 1: a query at position i and a key at position j have the bucket
            ``buckets[clamp(i - j + P - 1, 0, 2P-2)]``.
        scale: factor on the sum of all three products.

    Returns:
        Output ``(T, H)`` and received ``(T,)``, as of `ragged_attention_received`.

    Raises:
        ValueError: as `ragged_attention`, or the other tensors break the contract above.

    Source: He et al., DeBERTa (ICLR 2021), section 3.1; DeBERTa-v2's log buckets.
    """
    _check(q, k, v, cu_seqlens, positions, distance_keys, distance_queries, buckets, num_heads)
    check_rising(positions, bounds_of(cu_seqlens, q.shape[0]))
    rows = distance_keys.shape[1]
    if bool((buckets.diff() < 0).any()) or not 0 <= int(buckets[0]) <= int(buckets[-1]) < rows:
        raise ValueError(f"buckets must rise, and lie from 0 to {rows - 1}")
    tables = [table.unflatten(0, (num_heads, -1)) for table in (distance_keys, distance_queries)]
    middle = len(buckets) // 2

    def terms(tokens: slice) -> Tensor:
        place = positions[tokens].long()
        index = buckets[(place[:, None] - place + middle).clamp(0, 2 * middle)].long().expand(num_heads, -1, -1)
        queries, keys = (t[tokens].unflatten(1, (num_heads, -1)).transpose(0, 1) for t in (q, k))
        of_queries = (queries @ tables[0]).gather(2, index)
        of_keys = (keys @ tables[1]).gather(2, index.transpose(1, 2)).transpose(1, 2)
        return (of_queries + of_keys) * scale

    return with_received(q, sequences(q, k, v, cu_seqlens, num_heads, scale, terms))


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    positions: Tensor,
    distance_keys: Tensor,
    distance_queries: Tensor,
    buckets: Tensor,
    num_heads: int,
) -> None:
    check(q, k, v, cu_seqlens, num_heads)
    check_positions(q, positions)
    shapes = [tuple(table.shape) for table in (distance_keys, distance_queries)]
    if shapes[0] != shapes[1] or len(shapes[0]) != 2 or shapes[0][0] != q.shape[1]:
        raise ValueError(f"distance_keys and distance_queries must share one shape ({q.shape[1]}, R), got {shapes}")
    if not q.dtype == distance_keys.dtype == distance_queries.dtype:
        raise ValueError(
            f"distance_keys and distance_queries must have q's dtype, got {distance_keys.dtype}, {distance_queries.dtype}"
        )
    if buckets.dtype != torch.int32 or buckets.dim() != 1 or buckets.shape[0] % 2 == 0:
        raise ValueError(f"buckets must be (2P-1,) int32, got {tuple(buckets.shape)} {buckets.dtype}")


@ragged_attention_disentangled.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    positions: Tensor,
    distance_keys: Tensor,
    distance_queries: Tensor,
    buckets: Tensor,
    num_heads: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    _check(q, k, v, cu_seqlens, positions, distance_keys, distance_queries, buckets, num_heads)
    return torch.empty_like(q), empty_received(q)
