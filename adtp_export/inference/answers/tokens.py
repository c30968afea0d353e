"""One answer per token: tags, and the entities that tags of the form B-X, I-X mark."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ...errors import InputError, did_you_mean, quoted
from .sequence import SINGLE_LABEL, classification, scores

OUTSIDE = "O"
AGGREGATIONS = ("none", "simple", "first", "average", "max")
"""How tokens become entities, named as in transformers. none: each token alone. simple: neighbours of one label are joined. The others
give each word one label before: of its first token, of the mean of its tokens' scores, or of its surest token."""


class Token(NamedTuple):
    """A token's place in the list of a text's tokens, its characters `start` up to `end`, and whether it goes on with a word."""

    place: int
    start: int
    end: int
    inside: bool


@dataclass(frozen=True, kw_only=True)
class Tagged:
    """Characters `start` up to `end` of a text, which are `text`, their label, and its score from 0 to 1."""

    label: str
    text: str
    start: int
    end: int
    score: float


def answers(
    logits: np.ndarray, tokens: Sequence[Token], text: str, labels: Sequence[str], aggregation: str
) -> list[Tagged]:
    """Say what the tokens of a text are; those of label "O" are left out.

    Args:
        logits: ``(S, labels)``, one row for each place of a token.
        tokens: all but special ones.
        aggregation: of `AGGREGATIONS`. Labels ``B-X`` and ``I-X`` become ``X``, except with "none".

    Raises:
        InputError: an unknown aggregation, or another number of labels than the model gives.

    Source: `TokenClassificationPipeline` of transformers.
    """
    check_aggregation(aggregation)
    if logits.shape[1] != len(labels):
        raise InputError(f"the model gives {logits.shape[1]} values a token, and there are {len(labels)} labels")
    if not tokens:
        return []
    sure = scores(logits[[token.place for token in tokens]], SINGLE_LABEL)
    words = _words(sure, tokens, aggregation)
    best = [(labels[int(row.argmax())], float(row.max()), start, end) for row, start, end in words]
    if aggregation == "none":
        found = [(label, score, start, end) for label, score, start, end in best if label != OUTSIDE]
    else:
        found = [group for group in _joined(best) if group[0] != OUTSIDE]
    return [
        Tagged(label=label, text=text[start:end], start=start, end=end, score=score)
        for label, score, start, end in found
    ]


def check_aggregation(name: str) -> None:
    """Raises InputError for an unknown one."""
    if name not in AGGREGATIONS:
        raise InputError(
            f"aggregation: got {quoted(name)}; accepted are {', '.join(AGGREGATIONS)}{did_you_mean(str(name), AGGREGATIONS)}"
        )


def usual_aggregation(labels: Sequence[str]) -> str:
    """How tokens become answers where nothing is said: whole entities where labels mark them, else words."""
    return "simple" if marks_entities(labels) else "none"


def _words(sure: np.ndarray, tokens: Sequence[Token], aggregation: str) -> list[tuple[np.ndarray, int, int]]:
    """Return the scores ``(labels,)`` and the place of each word; of each token with "none" and "simple"."""
    if aggregation in ("none", "simple"):
        return [(row, token.start, token.end) for row, token in zip(sure, tokens)]
    begins = [i for i, token in enumerate(tokens) if i == 0 or not token.inside]
    words = []
    for begin, end in zip(begins, [*begins[1:], len(tokens)]):
        rows = sure[begin:end]
        row = {"first": rows[0], "average": rows.mean(0), "max": rows[int(rows.max(1).argmax())]}[aggregation]
        words.append((row, tokens[begin].start, tokens[end - 1].end))
    return words


def _joined(words: Sequence[tuple[str, float, int, int]]) -> Iterator[tuple[str, float, int, int]]:
    """Join neighbours of one label; a label ``B-X`` always begins a new group. The score is the mean."""
    group: list[tuple[str, float, int, int]] = []
    for word in [*words, None]:
        if word is not None and group and not word[0].startswith("B-") and _kind(word[0]) == _kind(group[-1][0]):
            group.append(word)
            continue
        if group:
            label = group[0][0].split("-", 1)[-1]
            yield label, float(np.mean([score for _, score, _, _ in group])), group[0][2], group[-1][3]
        group = [word] if word is not None else []


def _kind(label: str) -> str:
    return label[2:] if label[:2] in ("B-", "I-") else label


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


def quality(answered: Sequence[Sequence[str]], true: Sequence[Sequence[str]], tags: Sequence[str]) -> dict[str, float]:
    """Score tags of words against true ones, text by text.

    Args:
        tags: all that the model knows; they decide which measures there are, whatever these texts hold.

    Returns:
        "accuracy" of single tags. Where tags mark entities, "precision", "recall" and "f1" of whole entities, over all texts; else
        "f1_macro", the mean over tags that are answered or true. All from 0 to 1, and 0 where they are not defined.
    """
    flat = [tag for tags in answered for tag in tags], [tag for tags in true for tag in tags]
    names = sorted({*flat[0], *flat[1]})
    number = {name: i for i, name in enumerate(names)}
    classes = [np.array([number[tag] for tag in tags]) for tags in flat]
    measures = classification(classes[0], classes[1], max(len(names), 3))
    if not marks_entities(tags):
        return {name: measures[name] for name in ("accuracy", "f1_macro")}
    found, wanted = ({(i, *e) for i, row in enumerate(side) for e in entities(row)} for side in (answered, true))
    right = len(found & wanted)
    return {
        "accuracy": measures["accuracy"],
        "precision": right / max(len(found), 1),
        "recall": right / max(len(wanted), 1),
        "f1": 2 * right / max(len(found) + len(wanted), 1),
    }
