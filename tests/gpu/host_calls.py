"""Calls for hosts in processes of their own: written to a folder, read by `launch_probe.cpp` and `python_host.py`.

``calls.txt`` has a line for each: name, dtype, head size, heads, T, B, row stride, whether packed, whether what was received
is wanted, scale. Beside it lie ``NAME.q``, ``.k`` and ``.v``, or ``.qkv``, and ``.cu``; the host adds ``.out`` and ``.sums``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import emulation
import numpy as np
import torch

from adtp_export.plugins.variants import ATTENTION, DTYPES, HEAD_SIZES, RECEIVED


@dataclass(frozen=True, kw_only=True)
class HostCall:
    """One call of an operator."""

    name: str
    dtype: str
    case: emulation.Case
    head_size: int
    received: bool = False


LENGTHS = {"short": (4, 17, 9, 0, 32, 6), "middle": (63, 64, 65, 3), "long": (200, 165)}
"""Means up to 32 take the smallest variant, up to 128 or 160 the middle one, where there are three."""


def all_calls() -> list[HostCall]:
    """Every dtype, head size and choice of a variant, with received and without, packed by turns."""
    calls = []
    for dtype in DTYPES:
        for size in HEAD_SIZES:
            for i, (kind, lengths) in enumerate(LENGTHS.items()):
                received = kind == "middle"
                case = emulation.Case(lengths=lengths, heads=2, packed=i % 2 == 0, seed=i)
                name = f"{dtype}-d{size}-{kind}"
                calls.append(HostCall(name=name, dtype=dtype, case=case, head_size=size, received=received))
    return calls


def write(folder: Path, calls: list[HostCall]) -> None:
    lines = []
    for call in calls:
        data = emulation.make(call.case, call.dtype, call.head_size)
        tokens, hidden = data.q.shape
        parts = {"q": data.q, "k": data.k, "v": data.v}
        if data.packed:
            parts = {"qkv": torch.cat(list(parts.values()), dim=1)}
        for end, part in parts.items():
            (folder / f"{call.name}.{end}").write_bytes(emulation.raw_bytes(part).tobytes())
        (folder / f"{call.name}.cu").write_bytes(data.cu_seqlens.numpy().tobytes())
        stride = hidden * (3 if data.packed else 1)
        fields = (call.name, call.dtype, call.head_size, data.heads, tokens, len(data.cu_seqlens) - 1, stride)
        lines.append(" ".join(map(str, (*fields, int(data.packed), int(call.received), repr(data.scale)))))
    (folder / "calls.txt").write_text("\n".join(lines) + "\n")


def share_of_allowed(folder: Path, call: HostCall) -> float:
    """The largest error of what a host wrote, as a share of what is allowed; infinite where there is a NaN or nothing."""
    data = emulation.make(call.case, call.dtype, call.head_size)
    found = []
    for end, kernel in ((".out", ATTENTION), (".sums", RECEIVED)):
        if kernel == RECEIVED and not call.received:
            continue
        path = folder / (call.name + end)
        if not path.is_file():
            return math.inf
        raw = torch.from_numpy(np.fromfile(path, np.uint8))
        written = (
            raw.view(emulation.TYPES[call.dtype]).view_as(data.q) if kernel == ATTENTION else raw.view(torch.float32)
        )
        found.append(emulation.share_of_allowed(*emulation.reference(kernel, data), written))
    return math.inf if any(map(math.isnan, found)) else max(found)
