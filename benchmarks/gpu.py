"""Check and time on this machine's NVIDIA GPU whatever runs there; `benchmarks/gpu.sh` is the command:

    benchmarks/gpu.sh [MODEL_DIR] [--records DIR]       # MODEL_DIR: a student's checkpoint, by default demo/student

Each step is a process with a time limit of its own, and all of them end within 8 minutes. A step that fails, runs out of time
or lacks something is recorded with the end of what it said, and the next one goes on. Exit codes: 0 no step failed; 1 one did;
2 no GPU, or wrong use. Written, with NAME for the GPU:

    gpu-NAME-steps.jsonl                 one line for each step: status (ok, failed, skipped), reason, seconds, output_tail
    gpu-NAME-device.json                 the GPU, versions, and why a runtime cannot run here
    ragged-attention-NAME.json           of benchmarks/ragged_attention.py
    gpu-NAME-RUNTIME-PRECISION.json      the student beside dense BERT of its width and depth, with verdicts of parity

This file starts with Python's own library alone: what is missing is a step's reason, not a traceback.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import importlib.util
import json
import os
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from adtp_export.engines import Engine
    from adtp_export.latency.workloads import Workload
    from adtp_export.records import Manifest, Profile
    from adtp_export.text import Batch

ROOT = Path(__file__).resolve().parent.parent
RECORDS = ROOT / "benchmarks" / "records"
OK, FAILED, SKIPPED = "ok", "failed", "skipped"
BUDGET_S, LEAST_S = 470.0, 3.0
"""All steps end within the first; none is begun with less than the second left."""
TAIL_LINES, TAIL_LINES_OK, TAIL_CHARACTERS = 40, 10, 6000
SHAPES = ((1, 32), (1, 128), (8, 128), (32, 64))
SECONDS, DEVICE_ROUNDS = 1.5, 30
"""Of timing for each workload."""
PRECISIONS = ("fp32", "fp16")
PREFIXES = {"ort-cuda": "onnxruntime-cuda", "tensorrt": "trt", "rtx": "rtx"}
"""Runtimes that run exports on a GPU, with what the names of their targets begin with."""
MISSING_DEPENDENCY = 3
"""What commands of this project exit with where something is not installed."""
NOTHING_COLLECTED = 5  # pytest's
MODEL_NEEDS = ("numpy", "onnx", "onnx_ir", "onnxscript", "rich", "safetensors", "tokenizers", "torch", "transformers")
QUERY = (
    "name",
    "driver_version",
    "compute_cap",
    "memory.total",
    "pstate",
    "clocks.sm",
    "clocks.mem",
    "clocks.max.sm",
    "clocks.max.mem",
    "power.limit",
)
THIS = (sys.executable, str(Path(__file__).resolve()))


@dataclass(frozen=True)
class Step:
    """One process.

    limit_s: its time; it also ends by `ends_by_s` of the whole run, so that slow steps leave some for the others. needs:
    modules without which it is skipped. obstacle: why it cannot run here, where that is known before. skip_code: what it exits
    with where something is missing. proof: what it prints when it has really done something.
    """

    name: str
    command: Sequence[str] = ()
    limit_s: float = BUDGET_S
    ends_by_s: float = BUDGET_S
    needs: Sequence[str] = ()
    obstacle: str | None = None
    skip_code: int = MISSING_DEPENDENCY
    proof: str = ""


def absent(modules: Sequence[str]) -> str | None:
    """Name those of `modules` that are not installed; None where all are."""

    def found(module: str) -> bool:
        try:
            return importlib.util.find_spec(module) is not None
        except ModuleNotFoundError:  # the package that it would be in
            return False

    names = [module for module in modules if not found(module)]
    return f"not installed: {', '.join(names)}" if names else None


def run_step(step: Step, elapsed_s: float, folder: Path, environment: Mapping[str, str]) -> dict[str, Any]:
    """Run a step in `folder`; return its line of the record.

    Args:
        elapsed_s: of the whole run.
    """
    started, left_s = datetime.now(timezone.utc), step.ends_by_s - elapsed_s
    limit_s = round(min(step.limit_s, left_s), 1)
    why = step.obstacle or absent(step.needs)
    if why is None and left_s < LEAST_S:
        why = f"no time left: it has to end within {step.ends_by_s:g} s of the start, {elapsed_s:.0f} s are over"
    line: dict[str, Any] = {"step": step.name, "status": SKIPPED, "reason": why, "seconds": 0.0, "limit_s": limit_s}
    line["started"] = started.isoformat(timespec="seconds")
    if why is not None:
        return line
    began, log = time.monotonic(), folder / "log"
    code = finish(step.command, limit_s, log, environment)
    said = short(log.read_text(encoding="utf-8", errors="replace"), folder)
    tail = said[-TAIL_CHARACTERS:].splitlines()[-TAIL_LINES:]
    last = next((text.strip(" =") for text in reversed(tail) if text.strip()), "it said nothing")
    if code is None:
        line |= {"status": FAILED, "reason": f"timed out after {limit_s:g} s"}
    elif code == step.skip_code:
        line |= {"status": SKIPPED, "reason": last}
    elif code == 0 and step.proof not in said:
        line |= {"status": SKIPPED, "reason": f"nothing ran on the GPU: {last}"}
    elif code:
        line |= {"status": FAILED, "reason": f"exit code {code}: {last}"}
    else:
        line |= {"status": OK}
        tail = tail[-TAIL_LINES_OK:]
    command = shlex.join("python" if part == sys.executable else part for part in step.command)
    line |= {"seconds": round(time.monotonic() - began, 1), "command": short(command, folder), "output_tail": tail}
    return line


def short(text: str, folder: Path) -> str:
    """Say paths as they are from the repository, or from the run's folder: a record is read elsewhere."""
    return re.sub(rf"[./]*{re.escape(f'{ROOT}/')}", "", text.replace(f"{folder}/", ""))


