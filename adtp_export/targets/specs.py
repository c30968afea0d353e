"""Targets as values, and the one table of the runtimes that open them.

A target is how an exported file is run. Its name in the manifest says all of it: ``str(spec)`` and `TargetSpec.parse` are
inverses.
"""

from __future__ import annotations

import dataclasses
import re
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..artifacts.records import DECOMPOSED, ORT_PACKED, PLUGIN, ShapeRange, Target
from ..contract import LINEAR, PRECISIONS, __version__
from ..errors import EngineBuildError, InputError, quoted
from ..plugins import library
from ..runtimes import Engine, cuda, encoder, onnxruntime, openvino, tensorrt
from ..runtimes.packed import as_padded

CPU, CUDA = "cpu", "cuda"
PRECOMPUTED, PACKED, INLINE = "precomputed", "packed", "inline"
ADTP = "adtp"
"""Our own runner of whole encoders, and the form of its files where others run them."""
_PROOFS = ("trt", "rtx", ADTP)
"""Runtimes whose files are run node by node elsewhere, to prove them right."""

ENCODER_PRECISIONS = ("fp32", "fp16", "bf16")
"""That there are kernels of whole encoders for."""
_STATIC = "static_"
_FIXED = rf"(?P<form>{_STATIC}[1-9][0-9]{{0,8}}x[1-9][0-9]{{0,8}})"
_PRECISION = f"(?P<precision>{'|'.join(PRECISIONS)})"
_GPUS = r"(?P<gpus>sm_[0-9]+(?:\+sm_[0-9]+)*)"
_GRAMMAR: tuple[tuple[str, dict[str, str]], ...] = (
    (rf"(?P<runtime>onnxruntime|openvino)-(?P<device>cpu)-{_PRECISION}", {}),
    (rf"(?P<runtime>onnxruntime|openvino)-(?P<device>cpu)-{_PRECISION}-(?P<form>packed|inline)", {}),
    (rf"(?P<runtime>onnxruntime|openvino)-(?P<device>cpu)-{_PRECISION}-{_FIXED}", {}),
    (rf"(?P<runtime>onnxruntime)-(?P<device>cpu)-{_PRECISION}-(?P<form>precomputed|linear)", {}),
    (rf"(?P<runtime>onnxruntime)-(?P<device>cpu)-{_PRECISION}-(?P<attention>plugin)", {}),
    (
        rf"(?P<runtime>onnxruntime)-(?P<device>cpu)-{_PRECISION}-(?P<form>precomputed|packed|linear)-(?P<attention>plugin)",
        {},
    ),
    (rf"(?P<runtime>onnxruntime)-(?P<device>cpu)-(?P<form>trt|rtx|adtp)\.{_PRECISION}", {}),
    (rf"(?P<runtime>openvino)-(?P<device>cpu)-(?P<form>adtp)\.{_PRECISION}", {}),
    (rf"(?P<runtime>onnxruntime)-(?P<device>cuda)-{_PRECISION}", {"attention": ORT_PACKED}),
    (rf"(?P<runtime>onnxruntime)-(?P<device>cuda)-{_PRECISION}-(?P<attention>plugin)", {}),
    (rf"(?P<runtime>adtp)-(?P<device>cuda)-{_PRECISION}", {"attention": PLUGIN}),
    (
        rf"(?P<runtime>trt|rtx)-{_GPUS}-{_PRECISION}-(?P<attention>plugin|decomposed)(?:-{_FIXED})?",
        {"device": CUDA},
    ),
    (rf"(?P<runtime>trt)-{_GPUS}-{_PRECISION}-(?P<attention>plugin|decomposed)-(?P<form>packed)", {"device": CUDA}),
)
"""Patterns of names, each with what it implies."""
_ACCEPTED = (
    "onnxruntime-cpu-fp32, onnxruntime-cpu-fp32-precomputed-plugin, onnxruntime-cpu-trt.int8, onnxruntime-cuda-fp16, "
    f"adtp-cuda-fp16, openvino-cpu-bf16, rtx-sm_86+sm_89-fp32-plugin, trt-sm_89-int8-decomposed and the like, in {', '.join(PRECISIONS)}"
)


