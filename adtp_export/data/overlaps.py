"""Which texts overlap: rows that repeat each other count as one where a share of right answers gets its margin."""

from __future__ import annotations

import re
import unicodedata
from collections import defaultdict
from collections.abc import Iterable, Sequence

UNSPACED = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
)
"""Thai, Lao, Burmese, Khmer, kana and Han, which have no spaces between words: each character counts as a word."""
WORD = re.compile(rf"[{UNSPACED}]|[^\W{UNSPACED}]+")
SHARED_WORDS = 4
"""A shorter phrase stands in texts that have nothing else in common."""
SHARED_CHARACTERS = 8
"""The same where a character counts as a word."""


def normalized(text: str) -> str:
    """Return the words of a text in lower case, with one space between two; a text without words stays as it is."""
    return " ".join(filter(_is_word, WORD.findall(text.casefold()))) or text


def _is_word(found: str) -> bool:
    """Say whether what `WORD` finds is one: of characters without spaces it finds punctuation, too, and marks, which are parts of words."""
    return found.isalnum() or "_" in found or unicodedata.category(found).startswith("M")


class Sentences:
    """Texts of which none contains another, found again by their words."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._with_word: defaultdict[str, set[int]] = defaultdict(set)

    def add(self, text: str) -> int:
        self.texts.append(text)
        number = len(self.texts) - 1
        for word in text.split():
            self._with_word[word].add(number)
        return number

    def containing(self, phrase: str) -> list[int]:
        """Return the numbers of the texts that hold the words of `phrase` side by side."""
        candidates = set.intersection(*(self._with_word[word] for word in phrase.split()))
        return [i for i in candidates if f" {phrase} " in f" {self.texts[i]} "]


def overlapping(texts: Sequence[str]) -> list[int]:
    """Number the groups of texts that overlap, from 0 in order of appearance: one number per text.

    A text belongs to all texts that contain its words side by side, whatever their case and punctuation. With fewer than
    `SHARED_WORDS` words (`SHARED_CHARACTERS`, where characters count as words) it belongs to the first of them alone, and does not join
    them.
    """
    phrases = [normalized(text) for text in texts]
    sentences, holders = Sentences(), {}
    for phrase in sorted(set(phrases), key=lambda phrase: (-len(phrase.split()), phrase)):
        found = sorted(sentences.containing(phrase)) if phrase.strip() else []
        found = found or [sentences.add(phrase)]
        holders[phrase] = found if _says_much(phrase) else found[:1]
    roots = _connected(len(sentences.texts), holders.values())
    return _in_order(roots[holders[phrase][0]] for phrase in phrases)


def _says_much(phrase: str) -> bool:
    """Say whether texts that hold a phrase have more in common than a few words."""
    words = phrase.split()
    characters = len(re.findall(f"[{UNSPACED}]", phrase))
    return (len(words) - characters) / SHARED_WORDS + characters / SHARED_CHARACTERS >= 1


def joined(one: Sequence[int], other: Sequence[int]) -> list[int]:
    """Number the groups of rows that are in one group in either numbering, or by way of other rows, from 0 in order of appearance."""
    together: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    for which, numbers in enumerate((one, other)):
        for row, group in enumerate(numbers):
            together[which, group].append(row)
    return _in_order(_connected(len(one), together.values()))


def _connected(count: int, sets: Iterable[Sequence[int]]) -> list[int]:
    """Return one of the `count` things for each, the same for those that sets of them connect."""
    leads = list(range(count))

    def root(number: int) -> int:
        while leads[number] != number:
            leads[number] = leads[leads[number]]
            number = leads[number]
        return number

    for found in sets:
        for other in found[1:]:
            leads[root(other)] = root(found[0])
    return [root(number) for number in range(count)]


def _in_order(numbers: Iterable[int]) -> list[int]:
    order: dict[int, int] = {}
    return [order.setdefault(number, len(order)) for number in numbers]
