"""One run of `adtp-export`: its targets as they come to be, and the manifest they make."""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import os
import platform
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import __version__
from ..errors import InputError, MissingDependencyError, VerificationError, did_you_mean
from ..records import (
    BUILT_NOT_RUN,
    FAILED,
    ORT_PACKED,
    PLUGIN,
    PORTABLE,
    UNVERIFIED,
    VERIFIED,
    Manifest,
    Profile,
    Target,
    Views,
    file_entry,
)
from .console import Console

if TYPE_CHECKING:
    from ..engines import Engine
    from ..engines.tensorrt import Flavor
    from ..model.checkpoint import Checkpoint
    from ..text import Batch, Label, Text
    from ..verify.oracle import OracleRun

MODEL = "model.onnx"
ORT_CPU = "ort-cpu.fp32-lookup"
"""Key of the file that `--ort-cpu` makes."""
TIMING_SECONDS = 2.0
EXCUSED_LISTED = 3
"""Rows with excused flips that the notes name one by one."""


def plugin_obstacle(checkpoint: Checkpoint, gpus: tuple[str, ...]) -> str | None:
    """Say why engines of a model for these GPUs cannot have the attention plugin; None where they can."""
    from ..engines import tensorrt

    config = checkpoint.config
    return tensorrt.plugin_obstacle("fp32", config.hidden_size // config.num_attention_heads, gpus)


def _class_indices(labels: Sequence[Label], id2label: Mapping[Any, str], file: Path) -> list[int]:
    """Turn labels, which are class names or class numbers, into class numbers.

    Raises:
        InputError: a label that the student does not know.
    """
    index = {str(number): number for number in id2label} | {name: number for number, name in id2label.items()}
    for label in map(str, labels):
        if label not in index:
            known = ", ".join(map(str, id2label.values()))
            raise InputError(f"{file}: got the label {label!r}; the student knows {known}{did_you_mean(label, index)}")
    return [index[str(label)] for label in labels]


def _variant(target: str) -> str:
    """``int8`` of ``onnxruntime-cpu-int8``."""
    return target.split("-", 2)[2]


class Job:
    """One run's targets as they come to be."""

    def __init__(self, checkpoint: Checkpoint, work: Path, profile: dict[str, Profile], console: Console) -> None:
        self.checkpoint, self.work, self.profile, self.console = checkpoint, work, profile, console
        self.oracle: OracleRun | None = None
        self.oracles: dict[str, OracleRun] = {}
        self.models: dict[
            str, tuple[Path, Path]
        ] = {}  # by precision, or target.precision: the file, and its debug form
        self.details: dict[str, dict[str, Any]] = {}  # by the same key: what its targets say in the manifest
        self.points: float | None = None  # of accuracy that quantized targets may lose
        self.verification: dict[str, Any] = {}
        self.calibration: Mapping[str, Any] = {}
        self.targets: dict[str, Target] = {}
        self.notes: list[str] = []

    def batches(self, texts: Sequence[Text], all_tokens: int | None = None) -> list[Batch]:
        """Tokenize texts for this student, in batches that its engines would take."""
        from ..export.program import input_names
        from ..verify import samples

        config = self.checkpoint.config
        return samples.make_batches(
            self.checkpoint.tokenizer,
            texts,
            input_names(config.type_vocab_size),
            config.pad_token_id or 0,
            self.profile["seq"].max,
            self.profile["batch"].max,
            all_tokens,
        )

    def run_oracle(self, file: Path | None, column: str | None, label_column: str | None, rows: int | None) -> None:
        """Run the PyTorch student on a file's texts or the built-in ones.

        Args:
            rows: at most so many of the file; None: as many as the sample's bounds allow.
        """
        import numpy as np

        from ..text import read_rows
        from ..verify import samples
        from ..verify.oracle import run_oracle

        config = self.checkpoint.config
        if file is None:
            labelled = [(text, None) for text in samples.built_in_texts(config.type_vocab_size > 1)]
            source, total = "the built-in sentences", None
        else:
            labelled, total = samples.sample(read_rows(file, column, label_column), rows or samples.MAX_ROWS)
            source = file.name
        texts, labels = zip(*samples.shuffled(labelled))
        known = _class_indices(labels, config.id2label or {}, file) if file and label_column else None
        batches = self.batches(texts, None if rows else samples.MAX_TOKENS)
        rows = sum(len(batch["input_ids"]) for batch in batches)
        if total is not None and rows < total:
            source += f" ({rows} of {total} rows, seed 0)"
        shape = f"{rows} rows in {len(batches)} batches"
        with self.console.step(
            "oracle_s", f"running the PyTorch student on {source}: {shape}, fp32 and fp64"
        ) as progress:
            oracle = run_oracle(self.checkpoint.student, batches, progress)
            if known is not None:
                oracle = dataclasses.replace(oracle, labels=np.array(known[:rows]))
            self.oracle = self.oracles["fp32"] = oracle
        self.verification = {"text": source, "rows": rows, "batches": len(batches), "accuracy": oracle.accuracy}

    def export_onnx(self, debug_outputs: bool) -> None:
        """Write `model.onnx`, and its debug form beside it in a folder of its own unless they are one file."""
        with self.console.step("export_s", "exporting to ONNX"):
            from ..export import program

            metadata = {
                "version": __version__,
                "precision": "fp32",
                "checkpoint_sha256": self.checkpoint.sha256,
                "prune_sites": list(self.checkpoint.config.prune_sites),
            }
            model = program.export_portable(self.checkpoint.student, metadata)
            if debug_outputs:
                program.add_debug_outputs(model)
            program.save(model, self.work / MODEL)
            self.models["fp32"] = self.work / MODEL, self.work / MODEL
            if debug_outputs or self.oracle is None:
                return
            program.add_debug_outputs(model)
            debug = self.work / "debug" / MODEL
            debug.parent.mkdir()
            program.save(model, debug, inline_limit_bytes=0)  # weights apart: faster to write and to load
            self.models["fp32"] = self.work / MODEL, debug

    def lower_to_ort_cpu(self) -> None:
        """Write `model.ort-cpu.fp32.onnx` from `model.onnx`."""
        from ..export import program

        file, debug = self.models["fp32"]
        name = "model.ort-cpu.fp32.onnx"
        with self.console.step("ort_cpu_s", "tabulating the first layer's projections"):
            program.lower_to_ort_cpu(file, self.work / name)
            self.models[ORT_CPU] = self.work / name, self.work / name
            if debug != file:
                self.models[ORT_CPU] = self.work / name, debug.with_name(name)
                program.lower_to_ort_cpu(debug, debug.with_name(name))
        if self.oracle is not None:
            self.oracles[ORT_CPU] = self.oracle
        tables = (self.work / name).stat().st_size - file.stat().st_size
        self.details[ORT_CPU] = {"tables_bytes": tables}
        self.note(f"{name} is {tables / 1e6:.0f} MB larger than {MODEL}, for tables in place of products")

    def convert(self, precision: str) -> None:
        """Write `model.<precision>.onnx` from `model.onnx`, and find out what PyTorch is off in that precision."""
        from ..export import program
        from ..verify.oracle import for_precision, typed

        file, debug = self.models["fp32"]
        name = f"model.{precision}.onnx"
        with self.console.step(f"convert_{precision}_s", f"typing the graph in {precision}"):
            self.models[precision] = self.work / name, self.work / name
            program.convert_precision(file, self.work / name, precision)
            if debug != file:
                self.models[precision] = self.work / name, debug.with_name(name)
                program.convert_precision(debug, debug.with_name(name), precision)
        if self.oracle is not None:
            with self.console.step(f"oracle_{precision}_s", f"running the PyTorch student in {precision}") as progress:
                rounded = typed(self.checkpoint.student, precision)
                self.oracles[precision] = for_precision(self.oracle, rounded, precision, progress)

    def add_onnx_targets(self, openvino_too: bool) -> None:
        """Verify the ONNX files in ONNX Runtime; in OpenVINO on request, where it is the only one installed, and where
        ONNX Runtime's CPU provider has no arithmetic for them (bf16).

        Raises:
            MissingDependencyError: there is nothing to verify in.
        """
        from ..engines import onnxruntime, openvino

        if self.oracle is not None and not onnxruntime.installed() and not openvino.installed():
            raise MissingDependencyError(
                "verification needs a runtime, and none is installed; type: pip install 'adtp-export[cpu]', or add --no-verify"
            )
        for key, (file, _) in self.models.items():
            precision = key.removeprefix("ort-cpu.")
            in_onnxruntime = onnxruntime.installed() and precision != "bf16"
            if in_onnxruntime:
                load = functools.partial(onnxruntime.OnnxRuntimeEngine, as_written=key.startswith(("trt.", "rtx.")))
                self._add(
                    f"onnxruntime-cpu-{precision}",
                    file.name,
                    PORTABLE,
                    load,
                    key,
                    exact_debug=precision.startswith("fp32"),
                )
            if key in self.details:  # for one runtime alone
                if not in_onnxruntime:
                    unverified = Target(file.name, UNVERIFIED, PORTABLE, None, self.details[key])
                    self.targets[f"onnxruntime-cpu-{precision}"] = unverified
                    self.note(
                        f"{file.name} has not been verified: that takes ONNX Runtime; type: pip install 'adtp-export[cpu]'"
                    )
            elif openvino.installed() and (openvino_too or not in_onnxruntime):
                self._add(f"openvino-cpu-{precision}", file.name, PORTABLE, openvino.OpenVinoEngine, precision)
            elif precision == "bf16":
                self.targets[f"openvino-cpu-{precision}"] = Target(file.name, UNVERIFIED, PORTABLE)
                self.notes.append(
                    f"{file.name} has not been verified: ONNX Runtime's CPU provider has no bf16; type: pip install "
                    "'adtp-export[openvino]'"
                )

    def time_variants(self) -> None:
        """Time the CPU targets of several precisions in turns, and say which precision is no faster than a higher one."""
        verified = {
            name: t.file
            for name, t in self.targets.items()
            if "-cpu-" in name and "." not in name and t.status == VERIFIED
        }
        if self.oracle is None or len(set(map(_variant, verified))) < 2:
            return
        import numpy as np

        from ..engines import onnxruntime, openvino
        from ..latency.compare import in_this_process, measure
        from ..latency.workloads import Workload

        load: dict[str, Callable[[Path], Engine]] = {
            "onnxruntime": functools.partial(onnxruntime.OnnxRuntimeEngine, release_cores=True),
            "openvino": openvino.OpenVinoEngine,
        }
        engines = {name: load[name.split("-")[0]](self.work / file) for name, file in verified.items()}
        batch = max((b.batch for b in self.oracle.batches), key=lambda batch: batch["input_ids"].size)
        shape = "x".join(map(str, batch["input_ids"].shape))
        with self.console.step("timing_s", f"timing {', '.join(engines)} on {shape}") as progress:
            times = measure(
                Workload(shape, (batch,)), list(engines), in_this_process(engines), TIMING_SECONDS, progress
            )
        best: dict[str, float] = {}
        for name, ms in times.items():
            p50, precision = float(np.median(ms)), _variant(name)
            timing = {"timed_on": shape, "p50_ms": round(p50, 3)}
            target = self.targets[name]
            self.targets[name] = dataclasses.replace(target, details={**target.details, **timing})
            best[precision] = min(p50, best.get(precision, p50))
        ordered = [precision for key in self.models if (precision := key.removeprefix("ort-cpu.")) in best]
        for i, lower in enumerate(ordered[1:], start=1):
            higher = min(ordered[:i], key=best.__getitem__)
            if best[lower] >= best[higher]:
                self.notes.append(
                    f"{lower} is not faster than {higher} on this machine's CPU: {best[lower]:.1f} ms against "
                    f"{best[higher]:.1f} ms on {shape}"
                )

    def add_ort_cuda(self, precisions: Sequence[str]) -> None:
        """Write files for ONNX Runtime's CUDA provider, and verify them where that runs. It has no bf16 for this."""
        from ..engines import onnxruntime
        from ..export import program

        for precision in precisions:
            if precision not in ("fp32", "fp16"):
                self.notes.append(
                    f"no file for ONNX Runtime's CUDA provider in {precision}: its packed attention takes fp32 and fp16"
                )
                continue
            name, file = f"onnxruntime-cuda-{precision}", f"model.ort-cuda.{precision}.onnx"
            source, debug_source = self.models[precision]
            program.lower_to_ort_cuda(source, self.work / file)
            if not onnxruntime.cuda_runs_here():
                self.targets[name] = Target(file, BUILT_NOT_RUN, ORT_PACKED)
                continue
            debug = self.work / file
            if debug_source != source:
                debug = debug_source.with_name(file)
                program.lower_to_ort_cuda(debug_source, debug)
            load = functools.partial(onnxruntime.OnnxRuntimeEngine, cuda=True)
            self._add(name, file, ORT_PACKED, load, precision, debug=debug)

    def add_engines(self, flavor: Flavor, gpus: tuple[str, ...], attention: str, precision: str) -> None:
        """Build engines for a group of GPUs, with the attention and in the precision that were asked for.

        Args:
            attention: "portable", "plugin", or "auto": both where that is possible, until the plugin's engine has been
                verified on this machine.
        """
        obstacle = plugin_obstacle(self.checkpoint, gpus)
        if obstacle and attention == "auto":
            self.note(f"no engine with the attention plugin for {', '.join(gpus)}: {obstacle}")
        status = ""
        if attention != PORTABLE and not obstacle:
            status = self._add_engine(flavor, gpus, PLUGIN, precision)
        if attention == PORTABLE or (attention == "auto" and status != VERIFIED):
            self._add_engine(flavor, gpus, PORTABLE, precision)

    def _add_engine(self, flavor: Flavor, gpus: tuple[str, ...], attention: str, precision: str) -> str:
        from ..engines import tensorrt

        key = precision if precision in self.models else f"{flavor.short}.{precision}"
        name = f"{flavor.short}-{'+'.join(gpus)}-{precision}-{attention}"
        file = self.work / "engines" / f"{name}.engine"
        file.parent.mkdir(exist_ok=True)
        model, debug_model = self.models[key]
        details = self._build(flavor, gpus, attention, model, file)
        details["model"] = model.name
        if not tensorrt.runs_here(flavor, gpus):
            self.targets[name] = Target(f"engines/{file.name}", BUILT_NOT_RUN, attention, None, details)
            return BUILT_NOT_RUN
        debug = file
        if debug_model != model:
            debug = debug_model.with_name(file.name)
            self._build(flavor, gpus, attention, debug_model, debug)
        self._add(
            name,
            f"engines/{file.name}",
            attention,
            lambda path: tensorrt.TensorRtEngine(path, flavor, attention),
            key,
            details=details,
            debug=debug,
        )
        return self.targets[name].status

    def _build(self, flavor: Flavor, gpus: tuple[str, ...], attention: str, model: Path, file: Path) -> dict[str, Any]:
        from ..engines import tensorrt

        with self.console.step(f"build_{file.stem}_s", f"building {file.name}") as progress:
            engine, details = tensorrt.build(
                flavor, model, self.profile, gpus, attention, lambda phase, step, steps: progress(step, steps)
            )
            with file.open("wb") as stream:
                stream.write(engine)
        return {**details, "profile": {axis: str(p) for axis, p in self.profile.items()}}

    def ship_plugin_library(self) -> None:
        """Put the C++ host beside the engines that applications load it for."""
        from ..plugins import library

        if not any(target.attention == PLUGIN for target in self.targets.values()):
            return
        built = library.built()
        if built is None:
            self.notes.append(
                "applications load engines with the attention plugin together with its C++ library, which has not been built "
                "here (type: adtp-plugin build); adtp_export itself runs them without"
            )
            return
        (self.work / "plugins").mkdir(exist_ok=True)
        shutil.copy(built, self.work / "plugins" / built.name)

    def note(self, text: str) -> None:
        """Say something once."""
        if text not in self.notes:
            self.notes.append(text)

    def _add(
        self,
        name: str,
        file: str,
        attention: str,
        load: Callable[[Path], Engine],
        key: str,
        exact_debug: bool = False,
        details: dict[str, Any] | None = None,
        debug: Path | None = None,
    ) -> None:
        """Verify one target and record it.

        Args:
            key: of its model in `models`.

        Raises:
            VerificationError: it does not equal the oracle, or loses more accuracy than it may.
        """
        from ..verify.oracle import points_lost
        from ..verify.parity import compare

        details = {**(details or {}), **self.details.get(key, {})}
        if self.oracle is None:
            self.targets[name] = Target(file, UNVERIFIED, attention, None, details)
            return
        with self.console.step(f"verify_{name}_s", f"verifying {name} on {self.oracle.rows} rows") as progress:
            engine = load(self.work / file)
            inspected = None if "kept_site" in engine.outputs else load(debug or self.models[key][1])
            parity = compare(self.oracles[key], engine, inspected, exact_debug, progress)
        self.targets[name] = Target(file, FAILED if parity.failure else VERIFIED, attention, parity, details)
        if parity.failure:
            raise VerificationError(
                f"{name} does not equal the PyTorch student: {parity.failure}. Nothing was published"
            )
        lost = points_lost(self.oracle.accuracy, parity.accuracy, parity.prediction_agreement)
        if self.points is not None and key in self.details and lost > self.points:
            raise VerificationError(
                f"{name} loses {lost:.2f} points of accuracy, allowed are {self.points:g} (PyTorch, rounding alike, lost "
                f"{self.oracles[key].points_lost:.2f}); type: --max-accuracy-drop {lost + 0.005:.2f}. Nothing was published"
            )
        for flip in parity.excused_flips[:EXCUSED_LISTED]:
            self.notes.append(
                f"{name}: row {flip.row} keeps other tokens from site {flip.site} on; that decision has a margin of "
                f"{flip.margin:.2e}, below its rounding error of {flip.bound:.2e}"
            )
        if (more := len(parity.excused_flips) - EXCUSED_LISTED) > 0:
            self.notes.append(f"{name}: so do {more} other rows of {parity.rows}; manifest.json lists them")

    def views(self) -> Views | None:
        """What reports show of single texts; None where the oracle did not run."""
        from ..verify.views import make_views

        if self.oracle is None:
            return None
        config = self.checkpoint.config
        names = {} if config.num_labels == 1 else {int(i): name for i, name in (config.id2label or {}).items()}
        return make_views(self.oracle, self.checkpoint.tokenizer, names)

    def manifest(self, previous: Manifest | None) -> Manifest:
        config = self.checkpoint.config
        manifest = Manifest(
            versions=versions(),
            checkpoint={
                "name": self.checkpoint.directory.resolve().name,
                "sha256": self.checkpoint.sha256,
                "stored_dtype": self.checkpoint.stored_dtype,
                "prune_sites": list(config.prune_sites),
                "retention_ratios": list(config.retention_ratios),
            },
            profile=self.profile,
            retention=self.oracle.retention if self.oracle else {},
            targets=self.targets,
            verification=self.verification,
            calibration=self.calibration,
            notes=tuple(self.notes),
            durations_s=dict(self.console.durations_s),
        )
        if previous is None:
            return manifest
        known = {name: self._still_known(target, previous) for name, target in previous.targets.items()}
        return dataclasses.replace(
            manifest,
            profile=previous.profile,  # of what was there; the engines of this run carry their own
            targets={**known, **{name: self._better_known(name, t, previous) for name, t in self.targets.items()}},
            retention=manifest.retention or previous.retention,
            verification=manifest.verification or previous.verification,
            calibration=manifest.calibration or previous.calibration,
            notes=tuple(dict.fromkeys((*previous.notes, *manifest.notes))),
        )

    def _still_known(self, target: Target, previous: Manifest) -> Target:
        """Forget what was found out about a file that this run has changed."""
        if previous.files[target.file]["sha256"] == file_entry(self.work / target.file)["sha256"]:
            return target
        return dataclasses.replace(target, status=UNVERIFIED, parity=None)

    def _better_known(self, name: str, target: Target, previous: Manifest) -> Target:
        """Keep what an earlier run found out about a file, where this run wrote the same one and did not look."""
        if target.status != UNVERIFIED or name not in previous.targets:
            return target
        same = previous.files[target.file]["sha256"] == file_entry(self.work / target.file)["sha256"]
        return previous.targets[name] if same else target


def processor() -> str:
    """The processor's name, as the system tells it."""
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
        name = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), name)
    return name


def cpu(threads: int) -> dict[str, Any]:
    """What a record of times on the CPU says of the machine; 0 threads are a runtime's default."""
    return {"kind": "cpu", "model": processor(), "cores": os.cpu_count(), "threads": threads or "one per core"}


def commit() -> str | None:
    """Return the commit of a source checkout, None for an installed package."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return None
    result = subprocess.run(["git", "-C", root, "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return result.stdout.strip() or None


def versions() -> dict[str, str]:
    packages = (
        "torch",
        "transformers",
        "onnx",
        "onnxscript",
        "onnxruntime",
        "onnxruntime-gpu",
        "openvino",
        "ctranslate2",
        "tensorrt",
        "tensorrt-rtx",
    )
    versions = {
        "adtp-export": __version__,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
    }
    for package in packages:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions
