"""Texts and labels from files: .txt, .tsv, .csv and .jsonl, each also compressed."""

from __future__ import annotations

import contextlib
import csv
import gzip
import io
import itertools
import json
import math
import os
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from ..errors import InputError, did_you_mean, ellipsize, quoted
from ..io import MAX_ROW, Lines, check_regular, unreadable
from .truncate import check_unicode

Text = str | tuple[str, str]
Label = str | int | float
STDIN = "<stdin>"
"""The name, before its ending, of the file that stands for stdin."""

_DEFAULT_COLUMNS: tuple[tuple[str, ...], ...] = (
    ("sentence1", "sentence2"),
    ("question1", "question2"),
    ("premise", "hypothesis"),
    ("question", "context"),  # before the next, because questions may have a column "sentence" as well
    ("question", "sentence"),
    ("sentence",),
    ("text",),
)


def read_texts(path: Path, column: str | None = None) -> Iterator[Text]:
    """Yield texts, or pairs, from ``.txt`` (one a line), ``.tsv``, ``.csv`` (with a header) or ``.jsonl``, each also ``.gz``.

    Args:
        column: name of the text column, or two names with a comma for pairs. Default: the first of "sentence",
            "text", or a usual pair such as "sentence1,sentence2", that the file has.

    Raises:
        InputError: unreadable file, unknown format or column, malformed line, not UTF-8, or no text at all.
    """
    return (text for text, _ in read_rows(path, column))


def ending(path: Path) -> str:
    """Return what kind of file a path names, such as ``.jsonl``: its last suffix besides ``.gz``, in lower case; "" where there is none."""
    return next((suffix for each in reversed(path.suffixes[-2:]) if (suffix := each.lower()) != ".gz"), "")


def other_ending(path: Path, accepted: str) -> InputError:
    """Return the error for a file whose name does not end as it should. accepted: what a sentence says after "accepted"."""
    check_regular(path)
    if path.stem != STDIN and not os.path.exists(path):
        return InputError(f"{path}: there is no such file")
    got = f"a file ending in {quoted(kind)}" if (kind := ending(path)) else "a name without an ending"
    return InputError(f"{path}: got {got}; accepted {accepted}")


def read_rows(path: Path, column: str | None = None, label_column: str | None = None) -> Iterator[tuple[Text, Any]]:
    """Yield texts, or pairs, as `read_texts` does, each with its label (`Label`), or with None where none is asked for.

    Raises:
        InputError: as in `read_texts`; no such label column, or a row without a label.
    """
    kind = ending(path)
    if kind not in (".txt", ".tsv", ".csv", ".jsonl"):
        raise other_ending(path, "are .txt, .tsv, .csv and .jsonl, each also .gz")
    with opened(path, ".txt, .tsv, .csv or .jsonl") as stream:
        empty = True
        for row in _parse(stream, kind, path, column, label_column):
            empty = False
            yield row
    if empty:
        raise InputError(f"{path}: holds no text")


@contextlib.contextmanager
def opened(path: Path, accepted: str) -> Iterator[IO[str]]:
    """Open a text file, also ``.gz``, for the time of a block.

    Args:
        accepted: kinds of files, for the message.

    Raises:
        InputError: there is none, or it is not UTF-8 text.
    """
    try:
        with _open(path) as stream:
            yield stream
    except FileNotFoundError as error:
        raise InputError(f"{path}: there is no such file; type the path of a {accepted} file") from error
    except csv.Error as error:
        raise InputError(
            f"{path}: cannot be read as a table ({ellipsize(str(error))}); a field that begins with a quote ends with one, and quotes in "
            "it are doubled"
        ) from error
    except PermissionError as error:
        raise unreadable(path, error) from error
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        raise InputError(f"{path}: cannot be read as UTF-8 text ({ellipsize(str(error))})") from error


def _open(path: Path) -> IO[str]:
    if path.stem == STDIN:
        return io.TextIOWrapper(sys.stdin.buffer, encoding="utf-8-sig", newline="")
    check_regular(path)
    if path.suffix.lower() == ".gz":
        return gzip.open(path, "rt", encoding="utf-8-sig", newline="")
    return path.open(encoding="utf-8-sig", newline="")


