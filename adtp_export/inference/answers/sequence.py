"""One answer for each text: a class, several labels, or a value (regression)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...errors import InputError

SINGLE_LABEL, MULTI_LABEL, REGRESSION = "single_label_classification", "multi_label_classification", "regression"
"""The kinds of problem, named as in transformers' configs."""

REGRESSION_TOLERANCE = 0.01
"""Regression rows agree when they differ by at most this much: the definition of the figure, not a verdict."""


@dataclass(frozen=True)
class Answer:
    """Answer for one text: the best label (None for regression), its score, and every label's score."""

    label: str | None
    score: float
    scores: dict[str, float]


def scores(logits: np.ndarray, problem_type: str) -> np.ndarray:
    """Turn ``logits (B, C)`` into fp64 scores of the same shape.

    Returns:
        Softmax for one class of several, the logistic function for several labels, the logits themselves for regression.
    """
    values = logits.astype(np.float64)
    if problem_type == SINGLE_LABEL:
        values = np.exp(values - values.max(1, keepdims=True))
        return values / values.sum(1, keepdims=True)
    return _logistic(values) if problem_type == MULTI_LABEL else values


def _logistic(values: np.ndarray) -> np.ndarray:
    small = np.exp(-np.abs(values))  # of the side that cannot overflow
    return np.where(values >= 0, 1, small) / (1 + small)


def answers(logits: np.ndarray, labels: Sequence[str], problem_type: str) -> list[Answer]:
    """Answer each row of ``logits (B, C)``.

    Args:
        labels: names of the C classes.

    Raises:
        InputError: there are more or fewer labels than C.
    """
    if logits.shape[1] != len(labels):
        raise InputError(f"the model gives {logits.shape[1]} values a row, and there are {len(labels)} labels")
    values = scores(logits, problem_type)
    best = values.argmax(1).tolist()  # lists: taking numbers out of arrays one by one is slow
    return [
        Answer(
            label=None if problem_type == REGRESSION else labels[first],
            score=row[first],
            scores=dict(zip(labels, row)),
        )
        for first, row in zip(best, values.tolist())
    ]


def ranking(values: np.ndarray, activation: str | None) -> np.ndarray:
    """Turn the one output of a reranker, ``(rows,)``, into fp64 scores: the logistic function, or the values as they are.

    Args:
        activation: the last word of torch's name for it, "Sigmoid" or "Identity"; None: "Sigmoid", as sentence-transformers has it.

    Raises:
        InputError: another one.
    """
    if activation not in (None, *ACTIVATIONS):
        raise InputError(f"the model's scores go through {activation!r}; accepted are {', '.join(ACTIVATIONS)}")
    return values.astype(np.float64) if activation == "Identity" else _logistic(values.astype(np.float64))


ACTIVATIONS = ("Sigmoid", "Identity")


def agreement(logits: np.ndarray, expected: np.ndarray, problem_type: str | None) -> np.ndarray:
    """Say of each row of ``(rows, C)`` whether the prediction is the same; regression: within `REGRESSION_TOLERANCE`."""
    if problem_type == REGRESSION or logits.shape[1] == 1:
        return (np.abs(logits - expected) <= REGRESSION_TOLERANCE).all(1)
    if problem_type == MULTI_LABEL:
        return ((logits > 0) == (expected > 0)).all(1)
    return np.equal(logits.argmax(1), expected.argmax(1))


def order_kept(values: np.ndarray, expected: np.ndarray) -> float:
    """Return Spearman's correlation between values ``(rows, C)`` and the expected ones, from -1 to 1; of several outputs, the least.

    It is 1 where nothing can change its place: of one row, or of values that are all expected to be equal, but for rounding in fp32.
    """
    several = np.ptp(expected, axis=0) > 8 * np.finfo(np.float32).eps * np.abs(expected).max(0)
    found = [spearman(own, wanted) for own, wanted in zip(values.T[several], expected.T[several])]
    return min(found, default=1.0)


def points_lost(before: float | None, after: float | None, agreeing: float) -> float:
    """Return percentage points lost of a measure against labels; where they are not known, of what agrees."""
    return 100 * (before - after if before is not None and after is not None else 1 - agreeing)


def quality(logits: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Score answers ``(rows, C)`` against ``labels (rows,)``, with the measures of GLUE.

    Returns:
        For two classes "accuracy", "f1" of class 1 and "matthews", Matthews' correlation. For more classes "accuracy",
        "f1_macro", the mean of all classes that are answered or true, and "matthews". Where C = 1, the correlations
        "spearman" and "pearson". Ratios are from 0 to 1, correlations from -1 to 1, and 0 where they are not defined.
    """
    if logits.shape[1] > 1:
        return classification(logits.argmax(1), np.asarray(labels), logits.shape[1])
    values, truth = logits[:, 0].astype(np.float64), np.asarray(labels, np.float64)
    pearson = 0.0 if _any_constant(values, truth) else _correlation(values, truth)
    return {"spearman": spearman(values, truth), "pearson": pearson}


def spearman(values: np.ndarray, truth: np.ndarray) -> float:
    """Return the correlation of ranks of two rows of numbers, ``(n,)``, from -1 to 1; 0 where all of one are equal."""
    values, truth = (np.asarray(row, np.float64) for row in (values, truth))
    return 0.0 if _any_constant(values, truth) else _correlation(_ranks(values), _ranks(truth))


def classification(answered: np.ndarray, true: np.ndarray, classes: int) -> dict[str, float]:
    """Score classes ``(rows,)`` against true ones, as `quality` says."""
    counts = np.zeros((classes, classes))
    np.add.at(counts, (true, answered), 1)
    right, answers, truths, rows = counts.diagonal(), counts.sum(0), counts.sum(1), counts.sum()
    f1 = 2 * right / np.maximum(answers + truths, 1)
    score = {"f1": f1[1]} if classes == 2 else {"f1_macro": f1[answers + truths > 0].mean()}
    # The correlation of K classes (Gorodkin 2004), which is Matthews' for two.
    spread = (rows**2 - answers @ answers) * (rows**2 - truths @ truths)
    matthews = (right.sum() * rows - answers @ truths) / np.sqrt(spread) if spread else 0.0
    measures = {"accuracy": right.sum() / rows, **score, "matthews": matthews}
    return {name: float(value) for name, value in measures.items()}


def _any_constant(*rows: np.ndarray) -> bool:
    return any(np.ptp(row) == 0 for row in rows)


def _ranks(values: np.ndarray) -> np.ndarray:
    """Rank from 1 on; equal values share the average of their ranks."""
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[place]


def _correlation(a: np.ndarray, b: np.ndarray) -> float:
    a, b = (x - x.mean() for x in (a, b))
    a, b = (x / np.abs(x).max() for x in (a, b))  # squares of tiny differences would vanish
    return float((a @ b) / np.sqrt((a @ a) * (b @ b)))
