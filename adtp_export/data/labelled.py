"""Rows whose labels lie inside the text: tagged words, and questions with their answers.

Both are JSON lines; questions may also be in SQuAD's own ``.json``. Each file may be ``.gz``. Tagged words are tokenized here, too, so that
each token says which word it comes from.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Encoding, Tokenizer

from ..errors import InputError, did_you_mean, ellipsize, quoted
from ..io import MAX_ROW
from .readers import ending, json_rows, opened, other_ending
from .tokenize import TokenizedText, read_whole, reading_texts, taken
from .truncate import MAX_CHARACTERS, Beginnings

TOKENS, TAGS = "tokens", "tags"
"""Columns of a file of tagged words."""
QUESTION, CONTEXT, ANSWERS = "question", "context", "answers"
"""Columns of a file of questions, named as in SQuAD."""
TEXT, START = "text", "answer_start"
"""Of answers."""


@dataclass(frozen=True)
class Question:
    """A question about a context. answers: parts of the context, none where it does not answer; starts: their first characters."""

    question: str
    context: str
    answers: tuple[str, ...]
    starts: tuple[int, ...]


def read_tagged(
    path: Path, tokens_column: str = TOKENS, tags_column: str = TAGS
) -> Iterator[tuple[list[str], list[str]]]:
    """Yield the words of each row and their tags: ``{"tokens": ["Ada", "sleeps"], "tags": ["B-PER", "O"]}``.

    Tags are names, or numbers, which are returned as text. Both lists have the same length, at least 1.

    Raises:
        InputError: unreadable file, not JSON lines, a column that is missing, or a malformed row, which is named by its number.
    """
    for where, row in _rows(path, (tokens_column, tags_column)):
        words = _words(row, tokens_column, where)
        tags = _listed(row[tags_column], f"{where}: {quoted(tags_column)}", (str, int), "tags")
        if len(words) != len(tags):
            raise InputError(f"{where} has {len(words)} words and {len(tags)} tags; accepted is one tag for each word")
        yield words, [str(tag) for tag in tags]


def read_words(path: Path, column: str = TOKENS) -> Iterator[list[str]]:
    """Yield the words of each row, without tags.

    Raises:
        InputError: as `read_tagged` says.
    """
    for where, row in _rows(path, (column,)):
        yield _words(row, column, where)


def holds_words(path: Path, column: str = TOKENS) -> bool:
    """Say whether the first row of a file has a list of words in a column, and not a text.

    Raises:
        InputError: unreadable file, or a first line that is no JSON object.
    """
    if ending(path) != ".jsonl":
        return False
    with opened(path, ".jsonl") as stream:
        return isinstance(next(json_rows(stream, path), {}).get(column), list)


def read_questions(path: Path, answered: bool = True) -> Iterator[Question]:
    """Yield the questions of a file in SQuAD's own format (``.json``, version 1 or 2), or of JSON lines.

    A line is ``{"question": "Who?", "context": "Ada.", "answers": {"text": ["Ada"], "answer_start": [0]}}``. Both lists are empty where
    the context has no answer. More fields are ignored.

    Args:
        answered: SQuAD's questions must have answers. Else they may have none, and those that are there are not read.

    Raises:
        InputError: unreadable file, one of another form, a column that is missing, or a malformed row, which is named by its number. So
            is an answer that does not stand where it should.
    """
    for where, row in (
        _squad(path, answered) if is_squad(path) else _rows(path, (QUESTION, CONTEXT, ANSWERS), " or SQuAD's .json")
    ):
        for name in (QUESTION, CONTEXT):
            if not isinstance(row[name], str):
                raise InputError(f"{where} has no text in {quoted(name)}")
        answers = row[ANSWERS]
        if not isinstance(answers, dict) or not {TEXT, START} <= answers.keys():
            raise InputError(
                f"{where}: 'answers' is {quoted(answers)}; accepted is "
                '{"text": [...], "answer_start": [...]}, both empty where there is no answer'
            )
        texts = _listed(answers[TEXT], f"{where}: 'text' of 'answers'", (str,), "texts")
        starts = _listed(answers[START], f"{where}: 'answer_start' of 'answers'", (int,), "numbers")
        _check_answers(row[CONTEXT], texts, starts, where)
        yield Question(row[QUESTION], row[CONTEXT], tuple(texts), tuple(starts))


def is_squad(path: Path) -> bool:
    """Say whether a file is SQuAD's nested document, by its name: ``.json``, also ``.gz``."""
    return ending(path) == ".json"