def finish(command: Sequence[str], limit_s: float, log: Path, environment: Mapping[str, str]) -> int | None:
    """Run a command in the log's folder to its end; return its exit code, None where it was killed at its limit."""
    with log.open("wb") as stream:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            cwd=log.parent,
            env=environment,
            start_new_session=True,
        )
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return None
        finally:  # after an interruption as well
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # compilers and the like that it has started, too
                process.wait()


def run(model_dir: Path, records: Path) -> int:
    """Run all steps, or say why there is nothing to run on."""
    gpu, complaint = ask_nvidia_smi()
    if not gpu:
        print(
            f"gpu.sh: no NVIDIA GPU found: {complaint}. This needs a machine with an NVIDIA GPU of compute capability 8.0 or "
            "newer and a driver of R525 or newer; there, type: benchmarks/gpu.sh [MODEL_DIR]",
            file=sys.stderr,
        )
        return 2
    model, records = model_dir.resolve(), records.resolve()
    if not (model / "config.json").is_file():
        print(
            f"gpu.sh: {model_dir} is no checkpoint: it has no config.json; type: benchmarks/gpu.sh demo/student",
            file=sys.stderr,
        )
        return 2
    records.mkdir(parents=True, exist_ok=True)
    name = re.sub(r"[^a-z0-9.]+", "-", gpu["name"].lower()).strip("-")
    began, failed = time.monotonic(), False
    with tempfile.TemporaryDirectory(prefix="adtp-gpu-") as scratch:
        folder = Path(scratch)
        environment = child_environment(folder)
        with (records / f"gpu-{name}-steps.jsonl").open("w", encoding="utf-8") as lines:
            for step in steps(model, name, records, folder):
                print(f"{step.name:28}", end=" ", flush=True)
                line = run_step(step, time.monotonic() - began, folder, environment)
                print(f"{line['status']:8}{line['seconds']:6.1f} s  {line['reason'] or ''}", flush=True)
                print(json.dumps(line, ensure_ascii=False), file=lines, flush=True)
                failed |= line["status"] == FAILED
    print(f"{time.monotonic() - began:.0f} s in all; records: {records}/gpu-{name}-*, ragged-attention-{name}.json")
    return int(failed)


