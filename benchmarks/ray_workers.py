"""Processes of Ray that answer parts, on this machine and for a cluster that this process started."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
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
