"""The attention plugin's kernels on this machine's GPU: correct in every variant, and how fast beside PyTorch's.

    python -m benchmarks.gpu.attention_kernel            # checks, times, writes records/ragged-attention-<gpu>.json

Contenders: the kernel (the variant that its own rule picks, and each of the others), it after the kernels that say what tokens
received, PyTorch's variable-length flash attention, and padded scaled_dot_product_attention under a mask. Device times come
from CUDA graphs of many calls, so no launch from the host is in them; wall times are calls in a loop. Contenders take turns;
reported are medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from adtp_export.benchmarking.workloads import grid_lengths
from adtp_export.environment import commit
from adtp_export.ops.ragged_attention import received_bound, rounding_bound
from adtp_export.plugins import binaries
from adtp_export.plugins.pytorch import NAMES, attend, attend_received
from adtp_export.plugins.variants import DTYPES, HEAD_SIZES, VARIANTS, VARIANTS_OF_LSE, VARIANTS_OF_RECEIVED, Variant
from benchmarks.harness.processes import said_by
from benchmarks.harness.records import RECORDS

TYPES = {name: dtype for dtype, name in NAMES.items()}
HIDDEN = 768
DEVICE = "cuda"
CALLS, ROUNDS = 20, 30
KERNEL, WITH_RECEIVED, FLASH, PADDED = "kernel", "kernel-received", "flash-varlen", "padded-sdpa"
CHECKS = ([1], [1] * 7, [15, 16, 17], [63, 64, 65], [127, 128, 129], [2, 300, 1, 7], [0, 5, 0], [512] * 3)


def workloads() -> dict[str, list[int]]:
    """Lengths of each workload: what students kept of real texts, and the grid's shapes with nothing dropped."""
    kept = json.loads((RECORDS / "kept-lengths.json").read_text())

    def draw(name: str, sequences: int) -> list[int]:
        counts = {int(length): count for length, count in kept[name]["kept"].items()}
        share = np.array(list(counts.values())) / sum(counts.values())
        return np.random.default_rng(0).choice(list(counts), sequences, p=share).tolist()

    return {
        "sst2-kept-32": draw("sst2", 32),
        "sst2-kept-256": draw("sst2", 256),
        "4-to-32-x256": np.random.default_rng(0).integers(4, 33, 256).tolist(),
        "32x64": grid_lengths(32, 64).tolist(),
        "8x128": grid_lengths(8, 128).tolist(),
        "20news-kept-32": draw("20news", 32),
        "1x512": [512],
        "8x512": [512] * 8,
    }


def make(lengths: list[int], hidden: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """q, k, v ``(T, H)`` as columns of one tensor, and cu_seqlens."""
    qkv = torch.randn(sum(lengths), 3 * hidden, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(0)).to(
        dtype
    )
    cu_seqlens = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32, device=DEVICE)
    return *qkv.chunk(3, dim=1), cu_seqlens


def largest(values: Sequence[float]) -> float:
    """The largest of some values; NaN where one of them is."""
    return float(np.max(values))


def check(dtype: str, head_size: int, variant: str, code: str) -> dict[str, Any]:
    """Largest error of a variant's `code`, as a share of what rounding allows, over all of `CHECKS`."""
    heads, scale, shares = 3, head_size**-0.5, []
    for lengths in CHECKS:
        q, k, v, cu_seqlens = make(lengths, heads * head_size, TYPES[dtype])
        torch.empty_like(q, memory_format=torch.contiguous_format).fill_(float("nan"))  # what attend's memory will hold
        out = attend(q, k, v, cu_seqlens, heads, scale, binary=binaries.binary(variant, code)).double().cpu()
        exact, allowed = rounding_bound(*(t.cpu() for t in (q, k, v, cu_seqlens)), heads, scale)
        shares.append(float(((out - exact).abs() / allowed).max()))
    worst = largest(shares)
    return {"variant": variant, "code": code, "share_of_allowed_error": round(worst, 3), "holds": worst <= 1}


