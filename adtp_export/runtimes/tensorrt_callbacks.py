"""What TensorRT and TensorRT-RTX call back: a logger that keeps what they say, and a monitor of builds."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

Progress = Callable[[str, int, int], None]
"""Called with (phase, step, steps) while an engine is built."""


@functools.cache  # a process keeps the first logger it gives to a library, so there is one for each flavour
def collector(trt: Any) -> Any:
    """Return the one logger of a library in this process."""

    class Collector(trt.ILogger):
        """Keeps what the library says instead of printing it."""

        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.errors: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            if severity in (trt.ILogger.Severity.ERROR, trt.ILogger.Severity.INTERNAL_ERROR):
                self.errors.append(message)

        def said(self) -> str:
            return "; ".join(self.errors[-3:]) or "no reason given"

    return Collector()


def logger(trt: Any) -> Any:
    """Return it, with nothing said yet."""
    kept = collector(trt)
    kept.errors.clear()
    return kept


def monitor(trt: Any, progress: Progress) -> Any:
    """Return a monitor that tells how a build goes."""

    class Monitor(trt.IProgressMonitor):
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self.steps: dict[str, int] = {}

        def phase_start(self, phase: str, parent: str | None, steps: int) -> None:
            self.steps[phase] = steps

        def step_complete(self, phase: str, step: int) -> bool:
            progress(phase, step + 1, self.steps[phase])
            return True

        def phase_finish(self, phase: str) -> None:
            self.steps.pop(phase, None)

    return Monitor()
