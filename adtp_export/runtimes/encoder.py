"""A whole encoder as one replay of a CUDA graph: by the runner alone, which needs no ONNX Runtime, or as an operator in its sessions.

Both take the file that ``adtp-export --cuda`` writes, and the library that ``adtp-plugin build --cuda`` makes.
"""

from __future__ import annotations

import importlib.util
import logging
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ..contract import ATTENTION_MASK, INPUT_IDS, KEPT_SITE
from ..data.tokenize import Batch
from ..errors import CudaError, EngineBuildError, InputError
from ..plugins import runner
from ..plugins.encoder import kept
from ..plugins.runner import Runner
from . import Engine
from .encoder_file import EncoderFile, read
from .onnxruntime import OnnxRuntimeEngine, cuda_runs_here


def runs_here(in_onnxruntime: bool) -> bool:
    """Say whether such files can be tried on this machine, in ONNX Runtime or without it."""
    return obstacle() is None and (not in_onnxruntime or cuda_runs_here())


def obstacle() -> str | None:
    """Say why no such file can be tried on this machine; None: they can."""
    if importlib.util.find_spec("onnx_ir") is None:
        return "onnx-ir, which reads such files, is not installed; type: pip install 'adtp-export[cuda]'"
    return runner.obstacle()


def open_encoder(path: Path, in_onnxruntime: bool) -> Engine:
    """Open a file on the first GPU.

    Raises:
        InputError: the file is none of ``adtp-export --cuda``.
        MissingDependencyError: the library is not built, or does not load; or onnx-ir or ONNX Runtime is not installed.
        EngineBuildError: the GPU has no such kernels, or too little memory for the smallest calls.
    """
    inspector = EncoderEngine(path)
    return OperatorEngine(path, inspector) if in_onnxruntime else inspector.opened()


class EncoderEngine:
    """A file in the runner: pinned memory, and one CUDA graph for each size of a call, with its copies in it. Threads take turns.

    Calls beyond the largest size that the GPU's memory holds run in parts. `kept_site` comes from a second runner, with the same
    launches, that is made when it is first asked for. When the GPU is lost, calls raise `CudaError`; another engine then works.
    """

    def __init__(self, path: Path) -> None:
        self.file: EncoderFile = read(path)
        self.name = path.name
        self.inputs = tuple(self.file.inputs)
        self.outputs = (*self.file.outputs, KEPT_SITE)
        self._runners: dict[bool, Runner] = {}
        self._making, self._is_closed = threading.Lock(), False

    def opened(self) -> EncoderEngine:
        """Make the runner for answers now, not at the first call; say so where memory does not hold all sizes."""
        if warning := self._runner(False).warning:
            logging.getLogger("adtp_export").warning("%s: %s", self.name, warning)
        return self

    def run(self, batch: Batch, wanted: Sequence[str] | None = None) -> dict[str, np.ndarray]:
        """Answer int64 arrays ``(B, S)`` by name.

        Raises:
            InputError: arrays of different shapes, or a row longer than the largest size.
            CudaError: the driver refuses, or the GPU is lost.
        """
        names = tuple(wanted or self.outputs)
        arrays = [np.ascontiguousarray(batch[name], dtype=np.int64) for name in self.inputs]
        shapes = {array.shape for array in arrays}
        if len(shapes) > 1 or arrays[0].ndim != 2:
            raise InputError(f"batch: got arrays of shapes {sorted(shapes)}; accepted are (B, S), the same for all")
        found: dict[str, np.ndarray] = {}
        if set(names) != {KEPT_SITE}:
            parts = self._in_parts(False, arrays)
            found = {name: np.concatenate([part[i] for part in parts]) for i, name in enumerate(self.file.outputs)}
        if KEPT_SITE in names:
            found[KEPT_SITE] = self._kept_site(arrays)
        return {name: found[name] for name in names}

    def close(self) -> None:
        """Wait for all calls, and free what is on the GPU; later calls raise `CudaError`."""
        with self._making:
            self._is_closed = True
            for each in self._runners.values():
                each.close()

    def _kept_site(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        live, begin, found = arrays[self.inputs.index(ATTENTION_MASK)] != 0, 0, []
        for part in self._in_parts(True, arrays):
            rows = live[begin : begin + len(part[0])]
            chosen = part[len(self.file.outputs) :]
            found.append(kept.kept_site(rows, list(zip(chosen[::2], chosen[1::2]))))
            begin += len(rows)
        return np.concatenate(found)

    def _in_parts(self, with_kept: bool, arrays: Sequence[np.ndarray]) -> list[list[np.ndarray]]:
        """Run a batch in parts that fit; return all outputs of each."""
        used, (texts, length) = self._runner(with_kept), arrays[0].shape
        most_tokens, most_texts = used.limits
        step = min(most_texts, most_tokens // max(length, 1))
        if not step:
            raise InputError(f"{INPUT_IDS}: got rows of {length} tokens; accepted are at most {most_tokens}")
        return [self._part(used, [array[i : i + step] for array in arrays]) for i in range(0, texts, step)]

    def _part(self, used: Runner, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        texts, length = arrays[0].shape
        sizes = {"texts": texts, "length": length, "tokens": texts * length}
        made = [
            np.empty([sizes.get(axis) or int(axis) for axis in axes], kind)
            for kind, *axes in self.file.outputs.values()
        ]
        cuts = kept.cuts(self.file.plan) if len(used.plan.buckets[0].outputs) > len(made) else 0
        made += [np.empty(count, np.int32) for _ in range(cuts) for count in (texts * length, texts + 1)]
        try:
            used.run(arrays, made, texts=texts, tokens=texts * length, length=length)
        except CudaError:
            self.close()
            raise
        return made

    def _runner(self, with_kept: bool) -> Runner:
        """Return the runner that answers, or the one that also says which rows stay."""
        with self._making:
            if self._is_closed:
                raise CudaError(f"{self.name}: it was closed, or the GPU was lost in an earlier call; load it again")
            if with_kept not in self._runners:
                plan = kept.with_kept_rows(self.file.plan) if with_kept else self.file.plan
                try:
                    self._runners[with_kept] = Runner(plan, self.file.weights, library=runner.built())
                except CudaError as error:
                    raise EngineBuildError(f"{self.name}: {error}") from error
            return self._runners[with_kept]


class OperatorEngine:
    """The same file in a session of ONNX Runtime's CUDA provider, with the library registered. kept_site: from an `EncoderEngine`."""

    def __init__(self, path: Path, inspector: EncoderEngine) -> None:
        self._session, self._inspector = OnnxRuntimeEngine(path, cuda=True, plugin=True), inspector
        self.inputs, self.outputs = self._session.inputs, inspector.outputs

    def run(self, batch: Batch, wanted: Sequence[str] | None = None) -> dict[str, np.ndarray]:
        names = list(wanted or self.outputs)
        answers = [name for name in names if name != KEPT_SITE]
        found = self._session.run(batch, answers) if answers else {}
        return found | (self._inspector.run(batch, [KEPT_SITE]) if KEPT_SITE in names else {})
