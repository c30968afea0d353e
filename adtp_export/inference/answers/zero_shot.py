"""Labels that the caller gives: how well a text entails a sentence about each.

Source: Yin et al., Benchmarking Zero-shot Text Classification (EMNLP 2019); `ZeroShotClassificationPipeline` of transformers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence, Set

import numpy as np

from ...errors import InputError, quoted
from .sequence import SINGLE_LABEL, scores

HYPOTHESIS = "This example is {}."
ENTAILMENT = "entail"
"""What the name of the label begins with that says that the first text entails the second."""


def entailment(labels: Sequence[str]) -> int | None:
    """Return the number of a model's label for entailment; None where no name says it."""
    return next((i for i, label in enumerate(labels) if label.lower().startswith(ENTAILMENT)), None)


def checked(labels: object) -> list[str]:
    """Return labels as a list; a string is divided at commas.

    Raises:
        InputError: no labels, or something else than strings.
    """
    if isinstance(labels, str):
        labels = [label.strip() for label in labels.split(",") if label.strip()]
    if not isinstance(labels, Iterable) or isinstance(labels, (Mapping, Set, bytes, bytearray)):
        raise InputError(f"labels: got {quoted(labels)}; accepted is a list of strings, or one string with commas")
    listed = list(labels)
    if not listed or not all(isinstance(label, str) for label in listed):
        raise InputError(f"labels: got {quoted(listed)}; accepted are strings, at least one")
    return listed


def hypotheses(labels: Sequence[str], template: object) -> list[str]:
    """Return a sentence about each label.

    Raises:
        InputError: a template without a place for the label.
    """
    written: list[str] = []
    with contextlib.suppress(LookupError, ValueError, AttributeError, TypeError):
        if isinstance(template, str) and template.format("0") != template.format("1"):
            written = [template.format(label) for label in labels]
    if not written:
        raise InputError(
            f"hypothesis_template: got {quoted(template)}; accepted is a sentence with {{}} where the label stands, such as {HYPOTHESIS!r}"
        )
    return written


def answers(logits: np.ndarray, entails: int, multi_label: bool) -> list[tuple[list[int], list[float]]]:
    """Return for each text the numbers of its labels, best first, and their probabilities.

    Args:
        logits: ``(texts, labels, C)`` of a text with a sentence about each label.
        entails: which of the C classes is entailment. Contradiction is the first class, or the last where entailment is the first.
        multi_label: each label is judged alone, entailment against contradiction; so is a single label.
    """
    if multi_label or logits.shape[1] == 1:
        against = logits[:, :, [-1 if entails == 0 else 0, entails]]
        values = scores(against.reshape(-1, 2), SINGLE_LABEL)[:, 1].reshape(logits.shape[:2])
    else:
        values = scores(logits[:, :, entails], SINGLE_LABEL)
    found = []
    for row in values:
        order = row.argsort()[::-1]
        found.append((order.tolist(), row[order].tolist()))
    return found
