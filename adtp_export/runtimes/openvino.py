"""OpenVINO on the CPU. It does not know model-local functions, so it gets an inlined copy, made when it is loaded."""

from __future__ import annotations

import collections
import contextlib
import importlib.metadata
import importlib.util
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..data.tokenize import Batch
from ..environment import threads_to_ask_for
from ..errors import EngineBuildError, InputError, MissingDependencyError
from ..io import writing_scratch


def installed() -> str | None:
    """Return OpenVINO's version, or None where it or what inlines functions for it is missing."""
    if any(importlib.util.find_spec(name) is None for name in ("openvino", "onnx_ir")):
        return None
    try:
        return importlib.metadata.version("openvino")
    except importlib.metadata.PackageNotFoundError:  # brought by a package of another name
        return "unknown"


def has_bf16() -> bool:
    """Say whether this machine's CPU computes in bf16; without, OpenVINO takes the hint and computes in fp32."""
    return "BF16" in _openvino().Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")


def _openvino() -> Any:
    """Import OpenVINO without its telemetry, which would fork this process at every import to report it to Intel.

    A fork takes along locks that other threads hold, and PyTorch may be loaded here. OpenVINO works without the package.
    """
    sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]
    import openvino

    return openvino


class OpenVinoEngine:
    """An ONNX file in OpenVINO's CPU plugin. Threads may share it: each call has an infer request of its own.

    There are as many requests as there ever were calls at once. They hold inputs and outputs; a stream holds what is between.

    Args:
        path: the model; its local functions are inlined before OpenVINO sees it.
        threads: inference threads; 0 takes one per core that this process may use.
        precision: of its arithmetic; ``bf16`` is for dense peers alone, as it would take pruners out of fp32.
        snippets: whether OpenVINO may join steps to kernels of its own. In fixed sizes in bf16, such as 128 tokens of 4 or 8 texts,
            version 2026.4 ends the process while it does.

    Raises:
        MissingDependencyError: OpenVINO is not installed.
        EngineBuildError: OpenVINO refuses the model.
    """

    def __init__(self, path: Path, threads: int = 0, precision: str = "fp32", snippets: bool = True) -> None:
        if installed() is None:
            raise MissingDependencyError("OpenVINO is not installed; type: pip install 'adtp-export[openvino]'")
        import onnx_ir as ir

        from ..graph.inlined import inlined

        hint = {"fp32": "f32", "bf16": "bf16"}[precision]
        config: dict[str, object] = {"INFERENCE_PRECISION_HINT": hint, "PERFORMANCE_HINT": "LATENCY"}
        if not snippets:
            config["SNIPPETS_MODE"] = "DISABLE"
        if asked := threads or threads_to_ask_for(0):
            config["INFERENCE_NUM_THREADS"] = asked
        try:
            with contextlib.ExitStack() as stack:
                model = inlined(path)
                with writing_scratch("a temporary copy of the model"):
                    copy = Path(stack.enter_context(tempfile.TemporaryDirectory())) / path.name
                    ir.save(model, copy, external_data=copy.name + ".data")  # weights apart: twice as fast to load
                self._compiled = _openvino().Core().compile_model(copy, "CPU", config)
        except InputError:
            raise
        except Exception as error:  # OpenVINO raises RuntimeError, the inliner its own
            raise EngineBuildError(f"OpenVINO {installed()} refuses {path.name}: {error}") from error
        self._idle: collections.deque[Any] = collections.deque()  # its methods may be called from any thread
        self.inputs = tuple(str(value.name) for value in model.graph.inputs)  # OpenVINO may have several names for one
        self.outputs = tuple(str(value.name) for value in model.graph.outputs)

    def run(self, batch: Batch, wanted: Sequence[str] | None = None) -> dict[str, np.ndarray]:
        try:
            request = self._idle.pop()
        except IndexError:
            request = self._compiled.create_infer_request()
        results = request.infer({name: batch[name] for name in self.inputs}, share_inputs=True, share_outputs=True)
        answers = {name: results[name].copy() for name in wanted or self.outputs}
        self._idle.append(request)  # one that failed is left out
        return answers