def _squad(path: Path, answered: bool) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield where each question of a file of SQuAD's is, for messages, and its fields as a JSON line would have them.

    Source: Rajpurkar et al., SQuAD 2.0 (ACL 2018), and its files.
    """
    with opened(path, ".json or .jsonl") as stream:
        text = stream.read(MAX_ROW + 1)
        if len(text) > MAX_ROW:
            raise InputError(
                f"{path}: got more than {MAX_ROW:,} characters; accepted is also .jsonl of any size, with a question in each line"
            )
        try:
            document = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise InputError(f"{path} is not readable JSON: {ellipsize(str(error))}") from error
    if isinstance(document, list):
        raise InputError(
            f"{path}: is a JSON list; accepted are SQuAD's form in .json, and one object in each line in .jsonl. Write it as .jsonl"
        )
    number = 0
    try:
        for article in document["data"]:
            for paragraph in article["paragraphs"]:
                for asked in paragraph["qas"]:
                    number += 1
                    answers = asked[ANSWERS] if answered and not asked.get("is_impossible") else []
                    listed = {name: [answer[name] for answer in answers] for name in (TEXT, START)}
                    row = {QUESTION: asked[QUESTION], CONTEXT: paragraph[CONTEXT], ANSWERS: listed}
                    yield f"{path}: question {number}", row
    except (KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"{path}: is not of SQuAD's form (data, paragraphs, context, qas, question, answers): {quoted(error)}; accepted is also "
            ".jsonl with question, context and answers in each row"
        ) from error
    if not number:
        raise InputError(f"{path}: holds no question")


def _words(row: Mapping[str, Any], column: str, where: str) -> list[str]:
    words = _listed(row[column], f"{where}: {quoted(column)}", (str,), "words")
    if not words:
        raise InputError(f"{where} has no words; leave such rows out")
    return words


def _check_answers(context: str, texts: list[str], starts: list[int], where: str) -> None:
    """Raises InputError where an answer has no place, or another text stands there."""
    if len(texts) != len(starts):
        raise InputError(f"{where} has {len(texts)} answers and {len(starts)} starts; accepted is one start for each")
    for text, start in zip(texts, starts):
        if not text.strip():
            raise InputError(
                f"{where}: got the answer {quoted(text)}; accepted are texts, and empty lists where there is no answer"
            )
        if start < 0 or not context.startswith(text, start):
            there = context[start : start + len(text)] if start >= 0 else ""
            raise InputError(
                f"{where}: the answer {quoted(text)} should begin at character {start} of the context, where {quoted(there)} is"
            )


def _rows(path: Path, columns: tuple[str, ...], others: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield where each row is, for messages, and its fields; all have the columns. `others` are accepted, too, says a message.

    Raises:
        InputError: as `read_tagged` says.
    """
    if ending(path) != ".jsonl":
        raise other_ending(path, f"is .jsonl{others}, also .gz, with {', '.join(columns)} in each row")
    number = 0
    with opened(path, ".jsonl") as stream:
        for number, row in enumerate(json_rows(stream, path), start=1):
            where = f"{path}: row {number}"
            for name in columns:
                if name not in row:
                    raise InputError(
                        f"{where} has no {quoted(name)}; it has {ellipsize(', '.join(row)) or 'no field'}{did_you_mean(name, row)}"
                    )
            yield where, row
    if not number:
        raise InputError(f"{path}: holds no rows")


def _listed(value: object, where: str, kinds: tuple[type, ...], what: str) -> list[Any]:
    """Return a list of values of these types; raises InputError where it is none."""
    if not isinstance(value, list) or not all(type(item) in kinds for item in value):
        raise InputError(f"{where} is {quoted(value)}; accepted is a list of {what}")
    return value


def encode_words(
    tokenizer: Tokenizer, rows: Sequence[Sequence[str]], max_tokens: int
) -> list[tuple[TokenizedText, list[int | None]]]:
    """Tokenize texts that are divided into words, with special tokens, each cut at `max_tokens`.

    Returns:
        For each row its tokens, and for each of them the number of its word, None for special tokens. A word after the cut, or
        one that the tokenizer leaves nothing of, has no token.

    Raises:
        InputError: a text that the tokenizer cannot read.
    """
    room = max_tokens - tokenizer.num_special_tokens_to_add(False)
    short = Beginnings(tokenizer, room)
    read = (_first_words(short, words) for words in rows)
    found = read_whole(tokenizer, read, words=True)
    return [
        _cut(encoding, room, sum(map(len, words)) <= MAX_CHARACTERS)
        for encoding, words in zip(found, rows, strict=True)
    ]


def _first_words(short: Beginnings, words: Sequence[str]) -> list[str]:
    """Return the words that are read of a text, the long ones cut: as many as have `MAX_CHARACTERS` together, and one at least.

    Words but the first begin with a space, as they do in a text: byte-level tokenizers tell the two apart.
    """
    found: list[str] = []
    held = 0
    with reading_texts():
        for word in words:
            if held >= MAX_CHARACTERS:
                break
            found.append(short.of(f" {word}" if found else word))
            held += len(found[-1])
    return found


def _cut(encoding: Encoding, room: int, whole: bool) -> tuple[TokenizedText, list[int | None]]:
    """Leave so many tokens of words, and all special ones; whole: no word is missing."""
    left_out = {*[i for i, side in enumerate(encoding.sequence_ids) if side is not None][room:]}
    stay, words = [i for i in range(len(encoding)) if i not in left_out], encoding.word_ids
    return taken(encoding, stay if left_out or not whole else None), [words[i] for i in stay]
