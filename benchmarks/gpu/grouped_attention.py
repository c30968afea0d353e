"""Causal attention and grouped queries on this machine's GPU: right in every variant, and how fast beside PyTorch's.

    python -m benchmarks.gpu.grouped_attention      # checks, times, writes records/grouped-attention-<gpu>.json

Contenders: the kernel, it after the kernels that say what keys received, and PyTorch's variable-length flash attention, where there
is one for the type, the head size and the reach. Times are those of `attention_kernel`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from adtp_export.environment import commit
from adtp_export.errors import InputError
from adtp_export.ops.grouped_attention import (
    grouped_received_bound,
    grouped_rounding_bound,
    ragged_attention_grouped,
    ragged_attention_grouped_received,
)
from adtp_export.plugins import pytorch  # has the operators run on CUDA tensors
from adtp_export.plugins.encoder import binaries
from adtp_export.plugins.encoder.variants import HEAD_BLOCKS
from adtp_export.plugins.grouped import check as check_kernel
from benchmarks.gpu.attention_kernel import FLASH, architecture, gpu_name, largest, measure
from benchmarks.harness.records import RECORDS

TYPES = {name: dtype for dtype, name in pytorch.NAMES.items()}
DEVICE = "cuda"
KERNEL, WITH_RECEIVED = "kernel", "kernel-received"
CAUSAL, WINDOW, WHOLE = (-1, 0), (256, 256), (-1, -1)
SHAPES = {
    "qwen3-0.6b": (16, 8, 128, CAUSAL),
    "llama-1b": (32, 8, 64, CAUSAL),
    "embeddinggemma": (3, 1, 256, WINDOW),
    "eurobert": (12, 12, 64, WHOLE),
}
"""Heads of queries and of keys, their size, and how far a query sees."""
WORKLOADS = {
    "32x64": [64] * 32,
    "8x512": [512] * 8,
    "1x2048": [2048],
    "1x8192": [8192],
    "4-to-64-x128": [*range(4, 68)] * 2,
}
CHECKS = ([1], [1] * 7, [15, 16, 17], [63, 64, 65, 0], [2, 300, 1, 7])


def make(
    lengths: list[int], shape: tuple[int, int, int, Any], dtype: str, every: int = 1, last: bool = False
) -> list[torch.Tensor]:
    """Inputs of the operator on the GPU. every: of so many tokens one has stayed. last: each text's last token alone queries."""
    heads, kv_heads, size, _ = shape
    keys = np.concatenate([np.arange(length) * every for length in lengths])
    bounds = np.concatenate([[0], np.cumsum(lengths)])
    rows = np.array([end - 1 for end, n in zip(bounds[1:], lengths) if n]) if last else np.arange(len(keys))
    of_queries = np.concatenate([[0], np.cumsum([min(n, 1) for n in lengths])]) if last else bounds
    generator = torch.Generator(DEVICE).manual_seed(0)
    states = [
        torch.randn(n, many * size, device=DEVICE, generator=generator).to(TYPES[dtype])
        for n, many in ((len(rows), heads), (len(keys), kv_heads), (len(keys), kv_heads))
    ]
    return [
        *states,
        *(torch.tensor(each, dtype=torch.int32, device=DEVICE) for each in (of_queries, bounds, keys[rows], keys)),
    ]


def check(shape: tuple[int, int, int, Any], dtype: str) -> dict[str, Any]:
    """Largest error of a shape, as a share of what rounding allows, over `CHECKS`, with gaps and without; answers have to repeat."""
    heads, kv_heads, size, reach = shape
    settings, shares, repeats = (heads, kv_heads, size**-0.5, *reach), [], True
    for lengths in CHECKS:
        for every, last in ((1, False), (3, False), (2, True)):
            inputs = make(lengths, shape, dtype, every, last)
            found, again = (ragged_attention_grouped_received(*inputs, *settings) for _ in range(2))
            repeats &= all(torch.equal(a, b) for a, b in zip(found, again))
            q, k, v, *rest = (t.cpu() for t in inputs)
            bounds = grouped_rounding_bound(q, k, v, *rest, *settings), grouped_received_bound(q, k, *rest, *settings)
            for got, (exact, allowed) in zip(found, bounds):
                shares.append(float(((got.double().cpu() - exact).abs() / allowed).max()))
    worst = largest(shares)
    return {
        "dtype": dtype,
        "share_of_allowed_error": round(worst, 3),
        "repeats": repeats,
        "holds": worst <= 1 and repeats,
    }


def contenders(
    lengths: list[int], shape: tuple[int, int, int, Any], dtype: str
) -> dict[str, Callable[[], torch.Tensor]]:
    """What is timed, by name."""
    heads, kv_heads, size, reach = shape
    settings, inputs = (heads, kv_heads, size**-0.5, *reach), make(lengths, shape, dtype)
    found: dict[str, Callable[[], torch.Tensor]] = {
        KERNEL: lambda: ragged_attention_grouped(*inputs, *settings),
        WITH_RECEIVED: lambda: ragged_attention_grouped_received(*inputs, *settings)[0],
    }
    if dtype != "fp32" and reach != WINDOW:
        q, k, v = (t.unflatten(1, (-1, size)) for t in inputs[:3])
        flash, cu = torch.ops.aten._flash_attention_forward, inputs[3]
        rest = (cu, cu, max(lengths), max(lengths), 0.0, reach == CAUSAL, False)
        found[FLASH] = lambda: flash(q, k, v, *rest, scale=size**-0.5)[0]
    return found


def has_kernel(dtype: str, size: int) -> bool:
    try:
        check_kernel(dtype, size)
    except InputError:
        return False
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="record to write (default: records/grouped-attention-<gpu>.json)")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("no NVIDIA GPU that PyTorch can use; this benchmark needs one", file=sys.stderr)
        return 3
    gpu = gpu_name()
    out = options.out or RECORDS / f"grouped-attention-{gpu.lower().replace(' ', '-')}.json"
    cases = [(name, dtype) for name in SHAPES for dtype in HEAD_BLOCKS if has_kernel(dtype, SHAPES[name][2])]
    checks = [{"shape": name, **check(SHAPES[name], dtype)} for name, dtype in cases]
    results: list[dict[str, Any]] = []
    record = {
        "command": "python -m benchmarks.gpu.grouped_attention",
        "device": {"gpu": gpu, "architecture": architecture()},
        "versions": {"torch": torch.__version__, "kernels": binaries.manifest()["source_sha256"]},
        "commit": commit(),
        "checks": checks,
        "results": results,
    }
    for workload, lengths in WORKLOADS.items():
        for name, dtype in cases:
            for contender, times in measure(contenders(lengths, SHAPES[name], dtype)).items():
                results.append({"workload": workload, "shape": name, "dtype": dtype, "contender": contender, **times})
                print(
                    f"{workload:14} {name:16} {dtype} {contender:16} {times['device_us']:9.2f} us on the device",
                    flush=True,
                )
        out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")  # after each workload: nothing is lost
    print(out)
    return 0 if all(row["holds"] for row in checks) else 1


if __name__ == "__main__":
    sys.exit(main())
