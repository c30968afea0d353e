"""Text in, right-padded batches out: reading files, tokenizing, and the checks every batch passes before it is run."""

from __future__ import annotations

import contextlib
import csv
import gzip
import io
import itertools
import json
import math
import sys
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from tokenizers import Encoding, Tokenizer

from .errors import AdtpError, InputError, cut, did_you_mean, shown
from .files import MOST_OF_ROW, Lines, check_regular
from .truncation import Beginnings, portions, staying, unset

Text = str | tuple[str, str]
Label = str | int | float
STDIN = "<stdin>"
"""The name, before its ending, of the file that stands for stdin."""
Batch = dict[str, np.ndarray]

_DEFAULT_COLUMNS: tuple[tuple[str, ...], ...] = (
    ("sentence1", "sentence2"),
    ("question1", "question2"),
    ("premise", "hypothesis"),
    ("question", "sentence"),
    ("question", "context"),
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
    """Return what kind of file a path names, such as ``.jsonl``: its last suffix besides ``.gz``; "" where there is none."""
    return next((suffix for suffix in reversed(path.suffixes[-2:]) if suffix != ".gz"), "")


def read_rows(path: Path, column: str | None = None, label_column: str | None = None) -> Iterator[tuple[Text, Any]]:
    """Yield texts, or pairs, as `read_texts` does, each with its label (`Label`), or with None where none is asked for.

    Raises:
        InputError: as in `read_texts`; no such label column, or a row without a label.
    """
    kind = ending(path)
    if kind not in (".txt", ".tsv", ".csv", ".jsonl"):
        raise InputError(
            f"{path}: got a file ending in {shown(kind or 'nothing')}; accepted are .txt, .tsv, .csv and .jsonl, each also .gz"
        )
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
    except (OSError, EOFError, UnicodeDecodeError, csv.Error, zlib.error) as error:
        raise InputError(f"{path}: cannot be read as UTF-8 text ({cut(str(error))})") from error


def _open(path: Path) -> IO[str]:
    if path.stem == STDIN:
        return io.TextIOWrapper(sys.stdin.buffer, encoding="utf-8-sig", newline="")
    check_regular(path)
    if path.suffix == ".gz":
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
    rows = json_rows(stream, path) if kind == ".jsonl" else _table_rows(lines, kind)
    first = next(rows, None)
    if first is None:
        return
    present = [name for name in first if name is not None]
    try:
        columns = choose_columns(present, path, column)
        if label_column is not None:
            check_label_column(present, path, label_column)
    except InputError:
        if kind != ".jsonl":
            _check_header(present, [first, *itertools.islice(rows, _LOOKED_AT)], path, kind)
        raise
    for number, row in enumerate(itertools.chain([first], rows), start=1):
        yield _text_and_label(row, columns, label_column, f"{path}: row {number}")


def _text_and_label(
    row: Mapping[str, Any], columns: Sequence[str], label_column: str | None, where: str
) -> tuple[Text, Any]:
    if None in row:  # where csv.DictReader puts what has no header
        raise InputError(f"{where} has more fields than the header; quote fields that hold the delimiter")
    values = [value for name in columns if isinstance(value := row.get(name), str)]
    if len(values) < len(columns):
        raise InputError(f"{where} has no text in {' and '.join(map(repr, columns))}")
    label = None if label_column is None else row.get(label_column)
    if label_column is not None and not is_label(label):
        raise InputError(f"{where} has no label in {shown(label_column)}, got {shown(label)}")
    return values[0] if len(values) == 1 else (values[0], values[1]), label


_LOOKED_AT, _SENTENCE = 1000, 4


def _check_header(names: Sequence[str], rows: Sequence[Mapping[str, Any]], path: Path, kind: str) -> None:
    """Raises InputError where a table seems to have no header line."""
    if _looks_like_data(names, rows):
        line = f"sentence{',' if kind == '.csv' else '<TAB>'}label"
        raise InputError(
            f"{path}: seems to have no header line: its first line looks like the others ({cut(', '.join(names))}). Put a line of "
            f"names before it, such as {line}. If it is the header, name its columns with --text-column and --label-column"
        ) from None


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


def check_label_column(present: list[str], source: Path | str, column: str) -> None:
    """See that a table has the label column.

    Raises:
        InputError: it has none of that name; `source` is named in the message.
    """
    if column not in present:
        raise InputError(
            f"{source}: no label column {shown(column)}; it has {cut(', '.join(present))}{did_you_mean(column, present)}"
        )


def is_label(value: object) -> bool:
    """Whether a value can be a label: a class name, or a finite number."""
    if isinstance(value, str):
        return bool(value.strip())
    return isinstance(value, (int, float)) and abs(value) <= sys.float_info.max


def _table_rows(lines: Lines, kind: str) -> Iterator[Mapping[str, Any]]:
    csv.field_size_limit(MOST_OF_ROW)
    tabs: dict[str, Any] = {"delimiter": "\t", "quoting": csv.QUOTE_NONE}
    return lines.rows(csv.DictReader(lines, **(tabs if kind == ".tsv" else {})))


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
                raise InputError(f"{path}: line {number} is not JSON ({cut(str(error))})") from error
            if not isinstance(row, dict):
                raise InputError(f"{path}: line {number} is not a JSON object")
            yield row


def choose_columns(present: list[str], source: Path | str, column: str | None) -> Sequence[str]:
    """Pick the text columns of a table: the named ones (two with a comma for pairs), or the usual ones.

    Raises:
        InputError: no such column, or no usual one; `source` is named in the message.
    """
    if column is None:
        for names in _DEFAULT_COLUMNS:
            if all(name in present for name in names):
                return names
        raise InputError(
            f"{source}: which column holds the text? It has {cut(', '.join(present))}; say --text-column NAME"
        )
    names = tuple(name.strip() for name in column.split(","))
    for name in names:
        if name not in present:
            raise InputError(
                f"{source}: no column {shown(name)}; it has {cut(', '.join(present))}{did_you_mean(name, present)}"
            )
    if len(names) > 2:
        raise InputError(
            f"--text-column: got {shown(column)}; accepted is one name, or two with a comma for sentence pairs"
        )
    return names


@dataclass(frozen=True)
class Encoded:
    """One tokenized text: ``input_ids`` and ``token_type_ids`` (lists of equal length), and whether it was longer."""

    input_ids: list[int]
    token_type_ids: list[int]
    truncated: bool


def encode(tokenizer: Tokenizer, texts: Sequence[Text], max_tokens: int) -> list[Encoded]:
    """Tokenize texts or pairs with special tokens, each cut at `max_tokens`; of a pair, the longer side is cut first.

    Of a long text only the beginning is tokenized (`truncation.py`), and never more than `truncation.MOST_CHARACTERS`.

    Raises:
        InputError: a text that is no valid Unicode (lone surrogates), or one that the tokenizer cannot read.
    """
    return [taken(*found) for found in tokenized(tokenizer, texts, max_tokens, offsets=False)]


def tokenized(
    tokenizer: Tokenizer, texts: Sequence[Text], max_tokens: int, offsets: bool = True
) -> Iterator[tuple[Encoding, list[int] | None]]:
    """Tokenize as `encode` does; yield what `tokenizers` says of each text, and which tokens of it stay: None for all.

    Args:
        offsets: also say where tokens are in their text, and of which word, which takes a tenth more time. Else these are empty.

    Raises:
        InputError: as `encode` says.
    """
    short = Beginnings(tokenizer, max_tokens)
    inputs: list[Text] = []
    with reading_texts():
        for text in texts:
            inputs.append(short.of(text) if isinstance(text, str) else (short.of(text[0]), short.of(text[1])))
    for encoding, text in zip(read_whole(tokenizer, inputs, offsets=offsets), texts):
        with reading_texts():
            stay = staying(encoding, tokenizer, text, max_tokens)
        yield encoding, stay


def read_whole(
    tokenizer: Tokenizer, texts: Iterable[Text | list[str]], words: bool = False, offsets: bool = True
) -> Iterator[Encoding]:
    """Tokenize texts or pairs with special tokens, and cut none. Those that are long together are tokenized one after the other.

    Args:
        words: each text is a list of its words. offsets: as in `tokenized`.

    Raises:
        InputError: as `encode` says.
    """
    unset(tokenizer)
    run = tokenizer.encode_batch if offsets else tokenizer.encode_batch_fast
    for portion in portions(texts):
        with reading_texts():
            found: list[Encoding] = run(portion, is_pretokenized=words)
        yield from found


@contextlib.contextmanager
def reading_texts() -> Iterator[None]:
    """Turn what a tokenizer raises into one clear message, a panic of its Rust code included."""
    try:
        yield
    except AdtpError:
        raise
    except BaseException as error:  # tokenizers raises bare Exception, and pyo3's PanicException is no Exception
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise InputError(f"the tokenizer cannot read a text: {cut(str(error))}") from error


def taken(encoding: Encoding, stay: list[int] | None) -> Encoded:
    """Return the tokens of a text whose places are in `stay`, in order; None stands for all."""
    ids, types = encoding.ids, encoding.type_ids
    if stay is None:
        return Encoded(ids, types, truncated=False)
    return Encoded([ids[i] for i in stay], [types[i] for i in stay], truncated=True)


def strings(tokenizer: Tokenizer, ids: Iterable[int]) -> list[str]:
    """Return tokens as the vocabulary writes them, such as "<unk>" for what it does not have; "?" where no token has that number."""
    return [tokenizer.id_to_token(int(i)) or "?" for i in ids]


def pad(rows: Sequence[Encoded], pad_id: int, names: Iterable[str]) -> Batch:
    """Right-pad tokenized texts to int64 ``(B, S)`` arrays for the inputs in `names`."""
    longest = max(len(row.input_ids) for row in rows)
    batch = {
        "input_ids": np.full((len(rows), longest), pad_id, np.int64),
        "attention_mask": np.zeros((len(rows), longest), np.int64),
        "token_type_ids": np.zeros((len(rows), longest), np.int64),
    }
    for i, row in enumerate(rows):
        n = len(row.input_ids)
        batch["input_ids"][i, :n] = row.input_ids
        batch["attention_mask"][i, :n] = 1
        batch["token_type_ids"][i, :n] = row.token_type_ids
    return {name: batch[name] for name in names}


def check_batch(batch: Mapping[str, np.ndarray], vocab_size: int, type_vocab_size: int, max_tokens: int) -> None:
    """Refuse what the graph would answer wrongly.

    Args:
        batch: ``input_ids``, ``attention_mask`` and perhaps ``token_type_ids``, integer ``(B, S)``.

    Raises:
        InputError: shapes differ, a row is too long or empty, padding is not on the right, or an id is out of range.
    """
    ids, mask = batch["input_ids"], batch["attention_mask"]
    for name, array in batch.items():
        if array.ndim != 2 or array.shape != ids.shape or not np.issubdtype(array.dtype, np.integer):
            raise InputError(
                f"{name}: got {array.dtype} {array.shape}; accepted are integers (B, S), all inputs of one shape"
            )
    if 0 in ids.shape:
        raise InputError(f"input_ids: got an empty batch {ids.shape}; accepted is at least one row with one token")
    if ids.shape[1] > max_tokens:
        raise InputError(f"input_ids: got rows of {ids.shape[1]} tokens; accepted are at most {max_tokens}")
    if not np.isin(mask, (0, 1)).all():
        raise InputError("attention_mask: got values other than 0 and 1")
    empty = np.flatnonzero(mask.sum(1) == 0)
    if empty.size:
        raise InputError(f"attention_mask: row {empty[0]} has no live token; leave empty rows out of the batch")
    ragged = np.flatnonzero((np.diff(mask, axis=1) > 0).any(1))
    if ragged.size:
        raise InputError(
            f"attention_mask: row {ragged[0]} has padding before or between its tokens; "
            "accepted is right padding. Tokenize with padding_side='right'"
        )
    for name, size in (("input_ids", vocab_size), ("token_type_ids", type_vocab_size)):
        if name in batch and (wrong := batch[name][(batch[name] < 0) | (batch[name] >= size)]).size:
            raise InputError(f"{name}: got {wrong[0]}; accepted are ids from 0 to {size - 1}")