@dataclass(frozen=True, kw_only=True)
class TargetSpec:
    """What runs an exported file, and how.

    Args:
        runtime: a name in `RUNTIMES`.
        device: "cpu" or "cuda".
        precision: one of `PRECISIONS`.
        form: "" for all runtimes' form; "static_512x32" for packed inputs of 512 tokens in 32 texts, and "packed" for those of any
            size; "inline" for a file without functions; of files for CPUs "precomputed" with tables in place of the first projections,
            "linear" with operators of lower precision in place of matrix products, "trt" or "rtx" for a file that is made for TensorRT
            and run node by node, and "adtp" for one that is made for our own runner.
        gpus: what an engine is built for, such as ``("sm_86", "sm_89")``.
        attention: "decomposed", "plugin" (engines; ONNX Runtime on the CPU, there with all operators of ours; on CUDA the whole encoder,
            in ONNX Runtime or by our own runner, "adtp"), "ort-packed" (only ONNX Runtime's CUDA provider).

    Raises:
        InputError: no target is like this.
    """

    runtime: str
    device: str
    precision: str
    form: str = ""
    gpus: tuple[str, ...] = ()
    attention: str = DECOMPOSED

    def __post_init__(self) -> None:
        if _fields(str(self)) != dataclasses.asdict(self):
            raise InputError(f"target: there is none like {dataclasses.asdict(self)}; accepted are {_ACCEPTED}")

    def __str__(self) -> str:
        if self.gpus:
            form = f"-{self.form}" if self.form else ""
            return f"{self.runtime}-{'+'.join(self.gpus)}-{self.precision}-{self.attention}{form}"
        is_proof = self.form in _PROOFS
        made_for = f"{self.form}." if is_proof else ""
        form = f"-{self.form}" if self.form and not is_proof else ""
        plugin = f"-{PLUGIN}" if self.attention == PLUGIN and self.runtime != ADTP else ""
        return f"{self.runtime}-{self.device}-{made_for}{self.precision}{form}{plugin}"

    @classmethod
    def parse(cls, text: str) -> TargetSpec:
        """Read a target's name.

        Raises:
            InputError: it is none.
        """
        fields = _fields(text)
        if fields is None:
            raise InputError(f"target: got {quoted(text)}; accepted are {_ACCEPTED}")
        return cls(**fields)

    @property
    def disable_qdq_fusion(self) -> bool:
        """Whether the file is made for another runtime, and run node by node to prove it right: no speed is to be had."""
        return self.form in _PROOFS and self.form != ADTP

    @property
    def size(self) -> tuple[int, int] | None:
        """Tokens and texts of a form with fixed sizes; None for others."""
        return size_of(self.form)

    @property
    def is_proof(self) -> bool:
        """Whether it is run to prove a file for another runtime or for tools right, and for nothing else."""
        return self.form in (*_PROOFS, INLINE) or (self.device == CPU and self.size is not None)

    @property
    def is_timed(self) -> bool:
        """Whether an export that verified it times it, too."""
        return self.device == CPU and not self.is_proof


def static_form(size: object) -> str:
    """Name the form of files of fixed sizes: ``static_512x32``."""
    return f"{_STATIC}{size}"


def size_of(form: str) -> tuple[int, int] | None:
    """Return tokens and texts of a form with fixed sizes; None for others."""
    if not form.startswith(_STATIC):
        return None
    tokens, texts = map(int, form.removeprefix(_STATIC).split("x"))
    return tokens, texts


def profile_of(target: Target) -> dict[str, ShapeRange]:
    """Return the ranges of the axes "batch" and "seq" that a target takes; empty where it takes any."""
    ranges = target.details.get("profile", {})
    return {axis: ShapeRange.parse(text, axis) for axis, text in ranges.items() if axis in ("batch", "seq")}


def _fields(text: str) -> dict[str, Any] | None:
    """Return the fields of a name, or None where it is none."""
    for pattern, implied in _GRAMMAR:
        if (match := re.fullmatch(pattern, text)) is not None:
            found: dict[str, Any] = {"form": "", "gpus": "", "attention": DECOMPOSED, **implied, **match.groupdict("")}
            return {**found, "gpus": tuple(filter(None, found["gpus"].split("+")))}
    return None


@dataclass(frozen=True)
class Runtime(ABC):
    """One runtime. rank: its place in the order in which runtimes are taken where nothing was measured, lowest first."""

    rank: int

    @abstractmethod
    def installed(self) -> str | None:
        """Return its version, or None."""

    def takes(self, spec: TargetSpec) -> bool:
        """Say whether it has arithmetic for one of its targets."""
        return True

    def runs_here(self, spec: TargetSpec) -> bool:
        """Say whether a target can be tried on this machine: its runtime is installed, and its device is here."""
        return self.takes(spec) and self.installed() is not None

    def open(
        self,
        path: Path,
        spec: TargetSpec,
        threads: int = 0,
        *,
        stop_spinning: bool = False,
        keep_plugin_unloaded: bool = False,
    ) -> Engine:
        """Open a target's file, always in the same form, which is the one that is verified.

        Args:
            threads: on the CPU; 0 for one on each core that may be used.
            stop_spinning: stop spinning when a run ends, where a runtime spins, so that engines taking turns do not slow one
                another.
            keep_plugin_unloaded: keep the attention plugin's C++ library out of the process, where no decomposed engine could be built
                any more.

        Raises:
            MissingDependencyError: the runtime is not installed.
            EngineBuildError: the runtime refuses the file.
        """
        engine = self._open(path, spec, threads, stop_spinning=stop_spinning, keep_plugin_unloaded=keep_plugin_unloaded)
        return as_padded(engine, spec.size)

    @abstractmethod
    def _open(
        self, path: Path, spec: TargetSpec, threads: int, *, stop_spinning: bool, keep_plugin_unloaded: bool
    ) -> Engine:
        """Open a file with the inputs that it has; arguments and errors as of `open`."""

    def open_model(
        self, model: Path, spec: TargetSpec, profile: Mapping[str, ShapeRange] | None = None, threads: int = 0
    ) -> Engine:
        """Open an ONNX file as a target is opened; where that is an engine, build one of it first, for the GPU that is here.

        Args:
            profile: ranges of the axes "batch" and "seq" of an engine.

        Raises:
            MissingDependencyError: the runtime is not installed.
            EngineBuildError: the runtime refuses the file, or an engine has no GPU or no profile.
        """
        return self.open(model, spec, threads)


