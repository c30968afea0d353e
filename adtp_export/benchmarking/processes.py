"""One process per contender: threads that spin on after a run would slow the neighbours, and OpenMP runtimes do not mix.

Nothing here imports PyTorch or transformers, for a process that needs neither starts in half a second.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any

import numpy as np

from ..contract import per_token
from ..data.tokenize import Batch
from ..environment import thread_count, threads_to_ask_for
from ..errors import AdtpError, EngineBuildError
from ..runtimes import Engine

WITH_PLUGIN = "onnxruntime-plugin"
"""ONNX Runtime with the attention operators for CPUs."""

DEPLOYED = "deployed"
"""Whatever runs a target of an output directory: the contender's path is the directory's."""

STUDENT = "student"
"""What the names of the student's own files begin with."""


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One model to time.

    padded: it computes on padding. layers: its depth. sites: where it prunes. cls_only_last_layer: its last layer works for [CLS]
    alone. precomputed_first_layer: its first layer has tables in place of projections. engine: a runtime that `load` knows.
    length_bucket_rows: batches are split by length into parts of so many rows. process: the contender whose process runs it; by default
    it has one of its own. target: of an output directory; by default the name.
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
    target: str = ""

    @property
    def is_student(self) -> bool:
        """It is the student, in one form or another."""
        return self.name == STUDENT or self.name.startswith(f"{STUDENT}-")


PAUSE_S, SPINNING_S = 0.005, 0.05
"""Before each turn, for the threads of the one before to go to sleep; those that spin on do so for up to 30 ms first."""

GOODBYE_S = 10
"""For a process to end by itself when nobody asks any more."""


def load(contender: Contender, threads: int = 0) -> Engine:
    """Load a contender in this process.

    Raises:
        MissingDependencyError: its runtime is not installed.
        EngineBuildError: its runtime refuses it.
    """
    return _LOADERS[contender.engine](contender, threads)


def spin_on(threads: int) -> bool:
    """Say whether threads of ONNX Runtime are left to spin after a run, as all do in `load`: here those that are bound to no core.

    Bound ones sleep, and answer as fast. Unbound ones that have to wake up take two to three times as long for one text of 32 tokens.
    """
    return threads_to_ask_for(threads) > 1


def _onnxruntime(plugin: bool = False) -> Callable[[Contender, int], Engine]:
    def load_onnxruntime(contender: Contender, threads: int) -> Engine:
        from ..runtimes.onnxruntime import OnnxRuntimeEngine
        from ..runtimes.packed import as_padded

        stop_spinning = not spin_on(threads)
        return as_padded(OnnxRuntimeEngine(contender.path, threads, stop_spinning=stop_spinning, plugin=plugin))

    return load_onnxruntime


def _openvino(contender: Contender, threads: int) -> Engine:
    from ..runtimes.openvino import OpenVinoEngine

    return OpenVinoEngine(contender.path, threads, contender.precision)


def _ctranslate2(contender: Contender, threads: int) -> Engine:
    from ..runtimes.ctranslate2 import CTranslate2Engine

    return CTranslate2Engine(contender.path, threads, contender.precision)


def _llamacpp(contender: Contender, threads: int) -> Engine:
    from ..runtimes.llamacpp import LlamaCppEngine

    return LlamaCppEngine(contender.path, threads, contender.precision)


def _torch(attention: str = "sdpa", compiled: bool = False) -> Callable[[Contender, int], Engine]:
    def load_torch(contender: Contender, threads: int) -> Engine:
        from ..runtimes.torch import TorchEngine

        return TorchEngine(contender.path, threads, attention, compiled)

    return load_torch


class _Deployed:
    """A target of an output directory as `adtp_export.load` runs it, checks of the batch included."""

    def __init__(self, contender: Contender, threads: int) -> None:
        from ..inference.predictor import Predictor

        self._deployment = Predictor(contender.path, contender.target or contender.name, threads)
        self.inputs: tuple[str, ...] = self._deployment.inputs
        self.outputs: tuple[str, ...] = ("answers",)

    def run(self, batch: Batch, wanted: Sequence[str] | None = None) -> dict[str, np.ndarray]:
        return {"answers": self._deployment.run(batch)}


