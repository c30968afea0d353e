"""One run of `adtp-export`: its targets as they come to be, and the manifest they make."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import platform
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import __version__
from ..errors import MissingDependencyError, VerificationError
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
    file_entry,
)
from .console import Console

if TYPE_CHECKING:
    from ..engines import Engine
    from ..engines.tensorrt import Flavor
    from ..model.checkpoint import Checkpoint
    from ..verify.oracle import OracleRun

MODEL = "model.onnx"
ORT_CUDA_MODEL = "model.ort-cuda.fp32.onnx"


def plugin_obstacle(checkpoint: Checkpoint, gpus: tuple[str, ...]) -> str | None:
    """Say why engines of a model for these GPUs cannot have the attention plugin; None where they can."""
    from ..engines import tensorrt

    config = checkpoint.config
    return tensorrt.plugin_obstacle("fp32", config.hidden_size // config.num_attention_heads, gpus)


class Job:
    """One run's targets as they come to be."""

    def __init__(self, checkpoint: Checkpoint, work: Path, profile: dict[str, Profile], console: Console) -> None:
        self.checkpoint, self.work, self.profile, self.console = checkpoint, work, profile, console
        self.debug = work / MODEL
        self.oracle: OracleRun | None = None
        self.verification: dict[str, Any] = {}
        self.targets: dict[str, Target] = {}
        self.notes: list[str] = []

    def run_oracle(self, file: Path | None, column: str | None) -> None:
        from ..export.program import input_names
        from ..text import read_texts
        from ..verify import samples
        from ..verify.oracle import run_oracle

        config = self.checkpoint.config
        if file is None:
            texts, total = samples.built_in_texts(config.type_vocab_size > 1), None
            source = "the built-in sentences"
        else:
            texts, total = samples.sample(read_texts(file, column))
            source = file.name
        batches = samples.make_batches(
            self.checkpoint.tokenizer,
            texts,
            input_names(config.type_vocab_size),
            config.pad_token_id or 0,
            self.profile["seq"].max,
            self.profile["batch"].max,
        )
        rows = sum(len(batch["input_ids"]) for batch in batches)
        if total is not None and rows < total:
            source += f" ({rows} of {total} rows, seed 0)"
        shape = f"{rows} rows in {len(batches)} batches"
        with self.console.step(
            "oracle_s", f"running the PyTorch student on {source}: {shape}, fp32 and fp64"
        ) as progress:
            self.oracle = run_oracle(self.checkpoint.student, batches, progress)
        self.verification = {"text": source, "rows": rows, "batches": len(batches)}

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
            if debug_outputs or self.oracle is None:
                return
            program.add_debug_outputs(model)
            self.debug = self.work / "debug" / MODEL
            self.debug.parent.mkdir()
            program.save(model, self.debug, inline_limit_bytes=0)  # weights apart: faster to write and to load

    def add_onnx_targets(self, openvino_too: bool) -> None:
        """Verify the ONNX file in ONNX Runtime; in OpenVINO on request, or where it is the only one installed.

        Raises:
            MissingDependencyError: there is nothing to verify in.
        """
        from ..engines import onnxruntime, openvino

        if onnxruntime.installed():
            self._add("onnxruntime-cpu-fp32", MODEL, PORTABLE, onnxruntime.OnnxRuntimeEngine, exact_debug=True)
        elif not openvino.installed() and self.oracle is not None:
            raise MissingDependencyError(
                "verification needs a runtime, and none is installed; type: pip install 'adtp-export[cpu]', or add --no-verify"
            )
        if openvino_too or (openvino.installed() and not onnxruntime.installed()):
            self._add("openvino-cpu-fp32", MODEL, PORTABLE, openvino.OpenVinoEngine)

    def add_ort_cuda(self) -> None:
        """Write the file for ONNX Runtime's CUDA provider, and verify it where that runs."""
        from ..engines import onnxruntime
        from ..export import program

        name = "onnxruntime-cuda-fp32"
        program.lower_to_ort_cuda(self.work / MODEL, self.work / ORT_CUDA_MODEL)
        if not onnxruntime.cuda_runs_here():
            self.targets[name] = Target(ORT_CUDA_MODEL, BUILT_NOT_RUN, ORT_PACKED)
            return
        debug = self.work / ORT_CUDA_MODEL
        if self._has_debug():
            debug = self.debug.with_name(ORT_CUDA_MODEL)
            program.lower_to_ort_cuda(self.debug, debug)
        self._add(
            name, ORT_CUDA_MODEL, ORT_PACKED, lambda path: onnxruntime.OnnxRuntimeEngine(path, cuda=True), debug=debug
        )

    def add_engines(self, flavor: Flavor, gpus: tuple[str, ...], attention: str) -> None:
        """Build engines for a group of GPUs, with the attention that was asked for.

        Args:
            attention: "portable", "plugin", or "auto": both where that is possible, until the plugin's engine has been
                verified on this machine.
        """
        obstacle = plugin_obstacle(self.checkpoint, gpus)
        if obstacle and attention == "auto":
            self.notes.append(f"no engine with the attention plugin for {', '.join(gpus)}: {obstacle}")
        status = ""
        if attention != PORTABLE and not obstacle:
            status = self._add_engine(flavor, gpus, PLUGIN)
            self._ship_plugin_library()
        if attention == PORTABLE or (attention == "auto" and status != VERIFIED):
            self._add_engine(flavor, gpus, PORTABLE)

    def _add_engine(self, flavor: Flavor, gpus: tuple[str, ...], attention: str) -> str:
        from ..engines import tensorrt

        name = f"{flavor.short}-{'+'.join(gpus)}-fp32-{attention}"
        file = self.work / "engines" / f"{name}.engine"
        file.parent.mkdir(exist_ok=True)
        details = self._build(flavor, gpus, attention, self.work / MODEL, file)
        if not tensorrt.runs_here(flavor, gpus):
            self.targets[name] = Target(f"engines/{file.name}", BUILT_NOT_RUN, attention, None, details)
            return BUILT_NOT_RUN
        debug = file
        if self._has_debug():
            debug = self.debug.with_name(file.name)
            self._build(flavor, gpus, attention, self.debug, debug)
        self._add(
            name,
            f"engines/{file.name}",
            attention,
            lambda path: tensorrt.TensorRtEngine(path, flavor, attention),
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

    def _ship_plugin_library(self) -> None:
        """Put the C++ host beside the engines, which applications load it for."""
        from ..plugins import library

        built = library.built()
        if built is None:
            note = (
                "applications load engines with the attention plugin together with its C++ library, which has not been built "
                "here (type: adtp-plugin build); adtp_export itself runs them without"
            )
            if note not in self.notes:
                self.notes.append(note)
            return
        (self.work / "plugins").mkdir(exist_ok=True)
        shutil.copy(built, self.work / "plugins" / built.name)

    def _has_debug(self) -> bool:
        """Whether the debug form is a file of its own, and there is something to compare it with."""
        return self.oracle is not None and self.debug.parent != self.work

    def _add(
        self,
        name: str,
        file: str,
        attention: str,
        load: Callable[[Path], Engine],
        exact_debug: bool = False,
        details: dict[str, Any] | None = None,
        debug: Path | None = None,
    ) -> None:
        """Verify one target and record it.

        Raises:
            VerificationError: it does not equal the oracle.
        """
        from ..verify.parity import compare

        if self.oracle is None:
            self.targets[name] = Target(file, UNVERIFIED, attention, None, details or {})
            return
        with self.console.step(f"verify_{name}_s", f"verifying {name} on {self.oracle.rows} rows") as progress:
            debug = debug or self.debug
            engine = load(self.work / file)
            inspected = None if "kept_site" in engine.outputs else load(debug)
            parity = compare(self.oracle, engine, inspected, exact_debug, progress)
        self.targets[name] = Target(file, FAILED if parity.failure else VERIFIED, attention, parity, details or {})
        if parity.failure:
            raise VerificationError(
                f"{name} does not equal the PyTorch student: {parity.failure}. Nothing was published"
            )
        for flip in parity.excused_flips:
            self.notes.append(
                f"{name}: row {flip.row} keeps other tokens from site {flip.site} on; that decision has a margin of "
                f"{flip.margin:.2e}, below its rounding error of {flip.bound:.2e}"
            )

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


def versions() -> dict[str, str]:
    packages = (
        "torch",
        "transformers",
        "onnx",
        "onnxscript",
        "onnxruntime",
        "onnxruntime-gpu",
        "openvino",
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
