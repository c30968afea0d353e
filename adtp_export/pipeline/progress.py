"""The steps of a run: timed, and shown by whoever wants to show them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

Progress = Callable[[int, int], None]
"""Takes (done, total)."""


class Steps:
    """Times each step under a name. This one is silent; the console of a command shows steps and notes on stderr.

    Attributes:
        durations_s: seconds by the step's name, in order.
    """

    def __init__(self) -> None:
        self.durations_s: dict[str, float] = {}

    @contextlib.contextmanager
    def step(self, name: str, text: str, meanwhile: str = "") -> Iterator[Progress]:
        """Time a step under `name`; yields a function that takes (done, total). `meanwhile` is shown behind the text until it is done."""
        began = time.perf_counter()
        with self.showing(f"{text}{meanwhile}") as progress:
            yield progress
        self.durations_s[name] = round(time.perf_counter() - began, 3)
        self.finished(text, self.durations_s[name])

    def showing(self, text: str) -> AbstractContextManager[Progress]:
        """Show that a step is under way."""
        return contextlib.nullcontext(lambda done, total: None)

    def finished(self, text: str, seconds: float) -> None:
        """Show that a step is done."""

    def note(self, text: str) -> None:
        """Tell what a user should know, at once."""


@contextlib.contextmanager
def telling_how_to_go_on(steps: Steps, how: str) -> Iterator[None]:
    """Note `how` where a signal ends the block: its run keeps what is done."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        steps.note(f"what is done stays; to go on, {how}")
        raise
