"""Files that users give, read without hanging, and without more memory or recursion than a document needs."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from .errors import InputError, cut

JSON_BYTES, SETTINGS_BYTES = 16 << 20, 1 << 16
"""Most of a JSON document, and of a recipe or settings that people type: a parser's objects take up to a thousand times as much."""
MOST_NESTED = 64
MOST_OF_ROW = 1 << 26
"""Characters of a row, or of a document in JSON: small compressed files hold lines of gigabytes. They take up to 2 GB of memory."""


def check_regular(path: Path) -> None:
    """See that a path, where it exists, is a file: pipes, sockets and devices would wait or never end.

    Raises:
        InputError: it is something else.
    """
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError):
        return  # opening it says what is wrong
    if not stat.S_ISREG(mode):
        kinds = {stat.S_IFDIR: "directory", stat.S_IFIFO: "pipe", stat.S_IFSOCK: "socket"}
        kind = kinds.get(stat.S_IFMT(mode), "device")
        raise InputError(f"{path}: cannot be read: it is a {kind}; accepted is a file. Type the path of one")


def read_document(path: Path, most: int = SETTINGS_BYTES) -> str:
    """Read a small text file, in UTF-8.

    Raises:
        InputError: not a file, or larger than `most` bytes. OSError, UnicodeDecodeError: it cannot be read.
    """
    check_regular(path)
    if (size := path.stat().st_size) > most:
        raise InputError(f"{path}: got {size:,} bytes; accepted are at most {most:,}")
    return path.read_text(encoding="utf-8")


def read_json(path: Path) -> Any:
    """Read a JSON document.

    Raises:
        InputError: it cannot be read, is not JSON, or is nested deeper than `MOST_NESTED`.
    """
    try:
        text = read_document(path, JSON_BYTES)
    except (OSError, ValueError) as error:
        raise InputError(f"{path} is not readable JSON: {cut(str(error))}") from error
    return parse_json(text, path)


def parse_json(text: str | bytes, source: Path | str) -> Any:
    """Parse a JSON document.

    Raises:
        InputError: it is none, or is nested deeper than `MOST_NESTED`; `source` begins the message.
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{source} is not readable JSON: {cut(str(error))}") from error
    check_nesting(value, source)
    return value


class Lines:
    """The lines of a text file, one after the other; those of one row are `MOST_OF_ROW` characters at most.

    Raises:
        InputError: a longer row; `path` is named in the message.
    """

    def __init__(self, stream: IO[str], path: Path) -> None:
        self._stream, self._path = stream, path
        self._number = self._held = 0

    def __iter__(self) -> Iterator[str]:
        while line := self._stream.readline(MOST_OF_ROW + 1):
            self._number += 1
            self._held += len(line)
            if self._held > MOST_OF_ROW:
                raise InputError(
                    f"{self._path}: line {self._number}: a row has more than {MOST_OF_ROW:,} characters, which is the most "
                    "accepted; divide its text"
                )
            yield line

    def rows(self, made: Iterable[Any] | None = None) -> Iterator[Any]:
        """Yield rows that are made of these lines; by default, the lines."""
        for row in self if made is None else made:
            self._held = 0
            yield row


def check_nesting(value: Any, source: Path | str) -> None:
    """See that objects and lists are not nested deeper than `MOST_NESTED`.

    Raises:
        InputError: they are; `source` begins the message.
    """
    level = [value]
    for _ in range(MOST_NESTED):
        level = [
            child
            for outer in level
            if isinstance(outer, (dict, list))
            for child in (outer.values() if isinstance(outer, dict) else outer)
        ]
        if not level:
            return
    raise InputError(f"{source}: values are nested deeper than {MOST_NESTED} levels, which is the most accepted")


def with_weights(model: Path) -> list[Path]:
    """Return the files of an ONNX model: itself, and the one beside it that holds its weights, where there is one."""
    return [path for path in (model, model.with_name(f"{model.name}.data")) if path.exists()]
