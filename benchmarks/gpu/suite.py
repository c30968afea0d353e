"""Check and time on this machine's NVIDIA GPU whatever runs there; `benchmarks/gpu/run.sh` is the command:

    benchmarks/gpu/run.sh [MODEL_DIR] [--records DIR]       # MODEL_DIR: a student's checkpoint, by default demo/student
    benchmarks/gpu/run.sh --dry-run                         # on an emulated GPU: does every step that needs no engine work?
    benchmarks/gpu/run.sh probes|table ...                  # what launches, waits and products cost; a student beside its peers

Each step is a process with a time limit of its own, and all of them end within 8 minutes. A step that fails, runs out of time
or lacks something is recorded with the end of what it said, and the next one goes on. Exit codes: 0 no step failed; 1 one did;
2 no GPU, or wrong use. Written, with NAME for the GPU:

    gpu-NAME-steps.jsonl                 one line for each step: status (ok, failed, skipped), reason, seconds, output_tail
    gpu-NAME-device.json                 the GPU, versions, and why a runtime cannot run here
    ragged-attention-NAME.json           of benchmarks/gpu/attention_kernel.py
    gpu-NAME-RUNTIME-PRECISION.json      the student beside dense BERT of its width and depth, with verdicts of parity

This file starts with Python's own library alone: what is missing is a step's reason, not a traceback. `checks.py` has what
the steps do.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.harness.records import RECORDS, ROOT

OK, FAILED, SKIPPED = "ok", "failed", "skipped"
BUDGET_S, MIN_S = 470.0, 3.0
"""All steps end within the first; none is begun with less than the second left."""
TAIL_LINES, TAIL_LINES_OK, TAIL_CHARACTERS = 40, 10, 6000
PRECISIONS = ("fp32", "fp16")
DRY = "emulated - not a GPU"
"""What a dry run calls its GPU."""
DRY_RUNTIME = "ort-cpu"
"""What a dry run exports for and times, in the place of runtimes that need a GPU."""
PREFIXES = {"ort-cuda": "onnxruntime-cuda", "tensorrt": "trt", "rtx": "rtx"}
"""Runtimes that run exports on a GPU, with what the names of their targets begin with."""
MISSING_DEPENDENCY = 3
"""What commands of this project exit with where something is not installed."""
NOTHING_COLLECTED = 5  # pytest's
MODEL_NEEDS = ("numpy", "onnx", "onnx_ir", "onnxscript", "rich", "safetensors", "tokenizers", "torch", "transformers")
FURTHER = ("probes", "table")
"""Commands of `run.sh` that are modules of their own."""
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
CHECKS = (sys.executable, "-m", "benchmarks.gpu.checks")
"""What the steps do that need this project's own code."""


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
    started, left_s = datetime.now(UTC), step.ends_by_s - elapsed_s
    limit_s = round(min(step.limit_s, left_s), 1)
    why = step.obstacle or absent(step.needs)
    if why is None and left_s < MIN_S:
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
    text = text.replace(f"{folder}/", "").replace(f"{os.path.relpath(ROOT, folder)}/", "")  # as pytest says them
    return re.sub(rf"[./]*{re.escape(f'{ROOT}/')}", "", text)


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


def run(model_dir: Path, records: Path, dry: bool = False) -> int:
    """Run all steps, or say why there is nothing to run on."""
    gpu, complaint = (dict.fromkeys(QUERY, DRY), "") if dry else ask_nvidia_smi()
    if not gpu:
        print(
            f"run.sh: no NVIDIA GPU found: {complaint}. This needs a machine with an NVIDIA GPU of compute capability 8.0 or "
            "newer and a driver of R525 or newer; there, type: benchmarks/gpu/run.sh [MODEL_DIR]",
            file=sys.stderr,
        )
        return 2
    model, records = model_dir.resolve(), records.resolve()
    if not (model / "config.json").is_file():
        print(
            f"run.sh: {model_dir} is no checkpoint: it has no config.json; type: benchmarks/gpu/run.sh demo/student",
            file=sys.stderr,
        )
        return 2
    records.mkdir(parents=True, exist_ok=True)
    name = in_file_names(gpu["name"])
    began, failed = time.monotonic(), False
    with tempfile.TemporaryDirectory(prefix="adtp-gpu-") as scratch:
        folder = Path(scratch)
        environment = child_environment(folder) | (emulated(folder) if dry else {})
        with (records / f"gpu-{name}-steps.jsonl").open("w", encoding="utf-8") as lines:
            for step in steps(model, name, records, folder, dry):
                if dry:  # machines for dry runs are slow, and nothing is rented by the minute
                    step = replace(step, limit_s=1200.0, ends_by_s=7200.0)
                print(f"{step.name:28}", end=" ", flush=True)
                line = run_step(step, time.monotonic() - began, folder, environment)
                print(f"{line['status']:8}{line['seconds']:6.1f} s  {line['reason'] or ''}", flush=True)
                print(json.dumps(line, ensure_ascii=False), file=lines, flush=True)
                failed |= line["status"] == FAILED
    print(f"{time.monotonic() - began:.0f} s in all; records: {records}/gpu-{name}-*, ragged-attention-{name}.json")
    return int(failed)


