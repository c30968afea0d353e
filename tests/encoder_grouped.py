"""What grouped attention has to compute, and what keys receive in it: checks as in `encoder_checks`, by the bounds of the operators."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from encoder_checks import TYPES, WRONG, Random, bounds, is_unwritten, share, unwritten
from encoder_launch import Launch

from adtp_export.ops.grouped_attention import grouped_received_bound, grouped_rounding_bound
from adtp_export.plugins.encoder.variants import GROUPED_RECEIVED, Variant

REACHES = {
    "all": (-1, -1),
    "causal": (-1, 0),
    "ahead": (-1, 4),
    "back": (5, 0),
    "both": (3, 8),
    "wide": (900, 2),
    "far": (2**31 - 1, 0),
}
ASKS = {"all": slice(None), "last": slice(-1, None), "some": slice(1, None, 7), "none": slice(0)}
"""Which tokens of a text are queries."""

DEAD = 3
"""Rows behind the last text, which hold NaN."""


def places(length: int, gaps: bool) -> list[int]:
    """Positions of a text's tokens: of every other one a few times, then of all, then far behind, if there are gaps."""
    return [i + (min(i, length // 2) + (50 if i == length - 1 else 0)) * gaps for i in range(length)]


def texts_of(lengths: Sequence[int], gaps: bool, asks: Sequence[str]) -> tuple[list[list[int]], list[list[int]]]:
    """Return the positions of each text's queries and keys."""
    keys = [places(length, gaps) for length in lengths]
    return [kept[ASKS[ask]] for kept, ask in zip(keys, itertools.cycle(asks))], keys


def padded(rows: torch.Tensor, further: int) -> torch.Tensor:
    """Rows with dead ones behind them and columns beside them, all NaN, or -1 of integers."""
    whole = unwritten(len(rows) + DEAD, *(size + further for size in rows.shape[1:]), dtype=rows.dtype)
    whole[tuple(slice(size) for size in rows.shape)] = rows
    return whole


def check_grouped(
    launch: Launch,
    variant: Variant,
    *,
    lengths: Sequence[int],
    reach: str,
    gaps: bool = False,
    asks: Sequence[str] = ("all",),
    heads: tuple[int, int] = (4, 2),
    smaller: int = 0,
    magnitude: int = 1,
    seed: int = 0,
) -> float:
    """heads: of queries and of keys. smaller: by how much the head size is below the variant's. magnitude: factor on q."""
    (queries, keys), size = texts_of(lengths, gaps, asks), variant.constants["HEAD_BLOCK"] - smaller
    random = Random(seed, TYPES[variant.dtype or ""])
    rows = [sum(map(len, side)) for side in (queries, keys)]
    q, k, v = random(rows[0], heads[0] * size) * magnitude, *(random(rows[1], heads[1] * size) for _ in "kv")
    cu = [bounds([len(text) for text in side]) for side in (queries, keys)]
    at = [torch.tensor(list(itertools.chain(*side)), dtype=torch.int32) for side in (queries, keys)]
    inputs: tuple[Any, ...] = (*cu, *at, *heads, size**-0.5, *REACHES[reach])
    given: dict[str, Any] = {name: padded(t, 8) for name, t in zip("qkv", (q, k, v))}
    given |= {"cu_q": cu[0], "cu_k": cu[1]}
    given |= {f"positions_{side}": padded(places, 0) for side, places in zip("qk", at)}
    given |= {
        "q_stride": q.shape[1] + 8,
        "kv_stride": k.shape[1] + 8,
        "num_queries": rows[0] + DEAD,
        "num_keys": rows[1] + DEAD,
    }
    given |= {"num_texts": len(lengths), "num_heads": heads[0], "kv_heads": heads[1], "head_size": size}
    given |= {"scale": size**-0.5, "window_back": REACHES[reach][0], "window_ahead": REACHES[reach][1]}
    of_keys = variant.kernel == GROUPED_RECEIVED
    given["lse"] = unwritten(heads[0], rows[0] + DEAD, dtype=torch.float32)
    given["out"] = unwritten(rows[0] + DEAD, q.shape[1], dtype=q.dtype)
    given["received"] = unwritten(rows[1] + DEAD, dtype=torch.float32)
    if of_keys:
        given["lse"][:, : rows[0]] = log_sum_exp_bound(q, k, *inputs)[0]
    programs = (rows[of_keys] + DEAD) // variant.constants["BLOCK_M"] + len(lengths)
    launch(variant, programs * (1 if of_keys else heads[0]), **{name: given[name] for name in variant.arguments})
    if of_keys:
        written, wanted = given["received"], grouped_received_bound(q, k, *inputs)
    elif "out" in variant.arguments:
        written, wanted = given["out"], grouped_rounding_bound(q, k, v, *inputs)
    else:
        written, wanted = given["lse"].T, [t.T for t in log_sum_exp_bound(q, k, *inputs)]
    live = rows[of_keys]
    return share(*wanted, written[:live]) if is_unwritten(written[live:]) else WRONG


def log_sum_exp_bound(q: torch.Tensor, k: torch.Tensor, *inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """log2 of the sums over the keys that a query sees ``(N, T)``, and what they may differ by, as in `emulation.log_sum_exp_bound`."""
    w, heads = torch.finfo(torch.float32).eps / 2, inputs[4]
    exact, allowed = torch.zeros(2, heads, len(q), dtype=torch.float64)
    for rows, scores, reach, terms in _scores(q.double(), k.double(), *inputs):
        exact[:, rows] = torch.logsumexp(scores, -1) / math.log(2)
        of_sum = (q.shape[1] // heads + 6) * w * reach + (terms + 4) * w
        allowed[:, rows] = (of_sum + 3 * w * (reach + (terms + 1).log())) / math.log(2)
    return exact, allowed


def _scores(
    q: torch.Tensor, k: torch.Tensor, *inputs: Any
) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Of each text: rows of its queries, scores ``(N, n, m)``, the largest reach ``(N, n)`` of one, and how many keys each sees."""
    cu_q, cu_k, at_q, at_k, heads, kv_heads, scale, back, ahead = inputs
    size = q.shape[1] // heads
    for begin, end, first, past in zip(cu_q, cu_q[1:], cu_k, cu_k[1:]):
        if begin == end:
            continue
        queries = q[begin:end].unflatten(1, (heads, size)).transpose(0, 1)
        keys = k[first:past].unflatten(1, (kv_heads, size)).transpose(0, 1).repeat_interleave(heads // kv_heads, 0)
        away = at_k[first:past] - at_q[begin:end, None]
        far = (away < -back if back >= 0 else away != away) | (away > ahead if ahead >= 0 else away != away)
        scores, reach = (f(queries) @ f(keys).transpose(1, 2) * scale for f in (torch.positive, torch.abs))
        yield slice(begin, end), scores.masked_fill(far, -torch.inf), reach.masked_fill(far, 0).amax(-1), (~far).sum(1)