@dataclass(frozen=True)
class OnnxRuntime(Runtime):
    """ONNX Runtime: its CPU provider, and its CUDA provider for files with packed attention."""

    def installed(self) -> str | None:
        return onnxruntime.installed()

    def takes(self, spec: TargetSpec) -> bool:
        if spec.device == CUDA:
            return spec.precision in (ENCODER_PRECISIONS if spec.attention == PLUGIN else ("fp32", "fp16"))
        if spec.form == LINEAR:
            return spec.precision in ("bf16", "int8")
        return spec.precision in (("fp32", "int8") if spec.attention == PLUGIN else ("fp32", "fp16", "int8", "fp8"))

    def runs_here(self, spec: TargetSpec) -> bool:
        if not super().runs_here(spec):
            return False
        if spec.device == CUDA:
            return encoder.runs_here(True) if spec.attention == PLUGIN else onnxruntime.cuda_runs_here()
        return spec.attention != PLUGIN or onnxruntime.operators_obstacle() is None

    def _open(
        self, path: Path, spec: TargetSpec, threads: int, *, stop_spinning: bool, keep_plugin_unloaded: bool
    ) -> Engine:
        if (spec.device, spec.attention) == (CUDA, PLUGIN):
            return encoder.open_encoder(path, in_onnxruntime=True)
        return onnxruntime.OnnxRuntimeEngine(
            path,
            threads,
            stop_spinning,
            cuda=spec.device == CUDA,
            disable_qdq_fusion=spec.disable_qdq_fusion,
            plugin=spec.attention == PLUGIN,
        )


@dataclass(frozen=True)
class Adtp(Runtime):
    """Our own runner of whole encoders on a GPU, which needs no other runtime."""

    def installed(self) -> str | None:
        return __version__

    def takes(self, spec: TargetSpec) -> bool:
        return spec.precision in ENCODER_PRECISIONS

    def runs_here(self, spec: TargetSpec) -> bool:
        return self.takes(spec) and encoder.runs_here(False)

    def _open(
        self, path: Path, spec: TargetSpec, threads: int, *, stop_spinning: bool, keep_plugin_unloaded: bool
    ) -> Engine:
        return encoder.open_encoder(path, in_onnxruntime=False)


@dataclass(frozen=True)
class OpenVino(Runtime):
    """OpenVINO on the CPU."""

    def installed(self) -> str | None:
        return openvino.installed()

    def takes(self, spec: TargetSpec) -> bool:
        return spec.precision in ("fp32", "fp16", "bf16")

    def _open(
        self, path: Path, spec: TargetSpec, threads: int, *, stop_spinning: bool, keep_plugin_unloaded: bool
    ) -> Engine:
        return openvino.OpenVinoEngine(path, threads, snippets=spec.size is None or spec.precision != "bf16")


@dataclass(frozen=True)
class TensorRt(Runtime):
    """TensorRT or TensorRT-RTX: engines on a GPU that they were built for."""

    flavor: tensorrt.Flavor

    def installed(self) -> str | None:
        return self.flavor.installed()

    def runs_here(self, spec: TargetSpec) -> bool:
        return tensorrt.runs_here(self.flavor, spec.gpus)

    def _open(
        self, path: Path, spec: TargetSpec, threads: int, *, stop_spinning: bool, keep_plugin_unloaded: bool
    ) -> Engine:
        host = None if keep_plugin_unloaded else library.built()
        return tensorrt.TensorRtEngine(path, self.flavor, spec.attention, host)

    def open_model(
        self, model: Path, spec: TargetSpec, profile: Mapping[str, ShapeRange] | None = None, threads: int = 0
    ) -> Engine:
        gpu = cuda.local_gpu()
        if gpu is None or profile is None:
            raise EngineBuildError(f"{spec}: no engine of {model.name} can be built without a GPU and a profile")
        with tempfile.TemporaryDirectory(prefix="adtp-engine-") as scratch:
            file = Path(scratch) / f"{model.stem}.engine"
            engine, _ = tensorrt.build(self.flavor, model, profile, [gpu], spec.attention)
            file.write_bytes(engine)
            return self.open(file, spec, threads)


RUNTIMES: dict[str, Runtime] = {
    "trt": TensorRt(0, tensorrt.TENSORRT),
    "rtx": TensorRt(1, tensorrt.RTX),
    ADTP: Adtp(2),
    "onnxruntime": OnnxRuntime(3),
    "openvino": OpenVino(4),
}