def ask_nvidia_smi() -> tuple[dict[str, str], str]:
    """Return what nvidia-smi says about the GPU that a process takes; or nothing, and why."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    command = ["nvidia-smi", f"--id={chosen}", f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    except OSError:
        return {}, "nvidia-smi is not on the PATH"
    except subprocess.TimeoutExpired:
        return {}, "nvidia-smi does not answer"
    said = (done.stdout.strip() or done.stderr.strip() or "nothing").splitlines()[0]
    values = [value.strip() for value in said.split(",")]
    if done.returncode or len(values) != len(QUERY):
        return {}, f"nvidia-smi says: {said.rstrip('.')}"
    return dict(zip(QUERY, values)), ""


def child_environment(folder: Path) -> dict[str, str]:
    """What steps run with: this tree's package to be imported, where it is not installed laid out as an installation would."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    environment["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # so that GPU 0 is nvidia-smi's
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    if absent(["adtp_export.plugins"]):
        package = folder / "as-installed" / "adtp_export"
        package.mkdir(parents=True)
        for path in (*(ROOT / "adtp_export").iterdir(), ROOT / "calibration", ROOT / "plugins"):
            (package / path.name).symlink_to(path)
        paths = (str(package.parent), os.environ.get("PYTHONPATH", ""))
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    return environment


def steps(model: Path, name: str, records: Path, folder: Path) -> Iterator[Step]:
    """Yield the steps, each made when the one before has ended: what it left decides what comes."""
    described = records / f"gpu-{name}-device.json"
    described.unlink(missing_ok=True)  # of an earlier run
    yield Step("device", [*THIS, "device", str(described)], 60, 60)
    found = json.loads(described.read_text()) if described.exists() else {}
    tests = sorted((ROOT / "tests").rglob("test_*.py"))
    files = [str(path) for path in tests if "\n@pytest.mark.gpu" in path.read_text()]  # others may need what is missing
    pytest = [sys.executable, "-m", "pytest", "-m", "gpu", "-c", str(ROOT / "pyproject.toml"), "-p", "no:cacheprovider"]
    yield Step(
        "gpu-tests",
        [*pytest, "--tb=short", "--show-capture=no", *files],
        limit_s=120,
        ends_by_s=150,
        needs=("pytest", *MODEL_NEEDS),
        skip_code=NOTHING_COLLECTED,
        proof=" passed",
    )
    yield Step("plugin-host", [*THIS, "host", str(folder / "plugin")], 60, 190, proof="enqueue: fp32")
    script, record = str(ROOT / "benchmarks" / "ragged_attention.py"), str(records / f"ragged-attention-{name}.json")
    yield Step(
        "ragged-attention",
        [sys.executable, script, "--out", record],
        limit_s=180,
        ends_by_s=330,
        needs=("numpy", "torch", "cuda.bindings"),
    )
    obstacles = found.get("obstacles") or dict.fromkeys(PREFIXES, "the step device has not said whether it runs here")
    dense = folder / "dense"
    if None in obstacles.values():
        yield Step("dense-baselines", [*THIS, "baselines", str(model), str(dense)], 60, 390, MODEL_NEEDS)
    for runtime, obstacle in obstacles.items():
        if obstacle:
            yield Step(runtime, obstacle=obstacle)
            continue
        out, prefix = folder / "export", f"{records}/gpu-{name}"
        yield from runtime_steps(runtime, found["architecture"], model, out, dense, prefix)


def runtime_steps(runtime: str, gpu: str, model: Path, out: Path, dense: Path, prefix: str) -> Iterator[Step]:
    """Export for one runtime and time that. A precision and an attention that fail leave the others alone."""
    export = [sys.executable, "-c", "from adtp_export.cli.export import main; main()", str(model), "--out", str(out)]
    for precision in PRECISIONS:
        for attention in ("",) if runtime == "ort-cuda" else ("plugin", "portable"):
            engine = ["--trt", "--trt-flavor", runtime, "--gpu", gpu, "--attention", attention]
            asked = ["--precision", precision, *(engine if attention else ["--ort-cuda"])]
            more = ["--update"] if out.exists() else []
            label = "-".join(filter(None, ("export", runtime, precision, attention)))
            yield Step(label, [*export, *asked, *more], 75, 440)
        times = [*THIS, "time", runtime, precision, str(out), str(dense), f"{prefix}-{runtime}-{precision}.json"]
        nothing = None if out.exists() else "nothing was exported"
        yield Step(f"time-{runtime}-{precision}", times, 75, obstacle=nothing)


