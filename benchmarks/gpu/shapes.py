"""On this machine's NVIDIA GPU, what `adtp-bench --shape` times on the CPU: a student of BERT-base's width beside dense BERT.

    python -m benchmarks.gpu.shapes [--runtime ort-cuda|tensorrt|rtx] [--precision fp32,fp16] [--records DIR]

The student keeps a forced share of its tokens; all weights are random. Every contender runs in one runtime and one precision,
in turns with the others, and packed ones with one attention. Times are ms by the host's clock around one call: inputs to the GPU,
inference, logits back. In fp32 dense BERT may use TF32, as it does by default in ONNX Runtime; the student, whose decisions it
would flip, may not. A record is written for each precision: gpu-NAME-bert-base-LAYERS-RUNTIME-PRECISION.json.
"""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from adtp_export.artifacts.records import DECOMPOSED, ORT_PACKED, PLUGIN, ShapeRange
from adtp_export.benchmarking.compare import count_flops, relate
from adtp_export.benchmarking.contenders import dense_baselines, scheduled_student
from adtp_export.benchmarking.interleaved_timing import in_this_process, measure
from adtp_export.benchmarking.processes import Contender
from adtp_export.benchmarking.workloads import GRID, make_workloads
from adtp_export.contract import KEPT_SITE
from adtp_export.environment import versions
from adtp_export.graph.debug import debug_form
from adtp_export.runtimes.onnxruntime import OnnxRuntimeEngine
from benchmarks.gpu.checks import clip_masks, load, make_runnable, write
from benchmarks.gpu.suite import PREFIXES, ask_nvidia_smi, in_file_names
from benchmarks.harness.forced import LAYERS, RETENTION, SHAPE, SITES, architecture
from benchmarks.harness.records import RECORDS

WORKLOADS = (*GRID, "32x128", "64x256")
PROFILE = {"batch": ShapeRange(1, 8, 64), "seq": ShapeRange(1, 128, 384)}
BASELINES = ("padded-dense-12", "padded-dense-{}", "packed-dense-{}")


def make_contenders(layers: int, retention: float, folder: Path) -> list[Contender]:
    """Export the student, which comes first, and dense BERT."""
    student, _ = scheduled_student(architecture(layers), SITES, retention, folder)
    dense = dense_baselines(architecture(layers), folder)
    for contender in dense:
        if contender.padded:
            clip_masks(contender.path)
    return [student, *dense]


def time_all(runtime: str, precision: str, contenders: Sequence[Contender], seconds: float) -> list[dict[str, Any]]:
    """Load and time all contenders; return a row for each on each workload."""
    student, sizes = contenders[0], architecture(contenders[0].layers)
    with debug_form(student.path) as path:
        inspector = OnnxRuntimeEngine(path)
    engines, packed = {}, ORT_PACKED if runtime == "ort-cuda" else PLUGIN
    for c in contenders:
        attention = DECOMPOSED if c.padded else packed
        made = make_runnable(runtime, c.path.with_suffix(""), precision, attention, PROFILE)
        engines[c.name] = load(runtime, made, attention, tf32=c is not student)
    contenders = [dataclasses.replace(c, engine=runtime, precision=precision) for c in contenders]
    results = []
    for workload in make_workloads(WORKLOADS, sizes.input_names, sizes.tables["vocab_size"]):
        (batch,) = workload.batches
        kept = inspector.run(batch)[KEPT_SITE]
        flops = {c.name: np.array([count_flops(c, sizes.shape, batch, kept)]) for c in contenders}
        times = measure(workload, list(engines), in_this_process(engines), seconds)
        rows = relate(workload.name, times, flops, contenders, [name.format(student.layers) for name in BASELINES])
        for row in rows:
            told = f"{rows[0].vs[row.contender].speedup:.2f}x" if row.contender in rows[0].vs else ""
            print(f"{runtime} {precision} {row.workload:7} {row.contender:16} {row.p50_ms:8.3f} ms  {told}", flush=True)
        results += [dataclasses.asdict(row) for row in rows]
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runtime", choices=PREFIXES, default="ort-cuda")
    parser.add_argument("--precision", default="fp32,fp16")
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--retention", type=float, default=RETENTION)
    parser.add_argument("--seconds", type=float, default=2.0, help="of timing for each workload (default: 2)")
    parser.add_argument("--records", metavar="DIR", type=Path, default=RECORDS)
    options = parser.parse_args()
    gpu, complaint = ask_nvidia_smi()
    if not gpu:
        parser.error(complaint)
    name = in_file_names(gpu["name"])
    with tempfile.TemporaryDirectory() as scratch:
        contenders = make_contenders(options.layers, options.retention, Path(scratch))
        for precision in options.precision.split(","):
            asked = f"--runtime {options.runtime} --precision {precision} --layers {options.layers}"
            document = {
                "command": f"python -m benchmarks.gpu.shapes {asked} --retention {options.retention}",
                "shape": SHAPE,
                "layers": options.layers,
                "sites": list(SITES),
                "retention": options.retention,
                "device": gpu,
                "versions": versions(),
            }
            document["results"] = time_all(options.runtime, precision, contenders, options.seconds)
            file = f"gpu-{name}-{SHAPE}-{options.layers}-{options.runtime}-{precision}.json"
            write(options.records / file, document)


if __name__ == "__main__":
    main()
