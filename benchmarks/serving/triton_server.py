"""A Triton Inference Server on this machine: started, and asked by clients that do not wait for one another.

`make triton-server` installs one below `build/triton`, without a GPU or a container. TRITON_ROOT names another place.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

ROOT = Path(os.environ.get("TRITON_ROOT", Path(__file__).parents[2] / "build" / "triton"))
STARTS_S = 120


def obstacle() -> str | None:
    """Say why there is no server to start here; None where there is one."""
    client = importlib.util.find_spec("tritonclient")
    files = ("pytriton/tritonserver/bin/tritonserver", "venv/bin/python")
    if client is None or not all((ROOT / file).exists() for file in files):
        return "Triton Inference Server is not installed; type: make triton-server"
    return None


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """A server of a model repository on loopback, for the time of a block. It starts whichever models load.

    Attributes:
        url: host and port of its HTTP. log: what it printed.
    """

    def __init__(self, repository: Path, environment: Mapping[str, str] | None = None) -> None:
        self.port = free_port()
        self.url = f"127.0.0.1:{self.port}"
        python = ROOT / "venv" / "bin"
        library = subprocess.check_output(
            [python / "python", "-c", "import sysconfig; print(sysconfig.get_config_var('LIBDIR'))"], text=True
        ).strip()
        self._environment = {
            **os.environ,
            "PATH": f"{python}:{os.environ['PATH']}",  # where the Python backend finds its packages
            "LD_LIBRARY_PATH": f"{ROOT / 'nvidia_pytriton.libs'}:{library}",
            **(environment or {}),
        }
        self._command = [
            str(ROOT / "pytriton/tritonserver/bin/tritonserver"),
            f"--model-repository={repository}",
            f"--backend-directory={ROOT / 'backends'}",
            "--http-address=127.0.0.1",
            f"--http-port={self.port}",
            "--allow-grpc=false",
            "--allow-metrics=false",
            "--exit-on-error=false",
            "--strict-readiness=false",
            "--disable-auto-complete-config",
        ]

    def __enter__(self) -> Server:
        self._stream = tempfile.TemporaryFile("w+", encoding="utf-8")
        self._process = subprocess.Popen(
            self._command, env=self._environment, stdout=self._stream, stderr=subprocess.STDOUT
        )
        deadline = time.monotonic() + STARTS_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.__exit__(None, None, None)
                raise RuntimeError(f"the server does not start: {self.log[-2000:]}")
            time.sleep(0.05)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(60)
            finally:
                self._process.kill()  # which does nothing where it has ended

    def _answers(self) -> bool:
        """Say whether it listens, which it does once all models are loaded, or refused."""
        try:
            with urllib.request.urlopen(f"http://{self.url}/v2/health/live", timeout=5):
                return True
        except OSError:
            return False

    @property
    def log(self) -> str:
        self._stream.seek(0)
        return self._stream.read()

    @property
    def processes(self) -> list[int]:
        """The server, and those that run its models."""
        return [self._process.pid, *_children(self._process.pid)]

    def cpu_s(self) -> float:
        """CPU seconds of the server and of the processes that run its models."""
        ticks = 0
        for pid in self.processes:
            fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")


def _children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    found = [int(child) for task in tasks for child in task.read_text(encoding="utf-8").split()]
    return [*found, *(below for child in found for below in _children(child))]


def inputs(columns: Mapping[str, Sequence[str | bytes]]) -> list[Any]:
    """Make the inputs of a request of texts, by name; all columns have one text for each row."""
    from tritonclient.http import InferInput

    made = []
    for name, texts in columns.items():
        values = [text if isinstance(text, bytes) else text.encode() for text in texts]
        tensor = InferInput(name, [len(values), 1], "BYTES")
        tensor.set_data_from_numpy(np.array(values, np.object_).reshape(-1, 1))
        made.append(tensor)
    return made


def ask(
    url: str,
    model: str,
    requests: Iterable[Any],
    clients: int,
    outputs: Sequence[str] | None = None,
    parameters: Mapping[str, str] | None = None,
) -> list[tuple[Any, float]]:
    """Send requests, each client the next one as soon as it has its answer; return answers, or errors, and their seconds.

    Args:
        requests: what `inputs` gives, or columns for it.
        outputs: to ask for; default: all.
        parameters: of each request.
    """
    import gevent
    from tritonclient.http import InferenceServerClient, InferRequestedOutput
    from tritonclient.utils import InferenceServerException

    listed = list(requests)
    answers: list[Any] = [None] * len(listed)
    left = iter(range(len(listed)))
    wanted = [InferRequestedOutput(name) for name in outputs] if outputs else None

    def run() -> None:
        with InferenceServerClient(url, network_timeout=300.0, connection_timeout=300.0) as client:
            for i in left:
                given = inputs(listed[i]) if isinstance(listed[i], Mapping) else listed[i]
                began = time.perf_counter()
                try:
                    answer = client.infer(model, given, outputs=wanted, parameters=parameters)
                except InferenceServerException as error:
                    answer = error
                answers[i] = answer, time.perf_counter() - began

    gevent.joinall([gevent.spawn(run) for _ in range(clients)], raise_error=True)
    return answers


def statistics(url: str, model: str) -> dict[str, Any]:
    """Return what a server counted of a model: "requests", "executions", and how many of each "sizes" in texts."""
    from tritonclient.http import InferenceServerClient

    with InferenceServerClient(url) as client:
        found = client.get_inference_statistics(model)["model_stats"][0]
    return {
        "requests": found["inference_stats"]["success"]["count"],
        "executions": found["execution_count"],
        "sizes": {batch["batch_size"]: batch["compute_infer"]["count"] for batch in found["batch_stats"]},
    }
