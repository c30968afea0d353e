"""Where an answer begins and ends: the best spans of a text, and how answers compare with true ones."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .sequence import points_lost

__all__ = [
    "LONGEST", "Span", "accuracy", "agreement", "best_spans", "exact_and_f1", "normalized", "points_lost", "quality",
    "told",
]  # fmt: skip

LONGEST = 30
"""Tokens of an answer, as transformers' pipeline has it; its default is 15 in the pipeline and 30 in its examples."""

_ARTICLES = re.compile(r"\b(a|an|the)\b")


class Span(NamedTuple):
    """Tokens from `start` to `end`, both included, and the sum of their logits."""

    start: int
    end: int
    score: float


def best_spans(
    start: np.ndarray, end: np.ndarray, allowed: np.ndarray, top: int = 1, longest: int = LONGEST
) -> list[Span]:
    """Return the best spans of a text, best first; fewer than `top` where there are no more.

    Args:
        start, end: logits ``(S,)``.
        allowed: ``(S,) bool``, tokens of the context.
        longest: tokens of a span, at most.
    """
    scores = np.add.outer(start.astype(np.float64), end.astype(np.float64))
    width = np.subtract.outer(np.arange(len(end)), np.arange(len(start))).T  # end - start
    scores[~(allowed[:, None] & allowed & (width >= 0) & (width < longest))] = -np.inf
    order = np.argsort(-scores, axis=None, kind="stable")[:top]
    spans = [Span(*map(int, divmod(int(i), len(end))), float(scores.flat[i])) for i in order]
    return [span for span in spans if np.isfinite(span.score)]


def told(start: np.ndarray, end: np.ndarray, allowed: np.ndarray, nothing_too: bool = False) -> Span | None:
    """Return the best span of a text; None where there is none.

    Args:
        start, end: logits ``(S,)``.
        allowed: ``(S,) bool``, tokens of the context.
        nothing_too: also None where the first token, which stands for no answer, scores higher.

    Source: Rajpurkar et al., SQuAD 2.0 (ACL 2018); the threshold is 0, as in transformers' examples.
    """
    best = next(iter(best_spans(start, end, allowed)), None)
    return None if best is None or (nothing_too and start[0] + end[0] > best.score) else best


def agreement(
    answered: Sequence[tuple[np.ndarray, np.ndarray]],
    expected: Sequence[tuple[np.ndarray, np.ndarray]],
    allowed: Sequence[np.ndarray],
) -> np.ndarray:
    """Say of each text whether its best span is the same, ``(texts,) bool``.

    Args:
        answered, expected: logits of start and end, each ``(S,)``, of each text.
        allowed: ``(S,) bool`` of each text, tokens of the context.
    """

    def place(logits: tuple[np.ndarray, np.ndarray], context: np.ndarray) -> tuple[int, int] | None:
        span = told(*logits, context)
        return None if span is None else (span.start, span.end)

    return np.array([place(a, c) == place(e, c) for a, e, c in zip(answered, expected, allowed, strict=True)], bool)


def accuracy(answered: Sequence[str], true: Sequence[Sequence[str]]) -> float:
    """Return the share of questions whose answer is exactly a true one."""
    return quality(answered, true)["exact"]


def normalized(text: str) -> list[str]:
    """Return the words of an answer in lower case, without punctuation and articles, as SQuAD's evaluation compares them."""
    bare = "".join(c for c in text.lower() if c not in string.punctuation)
    return _ARTICLES.sub(" ", bare).split()


def exact_and_f1(answered: str, true: Sequence[str]) -> tuple[float, float]:
    """Compare one answer with the true ones: the best exact match and the best F1 of words; "" is no answer."""
    found, best = normalized(answered), (0.0, 0.0)
    for truth in true or [""]:
        wanted = normalized(truth)
        shared = sum((Counter(found) & Counter(wanted)).values())
        f1 = 2 * shared / (len(found) + len(wanted)) if found and wanted else float(found == wanted)
        best = max(best[0], float(found == wanted)), max(best[1], f1)
    return best


def quality(answered: Sequence[str], true: Sequence[Sequence[str]]) -> dict[str, float]:
    """Score answers against the true ones of each question; no true answer, or "", means that there is none.

    Returns:
        "exact" and "f1" over all rows; where some have no answer, also "has_answer_f1" and "no_answer_accuracy". From 0 to 1.

    Source: Rajpurkar et al., SQuAD 2.0 (ACL 2018), and its evaluation script.
    """
    scores = np.array([exact_and_f1(a, t) for a, t in zip(answered, true, strict=True)]).reshape(-1, 2)
    has = np.array([any(normalized(text) for text in texts) for texts in true], bool)
    measures = {"exact": scores[:, 0].mean(), "f1": scores[:, 1].mean()}
    if has.any() and not has.all():
        measures |= {"has_answer_f1": scores[has, 1].mean(), "no_answer_accuracy": scores[~has, 0].mean()}
    return {name: float(value) for name, value in measures.items()}
