"""Errors a user can cause or meet. Each class is one exit code of the commands.

A message says what was got, what is accepted and what to type next; the commands print it without a
traceback. Anything that is not an `AdtpError` is a bug of ours and keeps its traceback (exit code 70).
"""

from __future__ import annotations

import contextlib
import difflib
import os
import re
import shlex
from collections.abc import Iterable, Iterator


class AdtpError(Exception):
    """Base of everything the commands report without a traceback."""

    exit_code = 70


class VerificationError(AdtpError):
    """An exported target does not equal the oracle. Exit code 1."""

    exit_code = 1


class InputError(AdtpError, ValueError):
    """Bad input or usage: a checkpoint, a file, an option, a batch. Exit code 2."""

    exit_code = 2


class MissingDependencyError(AdtpError, ImportError):
    """An optional dependency is not installed; the message says what to install. Exit code 3."""

    exit_code = 3


class CudaError(AdtpError):
    """A call to CUDA failed. Exit code 4."""

    exit_code = 4


class EngineBuildError(AdtpError):
    """A runtime's parser or builder refused the model. Exit code 4."""

    exit_code = 4


_EXTRAS = {
    "chat": ("jinja2",),
    "export": ("onnx", "onnx_ir", "onnxscript", "rich", "safetensors", "scipy", "torch", "transformers"),
    "images": ("PIL",),
    "ray": ("ray", "pyarrow"),
    "strings": ("onnxruntime_extensions",),
    "train": ("accelerate", "datasets", "yaml"),
}
"""Extras of the package, and the modules that each brings."""


@contextlib.contextmanager
def needs_extras(what: str, extra: str | None = None) -> Iterator[None]:
    """Say which extra to install where a block, or a decorated function, imports a module that is not there.

    Args:
        what: who needs that module, for the message.
        extra: to name; default: the one that brings the module.

    Raises:
        MissingDependencyError: a module of an extra is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        home = next((extra for extra, modules in _EXTRAS.items() if error.name in modules), None)
        if home is None:
            raise
        raise MissingDependencyError(
            f"{what} needs the package {error.name}, which is not installed; type: pip install 'adtp-export[{extra or home}]'"
        ) from error


MAX_SHOWN = 200
"""Characters of a value in a message."""


def ellipsize(text: str) -> str:
    """Put a text on one line for a message, without what a terminal would obey, and cut it at `MAX_SHOWN` characters."""
    text = " ".join(printable(text[: 10 * MAX_SHOWN]).split())
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def quoted(value: object) -> str:
    """Return a value as Python writes it, cut for a message."""
    try:
        return ellipsize(repr(value[: MAX_SHOWN + 1] if isinstance(value, str) else value))
    except (ValueError, RecursionError):  # Python writes no integer of more than 4,300 digits
        return f"{type(value).__name__} too large to show"


def typed(path: os.PathLike[str] | str) -> str:
    """Return a path as it is typed in a shell, where a command takes it for no option."""
    return shlex.quote(f"./{path}" if str(path).startswith("-") else str(path))


_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""What a terminal obeys in place of showing it: control characters, C1 ones, those that turn the direction of writing; and surrogates."""


def printable(text: str) -> str:
    r"""Write out what a terminal would obey, as ``\x1b``; line breaks and tabs stay."""
    return _CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def printable_json(text: str) -> str:
    r"""Write out the same in JSON, as ``\u001b``: another spelling of the same document."""
    return _CONTROLS.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def flag_name(name: str) -> str:
    """Return an option as it is typed: ``--text-column`` for ``text_column``."""
    return f"--{name.replace('_', '-')}"


def did_you_mean(name: str, valid: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` for the closest valid name, or nothing when none is close."""
    close = difflib.get_close_matches(name[:MAX_SHOWN], list(valid), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def check_int(name: str, value: object, least: int, most: int = 2**31 - 1) -> None:
    """Raises InputError unless the value is an integer of at least `least`, and at most `most`."""
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        told = most < 2**31 - 1 or (isinstance(value, int) and value > most)
        accepted = f"from {least} to {most}" if told else f"of at least {least}"
        kind = "a Python int" if hasattr(value, "__index__") and not isinstance(value, int) else "an integer"
        raise InputError(f"{name}: got {quoted(value)}; accepted is {kind} {accepted}")
