"""`adtp::ragged_attention_grouped` and what keys receive in it, as torch custom ops: fewer heads of keys, queries that may be other tokens.

They are the reference for all other implementations, as `ragged_attention` is.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .ragged_attention import bounds_of, check, check_positions, check_rising, empty_received


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
        positions_q, positions_k: ``(T,)`` and ``(T',) int32``, not negative; they rise in each sequence. Gaps are where tokens were
            dropped.
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
    check_grouped(q, k, v, cu_q, cu_k, positions_q, positions_k, num_heads, kv_heads, scale, window_back, window_ahead)
    bounds = []
    for name, cu, positions in (("cu_q", cu_q, positions_q), ("cu_k", cu_k, positions_k)):
        bounds.append(bounds_of(cu, len(positions), name))
        check_rising(positions, bounds[-1])
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


def grouped_rounding_bound(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    """What another implementation of `ragged_attention_grouped` may differ by on exactly these inputs, if it sums in fp32.

    The terms are those of `ragged_attention.rounding_bound`. A key that a query does not see adds no term.

    Returns:
        The answer and the bound, both ``(T, N*D)`` fp64.
    """
    u, w = (torch.finfo(dtype).eps / 2 for dtype in (q.dtype, torch.float32))
    q, k, v = q.double(), k.double(), v.double()
    exact = ragged_attention_grouped(q, k, v, *others)
    bound = torch.empty_like(exact)
    for rows, seen, far, p, change in _changes(q, k, *others):
        values = v[seen].abs().unflatten(1, (p.shape[0], 1, -1)).permute(1, 2, 0, 3)
        terms = (~far).sum(1, keepdim=True)
        bound[rows] = (p * (change + terms * w + u) @ values).permute(2, 0, 1, 3).flatten(1)
    return exact, bound + u * exact.abs()


def grouped_received_bound(q: Tensor, k: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    """What keys receive, and by how much an implementation that computes in fp32 may differ, key by key.

    The terms are those of `ragged_attention.received_bound`; a division by the queries that see a key rounds once more.

    Returns:
        The answer and the bound, both ``(T',)`` fp64.
    """
    w, least = torch.finfo(torch.float32).eps / 2, torch.finfo(torch.float32).tiny
    q, k = q.double(), k.double()
    _, exact = ragged_attention_grouped_received(q, k, k, *others)
    bound = torch.full_like(exact, least)
    for _, seen, far, p, change in _changes(q, k, *others):
        seen_by = (~far).sum(0)
        terms = p.shape[0] * p.shape[1] * seen_by
        divisor = seen_by.clamp(min=1) if others[-1] == 0 else torch.ones_like(seen_by)
        bound[seen] = (p * change).sum((0, 1, 2)) / divisor + (terms + 1) * w * exact[seen] + (terms + 1) * least
    return exact, bound


def _changes(q: Tensor, k: Tensor, *others: Any) -> Iterator[tuple[slice, slice, Tensor, Tensor, Tensor]]:
    """Of each sequence: rows of its queries and of its keys, pairs that do not see each other, weights ``(KV, G, n, m)``, and by what
    share of each fp32 may change it.
    """
    w, size = torch.finfo(torch.float32).eps / 2, k.shape[1] // others[5]
    signed = _groups(q, k, k, *others)
    absolute = _groups(q.abs(), k.abs(), k, *others)
    for (rows, seen, far, scores, _), (_, _, _, reach, _) in zip(signed, absolute):
        if far.numel():
            d = ((size + 6) * w * reach).masked_fill(far, 0)
            terms = (~far).sum(1, keepdim=True)
            yield (
                rows,
                seen,
                far,
                torch.softmax(scores, -1),
                torch.expm1(d + d.amax(-1, keepdim=True)) + (terms + 4) * w,
            )


def check_grouped(
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
    """Raises ValueError where shapes, dtypes or windows break the contract of `ragged_attention_grouped`."""
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
    check_grouped(q, *others)
    return torch.empty_like(q)


@ragged_attention_grouped_received.register_fake
def _(q: Tensor, k: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    check_grouped(q, k, *others)
    return torch.empty_like(q), empty_received(k)