def check_received(lse: Variant, received: Variant, code: str) -> dict[str, Any]:
    """As `check`, of the kernels that say what tokens received; they also have to repeat to the bit."""
    heads, scale, shares, repeats = 5, lse.head_size**-0.5, [], True  # five: a program takes four at a time
    attention = next(v for v in VARIANTS if (v.dtype, v.head_size) == (lse.dtype, lse.head_size))
    chosen = [binaries.binary(variant.name, code) for variant in (lse, received, attention)]
    for lengths in CHECKS:
        q, k, v, cu_seqlens = inputs = make(lengths, heads * lse.head_size, TYPES[lse.dtype])
        for like in (q, torch.empty(len(q))):
            torch.empty(like.shape, dtype=like.dtype, device=DEVICE).fill_(float("nan"))  # what their memory will hold
        out, sums = attend_received(*inputs, heads, scale, binaries=chosen)
        again = attend_received(*inputs, heads, scale, binaries=chosen)
        repeats &= torch.equal(out, again[0]) and torch.equal(sums, again[1])
        q, k, v, cu_seqlens = (t.cpu() for t in inputs)
        bounds = (
            rounding_bound(q, k, v, cu_seqlens, heads, scale),
            received_bound(q, k, cu_seqlens, heads, scale),
        )
        for got, (exact, allowed) in zip((out, sums), bounds):
            shares.append(float(((got.double().cpu() - exact).abs() / allowed).max()))
    worst = largest(shares)
    row = {"variant": received.name, "code": code, "share_of_allowed_error": round(worst, 3), "repeats": repeats}
    return {**row, "holds": worst <= 1 and repeats}


def contenders(lengths: list[int], dtype: torch.dtype, head_size: int) -> dict[str, Callable[[], torch.Tensor]]:
    """What is timed, by name."""
    q, k, v, cu_seqlens = make(lengths, HIDDEN, dtype)
    heads, scale, longest = HIDDEN // head_size, head_size**-0.5, max(lengths)
    code, name = binaries.code_for(architecture()), NAMES[dtype]

    def run(binary: binaries.Binary | None) -> Callable[[], torch.Tensor]:
        return lambda: attend(q, k, v, cu_seqlens, heads, scale, check_values=False, binary=binary)

    found = {KERNEL: run(None)}
    found[WITH_RECEIVED] = lambda: attend_received(q, k, v, cu_seqlens, heads, scale, check_values=False)[0]
    for variant in VARIANTS:
        if (variant.dtype, variant.head_size) == (name, head_size):
            found[variant.name] = run(binaries.binary(variant.name, code))
    if dtype is not torch.float32 and DEVICE == "cuda":
        split = [t.unflatten(1, (heads, head_size)) for t in (q, k, v)]
        flash = torch.ops.aten._flash_attention_forward  # what torch.nn.attention.varlen calls, without its bookkeeping
        rest = (cu_seqlens, cu_seqlens, longest, longest, 0.0, False, False)
        found[FLASH] = lambda: flash(*split, *rest, scale=scale)[0]
    padded = [torch.zeros(len(lengths), heads, longest, head_size, dtype=dtype, device=DEVICE) for _ in range(3)]
    mask = (torch.arange(longest) < torch.tensor(lengths)[:, None])[:, None, None].to(DEVICE)
    found[PADDED] = lambda: torch.nn.functional.scaled_dot_product_attention(*padded, attn_mask=mask, scale=scale)
    return found


def measure(runs: dict[str, Callable[[], torch.Tensor]]) -> dict[str, dict[str, float]]:
    """Device and wall time of each, in microseconds: medians over rounds in which all take turns."""
    graphs = {}
    for name, run in runs.items():
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(3):
                run()
        stream.synchronize()
        graphs[name] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[name], stream=stream):
            for _ in range(CALLS):
                run()
    device: dict[str, list[float]] = {name: [] for name in runs}
    wall: dict[str, list[float]] = {name: [] for name in runs}
    names = list(runs)
    for i in range(ROUNDS):
        for name in names[i % len(names) :] + names[: i % len(names)]:
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            graphs[name].replay()  # while it runs the host sends off the one that is timed
            begin.record()
            graphs[name].replay()
            end.record()
            end.synchronize()
            device[name].append(begin.elapsed_time(end) * 1e3 / CALLS)
            began = time.perf_counter()
            for _ in range(CALLS):
                runs[name]()
            torch.cuda.synchronize()
            wall[name].append((time.perf_counter() - began) * 1e6 / CALLS)
    return {
        name: {
            "device_us": round(statistics.median(device[name]), 2),
            "wall_us": round(statistics.median(wall[name]), 2),
            "vs_flash": round(statistics.median(f / d for f, d in zip(device[FLASH], device[name])), 3)
            if FLASH in device
            else None,
        }
        for name in runs
    }


