"""Lower bounds on the attention kernel's time on GPUs that nobody has timed it on: modelled, not measured.

    python -m benchmarks.gpu.lower_bounds        # counts on the emulated GPU, writes records/modelled-bounds.json; no GPU

Each variant's machine code is executed on an emulated GPU, which counts instructions. The bound of a call is that of the scarcest
resource, when nothing ever waits: instructions issued, tensor-core operations, exponentials, passes of shared memory, bytes that
no cache can have had. Rates are those of Nvidia's data sheets and of the CUDA C++ Programming Guide (throughput of arithmetic
instructions). A real call takes longer; how much longer the bounds do not say.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.gpu import emulated
from benchmarks.harness.records import RECORDS, ROOT, claim, told, write

DTYPE, HEAD_SIZE, HIDDEN = "fp16", 64, 768
LENGTHS = (128, 256)
"""Of one sequence, counted: work is a constant of a program and a share for each step along the keys."""
RESOURCES = ("instructions", "tensor_flops", "exponentials", "shared_passes")
GPUS: dict[str, dict[str, Any]] = {
    "RTX 3060": {"code": "sm_86", "processors": 28, "ghz": 1.777, "gb_per_s": 360, "l2_mb": 3, "tensor_flops": 512},
    "RTX 3090": {"code": "sm_86", "processors": 82, "ghz": 1.695, "gb_per_s": 936, "l2_mb": 6, "tensor_flops": 512},
    "RTX 4060": {"code": "sm_89", "processors": 24, "ghz": 2.460, "gb_per_s": 272, "l2_mb": 24, "tensor_flops": 512},
    "RTX 4090": {"code": "sm_89", "processors": 128, "ghz": 2.520, "gb_per_s": 1008, "l2_mb": 72, "tensor_flops": 512},
    "RTX 5090": {"code": "sm_120", "processors": 170, "ghz": 2.407, "gb_per_s": 1792, "l2_mb": 96, "tensor_flops": 512},
    "H100": {"code": "sm_90", "processors": 132, "ghz": 1.980, "gb_per_s": 3350, "l2_mb": 50, "tensor_flops": 4096},
    "AGX Orin": {"code": "sm_87", "processors": 16, "ghz": 1.300, "gb_per_s": 204.8, "l2_mb": 4, "tensor_flops": 2048},
}
"""Data sheets: boost clock, memory. tensor_flops: of fp16 with sums in fp32, dense, each processor and clock. The H100 is here because its
record shows times: bounds have to lie below them."""
PER_CLOCK = {"instructions": 4, "exponentials": 0.5, "shared_passes": 1}
"""Of a processor, in instructions of a warp: four schedulers; 16 lanes of special functions; 32 banks."""


def count(code: str) -> dict[str, dict[str, list[float]]]:
    """Count a program's work on the emulated GPU, by variant and resource: a constant, and for each step."""
    with tempfile.TemporaryDirectory() as scratch:
        log = Path(scratch) / "log"
        environment = {
            **os.environ,
            **emulated.environment(int(code.removeprefix("sm_"))),
            "ADTP_EMULATOR_LOG": str(log),
        }
        subprocess.run(
            [sys.executable, "-m", "benchmarks.gpu.lower_bounds", "--launch", code],
            cwd=ROOT,
            env=environment,
            check=True,
        )
        lines = iter([json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()])
    found = {}
    for variant in variants():
        short, long = (work(next(lines), -(-length // variant.block_m)) for length in LENGTHS)
        steps = [length // variant.block_n for length in LENGTHS]
        share = {name: (long[name] - short[name]) / (steps[1] - steps[0]) for name in RESOURCES}
        found[variant.name] = {name: [short[name] - steps[0] * share[name], share[name]] for name in RESOURCES}
    assert next(lines, None) is None
    return found


def work(line: dict[str, Any], tiles: int) -> dict[str, float]:
    """What one of the tiles of a launch did."""
    assert line["failure"] is None, line["failure"]
    exponentials = sum(n for name, n in line["by_name"].items() if name.startswith("MUFU"))
    named = (line["instructions"], line["tensor_flops"], exponentials, line["shared_passes"])
    return {name: value / tiles for name, value in zip(RESOURCES, named)}


def variants() -> list[Any]:
    from adtp_export.plugins.variants import VARIANTS

    return [v for v in VARIANTS if (v.dtype, v.head_size) == (DTYPE, HEAD_SIZE)]


def launch_all(code: str) -> None:
    """Launch each variant on one sequence of each length, one head; the emulator's log has a line for each."""
    import torch

    from adtp_export.plugins import binaries
    from benchmarks.gpu.dry_run import attend

    for variant in variants():
        for length in LENGTHS:
            q = torch.randn(length, HEAD_SIZE, generator=torch.Generator().manual_seed(0)).half()
            bounds = torch.tensor([0, length], dtype=torch.int32)
            attend(q, q, q, bounds, 1, 0.125, binary=binaries.binary(variant.name, code))


def bound(gpu: dict[str, Any], counted: dict[str, dict[str, list[float]]], lengths: list[int]) -> dict[str, Any]:
    """The least time of a call, in microseconds, and of which resource it is that of."""
    from adtp_export.plugins import choice

    shapes, heads = variants(), HIDDEN // HEAD_SIZE
    variant = shapes[choice.choose(shapes, sum(lengths), len(lengths), heads, gpu["processors"])]
    rates = {**PER_CLOCK, "tensor_flops": gpu["tensor_flops"]}
    cycles = {}
    for name, (constant, share) in counted[variant.name].items():
        programs = [(-(-n // variant.block_m) * heads, constant + share * -(-n // variant.block_n)) for n in lengths]
        cycles[name] = sum(many * each for many, each in programs) / gpu["processors"] / rates[name]
        if name == "instructions":  # a warp issues one at a time, and no program ends before its warps do
            cycles["one program"] = max(each for _, each in programs) / variant.num_warps
    us = {name: value / gpu["ghz"] / 1e3 for name, value in cycles.items()}
    output, cache = (
        2 * sum(lengths) * HIDDEN,
        gpu["l2_mb"] * 2**20,
    )  # the cache may have had inputs, and may keep outputs
    us["memory"] = (max(3 * output - cache, 0) + max(output - cache, 0)) / gpu["gb_per_s"] / 1e3
    scarcest = max(us, key=lambda name: us[name])
    return {"variant": variant.name, "least_us": round(us[scarcest], 2), "scarcest": scarcest}


def main() -> None:
    if sys.argv[1:2] == ["--launch"]:
        launch_all(sys.argv[2])
        return
    from adtp_export.plugins import binaries
    from benchmarks.gpu.attention_kernel import workloads

    out = claim(RECORDS / "modelled-bounds.json")
    counts = {code: count(code) for code in dict.fromkeys(gpu["code"] for gpu in GPUS.values())}
    record = {
        "command": "python -m benchmarks.gpu.lower_bounds",
        "label": "modelled, not measured: lower bounds, never predictions",
        "dtype": DTYPE,
        "head_size": HEAD_SIZE,
        "hidden": HIDDEN,
        "kernels": binaries.manifest()["source_sha256"],
        "rates": GPUS,
        "counts": counts,
        "results": [
            {"workload": workload, "gpu": name, **bound(gpu, counts[gpu["code"]], lengths)}
            for workload, lengths in workloads().items()
            for name, gpu in GPUS.items()
        ],
    }
    write(out, {**record, "commit": told()["commit"]})


if __name__ == "__main__":
    main()
