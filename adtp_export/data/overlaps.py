"""Which texts overlap: rows that repeat each other count as one where a share of right answers gets its margin."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence

WORD = re.compile(r"\w+")
SHARED_WORDS = 4
"""A shorter phrase stands in texts that have nothing else in common."""


def normalized(text: str) -> str:
    """Return the words of a text in lower case, with one space between two; a text without words stays as it is."""
    return " ".join(WORD.findall(text.casefold())) or text


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
    `SHARED_WORDS` words it belongs to the first of them alone, and does not join them.
    """
    phrases = [normalized(text) for text in texts]
    sentences, holders = Sentences(), {}
    for phrase in sorted(set(phrases), key=lambda phrase: (-len(phrase.split()), phrase)):
        found = sorted(sentences.containing(phrase)) if phrase.strip() else []
        found = found or [sentences.add(phrase)]
        holders[phrase] = found if len(phrase.split()) >= SHARED_WORDS else found[:1]
    joined = list(range(len(sentences.texts)))

    def root(number: int) -> int:
        while joined[number] != number:
            joined[number] = joined[joined[number]]
            number = joined[number]
        return number

    for found in holders.values():
        for other in found[1:]:
            joined[root(other)] = root(found[0])
    order: dict[int, int] = {}
    return [order.setdefault(root(holders[phrase][0]), len(order)) for phrase in phrases]
