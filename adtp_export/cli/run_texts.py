"""What `adtp-run` answers: texts on the command line, in a file, or on stdin."""

from __future__ import annotations

import argparse
import contextlib
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from ..contract import DEFAULT_BATCH, DEFAULT_PICTURES, HEAD_IMAGES, HEAD_TEXT
from ..errors import InputError, quoted
from .parsing import Parser

if TYPE_CHECKING:
    from ..data.readers import Text

DASH = "-"
FORMATS = ("txt", "tsv", "csv", "jsonl", "json")
CHUNK, CHUNK_CHARACTERS = 1024, 1 << 24
SOURCES = 'TEXT, --text TEXT, --file FILE, or - to read stdin, as in: adtp-run OUT "a wonderful film"'


class TextsParser(Parser):
    """A parser that takes texts before, between and after options."""

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        return self.parse_intermixed_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        of_text = ("argument --text", "argument --query", "argument --prompt")
        misread = message.startswith(of_text) and message.endswith("expected one argument")
        if misread or re.match(r"unrecognized arguments: -[^-]", message):
            message += "; a text that begins with - goes behind --, or into one word with its option, as in --text=-abc"
        super().error(message)


def add_texts(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "texts", metavar="TEXT", nargs="*", help="texts to answer, each in quotes; - reads texts from stdin"
    )
    parser.add_argument(
        "--text",
        "--question",
        dest="text",
        metavar="T",
        action="append",
        help="text to answer, or question; may be given several times",
    )
    parser.add_argument(
        "--file",
        metavar="F",
        type=place,
        help="file with the texts: .txt, .tsv, .csv or .jsonl; for questions also SQuAD's .json; each also .gz",
    )
    parser.add_argument(
        "--format",
        metavar="KIND",
        choices=FORMATS,
        help="format of stdin: txt (one text per line), tsv, csv, jsonl or json (default: txt)",
    )
    parser.add_argument(
        "--text-pair",
        "--context",
        dest="text_pair",
        metavar="T",
        action="append",
        help="second sentence of a pair, or context of a question; once for each --text",
    )
    parser.add_argument(
        "--text-column",
        metavar="C",
        help="text column of --file or stdin, or two separated by a comma for sentence pairs",
    )


def place(typed: str) -> Path | str:
    """Return a path, or a URI as it is."""
    return typed if "://" in typed else Path(typed)


def batch_size(given: int | None, head: str) -> int:
    """Return how many texts or pictures are run at once: as many as are asked for, or else what the head takes by default."""
    return given if given is not None else DEFAULT_PICTURES if head == HEAD_IMAGES else DEFAULT_BATCH


def settle(options: argparse.Namespace) -> None:
    """See that texts come from one place, and say it in the options that others read: `text` or `file`.

    Raises:
        InputError: none is named, or several, or an option belongs to another one.
    """
    from ..data.readers import STDIN

    typed = {"TEXT": options.texts, "--text": options.text, "--file": options.file}
    given = [name for name, value in typed.items() if value]
    if not given:
        raise InputError(f"there is nothing to answer; give {SOURCES}")
    if len(given) > 1:
        raise InputError(f"got texts by {' and by '.join(given)}; give them in one of these ways: {SOURCES}")
    reads_stdin = DASH in options.texts or options.file == Path(DASH)
    if options.format is not None and not reads_stdin:
        raise InputError("--format says what stdin holds, and files say it by their ending; add -, or leave it out")
    if reads_stdin:
        if len(options.texts) > 1:
            raise InputError(
                f"got - among {len(options.texts)} texts; type - alone to read stdin, or --text - for that text"
            )
        if options.ray:
            raise InputError("-: stdin does not go with --ray, which answers Parquet files; name them with --file")
        if sys.stdin is None:
            raise InputError("-: stdin is closed; send texts to it, or name a --file")
        options.file, options.texts = Path(f"{STDIN}.{options.format or FORMATS[0]}"), []
    elif options.texts:
        for text in options.texts:
            _check_no_file(text)
        options.text, options.texts = options.texts, []


def _check_no_file(text: str) -> None:
    """Raises InputError for a text that is the name of a file: its content was meant, most likely."""
    try:
        is_file = Path(text).is_file()
    except (OSError, ValueError):  # a text may be longer than names are, or hold what they cannot
        return
    if is_file:
        raise InputError(
            f"{quoted(text)} is a file here; type --file for the texts in it, or --text for the name itself"
        )


def read(options: argparse.Namespace) -> Iterable[Text]:
    """Return what is to be answered, once `settle` has seen the options.

    Raises:
        InputError: pairs that are none; while reading, as `data.readers.read_texts`.
    """
    from ..data.labelled import is_squad, read_questions
    from ..data.readers import STDIN, ending, read_texts

    if options.file is not None:
        if ending(options.file) == ".parquet":
            raise InputError(f"--file {options.file}: Parquet files go with --ray; add --ray --out DIR")
        if options.text_pair:
            raise InputError("--text-pair goes with texts; for a file or stdin say --text-column FIRST,SECOND")
        if is_squad(options.file):
            if options.text_column:
                raise InputError("--text-column: SQuAD's .json has no columns; leave it out")
            return ((asked.question, asked.context) for asked in read_questions(options.file, answered=False))
        if options.text_column and ending(options.file) == ".txt":
            told = (
                "stdin is read as lines of text; leave it out, or add --format jsonl"
                if options.file.stem == STDIN
                else f"{options.file} has lines of text; leave it out, or name a .tsv, .csv or .jsonl"
            )
            raise InputError(f"--text-column: {told}")
        return read_texts(options.file, options.text_column)
    if options.text_column:
        raise InputError("--text-column names a column of --file or stdin; leave it out, or name a --file")
    if not options.text_pair:
        texts: list[Text] = options.text
        return texts
    if len(options.text_pair) != len(options.text):
        raise InputError(f"--text-pair: got {len(options.text_pair)} for {len(options.text)} texts; give one for each")
    return list(zip(options.text, options.text_pair))


def instead_of_pairs(options: argparse.Namespace) -> str:
    """Return what to type where single texts are accepted, and pairs were given."""
    from ..data.labelled import is_squad

    if options.text_pair:
        return "leave --text-pair out"
    return "name a file of single texts" if is_squad(options.file) else "name one column with --text-column"


def head_of(options: argparse.Namespace) -> str:
    """Return what OUT answers with; "" where it has no manifest that can be read, which is for others to judge."""
    from ..artifacts.hub import located
    from ..artifacts.manifest import read_manifest

    place = located(options.out)
    try:
        head = str(read_manifest(Path(place)).checkpoint.get("head", ""))
    except InputError:
        return ""
    if head in (HEAD_IMAGES, HEAD_TEXT):  # their readers take directories alone
        options.out = str(place)
    return head


@contextlib.contextmanager
def naming_rows(before: int, count: int) -> Iterator[None]:
    """Say among which rows of the input an error counts, which names a text by its index among those that are answered at once.

    Args:
        before: rows that were answered already. count: rows that are answered now.
    """
    try:
        yield
    except InputError as error:
        if not before or not str(error).startswith("texts: "):
            raise
        raise InputError(f"rows {before + 1} to {before + count}: {error}") from error


def chunks(texts: Iterable[Text]) -> Iterator[tuple[int, list[Text]]]:
    """Yield what is answered at once, with the number of texts before it."""
    from ..data.truncate import portions

    before = 0
    for chunk in portions(texts, CHUNK_CHARACTERS, CHUNK):
        yield before, chunk
        before += len(chunk)