def emulated(folder: Path) -> dict[str, str]:
    """What to set so that steps find an emulated GPU, and an nvidia-smi that answers."""
    from benchmarks.gpu import emulated as gpu

    tools = folder / "tools"
    tools.mkdir()
    (tools / "nvidia-smi").write_text(f"#!/bin/sh\necho '{', '.join([DRY] * len(QUERY))}'\n", encoding="ascii")
    (tools / "nvidia-smi").chmod(0o755)
    path = f"{tools}{os.pathsep}{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    return {**gpu.environment(), "PATH": path, "CUDA_VISIBLE_DEVICES": "0"}


def in_file_names(gpu: str) -> str:
    """Return how the names of records say a GPU's name."""
    return re.sub(r"[^a-z0-9.]+", "-", gpu.lower()).strip("-")


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
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]  # for `benchmarks`
    if absent(["adtp_export.plugins"]):
        package = folder / "as-installed" / "adtp_export"
        package.mkdir(parents=True)
        for path in (*(ROOT / "adtp_export").iterdir(), ROOT / "calibration", ROOT / "plugins"):
            (package / path.name).symlink_to(path)
        paths.insert(0, str(package.parent))
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    return environment


def steps(model: Path, name: str, records: Path, folder: Path, dry: bool = False) -> Iterator[Step]:
    """Yield the steps, each made when the one before has ended: what it left decides what comes."""
    described = records / f"gpu-{name}-device.json"
    described.unlink(missing_ok=True)  # of an earlier run
    yield Step("device", [*CHECKS, "device", str(described)], 60, 60)
    found = json.loads(described.read_text()) if described.exists() else {}
    tests = sorted((ROOT / "tests").rglob("test_*.py"))
    files = [str(path) for path in tests if "\n@pytest.mark.gpu" in path.read_text()]  # others may need what is missing
    pytest = [sys.executable, "-m", "pytest", "-m", "gpu", "-c", str(ROOT / "pyproject.toml"), "-p", "no:cacheprovider"]
    pytest += ["-o", "pythonpath="]  # the package may lie elsewhere, see `child_environment`
    yield Step(
        "gpu-tests",
        [*pytest, "--tb=short", "--show-capture=no", *files],
        limit_s=120,
        ends_by_s=150,
        needs=("pytest", *MODEL_NEEDS),
        skip_code=NOTHING_COLLECTED,
        proof=" passed",
    )
    short = ["--longest", "17"] if dry else []
    yield Step("plugin-host", [*CHECKS, "host", str(folder / "plugin"), *short], 60, 190, proof="enqueue: fp32")
    record = str(records / f"ragged-attention-{name}.json")
    yield Step(
        "ragged-attention",
        [sys.executable, "-m", "benchmarks.gpu.attention_kernel", "--out", record, *(["--dry-run"] if dry else [])],
        limit_s=180,
        ends_by_s=330,
        needs=("numpy", "torch", "cuda.bindings"),
    )
    obstacles = found.get("obstacles") or dict.fromkeys(PREFIXES, "the step device has not said whether it runs here")
    if dry:
        obstacles = {**dict.fromkeys(PREFIXES, "a dry run builds no engines"), DRY_RUNTIME: None}
    dense = folder / "dense"
    if None in obstacles.values():
        yield Step("dense-baselines", [*CHECKS, "baselines", str(model), str(dense)], 60, 390, MODEL_NEEDS)
    for runtime, obstacle in obstacles.items():
        if obstacle:
            yield Step(runtime, obstacle=obstacle)
            continue
        out, prefix = folder / "export", f"{records}/gpu-{name}"
        yield from runtime_steps(runtime, found["architecture"], model, out, dense, prefix)
    written = sorted(map(str, [*records.glob(f"gpu-{name}-*"), *records.glob(f"ragged-attention-{name}.json")]))
    yield Step("records", [*CHECKS, "records", *written], 60, needs=("msgspec",))