def _parse(
    stream: IO[str], kind: str, path: Path, column: str | None, label_column: str | None
) -> Iterator[tuple[Text, Any]]:
    lines = Lines(stream, path)
    if kind == ".txt":
        if label_column is not None:
            raise InputError(f"{path}: a .txt file has no labels; accepted are .tsv, .csv and .jsonl, each also .gz")
        yield from ((line.rstrip("\r\n"), None) for line in lines.rows() if line.strip())
        return
    table = None if kind == ".jsonl" else _table(lines, kind)
    rows = json_rows(stream, path) if table is None else lines.rows(table)
    try:
        first = next(rows, None)
    except csv.Error:
        _check_header(list((table and table.fieldnames) or ()), [], path, kind)
        raise
    if first is None:
        return
    present = list(first if table is None else table.fieldnames or ())
    try:
        columns = choose_columns(present, path, column)
        if label_column is not None:
            check_label_column(present, path, label_column, columns)
    except InputError:
        if kind != ".jsonl":
            _check_header(present, [first, *_readable(itertools.islice(rows, _LOOKED_AT))], path, kind)
        raise
    for number, row in enumerate(itertools.chain([first], rows), start=1):
        yield _text_and_label(row, columns, label_column, f"{path}: row {number}")


def _readable(rows: Iterator[Any]) -> Iterator[Any]:
    """Pass rows on, until one cannot be read as a row of a table."""
    with contextlib.suppress(csv.Error):
        yield from rows


def _text_and_label(
    row: Mapping[str, Any], columns: Sequence[str], label_column: str | None, where: str
) -> tuple[Text, Any]:
    if None in row:  # where csv.DictReader puts what has no header
        raise InputError(f"{where} has more fields than the header; quote fields that hold the delimiter")
    values = [value for name in columns if isinstance(value := row.get(name), str)]
    if len(values) < len(columns):
        raise InputError(f"{where} has no text in {' and '.join(map(repr, columns))}")
    for value in values:
        check_unicode(value, where)
    label = None if label_column is None else row.get(label_column)
    if label_column is not None and not is_label(label):
        raise no_label(label, label_column, where)
    return values[0] if len(values) == 1 else (values[0], values[1]), label


_LOOKED_AT, _SENTENCE = 1000, 4
_DELIMITERS = {".csv": ",", ".tsv": "\t"}


def _check_header(names: Sequence[str], rows: Sequence[Mapping[str, Any]], path: Path, kind: str) -> None:
    """Raises InputError where a table seems to have other delimiters, or no header line."""
    if len(names) == 1 and (other := _other_delimiter(names[0], rows, kind)):
        raise InputError(
            f"{path}: its columns seem to be separated by {quoted(other)}; accepted are commas in .csv and tabs in .tsv. "
            "Convert it, or give it the other ending"
        ) from None
    if _looks_like_data(names, rows):
        line = f"sentence{',' if kind == '.csv' else '<TAB>'}label"
        raise InputError(
            f"{path}: seems to have no header line: its first line looks like the others ({ellipsize(', '.join(names))}). Put a line of "
            f"names before it, such as {line}. If it is the header, name its columns with --text-column and --label-column"
        ) from None


def _other_delimiter(header: str, rows: Sequence[Mapping[str, Any]], kind: str) -> str | None:
    """Return what divides a header that should be one name, where all rows have it, too; None where it may be a text."""
    marks = (mark for mark in ";|\t," if mark in header and f"{mark} " not in header and mark != _DELIMITERS[kind])
    return next((mark for mark in marks if all(mark in str(row.get(header)) for row in rows)), None)


