"""What ONNX Runtime's CUDA provider does on the device in one run: kernels, copies, and the gaps between them, by CUPTI."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.gpu.table import DRY_WORKLOADS, parse, settings_of
from benchmarks.harness.records import Row

if TYPE_CHECKING:
    from adtp_export.runtimes import Engine

PROFILED = ("1x32", "1x128", "32x64")


def profiles(precision: str, dry: bool, folder: Path) -> Iterator[Row]:
    """Profile ONNX Runtime's CUDA provider on files as exports write them; in a dry run the CPU provider, without a kernel."""
    from adtp_export.artifacts.records import ORT_PACKED
    from adtp_export.benchmarking.contenders import dense_baselines, scheduled_student
    from adtp_export.benchmarking.workloads import make_workloads
    from adtp_export.runtimes.onnxruntime import OnnxRuntimeEngine
    from benchmarks.gpu.checks import load, make_runnable
    from benchmarks.harness.forced import RETENTION, SITES, architecture

    sizes = settings_of(parse(["--dry-run", f"--records={folder}"]))[0].architecture if dry else architecture()
    student, _ = scheduled_student(sizes, SITES, RETENTION, folder)
    made = {student.name: student.path}
    made |= {c.name: c.path for c in dense_baselines(sizes, folder, depths=(sizes.shape.layers,)) if not c.padded}
    workloads = make_workloads(DRY_WORKLOADS if dry else PROFILED, sizes.input_names, sizes.tables["vocab_size"])
    for name, path in made.items():
        if dry:
            engine: Engine = OnnxRuntimeEngine(path)
        else:
            engine = load(
                "ort-cuda", make_runnable("ort-cuda", path.with_suffix(""), precision, ORT_PACKED, {}), ORT_PACKED
            )
        for workload in workloads:
            yield {"contender": name, "workload": workload.name, **on_device(engine, workload.batches[0])}


def on_device(engine: Engine, batch: Any) -> Row:
    """Say what one run of an engine does on the device: CUPTI sees all kernels of the process."""
    import torch

    for _ in range(3):
        engine.run(batch)
    with torch.profiler.profile() as profile:
        began = time.perf_counter()
        engine.run(batch)
        wall_us = (time.perf_counter() - began) * 1e6
    events = [e for e in profile.events() or () if e.device_type == torch.autograd.DeviceType.CUDA]
    copies = sum(e.name.startswith(("Memcpy", "Memset")) for e in events)
    idle, until = 0.0, 0.0
    for event in sorted(events, key=lambda event: event.time_range.start):
        if until:
            idle += max(0.0, event.time_range.start - until)
        until = max(until, event.time_range.end)
    busy = sum(e.time_range.elapsed_us() for e in events)
    counts = {"kernels": len(events) - copies, "copies": copies}
    return {**counts, "busy_us": round(busy, 1), "gaps_us": round(idle, 1), "wall_us": round(wall_us, 1)}