def runtime_steps(runtime: str, gpu: str, model: Path, out: Path, dense: Path, prefix: str) -> Iterator[Step]:
    """Export for one runtime and time that. A precision and an attention that fail leave the others alone."""
    for precision in PRECISIONS[:1] if runtime == DRY_RUNTIME else PRECISIONS:
        for attention in ("",) if runtime.startswith("ort-") else ("plugin", "decomposed"):
            export = [*CHECKS, "export", runtime, precision, str(model), str(out)]
            engine = ["--gpu", gpu, "--attention", attention] if attention else []
            label = "-".join(filter(None, ("export", runtime, precision, attention)))
            yield Step(label, [*export, *engine], 75, 440)
        times = [*CHECKS, "time", runtime, precision, str(out), str(dense), f"{prefix}-{runtime}-{precision}.json"]
        nothing = None if out.exists() else "nothing was exported"
        yield Step(f"time-{runtime}-{precision}", times, 75, obstacle=nothing)


def further(module: str, arguments: Sequence[str]) -> int:
    """Run another command of `FURTHER` with what steps run with."""
    with tempfile.TemporaryDirectory(prefix="adtp-gpu-") as scratch:
        folder = Path(scratch)
        environment = child_environment(folder) | (emulated(folder) if "--dry-run" in arguments else {})
        command = [sys.executable, "-m", f"benchmarks.gpu.{module}", *arguments]
        return subprocess.run(command, env=environment, check=False).returncode


def parse_further(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the arguments of a further command: its own, and those that all of them have."""
    parser.add_argument("--library", type=Path, metavar="FILE", help="libadtp_cuda, where it is not the one built here")
    parser.add_argument("--records", type=Path, metavar="DIR", default=RECORDS, help="default: benchmarks/records")
    parser.add_argument("--dry-run", action="store_true", help="needs --records; its times mean nothing")
    options = parser.parse_args(arguments)
    if options.dry_run and options.records.resolve() == RECORDS:
        parser.error("--dry-run: its times mean nothing, so it needs --records DIR, outside of benchmarks/records")
    return options


def gpu_of(command: str, options: argparse.Namespace) -> dict[str, str] | None:
    """Return the GPU that a further command runs on, and make the folder of its records; None, said on stderr, where there is none."""
    gpu, complaint = (dict.fromkeys(QUERY, DRY), "") if options.dry_run else ask_nvidia_smi()
    if not gpu:
        print(f"run.sh {command}: no NVIDIA GPU found: {complaint}", file=sys.stderr)
        return None
    options.records.mkdir(parents=True, exist_ok=True)
    return gpu


def main() -> int:
    if sys.argv[1:2] and sys.argv[1] in FURTHER:
        return further(sys.argv[1], sys.argv[2:])
    parser = argparse.ArgumentParser(
        prog="benchmarks/gpu/run.sh", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "model_dir",
        metavar="MODEL_DIR",
        type=Path,
        nargs="?",
        default=ROOT / "demo" / "student",
        help="a student's checkpoint (default: demo/student)",
    )
    parser.add_argument("--records", metavar="DIR", type=Path, help="where records go (default: benchmarks/records)")
    parser.add_argument(
        "--dry-run", action="store_true", help="try out the steps on an emulated GPU; nothing is kept without --records"
    )
    options = parser.parse_args()
    # so that a step's process goes, too
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    if not options.dry_run:
        return run(options.model_dir, options.records or RECORDS)
    if options.records and options.records.resolve() == RECORDS:
        parser.error("--dry-run: its times mean nothing, so its records do not go to benchmarks/records")
    with tempfile.TemporaryDirectory(prefix="adtp-dry-run-") as scratch:
        return run(options.model_dir, options.records or Path(scratch), dry=True)


if __name__ == "__main__":
    sys.exit(main())
