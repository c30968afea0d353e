"""Zeros in the weights or fewer tokens? DeepSparse on BERT of the student's depth, dense and with 90% zeros, beside the student.

    make deepsparse
    python -m benchmarks.cpu.sparse_weights [--seconds 20] [--python build/deepsparse/bin/python]  # writes records/sparse-weights.json

DeepSparse 1.8, the last one, wants older packages, so it runs in an environment of its own. It compiles a model for one shape, and
computes on padding. All weights are random; of each layer's matrices those 90% are zero that were smallest. Both runtimes have the
same number of threads and take turns; a run is timed right after an untimed one of the same batch.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.harness.forced import LAYERS, RETENTION, SITES, architecture
from benchmarks.harness.processes import Worker, package_versions, serve
from benchmarks.harness.records import RECORDS, ROOT, claim, told, write

WORKLOADS = ("1x32", "1x128", "8x128", "32x64")
ZEROS, OPSET = 0.9, 14
DENSE, SPARSE = f"deepsparse-dense-{LAYERS}", f"deepsparse-{ZEROS:.0%}-zeros-{LAYERS}"
PYTHON = ROOT / "build" / "deepsparse" / "bin" / "python"
TOLERANCE = 1e-2
"""Between logits of DeepSparse and of ONNX Runtime, on dense BERT: it multiplies in another order."""


def make_models(folder: Path) -> Path:
    """Write dense BERT as PyTorch's older exporter does, and the same with zeros; return the first."""
    import numpy as np
    import onnx
    from onnx import numpy_helper

    from adtp_export.benchmarking.contenders import export_torchscript

    sizes = architecture()
    dense = folder / f"{DENSE}.onnx"
    export_torchscript(sizes, dense, OPSET)
    model = onnx.load(dense)
    widths = {sizes.shape.hidden, sizes.shape.intermediate}
    matrices = [tensor for tensor in model.graph.initializer if len(tensor.dims) == 2 and set(tensor.dims) <= widths]
    for tensor in matrices:
        weights = numpy_helper.to_array(tensor).copy()
        weights[np.abs(weights) < np.quantile(np.abs(weights), ZEROS)] = 0
        tensor.CopyFrom(numpy_helper.from_array(weights, tensor.name))
    if len(matrices) < 6 * LAYERS:
        raise RuntimeError(f"found {len(matrices)} matrices of layers; there are {6 * LAYERS}")
    onnx.save(model, folder / f"{SPARSE}.onnx")
    return dense


def work(name: str, folder: Path) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """In DeepSparse's environment: compile a model for each shape that is asked for, and run it."""
    import numpy as np
    from deepsparse import compile_model

    engines: dict[tuple[int, ...], Any] = {}

    def answer(asked: dict[str, Any]) -> dict[str, Any]:
        inputs = [np.array(rows, np.int64) for rows in asked["inputs"]]
        shape = inputs[0].shape
        if shape not in engines:
            engines[shape] = compile_model(
                str(folder / f"{name}.onnx"),
                batch_size=shape[0],
                num_cores=asked["threads"],
                input_shapes=[list(shape)] * len(inputs),
            )
        engines[shape].run(inputs)
        began = time.perf_counter()
        (logits,) = engines[shape].run(inputs)
        return {"ms": 1e3 * (time.perf_counter() - began), "logits": logits.tolist()}

    return answer


def measure_all(folder: Path, python: str, seconds: float) -> list[dict[str, Any]]:
    """Time the student, packed dense BERT and DeepSparse in turns; return a row for each on each workload."""
    import numpy as np

    from adtp_export.benchmarking.contenders import dense_baselines, scheduled_student
    from adtp_export.benchmarking.interleaved_timing import measure, speedup
    from adtp_export.benchmarking.processes import Processes
    from adtp_export.benchmarking.workloads import make_workloads
    from adtp_export.environment import thread_count
    from adtp_export.runtimes.onnxruntime import OnnxRuntimeEngine

    sizes, threads = architecture(), thread_count(0)
    reference = OnnxRuntimeEngine(make_models(folder), threads, stop_spinning=True)
    student, _ = scheduled_student(sizes, SITES, RETENTION, folder)
    own = [student, *(c for c in dense_baselines(sizes, folder, depths=(LAYERS,)) if not c.padded)]
    workers = {name: Worker(name, python, "benchmarks.cpu.sparse_weights", folder) for name in (DENSE, SPARSE)}
    names, rows = [*(c.name for c in own), *workers], []

    def ask(name: str, batch: Any) -> dict[str, Any]:
        return workers[name].ask(inputs=[batch[i].tolist() for i in reference.inputs], threads=threads)

    with Processes(own) as processes:
        try:
            for workload in make_workloads(WORKLOADS, sizes.input_names, sizes.tables["vocab_size"]):
                (batch,) = workload.batches
                off = float(np.abs(np.array(ask(DENSE, batch)["logits"]) - reference.run(batch)["logits"]).max())
                if off > TOLERANCE:
                    raise RuntimeError(f"DeepSparse's logits differ by {off:.2g}")
                ask(SPARSE, batch)  # compiles it

                def time_ms(name: str, batch: Any) -> float:
                    return float(ask(name, batch)["ms"]) if name in workers else processes.time_ms(name, batch)

                times = measure(workload, names, time_ms, seconds)
                for name, ms in times.items():
                    found, margin = speedup(ms, times[student.name])
                    row = {"workload": workload.name, "contender": name, "ms": round(float(np.median(ms)), 3)}
                    row |= {"times_student": round(found, 3), "margin": round(margin, 3), "rounds": len(ms)}
                    rows.append(row)
                    print(row, file=sys.stderr)
        finally:
            for worker in workers.values():
                worker.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20, help="for each workload (default: 20)")
    parser.add_argument("--python", default=str(PYTHON), help="of an environment with DeepSparse")
    parser.add_argument("--out", metavar="FILE", type=Path, default=RECORDS / "sparse-weights.json")
    options = parser.parse_args()
    claim(options.out)
    if not Path(options.python).exists():
        parser.error(f"--python: there is no {options.python}; type: make deepsparse")
    with tempfile.TemporaryDirectory() as scratch:
        rows = measure_all(Path(scratch), options.python, options.seconds)
    packages = package_versions(options.python, ("deepsparse",))
    command = f"python -m benchmarks.cpu.sparse_weights --seconds {options.seconds:g}"
    write(options.out, {"command": command, "retention": RETENTION, "results": rows, **told(**packages)})


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        serve(lambda: work(sys.argv[2], Path(sys.argv[3])))
    else:
        main()
