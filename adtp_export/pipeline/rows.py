"""Rows of a file as each head reads them: texts, pairs, tagged words, or questions, with labels where they are asked for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from ..contract import HEAD_EMBEDDING, HEAD_SPANS, HEAD_TOKENS
from ..errors import InputError
from ..labelled import (
    CONTEXT,
    QUESTION,
    TOKENS,
    encode_pairs,
    encode_words,
    holds_words,
    read_questions,
    read_tagged,
    read_words,
)
from ..text import Encoded, encode, read_rows
from .plan import Text

Row = tuple[Any, Any]
"""What is tokenized (a text, a pair, or words) and its label, or None: a class, a number, tags, or answers."""


def read(head: str, text: Text) -> Iterator[Row]:
    """Yield the rows of a file with their labels, where `text` names their column.

    Tagged words are read from columns of lists. Questions are pairs with their contexts, and labelled as in SQuAD.

    Raises:
        InputError: the file cannot be read, a column is missing, or a row is malformed.
    """
    column, label = text.column, text.label_column
    if head == HEAD_TOKENS and label:
        yield from read_tagged(text.file, column or TOKENS, label)
    elif head == HEAD_TOKENS and holds_words(text.file, column or TOKENS):
        yield from ((words, None) for words in read_words(text.file, column or TOKENS))
    elif head == HEAD_SPANS and label:
        for asked in read_questions(text.file):
            yield (asked.question, asked.context), asked.answers
    elif head == HEAD_SPANS and column is None and ".txt" not in text.file.suffixes:
        yield from read_rows(text.file, f"{QUESTION},{CONTEXT}")
    else:
        for found, value in read_rows(text.file, column, label):
            if head == HEAD_EMBEDDING and label and isinstance(found, str):
                raise InputError(
                    "--label-column: says how alike two texts are, and there is one text in a row; name both columns, such as "
                    "--text-column sentence1,sentence2"
                )
            yield found, value


@dataclass(frozen=True)
class Tokenized:
    """Rows for a model. places: of each token, where there are words or pairs: see `labelled`. each: rows of one row of the file."""

    rows: Sequence[Encoded]
    places: Sequence[Sequence[Any]] | None
    each: int = 1


def tokenize(head: str, tokenizer: Tokenizer, texts: Sequence[Any], max_tokens: int) -> Tokenized:
    """Tokenize what `read` gives. Vectors are of single texts: a pair is two of them.

    Raises:
        InputError: a text that the tokenizer cannot read.
    """
    pairs = isinstance(texts[0], tuple)
    if isinstance(texts[0], list) or (pairs and head == HEAD_SPANS):
        found: Sequence[tuple[Encoded, Sequence[Any]]] = (encode_pairs if pairs else encode_words)(
            tokenizer, texts, max_tokens
        )
        return Tokenized([row for row, _ in found], [places for _, places in found])
    if pairs and head == HEAD_EMBEDDING:
        return Tokenized(encode(tokenizer, [side for pair in texts for side in pair], max_tokens), None, 2)
    return Tokenized(encode(tokenizer, texts, max_tokens), None)
