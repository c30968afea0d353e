"""One process per contender: threads that spin on after a run would slow the neighbours, and OpenMP runtimes do not mix.

Nothing here imports PyTorch or transformers, for a process that needs neither starts in half a second.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
import time
import traceback
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from ..contract import per_token
from ..data.tokenize import Batch
from ..errors import AdtpError, EngineBuildError
from ..runtimes import Engine

WITH_PLUGIN = "onnxruntime-plugin"
"""ONNX Runtime with the attention operators that `adtp-plugin build --cpu` makes."""

DEPLOYED = "deployed"
"""Whatever runs a target of an output directory: the contender's path is the directory's, and its name the target's."""

STUDENT = "student"
"""What the names of the student's own files begin with."""


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One model to time.

    padded: it computes on padding. layers: its depth. sites: where it prunes. cls_only_last_layer: its last layer works for [CLS]
    alone. precomputed_first_layer: its first layer has tables in place of projections. engine: a runtime that `load` knows.
    length_bucket_rows: batches are split by length into parts of so many rows. process: the contender whose process runs it; by default
    it has one of its own.
    """

    name: str
    path: Path
    layers: int
    padded: bool
    sites: tuple[str, ...] = ()
    cls_only_last_layer: bool = False
    engine: str = "onnxruntime"
    precision: str = "fp32"
    length_bucket_rows: int = 0
    process: str = ""
    precomputed_first_layer: bool = False

    @property
    def is_student(self) -> bool:
        """It is the student, in one form or another."""
        return self.name == STUDENT or self.name.startswith(f"{STUDENT}-")


PAUSE_S = 0.005
"""Before each turn, for the threads of the one before to go to sleep."""

COLD_S = 0.5
"""Runs shorter than this are timed after one that is not: after the others' turns threads sleep and caches hold the others' weights,
which a server that is busy with one model never sees."""

GOODBYE_S = 10
"""For a process to end by itself when nobody asks any more."""


def load(contender: Contender, threads: int = 0) -> Engine:
    """Load a contender in this process.

    Raises:
        MissingDependencyError: its runtime is not installed.
        EngineBuildError: its runtime refuses it.
    """
    return _LOADERS[contender.engine](contender, threads)


def _onnxruntime(plugin: bool = False) -> Callable[[Contender, int], Engine]:
    def load_onnxruntime(contender: Contender, threads: int) -> Engine:
        from ..runtimes.onnxruntime import OnnxRuntimeEngine
        from ..runtimes.packed import as_padded

        return as_padded(OnnxRuntimeEngine(contender.path, threads, stop_spinning=True, plugin=plugin))

    return load_onnxruntime


def _openvino(contender: Contender, threads: int) -> Engine:
    from ..runtimes.openvino import OpenVinoEngine

    return OpenVinoEngine(contender.path, threads, contender.precision)


def _ctranslate2(contender: Contender, threads: int) -> Engine:
    from ..runtimes.ctranslate2 import CTranslate2Engine

    return CTranslate2Engine(contender.path, threads, contender.precision)


def _torch(attention: str = "sdpa", compiled: bool = False) -> Callable[[Contender, int], Engine]:
    def load_torch(contender: Contender, threads: int) -> Engine:
        from ..runtimes.torch import TorchEngine

        return TorchEngine(contender.path, threads, attention, compiled)

    return load_torch


class _Deployed:
    """A target of an output directory as `adtp_export.load` runs it, checks of the batch included."""

    def __init__(self, contender: Contender, threads: int) -> None:
        from ..inference.predictor import Predictor

        self._deployment = Predictor(contender.path, contender.name, threads)
        self.inputs: tuple[str, ...] = self._deployment.inputs
        self.outputs: tuple[str, ...] = ("answers",)

    def run(self, batch: Batch, wanted: Sequence[str] | None = None) -> dict[str, np.ndarray]:
        return {"answers": self._deployment.run(batch)}


_LOADERS: dict[str, Callable[[Contender, int], Engine]] = {
    "onnxruntime": _onnxruntime(),
    WITH_PLUGIN: _onnxruntime(plugin=True),
    "openvino": _openvino,
    "ctranslate2": _ctranslate2,
    DEPLOYED: _Deployed,
    "torch-eager": _torch("eager"),
    "torch-sdpa": _torch("sdpa"),
    "torch-compile": _torch("sdpa", compiled=True),
}


def run(engine: Engine, batch: Batch, size: int) -> dict[str, np.ndarray]:
    """Run a batch; where `size` is not 0, in parts of so many rows of like length, each padded to its own longest row."""
    if not size:
        return engine.run(batch)
    answers: dict[str, np.ndarray] = {}
    count, padded = batch["attention_mask"].shape
    for rows, longest in sorted_parts(batch["attention_mask"].sum(1), size):
        result = engine.run({name: array[rows, :longest] for name, array in batch.items()})
        for name, values in result.items():
            if per_token(name, values.ndim):  # padding has zeros
                whole = answers.setdefault(name, np.zeros((count, padded, *values.shape[2:]), values.dtype))
                whole[rows, :longest] = values
            else:
                answers.setdefault(name, np.empty((count, *values.shape[1:]), values.dtype))[rows] = values
    return answers


def sorted_parts(lengths: np.ndarray, size: int) -> list[tuple[np.ndarray, int]]:
    """Split rows of ``lengths (B,)`` into parts of at most `size` by length; return each part's rows and longest length."""
    order = np.argsort(lengths, kind="stable")
    return [(rows, int(lengths[rows].max())) for rows in np.split(order, range(size, len(order), size))]


