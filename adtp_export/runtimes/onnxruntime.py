"""ONNX Runtime, on the CPU and through its CUDA provider."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import importlib.util
import io
import json
import os
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ..data.tokenize import Batch
from ..environment import thread_count, threads_to_ask_for
from ..errors import EngineBuildError, MissingDependencyError, ellipsize, needs_extras
from ..plugins import operators, runner
from .cuda import local_gpu

PROFILE_WARM_UP = 3
_STDOUT_LOCK = threading.Lock()


def installed() -> str | None:
    """Return the version of ONNX Runtime, whichever package brings it, or None."""
    if importlib.util.find_spec("onnxruntime") is None:
        return None
    for package in ("onnxruntime", "onnxruntime-gpu"):
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "unknown"


def _onnxruntime() -> Any:
    """Import ONNX Runtime without its telemetry, unless the environment says otherwise.

    From version 1.29 on it reports use to Microsoft, and keeps a database in the user's home.
    """
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    import onnxruntime

    return onnxruntime


def extensions_library() -> str:
    """Return the library of onnxruntime-extensions; raises MissingDependencyError where it is not installed."""
    with needs_extras("--with-tokenizer, where it is verified,"):
        from onnxruntime_extensions import get_library_path
    path: str = get_library_path()
    return path


def cuda_runs_here() -> bool:
    """Say whether the CUDA provider can be tried on this machine."""
    if installed() is None or local_gpu() is None:
        return False
    return "CUDAExecutionProvider" in _onnxruntime().get_available_providers()


def operators_obstacle() -> str | None:
    """Say why the attention operators for CPUs cannot run here; None where they can."""
    if installed() is None:
        return "ONNX Runtime is not installed; type: pip install 'adtp-export[cpu]'"
    try:
        library = operators.library()
    except MissingDependencyError as error:
        return str(error)
    return _refusal(library, library.stat().st_mtime_ns)


@functools.cache
def _refusal(library: Path, changed: int) -> str | None:
    """Say why ONNX Runtime cannot load a library of operators that was changed at that time."""
    try:
        _onnxruntime().SessionOptions().register_custom_ops_library(str(library))
    except Exception as error:  # its exceptions share no public base
        return f"ONNX Runtime {installed()} cannot load {library.name} ({ellipsize(str(error))}); type: adtp-plugin build --cpu"
    return None


@contextlib.contextmanager
def _silenced() -> Iterator[None]:
    """Discard what a block prints. One block at a time, because `redirect_stdout` replaces `sys.stdout` for the whole process."""
    with _STDOUT_LOCK, contextlib.redirect_stdout(io.StringIO()):
        yield


def fuse_transformer(source: Path, path: Path, heads: int, hidden: int) -> None:
    """Write a dense BERT with ONNX Runtime's own transformer fusions, as optimum's optimizer does."""
    _onnxruntime()
    from onnxruntime.transformers import optimizer

    with _silenced():
        model = optimizer.optimize_model(str(source), model_type="bert", num_heads=heads, hidden_size=hidden)
    model.save_model_to_file(str(path))


@dataclass(frozen=True, kw_only=True)
class NodeTime:
    """One node of the graph as ONNX Runtime runs it, and the shapes of the inputs that are no constants."""

    name: str
    op_type: str
    ms: float
    inputs: tuple[tuple[int, ...], ...]
    output: tuple[int, ...]


def profile(path: Path, batch: Batch, runs: int, threads: int = 0) -> tuple[list[NodeTime], float]:
    """Run a batch under ONNX Runtime's profiler on the CPU; return the nodes and the ms of a run.

    Both are medians over runs, so that one that was interrupted tells nothing of the node that it was at.
    """
    onnxruntime = _onnxruntime()
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = threads_to_ask_for(threads), 3
    options.enable_profiling = True
    with tempfile.TemporaryDirectory() as scratch:
        options.profile_file_prefix = f"{scratch}/profile"
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        feed = {i.name: batch[i.name] for i in session.get_inputs()}
        for _ in range(PROFILE_WARM_UP + runs):
            session.run(None, feed)
        events = json.loads(Path(session.end_profiling()).read_text(encoding="utf-8"))
    runs_seen = sorted((e for e in events if e["name"] == "model_run"), key=lambda event: event["ts"])[PROFILE_WARM_UP:]
    calls: dict[str, list[dict[str, Any]]] = {}
    for event in sorted(events, key=lambda event: event["ts"]):
        if event.get("cat") == "Node" and event["name"].endswith("_kernel_time") and event["ts"] >= runs_seen[0]["ts"]:
            calls.setdefault(event["name"], []).append(event)
    nodes = [found[i :: len(found) // runs] for found in calls.values() for i in range(len(found) // runs)]
    times = []
    for found in nodes:
        event, args = found[0], found[0]["args"]
        inputs, outputs = (
            [tuple(shape) for entry in args[key] for shape in entry.values()]
            for key in ("input_type_shape", "output_type_shape")
        )
        name = event["name"].removesuffix("_kernel_time")
        output = outputs[0] if outputs else ()
        times.append(
            NodeTime(name=name, op_type=args["op_name"], ms=_median_ms(found), inputs=tuple(inputs), output=output)
        )
    return times, _median_ms(runs_seen)


def _median_ms(events: Sequence[dict[str, Any]]) -> float:
    return float(np.median([event["dur"] for event in events])) / 1e3


def _libraries(path: Path, plugin: bool, extensions: bool, cuda: bool) -> list[str]:
    """Return the libraries of operators that a file wants; raises MissingDependencyError where one is missing."""
    libraries = [extensions_library()] if extensions else []
    if plugin:
        if (obstacle := runner.obstacle() if cuda else operators_obstacle()) is not None:
            raise MissingDependencyError(f"{path.name}: {obstacle}")
        libraries.append(str(runner.built() if cuda else operators.library()))
    return libraries


def cuda_provider(exact: bool) -> tuple[str, dict[str, str]]:
    """Load pip's CUDA libraries, and return the CUDA provider with its settings.

    Args:
        exact: compute products in true fp32, and sums of fused norms too: ONNX Runtime before 1.27 sums them in fp16. From 1.28 on it
            always sums in fp32, and ignores that setting.
    """
    onnxruntime = _onnxruntime()
    if hasattr(onnxruntime, "preload_dlls"):
        with _silenced():
            onnxruntime.preload_dlls()
    settings = {"use_tf32": str(int(not exact)), "enable_skip_layer_norm_strict_mode": str(int(exact))}
    return "CUDAExecutionProvider", settings


class OnnxRuntimeEngine:
    """An ONNX file in ONNX Runtime's CPU provider, or its CUDA provider.

    Args:
        path: the model.
        threads: intra-op threads; 0 takes one per core that this process may use.
        cuda: run on the GPU, in true fp32: TF32 would flip decisions. "tf32" allows it, for models that decide nothing.
        stop_spinning: stop spinning when a run ends, so that sessions taking turns do not slow one another.
        disable_qdq_fusion: compute quantize and dequantize nodes one by one, without integer products: for files of other runtimes.
        plugin: run attention with the operators of `plugins.operators.library`, in place of the graph's own body; with `cuda`, the
            whole encoder.
        extensions: the file has operators of onnxruntime-extensions.

    Raises:
        MissingDependencyError: ONNX Runtime is not installed, or the operators cannot run here.
        EngineBuildError: ONNX Runtime refuses the model.
    """

    def __init__(
        self,
        path: Path,
        threads: int = 0,
        stop_spinning: bool = False,
        cuda: bool | Literal["tf32"] = False,
        disable_qdq_fusion: bool = False,
        plugin: bool = False,
        extensions: bool = False,
    ) -> None:
        if installed() is None:
            raise MissingDependencyError("ONNX Runtime is not installed; type: pip install 'adtp-export[cpu]'")
        onnxruntime = _onnxruntime()
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads_to_ask_for(threads)
        options.log_severity_level = 3
        if stop_spinning:
            options.add_session_config_entry("session.force_spinning_stop", "1")
        if disable_qdq_fusion:
            options.add_session_config_entry("session.disable_quant_qdq", "1")
        libraries = _libraries(path, plugin, extensions, bool(cuda))
        for library in libraries:
            options.register_custom_ops_library(library)
        on_gpu = [cuda_provider(exact=cuda is True)] if cuda else []
        no_cuda = (
            f"ONNX Runtime {installed()} cannot start its CUDA provider here; its log says which library it misses. type: "
            "pip install 'adtp-export[gpu]'"
        )
        try:
            self._session = onnxruntime.InferenceSession(
                str(path), options, providers=[*on_gpu, "CPUExecutionProvider"], enable_fallback=0
            )
        except Exception as error:  # its exceptions share no public base
            if cuda and "NOT_IMPLEMENTED" in str(error):  # what only CUDA can do was left to the CPU
                raise EngineBuildError(no_cuda) from error
            again = ". An earlier version wrote it; export the model again" if "input size" in str(error) else ""
            raise EngineBuildError(f"ONNX Runtime {installed()} refuses {path.name}: {error}{again}") from error
        if cuda and "CUDAExecutionProvider" not in self._session.get_providers():
            raise EngineBuildError(no_cuda)
        if plugin and not cuda:
            operators.set_threads(libraries[-1], thread_count(threads))
        self.inputs = tuple(i.name for i in self._session.get_inputs())
        self.outputs = tuple(o.name for o in self._session.get_outputs())

    def run(self, batch: Batch, wanted: Sequence[str] | None = None) -> dict[str, np.ndarray]:
        names = list(wanted or self.outputs)
        feed = {name: batch[name] for name in self.inputs}
        return dict(zip(names, self._session.run(names, feed)))
