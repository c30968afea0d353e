"""Contenders in processes of their own, perhaps in other environments: each runs a module of `benchmarks` and answers commands.

Workers import this module, so it imports nothing at its head that their environments may lack.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.harness.records import ROOT

if TYPE_CHECKING:
    from adtp_export.benchmarking.contenders import Architecture
    from adtp_export.benchmarking.processes import Contender

PAUSE_S = 0.05
"""After each answer, for the threads of that contender to go to sleep."""


class Worker:
    """A contender's process. It runs ``python -m module --worker name folder``, where the module calls `serve`."""

    def __init__(self, name: str, python: str, module: str, folder: Path) -> None:
        from adtp_export.benchmarking.processes import Child

        self.name = name
        self.log = (folder / f"{name}.log").open("w+")
        paths = filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))
        self.child = Child(
            [python, "-m", module, "--worker", name, str(folder)], self.log, {"PYTHONPATH": os.pathsep.join(paths)}
        )

    def ask(self, **asked: Any) -> dict[str, Any]:
        """Return the answer to a command; raises RuntimeError where the process has ended."""
        try:
            self.child.connection.send(asked)
            answer = self.child.connection.recv()
        except (EOFError, OSError) as error:
            self.log.seek(0)
            told = [text for text in self.log.read().splitlines() if text.strip()]
            raise RuntimeError(told[-1] if told else "the process ended") from error
        time.sleep(PAUSE_S)
        return dict(answer)

    def close(self) -> None:
        self.child.close()
        self.log.close()


def that_run(workers: Iterable[Worker], check: Callable[[Worker], None]) -> tuple[list[Worker], dict[str, str]]:
    """Start contenders one after the other and check each; return those that run, and why others do not.

    Args:
        check: raises RuntimeError where a contender does not answer, or answers otherwise.

    Raises:
        RuntimeError: the first one, which all others are compared with, does not run.
    """
    running: list[Worker] = []
    left_out: dict[str, str] = {}
    for worker in workers:
        try:
            check(worker)
        except RuntimeError as error:
            worker.close()
            if not running:
                raise
            left_out[worker.name] = str(error)
        else:
            running.append(worker)
        print(f"{worker.name}: {left_out.get(worker.name, 'runs')}", file=sys.stderr)
    return running, left_out


def serve(make: Callable[[], Callable[[dict[str, Any]], dict[str, Any]]]) -> None:
    """Answer the commands of `Worker.ask`, in whatever environment this is; `make` returns what answers."""
    connection = Connection(int(os.environ.pop("ADTP_BENCH_CONNECTION")))
    answer = make()
    with contextlib.suppress(EOFError):  # nobody asks any more
        while True:
            connection.send(answer(connection.recv()))


def in_turns(workers: Sequence[Worker], rounds: int) -> list[Worker]:
    """Return workers in the order in which they are asked: each round begins with the next one."""
    order = []
    for i in range(rounds):
        first = i % len(workers)
        order += [*workers[first:], *workers[:first]]
    return order


def beside_the_first(
    contenders: Sequence[Contender], sizes: Architecture, grid: Sequence[str], seconds: float
) -> Iterator[dict[str, Any]]:
    """Time contenders of `adtp-bench` on batches of random ids in turns; yield a row for each workload and contender, with its speedup over
    the first one.

    Args:
        sizes: of their inputs and tables.
        grid: names of workloads.
        seconds: for each workload.
    """
    from adtp_export.benchmarking.interleaved_timing import by_cycle, measure, speedup
    from adtp_export.benchmarking.processes import Processes
    from adtp_export.benchmarking.workloads import make_workloads

    names = [contender.name for contender in contenders]
    with Processes(contenders) as processes:
        for workload in make_workloads(grid, sizes.input_names, sizes.tables["vocab_size"]):
            times = measure(workload, names, processes.time_ms, seconds)
            cycles = {name: by_cycle(ms, len(workload.batches)) for name, ms in times.items()}
            for name, ms in cycles.items():
                gain, margin = speedup(cycles[names[0]], ms)
                row = {
                    "workload": workload.name,
                    "contender": name,
                    "p50_ms": round(statistics.median(map(float, ms)), 2),
                }
                yield row | {"speedup": round(gain, 3), "margin": round(margin, 3), "rounds": len(times[name])}


def best_size(sizes: Sequence[int], seconds: Callable[[int], float]) -> int:
    """Return the batch size of the least median of five runs in turns, after one of each that does not count."""
    tried = [{size: seconds(size) for size in sizes} for _ in range(6)][1:]
    return min(sizes, key=lambda size: statistics.median(run[size] for run in tried))


def package_versions(python: str, names: Sequence[str]) -> dict[str, str]:
    """Return the versions of what is installed of these packages in an environment."""
    code = (
        "import importlib.metadata as m, json, sys\n"
        "found = {}\n"
        "for name in sys.argv[1:]:\n"
        "    try: found[name] = m.version(name)\n"
        "    except m.PackageNotFoundError: pass\n"
        "print(json.dumps(found))"
    )
    told = subprocess.run([python, "-c", code, *names], capture_output=True, text=True, check=True).stdout
    return dict(json.loads(told))


def said_by(*command: str) -> str:
    """Return what a command prints, or "" where it is missing."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        return ""
