"""Where long texts are cut: what is read of them, without tokenizing all of it, and which of its tokens stay."""

from __future__ import annotations

from tokenizers import Encoding, Tokenizer, normalizers, pre_tokenizers


def uncut(tokenizer: Tokenizer) -> Tokenizer:
    """Have a tokenizer give all tokens of a text, and no padding, whatever its file says; return it."""
    tokenizer.no_padding()
    tokenizer.no_truncation()  # its own builds all combinations of what it cuts off two sides
    return tokenizer


def longest_first(first: int, second: int, room: int) -> tuple[int, int]:
    """Share `room` tokens between two sides that have more together, as `tokenizers` does."""
    less = min(first, second)
    if 2 * less > room:
        half = room // 2
        return (room - half, half) if first > second else (half, room - half)
    return (room - less, less) if first > second else (less, room - less)


_CHARACTERS = 16
"""Of a text's beginning, for each token that is read: words of a language with spaces are shorter."""
_REACH = 1000
_PIECE = 1 << 20


class Beginnings:
    """Cuts texts to a beginning whose tokens are the first tokens of the whole text, and more than `max_tokens`."""

    def __init__(self, tokenizer: Tokenizer, max_tokens: int) -> None:
        self._tokenizer, self._limit = tokenizer, max_tokens
        self._known: bool | None = None

    def of(self, text: str) -> str:
        """Return such a beginning; the whole text where it is short, or there is no place to cut it."""
        size = _CHARACTERS * (self._limit + 1)
        if size >= len(text):
            return text
        if self._known is None:
            self._known = splits_at_spaces(self._tokenizer)
        while self._known and size < len(text):
            place = _place(text, size)
            if place and len(self._tokenizer.encode(text[:place], add_special_tokens=False)) > self._limit:
                return text[:place]
            size *= 4
        return text


def count(tokenizer: Tokenizer, text: str) -> int:
    """Count the tokens of a text, without special ones, a piece at a time."""
    known, begin, total = splits_at_spaces(tokenizer), 0, 0
    while begin < len(text):
        end = begin + _PIECE
        while known and end < len(text) and not _place(text, end, begin):
            end += _PIECE
        end = _place(text, end, begin) if known and end < len(text) else len(text)
        total += len(tokenizer.encode(text[begin:end], add_special_tokens=False))
        begin = end
    return total


def staying(encoding: Encoding, tokenizer: Tokenizer, text: str | tuple[str, str], max_tokens: int) -> list[int] | None:
    """Choose the first `max_tokens` tokens of a text, or of the two sides of a pair together, as `longest_first` does; None for all."""
    pair = not isinstance(text, str)
    room = max_tokens - tokenizer.num_special_tokens_to_add(pair)
    if len(encoding) <= max_tokens or room < 0:
        return None
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


def _place(text: str, end: int, begin: int = 0) -> int:
    """Return a place up to `end`, and in reach of it, with a space after it and a letter, digit or ASCII sign before it; else 0.

    No normalizer removes such a character, or joins it with a space, so the place stays what it is: the end of a word.
    """
    least = max(begin, end - _REACH)
    while (end := text.rfind(" ", least + 1, end)) > 0:
        if text[end - 1].isalnum() or "!" <= text[end - 1] <= "~":
            return end
    return 0


_CHARACTERWISE = (
    normalizers.BertNormalizer,
    normalizers.Lowercase,
    normalizers.StripAccents,
    normalizers.NFC,
    normalizers.NFD,
    normalizers.NFKC,
    normalizers.NFKD,
)


def splits_at_spaces(tokenizer: Tokenizer) -> bool:
    """Whether the tokens before a `_place` depend on nothing after it, nor those after it on what is before.

    So it is where words are split at spaces, no word reaches beyond one (byte-level BPE gives a space to the word after it), normalizers
    see no farther than a space, and no added token holds a space or swallows the one after it.
    """
    words, normalizer = tokenizer.pre_tokenizer, tokenizer.normalizer
    byte_level = isinstance(words, pre_tokenizers.ByteLevel) and words.use_regex
    if not byte_level and not isinstance(words, (pre_tokenizers.BertPreTokenizer, pre_tokenizers.Whitespace)):
        return False
    if normalizer is not None and not isinstance(normalizer, _CHARACTERWISE):
        return False
    for token in tokenizer.get_added_tokens_decoder().values():
        forms = (token.content, normalizer.normalize_str(token.content) if normalizer else "")
        if token.rstrip or any(c.isspace() for form in forms for c in form):
            return False
    return True
