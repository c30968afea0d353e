"""Rows whose labels lie inside the text: tagged words, and questions with their answers. Both are JSON lines, also ``.gz``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import InputError, cut, did_you_mean, shown
from .text import json_rows, opened

QUESTION, CONTEXT, ANSWERS = "question", "context", "answers"
"""Columns of a file of questions, named as in SQuAD."""


@dataclass(frozen=True)
class Question:
    """A question about a context. answers: parts of the context, none where it does not answer; starts: their first characters."""

    question: str
    context: str
    answers: tuple[str, ...]
    starts: tuple[int, ...]


def read_tagged(
    path: Path, tokens_column: str = "tokens", tags_column: str = "tags"
) -> Iterator[tuple[list[str], list[str]]]:
    """Yield the words of each row and their tags: ``{"tokens": ["Ada", "sleeps"], "tags": ["B-PER", "O"]}``.

    Tags are names, or numbers, which are returned as text. Both lists have the same length, at least 1.

    Raises:
        InputError: unreadable file, not JSON lines, a column that is missing, or a malformed row, which is named by its number.
    """
    for where, row in _rows(path, (tokens_column, tags_column)):
        words = _listed(row[tokens_column], f"{where}: {shown(tokens_column)}", (str,), "words")
        tags = _listed(row[tags_column], f"{where}: {shown(tags_column)}", (str, int), "tags")
        if not words:
            raise InputError(f"{where} has no words; leave such rows out")
        if len(words) != len(tags):
            raise InputError(f"{where} has {len(words)} words and {len(tags)} tags; accepted is one tag for each word")
        yield words, [str(tag) for tag in tags]


def read_questions(path: Path) -> Iterator[Question]:
    """Yield questions as SQuAD has them: ``{"question": "Who?", "context": "Ada.", "answers": {"text": ["Ada"], "answer_start": [0]}}``.

    Both lists are empty where the context has no answer. More fields are ignored.

    Raises:
        InputError: unreadable file, not JSON lines, a column that is missing, or a malformed row, which is named by its number. So
            is an answer that does not stand where it should.
    """
    for where, row in _rows(path, (QUESTION, CONTEXT, ANSWERS)):
        for name in (QUESTION, CONTEXT):
            if not isinstance(row[name], str):
                raise InputError(f"{where} has no text in {shown(name)}")
        answers = row[ANSWERS]
        if not isinstance(answers, dict) or not {"text", "answer_start"} <= answers.keys():
            raise InputError(
                f"{where}: 'answers' is {shown(answers)}; accepted is "
                '{"text": [...], "answer_start": [...]}, both empty where there is no answer'
            )
        texts = _listed(answers["text"], f"{where}: 'text' of 'answers'", (str,), "texts")
        starts = _listed(answers["answer_start"], f"{where}: 'answer_start' of 'answers'", (int,), "numbers")
        _check_answers(row[CONTEXT], texts, starts, where)
        yield Question(row[QUESTION], row[CONTEXT], tuple(texts), tuple(starts))


def _check_answers(context: str, texts: list[str], starts: list[int], where: str) -> None:
    """Raises InputError where an answer has no place, or another text stands there."""
    if len(texts) != len(starts):
        raise InputError(f"{where} has {len(texts)} answers and {len(starts)} starts; accepted is one start for each")
    for text, start in zip(texts, starts):
        if not text or start < 0 or not context.startswith(text, start):
            there = context[start : start + len(text)] if start >= 0 else ""
            raise InputError(
                f"{where}: the answer {shown(text)} should begin at character {start} of the context, where {shown(there)} is"
            )


def _rows(path: Path, columns: tuple[str, ...]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield where each row is, for messages, and its fields; all have the columns.

    Raises:
        InputError: as `read_tagged` says.
    """
    kinds = [suffix for suffix in path.suffixes[-2:] if suffix != ".gz"]
    if kinds[-1:] != [".jsonl"]:
        raise InputError(
            f"{path}: got a file ending in {shown(kinds[-1] if kinds else 'nothing')}; accepted is .jsonl, also .gz, with "
            f"{', '.join(columns)} in each row"
        )
    number = 0
    with opened(path, ".jsonl") as stream:
        for number, row in enumerate(json_rows(stream, path), start=1):
            where = f"{path}: row {number}"
            for name in columns:
                if name not in row:
                    raise InputError(
                        f"{where} has no {shown(name)}; it has {cut(', '.join(row)) or 'no field'}{did_you_mean(name, row)}"
                    )
            yield where, row
    if not number:
        raise InputError(f"{path}: holds no rows")


def _listed(value: object, where: str, kinds: tuple[type, ...], what: str) -> list[Any]:
    """Return a list of values of these types; raises InputError where it is none."""
    if not isinstance(value, list) or not all(type(item) in kinds for item in value):
        raise InputError(f"{where} is {shown(value)}; accepted is a list of {what}")
    return value
