"""Processes of Ray that answer parts, on this machine and for a cluster that this process started."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

TITLE = b"ray::MapWorker(MapBatches(PartWorker)).submit"
"""What Ray calls a worker while it answers a part."""


def at_work() -> list[int]:
    """Return those that answer a part now."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            pid = int(path.parent.name)
            if path.read_bytes().startswith(TITLE) and os.getpid() in _above(pid):
                found.append(pid)
    return found


def kill() -> list[int]:
    """Kill those that answer a part now, and return them."""
    found = at_work()
    for pid in found:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return found


def _above(pid: int) -> Iterator[int]:
    """Yield the process that started this one, the one that started that, and so on."""
    while pid > 1:
        pid = int(Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[1])
        yield pid


@dataclass(frozen=True)
class Killed:
    """What was killed: processes, and the names of the files that these had begun to write and left behind."""

    workers: list[int] = field(default_factory=list)
    left: list[str] = field(default_factory=list)


@contextlib.contextmanager
def killing(to: Path, parts: int = 0) -> Iterator[Killed]:
    """Kill all workers that are at work once so many parts are in a directory and another one is being written, until one leaves
    behind what it had begun. Yields what then tells of them.
    """
    killed, ended = Killed(), threading.Event()

    def watch() -> None:
        while not killed.left and not ended.wait(0.002):
            begun = list(to.glob("_partial-*"))
            if begun and len(list(to.glob("part-*"))) >= parts and (workers := kill()):
                killed.workers.extend(workers)
                time.sleep(0.05)
                killed.left.extend(path.name for path in begun if path.exists())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield killed
    finally:
        ended.set()
        watcher.join()