_LOADERS: dict[str, Callable[[Contender, int], Engine]] = {
    "onnxruntime": _onnxruntime(),
    WITH_PLUGIN: _onnxruntime(plugin=True),
    "openvino": _openvino,
    "ctranslate2": _ctranslate2,
    "llamacpp": _llamacpp,
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


class Child:
    """A process that is told and tells pickled objects; perhaps of another environment of Python.

    Args:
        command: what to run; it finds the connection by `above`.
        log: a file that gets what it prints; None: this process's.
        environment: what to set, beside what is set here.
    """

    def __init__(
        self, command: Sequence[str], log: IO[str] | None = None, environment: Mapping[str, str] | None = None
    ) -> None:
        self.connection, there = multiprocessing.Pipe()
        with there:
            self.process = subprocess.Popen(
                command,
                env={**os.environ, **(environment or {}), DESCRIPTOR: str(there.fileno())},
                pass_fds=[there.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def close(self) -> None:
        """Have it end: nobody asks any more."""
        self.connection.close()
        try:
            self.process.wait(GOODBYE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


DESCRIPTOR = "ADTP_BENCH_CONNECTION"
"""Names the file descriptor of the connection to a child."""


def above() -> Connection:
    """Return, in a `Child`, the connection to the process that started it."""
    return Connection(int(os.environ.pop(DESCRIPTOR)))


class Processes:
    """Contenders in processes of their own, to be run in turns; a context manager.

    Raises (on entering): what `load` raises, from the first contender that does not load.
    """

    def __init__(self, contenders: Sequence[Contender], threads: int = 0) -> None:
        self.contenders, self.threads = list(contenders), threads
        self._by_name = {contender.name: contender for contender in self.contenders}
        self._children: dict[str, Child] = {}
        deployed = any(contender.engine == DEPLOYED for contender in self.contenders)
        self._pause_s = SPINNING_S if deployed or spin_on(thread_count(threads)) else PAUSE_S

    def __enter__(self) -> Processes:
        try:
            for contender in self.contenders:
                if not contender.process:
                    child = self._children[contender.name] = Child([sys.executable, "-c", SERVE])
                    # A deployed target chooses as it does for `load`.
                    own = self.threads if contender.engine == DEPLOYED else thread_count(self.threads)
                    child.connection.send((contender, own))
            for name in self._children:
                self._answer(name)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        for child in self._children.values():
            child.connection.close()
        for child in self._children.values():
            child.close()
        self._children.clear()

    def time_ms(self, name: str, batch: Batch, warm: bool = True) -> float:
        """Run one batch; return the ms that its engine took, without the way to its process and back.

        Args:
            warm: run it once untimed right before. After the others' turns threads sleep and caches hold the others' weights, which a
                server that is busy with one model never sees. A server that gets a new shape pays for its first run, too: False.
        """
        time.sleep(self._pause_s)
        contender = self._by_name[name]
        return float(self._answer(contender.process or name, (batch, contender.length_bucket_rows, warm)))

    def pid(self, name: str) -> int:
        """Return the number of a contender's process."""
        return self._children[self._by_name[name].process or name].process.pid

    def _answer(self, name: str, asked: tuple[Batch, int, bool] | None = None) -> Any:
        connection = self._children[name].connection
        try:
            if asked is not None:
                connection.send(asked)
            answer = connection.recv()
        except (EOFError, OSError) as error:
            peers = all(contender.engine != DEPLOYED for contender in self.contenders)
            then = ". Leave it out of --peers, or time fewer at once" if peers else ""
            raise EngineBuildError(f"the process of {name} has ended, perhaps for want of memory{then}") from error
        if isinstance(answer, BaseException):
            raise answer
        return answer


SERVE = f"from {__name__} import serve; serve()"


def serve() -> None:
    """Load the contender that the process above names, and answer batches with ms."""
    os.environ |= {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}  # read when it is imported
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process above gets it, too, and ends this one
    connection = above()
    contender, threads = connection.recv()
    try:
        engine = load(contender, threads)
        connection.send("loaded")
        while True:
            batch, rows, warm = connection.recv()
            if warm:
                run(engine, batch, rows)
            began = time.perf_counter()
            run(engine, batch, rows)
            connection.send((time.perf_counter() - began) * 1e3)
    except (EOFError, BrokenPipeError):  # nobody asks any more
        return
    except AdtpError as error:
        connection.send(error)
    except Exception as error:  # one that cannot be pickled would be lost
        connection.send(RuntimeError(f"{contender.name}: {error!r}\n{traceback.format_exc()}"))
