"""Tokens that know where they stand in their text, for answers that point into it; and long texts in windows that overlap."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tokenizers import Encoding, Tokenizer

from ..errors import InputError, check_int, did_you_mean, quoted
from .readers import Text
from .tokenize import TokenizedText, check_tokens, read_whole, reading_texts, tokenized
from .truncate import Beginnings, check_unicode


@dataclass(frozen=True)
class Windows:
    """How the contexts of questions are read; what is not said is as in transformers' `QuestionAnsweringPipeline`.

    max_tokens: tokens that the model reads at once, those of the question included. stride: tokens of a context that neighbouring
    windows share, at most half a window. max_answer_tokens: tokens of an answer, at most.

    Raises:
        InputError: a number out of range.
    """

    max_tokens: int = 384
    stride: int = 128
    max_answer_tokens: int = 15

    def __post_init__(self) -> None:
        for name, least in MINIMUM.items():
            check_int(f"windows.{name}", getattr(self, name), least)

    def changed(self, numbers: Mapping[str, Any]) -> Windows:
        """Return the same with some numbers changed; raises InputError for one of another name, or out of range."""
        wrong = [name for name in numbers if name not in MINIMUM] if isinstance(numbers, Mapping) else [numbers]
        if wrong:
            hint = did_you_mean(str(wrong[0]), MINIMUM)
            raise InputError(f"windows: got {quoted(wrong[0])}; accepted are numbers named {', '.join(MINIMUM)}{hint}")
        return replace(self, **numbers)

    def within(self, longest: int) -> Windows:
        """Return the windows of a model that reads at most so many tokens; they overlap by half at most."""
        window = min(self.max_tokens, longest)
        return replace(self, max_tokens=window, stride=min(self.stride, window // 2))


MINIMUM = {"max_tokens": 4, "stride": 0, "max_answer_tokens": 1}
"""The least that each number of `Windows` may be. A window of BERT holds three special tokens, and a token at least."""


@dataclass(frozen=True)
class TextWithOffsets:
    """One tokenized text.

    row: what the model reads. offsets: of each token, the characters of its own side, from and up to. words: the number of its word, and
    sides: 0 or 1 for the first or second text of a pair; both None for special tokens.
    """

    row: TokenizedText
    offsets: list[tuple[int, int]]
    words: list[int | None]
    sides: list[int | None]

    @classmethod
    def of(cls, encoding: Encoding, chosen: Sequence[list[int] | None], truncated: bool) -> list[TextWithOffsets]:
        """Take tokens by their places, in order, as often as they are chosen; None stands for all.

        Time is linear in the tokens of the whole and those that are chosen: `tokenizers` makes a list of the whole each time it is asked.
        """
        lists: Any = (encoding.ids, encoding.type_ids, encoding.offsets, encoding.word_ids, encoding.sequence_ids)
        found = (lists if stay is None else [[values[i] for i in stay] for values in lists] for stay in chosen)
        return [cls(TokenizedText(ids, types, truncated), *rest) for ids, types, *rest in found]


def encode_placed(tokenizer: Tokenizer, texts: Sequence[Text], max_tokens: int) -> list[TextWithOffsets]:
    """Tokenize as `data.tokenize.encode` does, with the same errors, and say where each token is."""
    found = tokenized(tokenizer, texts, max_tokens)
    placed = [TextWithOffsets.of(encoding, [stay], stay is not None)[0] for encoding, stay in found]
    check_tokens((each.row for each in placed), texts)
    return placed


def encode_windows(
    tokenizer: Tokenizer, pairs: Sequence[tuple[str, str]], windows: Windows
) -> list[list[TextWithOffsets]]:
    """Tokenize pairs whose second text may be long: it is read in windows, each with the whole first text before it.

    Neighbours share half of what fits of the second text, where no more of it fits than `windows.stride`.

    Returns:
        For each pair its windows, at least one. A first text that is longer than half a window is cut there; `truncated` says so.

    Raises:
        InputError: a text that is no valid Unicode, a second one of more than `MAX_CONTEXT` characters, or one that the tokenizer
            cannot read.
    """
    special = tokenizer.num_special_tokens_to_add(True)
    asked = Beginnings(tokenizer, windows.max_tokens)
    found = []
    for encoding in read_whole(tokenizer, ((_question(asked, pair[0]), _context(pair[1])) for pair in pairs)):
        chosen, whole = _windows(encoding.sequence_ids, windows, special)
        found.append(TextWithOffsets.of(encoding, chosen, truncated=not whole))
    return found


MAX_CONTEXT = 1 << 20
"""Characters of a context, which is read whole: those of two long novels. A gigabyte of memory at most, and 60 windows or more a novel."""


def _question(asked: Beginnings, question: str) -> str:
    with reading_texts():
        return asked.of(question)


def _context(context: str) -> str:
    """Raises InputError for one that is too long, or no valid Unicode."""
    check_unicode(context)
    if len(context) > MAX_CONTEXT:
        raise InputError(
            f"context: got {len(context):,} characters; accepted are at most {MAX_CONTEXT:,}. Divide it, and ask each part"
        )
    return context


def _windows(sides: Sequence[int | None], windows: Windows, special: int) -> tuple[list[list[int] | None], bool]:
    """Return the tokens of each window, None for all, and whether the first text is whole. Steps are those of `tokenizers`."""
    window, overlap = windows.max_tokens, min(windows.stride, windows.max_tokens // 2)
    if len(sides) <= window:
        return [None], True
    asked, long = ([i for i, side in enumerate(sides) if side == number] for number in (0, 1))
    left_out = set(asked[max(min(window // 2, window - special - 1), 0) :])
    around = [i for i, side in enumerate(sides) if side != 1 and i not in left_out]
    before, after = ([i for i in around if (i > long[0]) == late] for late in (False, True)) if long else (around, [])
    room = max(window - special - (len(asked) - len(left_out)), 1)
    step = room - (overlap if overlap < room else room // 2)
    found: list[list[int] | None] = []
    for begin in range(0, max(len(long), 1), step):
        found.append([*before, *long[begin : begin + room], *after])
        if begin + room >= len(long):
            break
    return found, not left_out
