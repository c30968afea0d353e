"""`adtp::ragged_attention_grouped` and what keys receive in it, as torch custom ops: fewer heads of keys, queries that may be other tokens.

They are the reference for all other implementations, as `ragged_attention` is.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .ragged_attention import check, check_positions, empty_received, rises


@torch.library.custom_op("adtp::ragged_attention_grouped", mutates_args=())
def ragged_attention_grouped(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    positions_q: Tensor,
    positions_k: Tensor,
    num_heads: int,
    kv_heads: int,
    scale: float,
    window_back: int,
    window_ahead: int,
) -> Tensor:
    """Attend within packed sequences from some tokens to others, with fewer heads of keys than of queries, and bounds on either side.

    Args: `scale` as of `ragged_attention`, and
        q: ``(T, N*D)``. k, v: ``(T', kv_heads*D)``, one floating dtype; head i of q reads head ``i * kv_heads // N`` of k and v.
        cu_q, cu_k: ``(B+1,) int32`` bounds of each sequence's queries and keys, as `cu_seqlens`. A sequence may have no queries.
        positions_q, positions_k: ``(T,)`` and ``(T',) int32``, not negative; those of keys rise in each sequence. Gaps are where tokens
            were dropped.
        num_heads: N. kv_heads: a divisor of N.
        window_back, window_ahead: a query at position i sees keys at ``i - window_back`` to ``i + window_ahead``; -1 is no bound, and
            0 ahead makes attention causal. Every query must see a key.

    Returns:
        ``(T, N*D)`` in the dtype of `q`.

    Raises:
        ValueError: shapes, dtypes or numbers break the contract above.

    Source: Ainslie et al., GQA (EMNLP 2023); queries, keys and bounds as in FlashAttention's variable-length interface.
    """
    out = torch.empty_like(q)
    settings = (num_heads, kv_heads, scale, window_back, window_ahead)
    for rows, _, _, _, context in _groups(q, k, v, cu_q, cu_k, positions_q, positions_k, *settings):
        out[rows] = context
    return out


@torch.library.custom_op("adtp::ragged_attention_grouped_received", mutates_args=())
def ragged_attention_grouped_received(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    positions_q: Tensor,
    positions_k: Tensor,
    num_heads: int,
    kv_heads: int,
    scale: float,
    window_back: int,
    window_ahead: int,
) -> tuple[Tensor, Tensor]:
    """Attend as `ragged_attention_grouped` does, and say how much attention every key received.

    Args: as of `ragged_attention_grouped`.

    Returns:
        output: ``(T, N*D)``, that of `ragged_attention_grouped`.
        received: ``(T',)``, the sum of the softmax's probabilities over the N heads and over the queries that see the key. Where
            `window_ahead` is 0, it is divided by the number of these queries: few see the end of a text, and a sum would rank its
            beginning first, whatever it says. A key that no query sees received 0. The type is as of `ragged_attention_received`.

    Raises:
        ValueError: as `ragged_attention_grouped`.
    """
    out, received = torch.empty_like(q), empty_received(k)
    settings = (num_heads, kv_heads, scale, window_back, window_ahead)
    for rows, seen, far, scores, context in _groups(q, k, v, cu_q, cu_k, positions_q, positions_k, *settings):
        out[rows] = context
        received[seen] = torch.softmax(scores, dim=-1, dtype=received.dtype).sum((0, 1, 2))
        if window_ahead == 0:
            received[seen] /= (~far).sum(0).clamp(min=1)
    return out, received


def _groups(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    positions_q: Tensor,
    positions_k: Tensor,
    num_heads: int,
    kv_heads: int,
    scale: float,
    window_back: int,
    window_ahead: int,
) -> Iterator[tuple[slice, slice, Tensor, Tensor, Tensor]]:
    """Attend in one sequence after another: rows of its n queries and its m keys, which pairs do not see each other ``(n, m) bool``, scores
    ``(KV, G, n, m)``, and the result ``(n, N*D)``.
    """
    _check_grouped(q, k, v, cu_q, cu_k, positions_q, positions_k, num_heads, kv_heads, scale, window_back, window_ahead)
    bounds = []
    for name, cu, tensor in (("cu_q", cu_q, q), ("cu_k", cu_k, k)):
        bounds.append(cu.tolist())
        if not rises(bounds[-1], tensor.shape[0]):
            raise ValueError(f"{name} must rise from 0 to {tensor.shape[0]}, got {bounds[-1]}")
    for begin, end, first, past in zip(bounds[0], bounds[0][1:], bounds[1], bounds[1][1:]):
        rows, seen = slice(begin, end), slice(first, past)
        queries = q[rows].unflatten(1, (kv_heads, num_heads // kv_heads, -1)).permute(1, 2, 0, 3)  # (KV, G, n, D)
        keys, values = (t[seen].unflatten(1, (kv_heads, 1, -1)).permute(1, 2, 0, 3) for t in (k, v))
        distance = positions_k[seen] - positions_q[rows, None]
        far = torch.zeros_like(distance, dtype=torch.bool)
        far = far if window_back < 0 else far | (distance < -window_back)
        far = far if window_ahead < 0 else far | (distance > window_ahead)
        if bool(far.all(1).any()):
            raise ValueError(f"every query must see a key, and one of rows {begin} to {end - 1} sees none")
        scores = (queries @ keys.transpose(2, 3) * scale).masked_fill(far, -torch.inf)
        yield rows, seen, far, scores, (torch.softmax(scores, dim=-1) @ values).permute(2, 0, 1, 3).flatten(1)


def _check_grouped(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    positions_q: Tensor,
    positions_k: Tensor,
    num_heads: int,
    kv_heads: int,
    *others: Any,
) -> None:
    check(k, k, v, cu_k, kv_heads)
    check(q, q, q, cu_q, num_heads)
    check_positions(q, positions_q)
    check_positions(k, positions_k)
    if num_heads % kv_heads or cu_q.shape != cu_k.shape or q.shape[1] * kv_heads != k.shape[1] * num_heads:
        raise ValueError(
            f"q must be (T, N*D) and k (T', kv_heads*D) with kv_heads a divisor of N, in as many sequences, got {tuple(q.shape)} and "
            f"{tuple(k.shape)} for {num_heads} and {kv_heads} heads, {cu_q.shape[0] - 1} and {cu_k.shape[0] - 1} sequences"
        )
    if q.dtype != k.dtype or min(others[1:]) < -1:
        raise ValueError(
            f"q and k must share a dtype and windows be at least -1, got {q.dtype}, {k.dtype}, {others[1:]}"
        )


@ragged_attention_grouped.register_fake
def _(q: Tensor, *others: Any) -> Tensor:
    _check_grouped(q, *others)
    return torch.empty_like(q)


@ragged_attention_grouped_received.register_fake
def _(q: Tensor, k: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    _check_grouped(q, k, *others)
    return torch.empty_like(q), empty_received(k)
