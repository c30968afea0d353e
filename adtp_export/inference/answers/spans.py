"""Where an answer begins and ends: the best spans of a text, and how answers compare with true ones."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from ...data.windows import TextWithOffsets

MORE = 10
"""Spans looked at beyond twice those asked for: several may be of the same words."""

_ARTICLES = re.compile(r"\b(a|an|the)\b")


class Span(NamedTuple):
    """Tokens from `start` to `end`, both included, and the sum of their logits."""

    start: int
    end: int
    score: float


@dataclass(frozen=True)
class Part:
    """Characters `start` up to `end` of a context, which are `text`; "" stands for no answer. score: probability, from 0 to 1."""

    text: str
    start: int
    end: int
    score: float


@dataclass(frozen=True)
class SpanAnswers:
    """What a context answers. parts: best first. no_answer: probability that it does not. window: the best one's, by number."""

    parts: list[Part]
    no_answer: float
    window: int


def best_spans(start: np.ndarray, end: np.ndarray, allowed: np.ndarray, longest: int, top: int = 1) -> list[Span]:
    """Return the best spans of a text, best first; fewer than `top` where there are no more.

    Args:
        start, end: logits ``(S,)``.
        allowed: ``(S,) bool``, tokens of the context.
        longest: tokens of a span, at most.
    """
    width = min(longest, len(end))
    ends = np.concatenate([np.where(allowed, end.astype(np.float64), -np.inf), np.full(width, -np.inf)])
    reached = np.lib.stride_tricks.sliding_window_view(ends, width)[: len(start)]  # (S, width), from each start on
    scores = (np.where(allowed, start.astype(np.float64), -np.inf)[:, None] + reached).reshape(-1)
    order = np.argsort(-scores, kind="stable")[:top]
    return [
        Span(int(i // width), int(i // width + i % width), float(scores[i])) for i in order if np.isfinite(scores[i])
    ]


def answers(
    context: str,
    windows: Sequence[tuple[np.ndarray, TextWithOffsets]],
    longest: int,
    top: int = 1,
    may_be_none: bool = False,
) -> SpanAnswers:
    """Find the answers of one question in the windows of its context.

    A window's probabilities are over its context and its first token, which stands for no answer. Answers are whole words. Those of the
    same text are one answer: in a window their probabilities are added, and of several windows the one with the greatest sum counts.
    transformers adds over windows, too, where a sum of what several windows are sure of is no probability: it reaches their number.

    Args:
        windows: of each its logits ``(S, 2)`` of start and end, and its tokens.
        longest: tokens of an answer, at most.
        top: answers to return, at most.
        may_be_none: no answer is an answer, too.

    Source: `QuestionAnsweringPipeline` of transformers 4.
    """
    found: dict[str, tuple[Part, int]] = {}
    none = 1.0
    for number, (logits, placed) in enumerate(windows):
        own, beside = _of_window(context, logits, placed, longest, 2 * top + MORE)
        none = min(none, beside)
        for key, part in own.items():
            if key not in found or part.score > found[key][0].score:
                found[key] = part, number
    listed = list(found.values())
    if may_be_none or not listed:
        listed.append((Part("", 0, 0, none), 0))
    listed = sorted(listed, key=lambda item: -item[0].score)[:top]
    return SpanAnswers([part for part, _ in listed], none, listed[0][1])


def _of_window(
    context: str, logits: np.ndarray, placed: TextWithOffsets, longest: int, top: int
) -> tuple[dict[str, Part], float]:
    """Return the answers of one window, by their text in lower case, and the probability that it has none."""
    inside = np.array([side == 1 for side in placed.sides])
    counted = inside.copy()
    counted[0] = True
    start, end = (_log_softmax(side, counted) for side in logits.astype(np.float64).T)
    found: dict[str, Part] = {}
    for span in best_spans(start, end, inside, longest, top):
        first, last = _characters(placed, span)
        text, score = context[first:last], float(np.exp(span.score))
        best = found.setdefault(text.lower(), Part(text, first, last, 0.0))
        found[text.lower()] = replace(best, score=min(best.score + score, 1.0))  # the sum of all is 1, but for rounding
    return found, min(float(np.exp(start[0] + end[0])), 1.0)


def _log_softmax(logits: np.ndarray, counted: np.ndarray) -> np.ndarray:
    """Return log probabilities ``(S,)`` over the tokens that count; what the others have means nothing."""
    most = logits[counted].max()
    result: np.ndarray = logits - most - np.log(np.exp(logits[counted] - most).sum())
    return result


def _characters(placed: TextWithOffsets, span: Span) -> tuple[int, int]:
    """Return the characters of a span, from and up to, widened to whole words where the tokenizer has words."""
    first, last = (placed.words[i] for i in (span.start, span.end))
    if first is None or last is None:
        return placed.offsets[span.start][0], placed.offsets[span.end][1]
    begin, end = span.start, span.end
    while begin > 0 and (placed.words[begin - 1], placed.sides[begin - 1]) == (first, 1):
        begin -= 1
    while end + 1 < len(placed.words) and (placed.words[end + 1], placed.sides[end + 1]) == (last, 1):
        end += 1
    return placed.offsets[begin][0], placed.offsets[end][1]


def told(start: np.ndarray, end: np.ndarray, allowed: np.ndarray, longest: int) -> tuple[int, int] | None:
    """Return the first and the last token of the best span of a text; None where there is none. Arguments are those of `best_spans`."""
    return next(((span.start, span.end) for span in best_spans(start, end, allowed, longest)), None)


def normalized(text: str) -> list[str]:
    """Return the words of an answer in lower case, without punctuation and articles, as SQuAD's evaluation compares them."""
    bare = "".join(c for c in text.lower() if c not in string.punctuation)
    return _ARTICLES.sub(" ", bare).split()


def exact_and_f1(answered: str, true: Sequence[str]) -> tuple[float, float]:
    """Compare one answer with the true ones: the best exact match and the best F1 of words; "" is no answer.

    True answers without words, such as "the", do not count beside others, as in SQuAD's evaluation.
    """
    found, best = normalized(answered), (0.0, 0.0)
    for wanted in [words for text in true if (words := normalized(text))] or [[]]:
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
