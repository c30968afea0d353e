"""Where long texts are cut: what is read of them, without tokenizing all of it, and which of its tokens stay."""

from __future__ import annotations

import base64
import functools
import json
import sys
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tokenizers import Encoding, Regex, Tokenizer, normalizers

from ..errors import InputError, ellipsize


def longest_first(first: int, second: int, room: int) -> tuple[int, int]:
    """Share `room` tokens between two sides that have more together, as `tokenizers` does."""
    less = min(first, second)
    if 2 * less > room:
        half = room // 2
        return (room - half, half) if first > second else (half, room - half)
    return (room - less, less) if first > second else (less, room - less)


MAX_CHARACTERS = 1 << 18
"""Of a text, those that are read at most, where so many give fewer tokens than the model reads. They take up to 250 MB."""
_CHARACTERS = 8
"""Of a text's beginning, for each token that is read: a token of most languages has fewer, and four times as many come next."""
_SEARCHED = 1000
_PATTERN = 16
"""Characters of a string that a normalizer replaces or a pre-tokenizer splits at, at most; byte-level BPE looks three ahead, for "'ll"."""
_GROWTH = 8
"""Characters that a normalizer may make of one, at most."""


class Beginnings:
    """Cuts texts to a beginning whose tokens are the first tokens of the whole text, and more than `max_tokens`."""

    def __init__(self, tokenizer: Tokenizer, max_tokens: int) -> None:
        unset(tokenizer)
        self._tokenizer, self._limit = tokenizer, max_tokens

    def of(self, text: str) -> str:
        """Return such a beginning; where there is none, or the text is short, its first `MAX_CHARACTERS`.

        Raises:
            InputError: it is no valid Unicode.
        """
        text = text[:MAX_CHARACTERS]
        check_unicode(text)
        size = _CHARACTERS * (self._limit + 1)
        while size < len(text) and self._reach is not None:
            end = _seam(text, size)
            if end:
                beginning = self._tokenizer.encode(text[:end], add_special_tokens=False)
                if settled(beginning, text, end, self._reach) > self._limit:
                    return text[:end]
            size *= 4
        return text

    @functools.cached_property
    def _reach(self) -> int | None:
        return reach(self._tokenizer)


def count(tokenizer: Tokenizer, text: str) -> int:
    """Count the tokens of what is read of a text, without special ones."""
    return len(tokenizer.encode(text[:MAX_CHARACTERS], add_special_tokens=False))


