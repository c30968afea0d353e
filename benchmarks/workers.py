"""Contenders in processes of their own, perhaps in other environments: each runs a script of this folder and answers JSON lines."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

PAUSE_S = 0.05
"""After each answer, for the threads of that contender to go to sleep."""


class Worker:
    """A contender's process. It runs ``python script --worker name folder``, where the script calls `serve`."""

    def __init__(self, name: str, python: str, script: str, folder: Path) -> None:
        self.name = name
        self.log = (folder / f"{name}.log").open("w+")
        command = [python, script, "--worker", name, str(folder)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, text=True
        )

    def ask(self, **asked: Any) -> dict[str, Any]:
        """Return the answer to a command; raises RuntimeError where the process has ended."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            print(json.dumps(asked), file=self.process.stdin, flush=True)
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            self.log.seek(0)
            told = [text for text in self.log.read().splitlines() if text.strip()]
            raise RuntimeError(told[-1] if told else "the process ended")
        time.sleep(PAUSE_S)
        return dict(json.loads(line))

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
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
    """Answer commands on stdin, a JSON line each, with one on stdout. `make` returns what answers; all else it prints is a log."""
    answers, sys.stdout = sys.stdout, sys.stderr
    answer = make()
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), file=answers, flush=True)


def in_turns(workers: Sequence[Worker], rounds: int) -> list[Worker]:
    """Return workers in the order in which they are asked: each round begins with the next one."""
    order = []
    for i in range(rounds):
        first = i % len(workers)
        order += [*workers[first:], *workers[:first]]
    return order


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