def device(record: Path) -> int:
    """Write what is here: the GPU, versions, and for each runtime why it cannot run exports, None where it can."""
    from adtp_export.cli.job import processor, versions
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
    from adtp_export.engines import onnxruntime, tensorrt
    from adtp_export.engines.cuda import local_gpu

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


def host(folder: Path) -> int:
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
    return subprocess.run([path.with_name(library.HARNESS), path], check=False).returncode


def baselines(model: Path, folder: Path) -> int:
    """Export dense BERT of the student's width and depth: `packed.onnx` and `padded.onnx`."""
    import numpy as np
    import onnx

    from adtp_export.latency.contenders import TABLES, dense_baselines
    from adtp_export.model.flops import Shape

    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    shape, tables = Shape.of(config), {table: config[table] for table in TABLES}
    folder.mkdir()
    for contender in dense_baselines(shape, folder, lambda done, total: None, tables, depths=(shape.layers,)):
        contender.path.rename(folder / ("padded.onnx" if contender.padded else "packed.onnx"))
    # What padding is masked with is fp32's lowest number; fp16 needs one that it has, and softmax sees no difference.
    model = onnx.load(folder / "padded.onnx")
    for tensor in model.graph.initializer:
        values = onnx.numpy_helper.to_array(tensor)
        if values.dtype == np.float32 and values.ndim == 0:
            tensor.CopyFrom(onnx.numpy_helper.from_array(values.clip(-1e4, 1e4), tensor.name))
    onnx.save(model, folder / "padded.onnx")
    return 0


