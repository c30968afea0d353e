"""Parts of the work: ranges of rows of Parquet files, planned from the files' footers, and read."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pyarrow
from pyarrow import fs
from pyarrow import parquet as pq

from ...data.readers import choose_columns
from ...errors import InputError, did_you_mean, ellipsize, quoted
from .config import ScoringConfig
from .storage import Directory, File, stores_of

_AT_ONCE = 32
"""Footers that are read at a time."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """Rows `start` up to `start + rows` of a file. name: of the output file. store: the file's, by number."""

    name: str
    store: int
    path: str
    start: int
    rows: int

    def is_in(self, to: Directory) -> bool:
        """Say whether its answers are there: a file that was cut short, or has another number of rows, holds none."""
        return to.rows(self.name) == self.rows


@dataclass(frozen=True)
class PartitionPlan:
    """All parts, the stores of their files, and the columns that hold the texts."""

    parts: list[Part]
    stores: list[fs.FileSystem]
    columns: list[str]


def plan(files: Sequence[File], asked: ScoringConfig, answered: Sequence[str]) -> PartitionPlan:
    """Divide files into parts; every footer is read before any work is done.

    Args:
        answered: names of the answer's columns.

    Raises:
        InputError: a file that is no Parquet, or lacks a column; it is named.
    """
    stores = stores_of(files)
    parts: list[Part] = []
    columns: list[str] = []
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        for file, (schema, rows) in zip(files, pool.map(_schema, files)):
            columns = columns or text_columns(schema, file.path, asked)
            check(schema, file.path, columns, asked, answered)
            known = f"{file.store.type_name} {file.path} {file.size} {file.time}"
            digest = hashlib.sha256(known.encode()).hexdigest()[:12]
            stem = file.path.rpartition("/")[2].removesuffix(".parquet").encode()[:80].decode(errors="ignore")
            parts += [
                Part(
                    name=f"part-{stem}-{digest}-{start:010}.parquet",
                    store=stores.index(file.store),
                    path=file.path,
                    start=start,
                    rows=min(asked.rows_per_part, rows - start),
                )
                for start in range(0, max(rows, 1), asked.rows_per_part)
            ]
    return PartitionPlan(parts, stores, columns)


def found(parts: Sequence[Part], to: Directory) -> set[str]:
    """Return the names of those parts whose answers are there."""
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return {part.name for part, there in zip(parts, pool.map(lambda part: part.is_in(to), parts)) if there}


def text_columns(schema: pyarrow.Schema, source: str, asked: ScoringConfig) -> list[str]:
    """Choose the columns that hold the texts, as `adtp-run --file` does.

    Raises:
        InputError: there are none.
    """
    return list(choose_columns(schema.names, source, asked.columns))


def check(
    schema: pyarrow.Schema, source: str, columns: Sequence[str], asked: ScoringConfig, answered: Sequence[str]
) -> None:
    """See that a table has what is asked for.

    Raises:
        InputError: a column is missing, holds no text, or is named as one of the answer.
    """
    names = schema.names
    for name in (*columns, *(asked.keep or ())):
        if names.count(name) != 1:
            many = "more than one column" if name in names else "no column"
            raise InputError(
                f"{source}: {many} {quoted(name)}; it has {ellipsize(', '.join(names))}{did_you_mean(name, names)}"
            )
    for name in columns:
        if not _is_text(schema.field(name).type):
            raise InputError(
                f"{source}: column {quoted(name)} has the type {schema.field(name).type}; accepted is text"
            )
    if taken := [name for name in (names if asked.keep is None else asked.keep) if name in answered]:
        raise InputError(
            f"{source}: has a column {quoted(taken[0])}, and so has the answer; say --prefix answer_ (prefix), or name the columns to "
            "keep with --keep (keep)"
        )


def read(
    store: fs.FileSystem, part: Part, columns: Sequence[str], keep: Sequence[str] | None, rows: int
) -> Iterator[Any]:
    """Yield the part's rows as tables of at most so many rows; at least one table.

    Raises:
        InputError: the file cannot be read, or has fewer rows than it had.
    """
    names = None if keep is None else list(dict.fromkeys([*keep, *columns]))
    with reading(part.path), pq.ParquetFile(store.open_input_file(part.path), pre_buffer=True) as file:
        wanted, before = [], 0
        first, end = None, part.start + part.rows
        for group in range(file.metadata.num_row_groups):
            count = file.metadata.row_group(group).num_rows
            if before < end and before + count > part.start:
                first = before if first is None else first
                wanted.append(group)
            before += count
        if before < end:
            raise InputError(f"{part.path}: has {before} rows, and had {end} or more; it changed while it was read")
        if not part.rows:
            yield file.schema_arrow.empty_table() if names is None else file.schema_arrow.empty_table().select(names)
            return
        place = first or 0
        for batch in file.iter_batches(rows, row_groups=wanted, columns=names):
            begin, stop = max(part.start - place, 0), min(end - place, batch.num_rows)
            if begin < stop:
                yield pyarrow.table(batch.slice(begin, stop - begin))
            place += batch.num_rows
            if place >= end:
                return


def _schema(file: File) -> tuple[pyarrow.Schema, int]:
    """Read a file's footer; return its columns and the number of its rows."""
    with reading(file.path), pq.ParquetFile(file.store.open_input_file(file.path)) as opened:
        return opened.schema_arrow, opened.metadata.num_rows


@contextlib.contextmanager
def reading(path: str) -> Iterator[None]:
    """Turn what pyarrow raises while it reads a file into one clear message."""
    try:
        yield
    except InputError:
        raise
    except (pyarrow.ArrowException, OSError) as error:
        raise InputError(f"{path}: cannot be read as Parquet ({ellipsize(str(error))})") from error


def _is_text(kind: pyarrow.DataType) -> bool:
    types = pyarrow.types
    kind = kind.value_type if types.is_dictionary(kind) else kind
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))
