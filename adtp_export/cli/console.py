"""What all commands share: steps with progress on stderr, and how a command ends."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NoReturn

from ..errors import AdtpError, needs_extras
from ..pipeline.steps import Progress, Steps

if TYPE_CHECKING:
    from rich.console import Console as RichConsole

BUG = 70
WIDTH = 160


class Console(Steps):
    """Steps on stderr: a live bar on a terminal, one line per finished step elsewhere; durations are kept."""

    def __init__(self) -> None:
        super().__init__()
        self._out = rich_console(stderr=True)

    @contextlib.contextmanager
    def showing(self, text: str) -> Iterator[Progress]:
        from rich.markup import escape
        from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bars

        columns = (TextColumn("[cyan]{task.description}"), BarColumn(), TimeElapsedColumn())
        live = Bars(*columns, console=self._out, transient=True, disable=not self._out.is_terminal)
        with live:
            task = live.add_task(escape(text), total=None)
            yield lambda done, total: live.update(task, completed=done, total=total)

    def finished(self, text: str, seconds: float) -> None:
        from rich.markup import escape

        self._out.print(f"[green]done[/]  {escape(text)}  [dim]{seconds:.1f} s[/]")

    def note(self, text: str) -> None:
        from rich.markup import escape

        self._out.print(f"[yellow]note[/]  {escape(text)}")

    def print(self, *items: object) -> None:
        self._out.print(*items, markup=False)


def rich_console(stderr: bool = False) -> RichConsole:
    """Return a console as wide as the terminal, or wide enough for tables where there is none."""
    from rich.console import Console as RichConsole

    terminal = (sys.stderr if stderr else sys.stdout).isatty()
    return RichConsole(stderr=stderr, highlight=False, width=None if terminal else WIDTH)


def print_json(document: object) -> None:
    """Print one machine-readable object on stdout."""
    print(json.dumps(document, indent=2, ensure_ascii=False))


def run_command(name: str, command: Callable[[], int]) -> NoReturn:
    """Run a command and end the process: a user's error is one message, a bug keeps its traceback (exit code 70)."""

    def terminated(signum: int, frame: object) -> NoReturn:
        raise SystemExit(128 + signum)  # unwinds, so that half-written output is removed

    signal.signal(signal.SIGTERM, terminated)
    gc.set_threshold(
        100_000, 20, 100
    )  # the frameworks' millions of objects live to the end: scanning them costs a second
    try:
        with needs_extras(name):
            code = command()
        sys.stdout.flush()
    except AdtpError as error:
        print(f"{name}: error: {error}", file=sys.stderr)
        code = error.exit_code
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        code = 128 + signal.SIGINT
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader is gone; say no more
        code = 128 + signal.SIGPIPE
    except Exception:
        traceback.print_exc()
        print(f"{name}: this is a bug in adtp-export; please report it with the text above", file=sys.stderr)
        code = BUG
    sys.stderr.flush()
    os._exit(code)  # all is written and closed; taking the frameworks down in order costs another second
