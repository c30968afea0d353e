"""What all commands share: steps with progress on stderr, and how a command ends."""

from __future__ import annotations

import codecs
import contextlib
import errno
import gc
import importlib.util
import io
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from ..errors import AdtpError, InputError, needs_extras, printable, printable_json
from ..io import is_full, written_whole
from ..pipeline.progress import Progress, Steps

if TYPE_CHECKING:
    import numpy as np
    from rich.console import Console as RichConsole
    from rich.table import Table

BUG, NO_SCRATCH = 70, "No usable temporary directory"
WIDTH, LEAST_WIDTH = 160, 60
GARBAGE = (100_000, 20, 100)
"""Thresholds of the collector: the frameworks' millions of objects live to the end, and scanning them costs a second."""
TIMES_OTHERS = "adtp-bench"
"""The command that times PyTorch in processes of its own, which must run it as users do."""


class Console(Steps):
    """Steps on stderr: a live bar on a terminal, one line per finished step elsewhere; durations are kept."""

    def __init__(self) -> None:
        super().__init__()
        self._out = rich_console(stderr=True)

    @contextlib.contextmanager
    def showing(self, text: str) -> Iterator[Progress]:
        from rich.markup import escape
        from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
        from rich.progress import Progress as Bars

        columns = (TextColumn("[cyan]{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
        live = Bars(*columns, console=self._out, transient=True, disable=not self._out.is_terminal)
        with live:
            task = live.add_task(escape(printable(text)), total=None)
            yield lambda done, total: live.update(task, completed=done, total=total)

    def finished(self, text: str, seconds: float) -> None:
        from rich.markup import escape

        self._out.print(f"[green]done[/]  {escape(printable(text))}  [dim]{seconds:.1f} s[/]")

    def note(self, text: str) -> None:
        from rich.markup import escape

        self._out.print(f"[yellow]note[/]  {escape(printable(text))}")

    def print(self, *items: object) -> None:
        console = table_console(stderr=True)
        console.print(*(printable(item) if isinstance(item, str) else item for item in items), markup=False)


def rich_console(stderr: bool = False) -> RichConsole:
    """Return a console as wide as the terminal, or wide enough for tables where there is none."""
    from rich.console import Console as RichConsole

    terminal = (sys.stderr if stderr else sys.stdout).isatty()
    return RichConsole(stderr=stderr, highlight=False, width=None if terminal else WIDTH)


def table_console(stderr: bool = False) -> RichConsole:
    """Return a console for tables, which is not as narrow as the narrowest terminals: these break its lines. No bar may be shown there."""
    console = rich_console(stderr)
    if console.width < LEAST_WIDTH:
        console.width = LEAST_WIDTH
    return console


def make_table(*columns: str, right: Collection[str] = (), title: str | None = None) -> Table:
    """Return a table without rows, whose cells are folded where a terminal is narrow, and never cut.

    Args:
        right: the columns whose cells stand at the right.
    """
    from rich.table import Column, Table

    sides: dict[bool, Literal["left", "right"]] = {False: "left", True: "right"}
    return Table(*(Column(name, justify=sides[name in right], overflow="fold") for name in columns), title=title)


def has_rich() -> bool:
    """Say whether rich is installed, which a machine that only answers does not need."""
    return importlib.util.find_spec("rich") is not None


@contextlib.contextmanager
def counting_rows(answers_elsewhere: bool = False) -> Iterator[Callable[[int], None]]:
    """Show on a terminal how many rows are done and how many a second; yields a function that takes the rows done since.

    Nothing is shown where stderr is no terminal, where the answers go to that terminal, too, or without rich, which serving does
    not need.

    Args:
        answers_elsewhere: answers do not go to stdout, whatever it is.
    """
    on_stdout = sys.stdout.isatty() and not answers_elsewhere
    if not sys.stderr.isatty() or on_stdout or not has_rich():
        yield lambda rows: None
        return
    from rich.progress import Progress as Bars
    from rich.progress import TextColumn, TimeElapsedColumn

    began, done = time.perf_counter(), 0
    columns = (TextColumn("[cyan]{task.description}"), TimeElapsedColumn())
    with Bars(*columns, console=rich_console(stderr=True), redirect_stdout=False, redirect_stderr=False) as live:
        task = live.add_task("0 rows", total=None)

        def count(rows: int) -> None:
            nonlocal done
            done += rows
            live.update(task, description=f"{done:,} rows, {done / (time.perf_counter() - began):,.0f} rows/s")

        yield count


def watched(tokens: Sequence[int]) -> Iterable[int]:
    """Give tokens back one by one; on a terminal, with a bar on stderr that shows how many are done and what is left."""
    from rich.progress import track

    console = rich_console(stderr=True)
    return track(tokens, "tokens", console=console, transient=True, disable=not console.is_terminal)


def print_json(document: object, indent: int | None = 2) -> None:
    """Print one machine-readable object on stdout; without `indent` on one line. Where stdout is not in UTF-8, it is spelled in ASCII."""
    spelled = codecs.lookup(sys.stdout.encoding or "ascii").name != "utf-8"
    print(printable_json(json.dumps(document, indent=indent, ensure_ascii=spelled)))


def print_path(path: object) -> None:
    """Print a path on stdout: as it is for programs, as it can be shown on a terminal."""
    print(printable(str(path)) if sys.stdout.isatty() else path)


def check_place(flag: str, path: Path, suffix: str) -> None:
    """Raises InputError where an option names no file of this kind that can be made: before hours of work."""
    if path.suffix != suffix:
        raise InputError(f"{flag}: got {path}; accepted is a file that ends in {suffix}")
    if not path.parent.is_dir():
        raise InputError(f"{flag}: there is no directory {path.parent}; make it, or name another place")


@contextlib.contextmanager
def writing_place(flag: str, path: Path) -> Iterator[Path]:
    """Yield where to write the file that an option names, which is there whole, or not at all.

    Raises:
        InputError: the file cannot be written.
    """
    try:
        with written_whole(path) as partial:
            yield partial
    except OSError as error:
        raise InputError(f"{flag}: {path} cannot be written ({error.strerror}); name a place with room") from error


def write_npy(path: Path, vectors: np.ndarray) -> None:
    """Write the vectors ``(N, D)`` of `--out`, and say how many there are; errors are those of `writing_place`."""
    import numpy as np

    with writing_place("--out", path) as partial, partial.open("wb") as stream:
        np.save(stream, vectors)
    print(printable(f"adtp-run: {len(vectors)} rows of {vectors.shape[1]} numbers, fp32"), file=sys.stderr)
    print_path(path)


class _ReaderGone(BaseException):
    """Whoever reads stdout has closed it, as ``head`` does."""


class _Stdout(io.FileIO):
    """The file under stdout; what it refuses is a user's error."""

    def write(self, data: Any) -> int | None:  # type: ignore[override]
        try:
            return super().write(data)
        except BrokenPipeError:
            raise _ReaderGone from None
        except OSError as error:
            raise InputError(f"stdout cannot be written ({error.strerror}); send it to a place with room") from None


class _Stderr(io.FileIO):
    """The file under stderr; what it refuses is lost, for there is nobody to tell."""

    def write(self, data: Any) -> int | None:  # type: ignore[override]
        try:
            return super().write(data)
        except OSError:
            return len(data)


def _open_streams() -> None:
    """Put files that answer for themselves under stdout and stderr.

    Raises:
        InputError: stdout is closed.
    """
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - it stays open to the end
    else:
        sys.stderr = _text(_Stderr(sys.stderr.fileno(), "wb", closefd=False), sys.stderr, "backslashreplace")
    if sys.stdout is None:
        raise InputError("stdout is closed; send it to a file, or to /dev/null")
    sys.stdout = _text(_Stdout(sys.stdout.fileno(), "wb", closefd=False), sys.stdout, _ANY_TEXT)


_ANY_TEXT = "adtp-any-text"
"""A handler of errors for stdout: bytes of a path that is not in its encoding stay, and other characters that it lacks are written out."""


def _write_out(error: UnicodeError) -> tuple[str | bytes, int]:
    assert isinstance(error, UnicodeEncodeError)
    error.end = error.start + 1  # of several characters the first, as the others may be of the other kind
    try:
        return codecs.lookup_error("surrogateescape")(error)
    except UnicodeEncodeError:
        return codecs.backslashreplace_errors(error)


codecs.register_error(_ANY_TEXT, _write_out)


def _text(raw: io.FileIO, old: Any, errors: str) -> io.TextIOWrapper:
    by_line = old.line_buffering or old.write_through or old is sys.stderr  # PYTHONUNBUFFERED asks for the second
    return io.TextIOWrapper(io.BufferedWriter(raw), old.encoding, errors, line_buffering=by_line)


def run_command(name: str, command: Callable[[], int]) -> NoReturn:
    """Run a command and end the process: a user's error is one message, a bug keeps its traceback (exit code 70)."""
    signals = _handle_signals()
    if name != TIMES_OTHERS:
        # PyTorch's threads spin while they wait for one another. Where other processes want the cores, that takes 40 times as long.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read once, when torch is imported
    gc.set_threshold(*GARBAGE)
    try:
        _open_streams()
        with needs_extras(name):
            code = _code_of(command, signals)
        sys.stdout.flush()
    except AdtpError as error:
        print(printable(f"{name}: error: {error}"), file=sys.stderr)
        code = error.exit_code
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        code = 128 + signal.SIGINT
    except _ReaderGone:
        code = 128 + signal.SIGPIPE
    except Exception as error:
        if (told := _of_the_machine(error)) is not None:
            print(printable(f"{name}: error: {told}"), file=sys.stderr)
            code = InputError.exit_code
        else:
            print(printable(traceback.format_exc()), file=sys.stderr, end="")
            print(f"{name}: this is a bug in adtp-export; please report it with the text above", file=sys.stderr)
            code = BUG
    finally:  # a signal to end is no Exception
        _remove_unused_cache()
    with contextlib.suppress(InputError, _ReaderGone):  # answers that were given stay given
        if sys.stdout is not None:
            sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # all is written and closed; taking the frameworks down in order costs another second


def _handle_signals() -> list[int]:
    """Make signals that end the process raise, so that half-written output is removed. Return the list to which each one is added."""
    came: list[int] = []

    def raising(signum: int, frame: object) -> NoReturn:
        came.append(signum)
        raise _ending(signum)

    signal.signal(signal.SIGTERM, raising)
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # which nohup asks for
        signal.signal(signal.SIGHUP, raising)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a shell has its background jobs ignore it
        signal.signal(signal.SIGINT, raising)
    return came


def _ending(signum: int) -> BaseException:
    return KeyboardInterrupt() if signum == signal.SIGINT else SystemExit(128 + signum)


def _code_of(command: Callable[[], int], signals: Sequence[int]) -> int:
    """Run a command; return its exit code, also where its parser ends it.

    Raises:
        KeyboardInterrupt, SystemExit: after a signal, also where a library turned it into another error, as PyTorch does while it reads
            weights.
    """
    try:
        return command()
    except SystemExit as error:
        if isinstance(error.code, int) and error.code < 128:  # no signal
            return error.code
        raise
    except Exception as error:
        if signals:
            raise _ending(signals[-1]) from error
        raise


def _of_the_machine(error: Exception) -> str | None:
    """Say what a command could not have on this machine, wherever it asked for it; None where an error is something else."""
    if isinstance(error, MemoryError) or "std::bad_alloc" in str(error):
        return "there is not enough memory; end other programs, or take smaller batches"
    if is_full(error):
        return f"a disk is full ({error}); free some space"
    # Windows calls it so, too, where a file is open.
    if isinstance(error, PermissionError) and error.errno == errno.EACCES and error.filename and os.name != "nt":
        return f"{error.filename} may not be used ({error.strerror}); ask its owner for the right to"
    if not isinstance(error, FileNotFoundError):
        return None
    if NO_SCRATCH in str(error):  # as tempfile says it
        return "no directory takes temporary files; type TMPDIR=DIR before the command"
    try:
        os.getcwd()
    except FileNotFoundError:
        return "the current directory has been removed; type cd . or go to another one"
    return None


def _remove_unused_cache() -> None:
    """Remove the folder that torch makes for compiled code in the temporary folder, as it is imported, unless something is in it."""
    made = os.environ.get("TORCHINDUCTOR_CACHE_DIR")  # set by torch, too
    with contextlib.suppress(OSError):
        if made is not None and os.path.dirname(made) == os.path.abspath(tempfile.gettempdir()):
            os.rmdir(made)