def check_unicode(text: str, where: str = "text") -> None:
    """Raises InputError for a text that is no valid Unicode (lone surrogates), and says where it is."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        other = sys.getfilesystemencoding() != "utf-8"
        then = "; this locale is not UTF-8: type PYTHONUTF8=1 before the command" if other else ""
        raise InputError(f"{where}: got {text[:40]!r}, which is not valid Unicode ({error.reason}){then}") from error


def portions(texts: Iterable[Any], most: int = MAX_CHARACTERS, most_texts: int | None = None) -> Iterator[list[Any]]:
    """Divide texts, pairs, or lists of words, in their order: each portion has at most so many characters and texts, or one text."""
    portion: list[Any] = []
    held = 0
    for text in texts:
        size = len(text) if isinstance(text, str) else sum(map(len, text)) + len(text)
        if portion and held + size > most:
            yield portion
            portion, held = [], 0
        portion.append(text)
        held += size
        if len(portion) == most_texts:  # before another text is asked for, which may wait for this one's answer
            yield portion
            portion, held = [], 0
    if portion:
        yield portion


def staying(encoding: Encoding, tokenizer: Tokenizer, text: str | tuple[str, str], max_tokens: int) -> list[int] | None:
    """Choose the first `max_tokens` tokens of a text, or of the two sides of a pair together, as `longest_first` does; None for all.

    Where a text is longer than what is read of it, all tokens are chosen by their places, for they are not all of the text.
    """
    pair = not isinstance(text, str)
    room = max_tokens - tokenizer.num_special_tokens_to_add(pair)
    if len(encoding) <= max_tokens or room < 0:
        read = all(len(part) <= MAX_CHARACTERS for part in (text if pair else (text,)))
        return None if read else list(range(len(encoding)))
    owners = encoding.sequence_ids
    kept: tuple[int, ...] = (room,)
    if pair:
        lengths = (owners.count(0), owners.count(1))
        if room % 2 and min(lengths) > room:  # the longer side gets the odd token
            lengths = (count(tokenizer, text[0]), count(tokenizer, text[1]))
        kept = longest_first(*lengths, room)
    seen, stay = [0, 0], []
    for i, owner in enumerate(owners):
        if owner is None or seen[owner] < kept[owner]:
            stay.append(i)
        if owner is not None:
            seen[owner] += 1
    return stay


def settled(beginning: Encoding, text: str, end: int, reach: int) -> int:
    """Count the first tokens that a text's beginning, up to its seam `end`, has in common with whatever text begins so.

    Words are settled where `reach` plain characters are between them and the seam. Words end where the offsets of their tokens say, but
    for space that is trimmed; so one word more is left out.
    """
    place, seen = end, 0
    while place and seen < reach:
        place -= 1
        seen += plain(text[place])
    words = [word or 0 for word in beginning.word_ids]
    beyond = next(
        (words[i] for i, (_, last) in enumerate(beginning.offsets) if last > place), words[-1] if words else 0
    )
    return next((i for i, word in enumerate(words) if word >= beyond - 1), 0)


def _seam(text: str, end: int) -> int:
    """Return the last place up to `end` where a text can be divided, so that its normal form is that of both parts; 0 for none near.

    A plain character is before it, and one or a space after it: no normal form joins, reorders or removes these.
    """
    return next(
        (
            i
            for i in range(end, max(end - _SEARCHED, 0), -1)
            if plain(text[i - 1]) and (text[i] == " " or plain(text[i]))
        ),
        0,
    )


@functools.lru_cache(1 << 14)
def plain(character: str) -> bool:
    """Whether a character is a visible one of ASCII, or a letter or number that stands by itself.

    It begins with no mark in any normal form, is no part of a Hangul syllable, and begins a grapheme (Unicode's annexes 15 and 29).
    """
    if "!" <= character <= "~":
        return True
    if not character.isalnum() or character > "\ud7a3" or character == "\u0d4e":
        return False
    first = unicodedata.normalize("NFKD", character)[0]
    jamo = "\u1100" <= character <= "\u11ff" or "\ua960" <= character <= "\ua97f" or "\u1160" <= first <= "\u11ff"
    return unicodedata.category(first)[0] in "LN" and not jamo


_LOCAL_NORMALIZERS = {
    "BertNormalizer", "ByteLevel", "Lowercase", "NFC", "NFD", "NFKC", "NFKD", "Nmt", "Precompiled", "Prepend", "Strip", "StripAccents",
}  # fmt: skip
_LOCAL_PRE_TOKENIZERS = {
    "BertPreTokenizer", "ByteLevel", "Digits", "Metaspace", "Punctuation", "Whitespace", "WhitespaceSplit",
}  # fmt: skip


_SPACES = {"Regex": " {2,}"}


def reach(tokenizer: Tokenizer) -> int | None:
    """Return on how many plain characters after a word its tokens depend, at most; None where that is not known.

    It is known where normalizers and pre-tokenizers look at single characters, at graphemes, at short strings, or at runs of one kind. An
    added token that begins in a word is no longer than the longest one; nor is space that it swallows, for plain characters end that.
    """
    normalizer, shrinks = tokenizer.normalizer, 1
    steps = [(step, _LOCAL_NORMALIZERS) for step in parts(normalizer)]
    steps += [(step, _LOCAL_PRE_TOKENIZERS) for step in parts(tokenizer.pre_tokenizer)]
    for step, local in steps:
        if step["type"] in local or step.get("pattern") == _SPACES:
            continue
        pattern = step.get("pattern", {}).get("String", "")
        least, lost = len(step.get("content", pattern)), sum(map(plain, pattern))
        if not 0 < len(pattern) <= _PATTERN or (lost and not least):
            return None
        shrinks *= max(-(-lost // max(least, 1)), 1)
    contents = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
    forms = [normalizer.normalize_str(content) for content in contents] if normalizer else []
    return shrinks * (max(map(len, (*contents, *forms)), default=0) + _PATTERN * (len(steps) + 1))


def parts(component: Any) -> list[Mapping[str, Any]]:
    """Return the settings of a tokenizer's normalizer or pre-tokenizer, as `tokenizer.json` has them: of a sequence, those of each part."""

    def flat(state: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
        inner = state.get("normalizers", state.get("pretokenizers"))
        if inner is None:
            yield state
        for part in inner or ():
            yield from flat(part)

    if component is None:
        return []
    try:
        return list(flat(json.loads(component.__getstate__())))
    except Exception:  # of one that is written in Python, tokenizers raises bare Exception
        return [{"type": "Custom"}]


def read_tokenizer(path: Path, then: str) -> Tokenizer:
    """Read a `tokenizer.json`, as `prepared` returns it.

    Args:
        then: what to do where it is damaged.

    Raises:
        InputError: it is damaged; or as `prepared`.
    """
    try:
        tokenizer = Tokenizer.from_buffer(path.read_bytes())  # from_file opens no path that is not UTF-8
    except Exception as error:  # tokenizers raises bare Exception
        raise InputError(f"{path} is damaged ({ellipsize(str(error))}); {then}") from error
    return prepared(tokenizer)


def prepared(tokenizer: Tokenizer) -> Tokenizer:
    """Return a tokenizer that was just loaded, when it is seen to be fit for texts of any length, and without its own padding and cuts.

    Raises:
        InputError: its normalizer multiplies texts.
    """
    check_growth(tokenizer)
    unset(tokenizer)
    return tokenizer


def unset(tokenizer: Tokenizer) -> None:
    """Have a tokenizer neither pad nor cut nor draw: its own truncation builds all combinations of what it cuts off two sides.

    Setting takes a lock that reading texts holds, and a process that is forked meanwhile waits for ever; so it is set only once.
    """
    if tokenizer.padding is not None:
        tokenizer.no_padding()
    if tokenizer.truncation is not None:
        tokenizer.no_truncation()
    draw_nothing(tokenizer)


def draw_nothing(tokenizer: Tokenizer) -> None:
    """Have a tokenizer make the same tokens of a text each time: a dropout is for training."""
    if getattr(tokenizer.model, "dropout", None):
        tokenizer.model.dropout = None


def check_growth(tokenizer: Tokenizer) -> None:
    """See that a normalizer does not multiply texts: what is read of them is bounded in characters.

    Raises:
        InputError: it may make more than `_GROWTH` characters of one.
    """
    grown = 1.0
    for step in parts(tokenizer.normalizer):
        grown *= _growth(step)
        if grown > _GROWTH:
            raise InputError(
                f"the tokenizer's normalizer may make {grown:,.0f} characters of one ({step['type']}); accepted are at most {_GROWTH}. "
                "Give the model's own tokenizer"
            )


def _growth(step: Mapping[str, Any]) -> float:
    """Return how many characters one part of a normalizer makes of one, at most. Normal forms make up to 18, and are not counted."""
    if step["type"] == "Precompiled":
        table = base64.b64decode(step["precompiled_charsmap"])
        longest = max(
            map(len, table[4 + int.from_bytes(table[:4], "little") :].split(b"\0"))
        )  # Source: SentencePiece, normalizer.cc
        return 1 if longest <= _LONGEST_FORM else longest
    if step["type"] == "Prepend":
        return max(len(step["prepend"]), 1)
    if step["type"] != "Replace":
        return 1
    content, pattern = step["content"], step["pattern"]
    if string := pattern.get("String"):
        return max(len(content) / len(string), 1)
    everywhere = normalizers.Replace(Regex(pattern.get("Regex", "")), content).normalize_str("")
    return max(len(content), 1) + len(everywhere)


_LONGEST_FORM = 64
"""Bytes of a character's compatibility form; of Unicode's own, U+FDFA has the longest: 33."""
