"""One answer per token: tags, and the entities that tags of the form B-X, I-X mark."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from .sequence import classification, points_lost

__all__ = ["OUTSIDE", "Entity", "accuracy", "agreement", "entities", "marks_entities", "points_lost", "quality"]

OUTSIDE = "O"


class Entity(NamedTuple):
    """Tagged words from `start` up to, not including, `end`."""

    label: str
    start: int
    end: int


def marks_entities(tags: Sequence[str]) -> bool:
    """Say whether tags are of the form ``O``, ``B-X``, ``I-X``."""
    return OUTSIDE in tags and all(tag == OUTSIDE or tag[:2] in ("B-", "I-") for tag in tags)


def entities(tags: Sequence[str]) -> Iterator[Entity]:
    """Yield the entities of a sequence of tags, as CoNLL's evaluation reads them.

    One begins at each B-, and at an I- whose label is another than that of the tag before it; it ends where its label does.

    Source: Tjong Kim Sang and De Meulder, CoNLL-2003 shared task, and its script conlleval.
    """
    start, label = 0, ""
    for i, tag in enumerate([*tags, OUTSIDE]):
        kind, name = (tag[:2], tag[2:]) if tag != OUTSIDE else ("", "")
        if label and (kind != "I-" or name != label):
            yield Entity(label, start, i)
            label = ""
        if name and not label:
            start, label = i, name


def agreement(logits: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Say of each live token of ``(tokens, tags)`` whether it has the same tag, ``(tokens,) bool``."""
    return np.equal(logits.argmax(-1), expected.argmax(-1))


def accuracy(answered: Sequence[Sequence[str]], true: Sequence[Sequence[str]]) -> float:
    """Return the share of words whose tag is right."""
    return quality(answered, true)["accuracy"]


def quality(answered: Sequence[Sequence[str]], true: Sequence[Sequence[str]]) -> dict[str, float]:
    """Score tags of words against true ones, text by text.

    Returns:
        "accuracy" of single tags. Where tags mark entities, "precision", "recall" and "f1" of whole entities, over all texts; else
        "f1_macro", the mean over tags that are answered or true. All from 0 to 1, and 0 where they are not defined.
    """
    flat = [tag for tags in answered for tag in tags], [tag for tags in true for tag in tags]
    names = sorted({*flat[0], *flat[1]})
    number = {name: i for i, name in enumerate(names)}
    measures = classification(*([number[tag] for tag in tags] for tags in flat), max(len(names), 3))
    if not marks_entities(names):
        return {name: measures[name] for name in ("accuracy", "f1_macro")}
    found, wanted = ({(i, *e) for i, tags in enumerate(side) for e in entities(tags)} for side in (answered, true))
    right = len(found & wanted)
    return {
        "accuracy": measures["accuracy"],
        "precision": right / max(len(found), 1),
        "recall": right / max(len(wanted), 1),
        "f1": 2 * right / max(len(found) + len(wanted), 1),
    }