class Processes:
    """Contenders in processes of their own, to be run in turns; a context manager.

    Raises (on entering): what `load` raises, from the first contender that does not load.
    """

    def __init__(self, contenders: Sequence[Contender], threads: int = 0) -> None:
        self.contenders, self.threads = list(contenders), threads
        self._by_name = {contender.name: contender for contender in self.contenders}
        self._children: dict[str, tuple[Any, Connection]] = {}

    def __enter__(self) -> Processes:
        context = multiprocessing.get_context("spawn")
        for contender in self.contenders:
            if contender.process:
                continue
            here, there = context.Pipe()
            child = context.Process(target=_serve, args=(there, contender, self.threads), daemon=True)
            with _main_hidden():
                child.start()
            there.close()
            self._children[contender.name] = child, here
        try:
            for name in self._children:
                self._answer(name)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        for _, connection in self._children.values():
            connection.close()
        for child, _ in self._children.values():
            child.join(GOODBYE_S)
            child.terminate()
        self._children.clear()

    def time_ms(self, name: str, batch: Batch) -> float:
        """Run one batch; return the ms that its engine took, without the way to its process and back."""
        time.sleep(PAUSE_S)
        contender = self._by_name[name]
        return float(self._answer(contender.process or name, (batch, contender.length_bucket_rows)))

    def _answer(self, name: str, asked: tuple[Batch, int] | None = None) -> Any:
        connection = self._children[name][1]
        try:
            if asked is not None:
                connection.send(asked)
            answer = connection.recv()
        except (EOFError, OSError) as error:
            raise EngineBuildError(
                f"the process of {name} has ended, perhaps for want of memory. Leave it out of --peers, or time fewer at once"
            ) from error
        if isinstance(answer, BaseException):
            raise answer
        return answer


@contextlib.contextmanager
def _main_hidden() -> Iterator[None]:
    """Have a child not run the script that this process runs: it needs nothing of it, and a script may lack a guard."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _serve(connection: Connection, contender: Contender, threads: int) -> None:
    os.environ |= {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}  # read when it is imported
    try:
        engine = load(contender, threads)
        connection.send("loaded")
        lasted_s = 0.0
        while True:
            batch, rows = connection.recv()
            if lasted_s < COLD_S:
                run(engine, batch, rows)
            began = time.perf_counter()
            run(engine, batch, rows)
            lasted_s = time.perf_counter() - began
            connection.send(lasted_s * 1e3)
    except (EOFError, BrokenPipeError):  # nobody asks any more
        return
    except AdtpError as error:
        connection.send(error)
    except Exception as error:  # one that cannot be pickled would be lost
        connection.send(RuntimeError(f"{contender.name}: {error!r}\n{traceback.format_exc()}"))