def limits() -> dict[str, float]:
    """What this GPU reaches: bytes a second of a large copy, FLOPs a second of a large fp16 matrix product. Data that
    fits the cache may be read faster than that, so a share of this bound can exceed 1."""

    def best_s(run: Callable[[], object]) -> float:
        times = []
        for _ in range(10):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            run()
            begin.record()
            run()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / 1e3)
        return min(times)

    source = torch.empty(2**31, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    size = 8192
    matrix = torch.randn(size, size, device="cuda", dtype=torch.float16)
    return {
        "bytes_per_s": 2 * source.numel() / best_s(lambda: target.copy_(source)),
        "flops_per_s": 2 * size**3 / best_s(lambda: matrix @ matrix),
    }


def gpu_name() -> str:
    return torch.cuda.get_device_name()


def architecture() -> str:
    return "sm_{}{}".format(*torch.cuda.get_device_capability())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="record to write (default: records/ragged-attention-<gpu>.json)")
    parser.add_argument("--dry-run", action="store_true", help="try out this script on an emulated GPU; needs --out")
    options = parser.parse_args()
    if options.dry_run:
        if not options.out:
            parser.error("--dry-run: its times mean nothing, so it needs --out FILE, outside of the records")
        from benchmarks.gpu import dry_run

        dry_run.install(globals())
    elif not torch.cuda.is_available():
        print("no NVIDIA GPU that PyTorch can use; this benchmark needs one", file=sys.stderr)
        return 3
    gpu = gpu_name()
    out = options.out or RECORDS / f"ragged-attention-{gpu.lower().replace(' ', '-')}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    codes = dict.fromkeys((binaries.code_for(architecture()), "ptx"))  # PTX: what the driver compiles for newer GPUs
    checks = [check(v.dtype, v.head_size, v.name, code) for code in codes for v in VARIANTS]
    pairs = list(zip(VARIANTS_OF_LSE, VARIANTS_OF_RECEIVED, strict=True))
    checks += [check_received(*pair, code) for code in codes for pair in pairs]
    for row in checks:
        share = f"{row['share_of_allowed_error']:.3f} of the allowed error"
        print(f"{row['variant']:18} {row['code']:6} {share}", flush=True)
    reach = limits()
    results: list[dict[str, Any]] = []
    record = {
        "command": "python -m benchmarks.gpu.attention_kernel",
        "device": {
            "gpu": gpu,
            "architecture": architecture(),
            "driver_and_clocks": said_by(
                "nvidia-smi", "--query-gpu=driver_version,clocks.sm,clocks.mem", "--format=csv,noheader"
            ),
            **reach,
        },
        "versions": {
            "torch": torch.__version__,
            "cuda": torch.version.cuda or "none",
            "kernels": binaries.manifest()["source_sha256"],
        },
        "commit": commit(),
        "checks": checks,
        "results": results,
    }
    for workload, lengths in workloads().items():
        tokens = sum(lengths)
        for dtype in DTYPES:
            for head_size in HEAD_SIZES:
                width = 4 if dtype == "fp32" else 2
                size_bytes = 4 * tokens * HIDDEN * width + 4 * (len(lengths) + 1)
                flops = 4 * sum(n * n for n in lengths) * HIDDEN
                bound_us = 1e6 * max(size_bytes / reach["bytes_per_s"], flops / reach["flops_per_s"])
                for name, times in measure(contenders(lengths, TYPES[dtype], head_size)).items():
                    row = {"workload": workload, "dtype": dtype, "head_size": head_size, "contender": name, **times}
                    row |= {
                        "bytes": size_bytes,
                        "flops": flops,
                        "share_of_bound": round(bound_us / times["device_us"], 3),
                    }
                    results.append(row)
                    if name in (KERNEL, WITH_RECEIVED, FLASH, PADDED):
                        print(
                            f"{workload:16} {dtype} D={head_size:<4} {name:13} {times['device_us']:9.2f} us on the device, "
                            f"{times['wall_us']:9.2f} us in all, {times['vs_flash'] or 0:.2f}x flash, "
                            f"{row['share_of_bound']:.0%} of the bound",
                            flush=True,
                        )
        out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")  # after each workload: nothing is lost
    print(out)
    return 0 if all(row["holds"] for row in checks) else 1


if __name__ == "__main__":
    sys.exit(main())