def _looks_like_data(names: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> bool:
    """Whether what should be a header is a first row: a value of it comes again below it, or a number stands beside a sentence.

    A header may be numbers alone, and be repeated where files were joined.
    """
    numbers = {name for name in names if _is_number(name)}
    if len(numbers) == len(names):
        return False
    for row in rows:
        again = [name for name in names if name.strip() and row.get(name) == name]
        if again and len(again) < len(names):
            return True
    sentence = any(len(name.split()) >= _SENTENCE for name in names)
    return sentence and any(all(_is_number(row.get(name)) for row in rows) for name in numbers)


def _is_number(value: object) -> bool:
    try:
        return isinstance(value, str) and math.isfinite(float(value))
    except ValueError:
        return False


def check_label_column(present: list[str], source: Path | str, column: str, texts: Sequence[str]) -> None:
    """See that a table has the label column, and that it is none of the columns of `texts`.

    Raises:
        InputError: it has none of that name, or is one of them; `source` is named in the message.
    """
    if column in texts:
        raise InputError(
            f"{source}: the column {quoted(column)} holds the texts, so it cannot hold the labels; name another one with --label-column"
        )
    if column not in present:
        raise InputError(
            f"{source}: no label column {quoted(column)}; it has {_listed(present)}{did_you_mean(column, present)}"
        )
    _check_alone(present, source, column)


def _listed(names: Sequence[str]) -> str:
    """Return names of columns for a message, with quotes around those that begin or end with a space."""
    return ellipsize(", ".join(name if name == name.strip() else quoted(name) for name in names))


def _check_alone(present: list[str], source: Path | str, name: str) -> None:
    if (count := present.count(name)) > 1:
        raise InputError(f"{source}: {count} columns are called {quoted(name)}; give each a name of its own")


def no_label(value: object, column: str, where: str) -> InputError:
    """Return the refusal of a row without a label; `where` begins the message."""
    return InputError(
        f"{where} has no label in {quoted(column)}, got {quoted(value)}; accepted is one class name or one finite number"
    )


def is_label(value: object) -> bool:
    """Whether a value can be a label: a class name, or a finite number."""
    if isinstance(value, str):
        return bool(value.strip())
    return isinstance(value, (int, float)) and abs(value) <= sys.float_info.max


def class_name(label: Label) -> str:
    """Return the name of the class that a label stands for: as text, without spaces around it; a whole number without a point."""
    return str(int(label)) if isinstance(label, float) and label == int(label) else str(label).strip()


def _table(lines: Lines, kind: str) -> csv.DictReader[str]:
    csv.field_size_limit(MAX_ROW)
    tabs: dict[str, Any] = {"delimiter": "\t", "quoting": csv.QUOTE_NONE}
    return csv.DictReader(lines, **(tabs if kind == ".tsv" else {"strict": True}))


def json_rows(stream: IO[str], path: Path) -> Iterator[Mapping[str, Any]]:
    """Yield the objects of JSON lines; blank lines are passed over.

    Raises:
        InputError: a line that is no JSON object, or is too long; `path` is named in the message.
    """
    for number, line in enumerate(Lines(stream, path).rows(), start=1):
        if line.strip():
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise InputError(f"{path}: line {number} is not JSON ({ellipsize(str(error))})") from error
            if not isinstance(row, dict):
                raise InputError(f"{path}: line {number} is not a JSON object")
            yield row


def choose_columns(present: list[str], source: Path | str, column: str | None) -> Sequence[str]:
    """Pick the text columns of a table: the named ones (two with a comma for pairs), or the usual ones.

    Raises:
        InputError: no such column, or no usual one; `source` is named in the message.
    """
    if column is None:
        usual = next((names for names in _DEFAULT_COLUMNS if all(name in present for name in names)), None)
        if usual is None:
            raise InputError(
                f"{source}: which column holds the text? It has {_listed(present)}; say --text-column NAME"
            )
        column = ",".join(usual)
    parts = (column,) if column in present else tuple(column.split(","))
    names = tuple(part if part in present else part.strip() for part in parts)
    for name in names:
        if name not in present:
            raise InputError(
                f"{source}: no column {quoted(name)}; it has {_listed(present)}{did_you_mean(name, present)}"
            )
        _check_alone(present, source, name)
    if len(names) > 2 or len(set(names)) < len(names):
        raise InputError(
            f"--text-column: got {quoted(column)}; accepted is one name, or two different ones with a comma for sentence pairs"
        )
    return names
