"""What the steps of `benchmarks/gpu/suite.py` do on the GPU, each in a process of its own:

    python -m benchmarks.gpu.checks device|host|baselines|export|time|records ...

Exit codes are those of this project's commands.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.gpu.suite import MISSING_DEPENDENCY, MODEL_NEEDS, PREFIXES, absent, ask_nvidia_smi
from benchmarks.harness.processes import said_by

if TYPE_CHECKING:
    from adtp_export.artifacts.records import Manifest, ShapeRange, Target
    from adtp_export.benchmarking.workloads import Workload
    from adtp_export.data.tokenize import Batch
    from adtp_export.runtimes import Engine

WORKLOADS = ("1x32", "1x128", "8x128", "32x64")
DRY_PREFIX = "onnxruntime-cpu"
"""What the names of a dry run's targets begin with."""
SECONDS, DEVICE_ROUNDS = 1.5, 30
"""Of timing for each workload."""


def device(record: Path) -> int:
    """Write what is here: the GPU, versions, and for each runtime why it cannot run exports, None where it can."""
    from adtp_export.environment import processor, versions
    from adtp_export.errors import MissingDependencyError
    from adtp_export.plugins import library

    document: dict[str, Any] = {"gpu": ask_nvidia_smi()[0], "processor": processor(), "cores": os.cpu_count()}
    document["versions"] = versions()
    for package in ("numpy", "triton", "cuda-bindings", "pytest"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            document["versions"][package] = importlib.metadata.version(package)
    nvcc = shutil.which("nvcc", path=f"{os.environ['PATH']}{os.pathsep}/usr/local/cuda/bin")
    document["nvcc"] = said_by(nvcc, "--version").splitlines()[-1:] if nvcc else None
    try:
        document["nvinfer_headers"] = str(library.find_headers())
    except MissingDependencyError:
        document["nvinfer_headers"] = None
    document |= obstacles()
    write(record, document)
    print(json.dumps(document))
    return 0


def obstacles() -> dict[str, Any]:
    """The GPU's architecture as engines name it, and by runtime why it cannot run exports here, None where it can."""
    if why := absent(MODEL_NEEDS):
        return {"architecture": None, "obstacles": dict.fromkeys(PREFIXES, why)}
    from adtp_export.runtimes import onnxruntime, tensorrt
    from adtp_export.runtimes.cuda import local_gpu

    gpu = local_gpu()
    if gpu is None:
        why = "CUDA finds no GPU, or cuda-python is not installed; type: pip install cuda-bindings"
        return {"architecture": None, "obstacles": dict.fromkeys(PREFIXES, why)}
    told: dict[str, str | None] = {"ort-cuda": None}
    if not onnxruntime.cuda_runs_here():
        version = onnxruntime.installed()
        what = f"ONNX Runtime {version} has no CUDA provider" if version else "ONNX Runtime is not installed"
        told["ort-cuda"] = f"{what}; type: pip install 'adtp-export[gpu]'"
    for flavor in tensorrt.FLAVORS.values():
        told[flavor.option] = None
        if flavor.installed() is None:
            told[flavor.option] = f"{flavor.product} is not installed; type: pip install 'adtp-export[{flavor.extra}]'"
        elif flavor is tensorrt.RTX and gpu not in tensorrt.RTX_GPUS:
            told[flavor.option] = f"{flavor.product} does not run on {gpu}; it runs on {', '.join(tensorrt.RTX_GPUS)}"
    return {"architecture": gpu, "obstacles": told}


def host(folder: Path, longest: str | None) -> int:
    """Build the plugin's C++ host and have its harness run it on the GPU; without the headers, the one built before."""
    from adtp_export.errors import MissingDependencyError
    from adtp_export.plugins import library

    try:
        path = library.build(folder)
    except MissingDependencyError:
        if (built := library.built()) is None:
            raise
        path = built
        print("built before, from the same sources")
    command = [path.with_name(library.HARNESS), path, *([longest] if longest else [])]
    return subprocess.run(command, check=False).returncode


def check_records(records: list[Path]) -> int:
    """Check that what was written can be read by those who render and judge it."""
    import msgspec

    from benchmarks.gpu import schemas

    failed = 0
    for path in records:
        try:
            print(f"{path.name}: {len(schemas.read(path))} read")
        except msgspec.ValidationError as error:
            print(f"{path.name}: {error}")
            failed = 1
    return failed


def baselines(model: Path, folder: Path) -> int:
    """Export dense BERT of the student's width and depth: `packed.onnx` and `padded.onnx`."""
    from adtp_export.benchmarking.contenders import Architecture, dense_baselines
    from adtp_export.model.checkpoint import load_checkpoint
    from adtp_export.model.registry import fields

    architecture = Architecture.of(fields(load_checkpoint(model).student.dense.config))
    folder.mkdir()
    for contender in dense_baselines(architecture, folder, depths=(architecture.shape.layers,)):
        contender.path.rename(folder / ("padded.onnx" if contender.padded else "packed.onnx"))
    clip_masks(folder / "padded.onnx")
    return 0


def clip_masks(path: Path) -> None:
    """Mask padding with a number that fp16 has, where it was fp32's lowest; softmax sees no difference."""
    import numpy as np
    import onnx

    graph = onnx.load(path)
    for tensor in graph.graph.initializer:
        values = onnx.numpy_helper.to_array(tensor)
        if values.dtype == np.float32 and values.ndim == 0:
            tensor.CopyFrom(onnx.numpy_helper.from_array(values.clip(-1e4, 1e4), tensor.name))
    onnx.save(graph, path)


def export(runtime: str, precision: str, model: Path, out: Path, gpu: str | None, attention: str | None) -> int:
    """Export a student for one runtime in one precision, beside what `out` has already."""
    from adtp_export import export
    from adtp_export.cli.console import Console

    engine: dict[str, Any] = {"trt": True, "trt_flavor": runtime, "gpu": gpu, "attention": attention}
    asked = engine if attention else {"ort_cuda": runtime == "ort-cuda"}
    manifest = export(model, out, precisions=(precision,), update=out.exists(), steps=Console(), **asked)
    for name, target in manifest.targets.items():
        print(f"{name}: {target.status}")
    return 0


def time_targets(runtime: str, precision: str, out: Path, dense: Path, record: Path) -> int:
    """Time a runtime's targets of one precision in turns with dense BERT in the same runtime."""
    from adtp_export.artifacts.records import Manifest

    manifest = Manifest.read(out)
    prefix = f"{PREFIXES.get(runtime, DRY_PREFIX)}-"
    targets = {n: t for n, t in manifest.targets.items() if n.startswith(prefix) and precision in n.split("-")}
    if not targets:
        print(f"nothing was exported for {runtime} in {precision}")
        return MISSING_DEPENDENCY
    timed = workloads(out, manifest)
    failures: dict[str, str] = {}
    files = {name: (out / target.file, target.attention) for name, target in targets.items()}
    files |= make_dense(runtime, precision, dense, targets, manifest.profile, failures)
    engines = load_all(runtime, files, timed, failures)
    results: list[dict[str, Any]] = []
    document = {
        "command": "benchmarks/gpu/run.sh",
        "model": manifest.checkpoint["name"],
        "runtime": runtime,
        "precision": precision,
        "wall": "ms by the host's clock around one call: inputs to the GPU, inference, logits back; no tokenizing",
        "device": "ms by CUDA events around inference alone, no transfers; null where the runtime does not let them in",
        "cuda_graphs": "none",
        "dense": "BERT of the student's width and depth, random weights; packed: the student's graph, all tokens kept",
        "versions": manifest.versions,
        "parity": {name: target.to_json() for name, target in targets.items()},
        "failures": failures,
        "results": results,
    }
    for workload in timed if engines else ():
        results += time_workload(workload, engines, targets, SECONDS if runtime in PREFIXES else 0.1)
        write(record, document)  # after each workload: nothing is lost
    write(record, document)
    for name, why in failures.items():
        print(f"{name}: {why}")
    return int(any(name in failures for name in targets))


def make_dense(
    runtime: str,
    precision: str,
    dense: Path,
    targets: Mapping[str, Target],
    profile: Mapping[str, ShapeRange],
    failures: dict[str, str],
) -> dict[str, tuple[Path, str]]:
    """Make dense BERT runnable, packed with each attention that the targets have, and padded; return files and attention.

    All are made before any is loaded: beside the plugin's C++ host no decomposed engine can be built.
    """
    from adtp_export.artifacts.records import DECOMPOSED

    made_of = {f"packed-dense-{target.attention}": ("packed", target.attention) for target in targets.values()}
    made_of["padded-dense"] = ("padded", DECOMPOSED)
    files = {}
    for name, (kind, attention) in made_of.items():
        with noted(failures, name):
            files[name] = make_runnable(runtime, dense / kind, precision, attention, profile), attention
    return files


def load_all(
    runtime: str, files: Mapping[str, tuple[Path, str]], timed: list[Workload], failures: dict[str, str]
) -> dict[str, Engine]:
    """Load what can be loaded and runs on every workload."""
    engines: dict[str, Engine] = {}
    for name, (path, attention) in files.items():
        with noted(failures, name):
            engine = load(runtime, path, attention)
            for workload in timed:
                engine.run(workload.batches[0])
            engines[name] = engine
    return engines


def time_workload(
    workload: Workload, engines: Mapping[str, Engine], targets: Mapping[str, Target], seconds: float
) -> list[dict[str, Any]]:
    """Time engines in turns, by the host's clock and by CUDA events; return a row for each."""
    from adtp_export.benchmarking.interleaved_timing import in_this_process, measure

    rows, time_ms = [], in_this_process(engines)
    measure(workload, list(engines), time_ms, 0)  # clocks rise with load
    wall = measure(workload, list(engines), time_ms, seconds)
    on_device = device_times(engines, workload.batches[0])
    for name, ms in wall.items():
        row: dict[str, Any] = {"workload": workload.name, "contender": name, "rounds": len(ms)}
        row |= percentiles("wall", ms) | percentiles("device", on_device.get(name))
        others = [other for other in wall if other not in targets and name in targets]
        row["wall_speedup_over"] = {o: round(float(statistics.median(wall[o] / ms)), 3) for o in others}
        rows.append(row)
        print(f"{workload.name:7} {name:45} {row['wall_p50_ms']:8.3f} ms wall, {row['device_p50_ms'] or '-'} ms device")
    return rows


def workloads(out: Path, manifest: Manifest) -> list[Workload]:
    """Running text in the shapes that the engines take."""
    from tokenizers import Tokenizer

    from adtp_export.benchmarking.contenders import Architecture
    from adtp_export.benchmarking.workloads import make_workloads, shape_of
    from adtp_export.verify.samples import built_in_texts

    config = json.loads((out / "config.json").read_text(encoding="utf-8"))
    short = [name for name in WORKLOADS if shape_of(name)[1] <= manifest.profile["seq"].max]
    tokenizer, names = Tokenizer.from_file(str(out / "tokenizer.json")), Architecture.of(config).input_names
    return make_workloads(short, names, config["vocab_size"], tokenizer, built_in_texts(pairs=False))


@contextlib.contextmanager
def noted(failures: dict[str, str], name: str) -> Iterator[None]:
    """Note what goes wrong with one contender, and go on: the others are still worth timing."""
    try:
        yield
    except Exception as error:
        failures[name] = f"{type(error).__name__}: {error}"


def make_runnable(runtime: str, stem: Path, precision: str, attention: str, profile: Mapping[str, ShapeRange]) -> Path:
    """Turn dense BERT's fp32 file `stem`.onnx into what a runtime loads, beside it; return its path."""
    from adtp_export.artifacts.records import DECOMPOSED
    from adtp_export.graph import program
    from adtp_export.runtimes import tensorrt
    from adtp_export.runtimes.cuda import local_gpu

    path = stem.with_name(f"{stem.name}-{runtime}-{precision}-{attention}.onnx")
    typed = stem.with_suffix(".onnx")
    if precision != "fp32":
        typed = path.with_name(f"typed-{path.name}")
        program.convert_precision(stem.with_suffix(".onnx"), typed, precision)
    if runtime.startswith("ort-"):
        if attention == DECOMPOSED:
            return typed
        program.lower_to_ort_cuda(typed, path)
        return path
    engine, _ = tensorrt.build(tensorrt.FLAVORS[runtime], typed, profile, [str(local_gpu())], attention)
    path = path.with_suffix(".engine")
    with path.open("wb") as stream:
        stream.write(engine)
    return path


def load(runtime: str, path: Path, attention: str, tf32: bool = False) -> Engine:
    """Load a file on the GPU; engines with the plugin as applications do, in its C++ host where that has been built.

    Args:
        tf32: let ONNX Runtime use it, as it does by default, for models that decide nothing.
    """
    from adtp_export.plugins import library
    from adtp_export.runtimes import onnxruntime, tensorrt

    if runtime.startswith("ort-"):
        return onnxruntime.OnnxRuntimeEngine(path, cuda=runtime == "ort-cuda" and ("tf32" if tf32 else True))
    return tensorrt.TensorRtEngine(path, tensorrt.FLAVORS[runtime], attention, library.built())


def device_times(engines: Mapping[str, Engine], batch: Batch) -> dict[str, list[float]]:
    """Time inference alone by CUDA events on the engine's stream, in turns; ms by engine, of TensorRT's engines."""
    import torch

    from adtp_export.runtimes.tensorrt import TensorRtEngine

    times: dict[str, list[float]] = {}
    if not torch.cuda.is_available():
        return times
    for _ in range(DEVICE_ROUNDS):
        for name, engine in engines.items():
            if isinstance(engine, TensorRtEngine):
                engine.run(batch)  # leaves shapes and addresses in place, and inputs on the GPU
                stream = torch.cuda.ExternalStream(engine._buffers.stream)
                begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                begin.record(stream)
                engine._context.execute_async_v3(stream.cuda_stream)
                end.record(stream)
                end.synchronize()
                times.setdefault(name, []).append(begin.elapsed_time(end))
    return times


def percentiles(what: str, ms: Any) -> dict[str, float | None]:
    """Return p50 and p90 under names that say what was timed; None where it was not."""
    import numpy as np

    return {f"{what}_p{p}_ms": None if ms is None else round(float(np.percentile(ms, p)), 4) for p in (50, 90)}


def write(record: Path, document: Mapping[str, Any]) -> None:
    """Write a record, with the time and the commit."""
    from adtp_export.environment import commit

    document = {"written": datetime.now(UTC).isoformat(timespec="seconds"), "commit": commit(), **document}
    record.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    for name, (step, arguments) in STEPS.items():
        command = commands.add_parser(name)
        command.set_defaults(do=step)
        for argument in arguments.split():
            kind = str if argument in ("runtime", "precision") else Path
            command.add_argument(argument, type=kind, nargs="*" if argument == "records" else None)
        if step is host:
            command.add_argument("--longest")
        if step is export:
            command.add_argument("--gpu")
            command.add_argument("--attention")
    options = vars(parser.parse_args())
    do = options.pop("do")
    from adtp_export.errors import AdtpError

    try:
        return do(**options)
    except AdtpError as error:
        print(error)
        return error.exit_code


STEPS = {
    "device": (device, "record"),
    "host": (host, "folder"),
    "records": (check_records, "records"),
    "baselines": (baselines, "model folder"),
    "export": (export, "runtime precision model out"),
    "time": (time_targets, "runtime precision out dense record"),
}
"""Commands, each with its arguments."""

if __name__ == "__main__":
    sys.exit(main())