def time_targets(runtime: str, precision: str, out: Path, dense: Path, record: Path) -> int:
    """Time a runtime's targets of one precision in turns with dense BERT in the same runtime."""
    from adtp_export.latency.compare import in_this_process, measure
    from adtp_export.records import PORTABLE, Manifest

    manifest = Manifest.read(out)
    prefix = f"{PREFIXES[runtime]}-"
    targets = {n: t for n, t in manifest.targets.items() if n.startswith(prefix) and precision in n.split("-")}
    if not targets:
        print(f"nothing was exported for {runtime} in {precision}")
        return MISSING_DEPENDENCY
    timed = workloads(out, manifest)
    failures: dict[str, str] = {}
    files = {name: (out / target.file, target.attention) for name, target in targets.items()}
    made_of = {f"packed-dense-{target.attention}": ("packed", target.attention) for target in targets.values()}
    made_of["padded-dense"] = ("padded", PORTABLE)
    # All are made before any is loaded: beside the plugin's C++ host no portable engine can be built.
    for name, (kind, attention) in made_of.items():
        with noted(failures, name):
            files[name] = make_runnable(runtime, dense / kind, precision, attention, manifest.profile), attention
    engines: dict[str, Engine] = {}
    for name, (path, attention) in files.items():
        with noted(failures, name):
            engine = load(runtime, path, attention)
            for workload in timed:
                engine.run(workload.batches[0])
            engines[name] = engine
    results: list[dict[str, Any]] = []
    document = {
        "command": "benchmarks/gpu.sh",
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
        time_ms = in_this_process(engines)
        measure(workload, list(engines), time_ms, 0)  # clocks rise with load
        wall = measure(workload, list(engines), time_ms, SECONDS)
        on_device = device_times(engines, workload.batches[0])
        for name, ms in wall.items():
            row: dict[str, Any] = {"workload": workload.name, "contender": name, "rounds": len(ms)}
            row |= percentiles("wall", ms) | percentiles("device", on_device.get(name))
            others = [other for other in wall if other not in targets and name in targets]
            row["wall_speedup_over"] = {o: round(float(statistics.median(wall[o] / ms)), 3) for o in others}
            results.append(row)
            print(
                f"{workload.name:7} {name:45} {row['wall_p50_ms']:8.3f} ms wall, {row['device_p50_ms'] or '-'} ms device"
            )
        write(record, document)  # after each workload: nothing is lost
    write(record, document)
    for name, why in failures.items():
        print(f"{name}: {why}")
    return int(any(name in failures for name in targets))


def workloads(out: Path, manifest: Manifest) -> list[Workload]:
    """Running text in the shapes that the engines take."""
    from tokenizers import Tokenizer

    from adtp_export.export.program import input_names
    from adtp_export.latency.workloads import grid
    from adtp_export.verify.samples import built_in_texts

    config = json.loads((out / "config.json").read_text(encoding="utf-8"))
    shapes = [shape for shape in SHAPES if shape[1] <= manifest.profile["seq"].max]
    tokenizer, names = Tokenizer.from_file(str(out / "tokenizer.json")), input_names(config["type_vocab_size"])
    return grid(shapes, names, config["vocab_size"], tokenizer, built_in_texts(pairs=False))


@contextlib.contextmanager
def noted(failures: dict[str, str], name: str) -> Iterator[None]:
    """Note what goes wrong with one contender, and go on: the others are still worth timing."""
    try:
        yield
    except Exception as error:
        failures[name] = f"{type(error).__name__}: {error}"


def make_runnable(runtime: str, stem: Path, precision: str, attention: str, profile: Mapping[str, Profile]) -> Path:
    """Turn dense BERT's fp32 file `stem`.onnx into what a runtime loads, beside it; return its path."""
    from adtp_export.engines import tensorrt
    from adtp_export.engines.cuda import local_gpu
    from adtp_export.export import program
    from adtp_export.records import PORTABLE

    path = stem.with_name(f"{stem.name}-{runtime}-{precision}-{attention}.onnx")
    typed = stem.with_suffix(".onnx")
    if precision != "fp32":
        typed = path.with_name(f"typed-{path.name}")
        program.convert_precision(stem.with_suffix(".onnx"), typed, precision)
    if runtime == "ort-cuda":
        if attention == PORTABLE:
            return typed
        program.lower_to_ort_cuda(typed, path)
        return path
    engine, _ = tensorrt.build(tensorrt.FLAVORS[runtime], typed, profile, [str(local_gpu())], attention)
    path = path.with_suffix(".engine")
    with path.open("wb") as stream:
        stream.write(engine)
    return path


def load(runtime: str, path: Path, attention: str) -> Engine:
    """Load a file on the GPU; engines with the plugin as applications do, in its C++ host where that has been built."""
    from adtp_export.engines import onnxruntime, tensorrt
    from adtp_export.plugins import library

    if runtime == "ort-cuda":
        return onnxruntime.OnnxRuntimeEngine(path, cuda=True)
    return tensorrt.TensorRtEngine(path, tensorrt.FLAVORS[runtime], attention, library.built())


def device_times(engines: Mapping[str, Engine], batch: Batch) -> dict[str, list[float]]:
    """Time inference alone by CUDA events on the engine's stream, in turns; ms by engine, of TensorRT's engines."""
    import torch

    from adtp_export.engines.tensorrt import TensorRtEngine

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


def said_by(*command: str) -> str:
    """What a command prints, or nothing where it is missing."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        return ""


def write(record: Path, document: Mapping[str, Any]) -> None:
    """Write a record, with the time and the commit."""
    commit = said_by("git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*") or None
    document = {"written": datetime.now(timezone.utc).isoformat(timespec="seconds"), "commit": commit, **document}
    record.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    everything = commands.add_parser("run", help="all steps; the other commands are steps")
    everything.prog = "benchmarks/gpu.sh"
    everything.add_argument(
        "model_dir",
        metavar="MODEL_DIR",
        type=Path,
        nargs="?",
        default=ROOT / "demo" / "student",
        help="a student's checkpoint (default: demo/student)",
    )
    everything.add_argument(
        "--records", metavar="DIR", type=Path, default=RECORDS, help="where records go (default: benchmarks/records)"
    )
    everything.set_defaults(do=run)
    for step, arguments in {device: "record", host: "folder", baselines: "model folder"}.items():
        command = commands.add_parser(step.__name__)
        command.set_defaults(do=step)
        for argument in arguments.split():
            command.add_argument(argument, type=Path)
    timing = commands.add_parser("time")
    timing.set_defaults(do=time_targets)
    for argument in ("runtime", "precision"):
        timing.add_argument(argument)
    for argument in ("out", "dense", "record"):
        timing.add_argument(argument, type=Path)
    options = vars(parser.parse_args())
    do = options.pop("do")
    if do is run:  # imports nothing of the project
        signal.signal(
            signal.SIGTERM, lambda number, frame: sys.exit(128 + number)
        )  # so that a step's process goes, too
        return run(**options)
    from adtp_export.errors import AdtpError

    try:
        return do(**options)
    except AdtpError as error:
        print(error)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
