"""Rows of a file as each head reads them: texts, pairs, tagged words, or questions, with labels where they are asked for."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from ..contract import (
    HEAD_SPANS,
    HEAD_TOKENS,
    HEAD_VECTORS,
    VECTORS,
)
from ..errors import InputError
from .labelled import (
    CONTEXT,
    QUESTION,
    TOKENS,
    encode_words,
    holds_words,
    is_squad,
    read_questions,
    read_tagged,
    read_words,
)
from .readers import ending, read_rows
from .sides import SIDES, Sides
from .template import ChatTemplate
from .tokenize import TokenizedText, encode
from .windows import Windows, encode_windows

ONE_TEXT = (
    "--label-column: says how alike two texts are, and there is one text in a row; name both columns, such as "
    "--text-column sentence1,sentence2"
)
"""What is wrong with labels of texts that get vectors."""


@dataclass(frozen=True)
class TextSource:
    """Rows of a file: its columns, and how many rows to take (None: as many as the sample's bounds allow)."""

    file: Path
    column: str | None
    label_column: str | None = None
    rows: int | None = None


Row = tuple[Any, Any]
"""What is tokenized (a text, a pair, or words) and its label, or None: a class, a number, tags, or answers."""


def read(head: str, text: TextSource) -> Iterator[Row]:
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
    elif head == HEAD_SPANS and (label or is_squad(text.file)):
        for asked in read_questions(text.file, answered=bool(label)):
            yield (asked.question, asked.context), asked.answers if label else None
    elif head == HEAD_SPANS and column is None and ending(text.file) != ".txt":
        yield from read_rows(text.file, f"{QUESTION},{CONTEXT}")
    else:
        for found, value in read_rows(text.file, column, label):
            if head in VECTORS and label and isinstance(found, str):
                raise InputError(ONE_TEXT)
            yield found, value


@dataclass(frozen=True)
class TokenizedRows:
    """Rows for a model.

    owners: for each row the number of its text, from 0 on, in order: a pair is two rows for vectors, and a context is as many as it has
    windows. places: of each row, where there are any: `windows.TextWithOffsets` of windows, or the words of tokens.
    """

    rows: Sequence[TokenizedText]
    owners: Sequence[int]
    places: Sequence[Any] | None = None

    @property
    def texts(self) -> int:
        """How many there are."""
        return self.owners[-1] + 1

    def first(self, most: float, cost: Callable[[np.ndarray], np.ndarray] = lambda tokens: tokens) -> TokenizedRows:
        """Return the first texts that cost at most so much together, and at least one.

        Args:
            cost: of rows by their numbers of tokens, ``(rows,)`` both.
        """
        ends = np.cumsum(cost(np.array([len(row.input_ids) for row in self.rows])))
        over = next((owner for owner, end in zip(self.owners, ends) if end > most), self.texts)
        stay = sum(owner < max(over, 1) for owner in self.owners)
        return TokenizedRows(self.rows[:stay], self.owners[:stay], self.places and self.places[:stay])


def tokenize(
    head: str,
    tokenizer: Tokenizer,
    texts: Sequence[Any],
    max_tokens: int,
    windows: Windows,
    around: ChatTemplate | Sides | None = None,
) -> TokenizedRows:
    """Tokenize what `read` gives. Vectors are of single texts: a pair is two of them.

    Args:
        windows: how contexts are read. around: what stands around texts. Where a model tells queries from documents, every other text is
            a query.

    Raises:
        InputError: a text that the tokenizer cannot read.
    """
    alone = list(range(len(texts)))
    if isinstance(texts[0], list):
        rows, words = zip(*encode_words(tokenizer, texts, max_tokens))
        return TokenizedRows(rows, alone, words)
    if isinstance(texts[0], tuple) and head == HEAD_SPANS:
        found = encode_windows(tokenizer, texts, windows)
        placed = [window for own in found for window in own]
        return TokenizedRows([window.row for window in placed], [i for i, own in enumerate(found) for _ in own], placed)
    if isinstance(texts[0], tuple) and head in (*VECTORS, HEAD_VECTORS):
        texts = [side for pair in texts for side in pair]
        alone = [i // 2 for i in range(len(texts))]
    if isinstance(around, ChatTemplate):
        return TokenizedRows(around.encode(tokenizer, texts, max_tokens), alone)
    if around is not None:
        sides = itertools.cycle(SIDES)
        read = [around.encode(tokenizer, [text], side, max_tokens)[0] for text, side in zip(texts, sides)]
        return TokenizedRows(read, alone)
    return TokenizedRows(encode(tokenizer, texts, max_tokens), alone)
