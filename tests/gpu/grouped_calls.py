"""Calls of grouped attention for hosts: what they are given, and whether what they write is right."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from emulation import raw_bytes
from encoder_checks import TYPES, Random, bounds, share
from encoder_grouped import REACHES, texts_of

from adtp_export.ops.grouped_attention import grouped_received_bound, grouped_rounding_bound

POINTERS = ("q", "k", "v", "cu_q", "cu_k", "positions_q", "positions_k")


@dataclass(frozen=True, kw_only=True)
class GroupedCall:
    """heads: of queries and of keys."""

    dtype: str
    head_size: int
    lengths: tuple[int, ...]
    reach: str
    asks: tuple[str, ...] = ("all",)
    heads: tuple[int, int] = (4, 2)
    received: bool = False


CALLS = {
    "causal": GroupedCall(dtype="fp16", head_size=64, lengths=(1, 70, 0, 33), reach="far", received=True),
    "window": GroupedCall(
        dtype="bf16", head_size=24, lengths=(65, 9, 40), reach="both", asks=("all", "some", "none"), heads=(3, 1)
    ),
    "last": GroupedCall(dtype="fp32", head_size=128, lengths=(20, 3), reach="all", asks=("last",), received=True),
}
VARIANTS = tuple(
    f"{kernel}-{dtype}-d{block}"
    for dtype, block in (("fp16", 64), ("bf16", 64), ("fp32", 128))
    for kernel in ("grouped", "grouped_lse", "grouped_received")
)
"""What they launch."""


class Data:
    """What a host is given: `arrays` by name, which lie on the device, and `numbers`."""

    def __init__(self, call: GroupedCall) -> None:
        (queries, keys), size, random = (
            texts_of(call.lengths, True, call.asks),
            call.head_size,
            Random(0, TYPES[call.dtype]),
        )
        rows = [sum(map(len, side)) for side in (queries, keys)]
        q, k, v = (
            random(n, heads * size) for n, heads in zip((rows[0], rows[1], rows[1]), (*call.heads, call.heads[1]))
        )
        cu = [bounds([len(text) for text in side]) for side in (queries, keys)]
        at = [torch.tensor(list(itertools.chain(*side)), dtype=torch.int32) for side in (queries, keys)]
        self.call, self.tensors = call, (q, k, v, *cu, *at)
        self.settings = (*call.heads, size**-0.5, *REACHES[call.reach])
        self.arrays = {name: raw_bytes(t) for name, t in zip(POINTERS, self.tensors)}
        self.arrays |= {"out": np.full(q.nbytes, 255, np.uint8), "received": np.full(4 * len(k), 255, np.uint8)}
        names = ("num_heads", "kv_heads", "scale", "window_back", "window_ahead")
        self.numbers: dict[str, Any] = dict(zip(names, self.settings))
        self.numbers |= {"q_stride": q.shape[1], "kv_stride": k.shape[1], "queries": len(q), "keys": len(k)}
        self.numbers |= {"texts": len(call.lengths), "head_size": size, "dtype": call.dtype}

    def share_of_allowed(self, out: np.ndarray, received: np.ndarray) -> float:
        """The largest error of what a host wrote, as a share of what is allowed."""
        q, k, v, *rest = self.tensors
        written = torch.from_numpy(out).view(q.dtype).view_as(q)
        shares = [share(*grouped_rounding_bound(q, k, v, *rest, *self.settings), written)]
        if self.call.received:
            of_keys = torch.from_numpy(received).view(torch.float32)
            shares.append(share(*grouped_received_bound(q, k, *rest, *self.settings), of_keys))
        return float(torch.tensor(shares).max())  # NaN stays
