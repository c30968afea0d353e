"""One vector per text: how near vectors are to one another, and how well that matches what people judged."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .sequence import order_kept
from .sequence import quality as correlations


def answers(vectors: Sequence[np.ndarray], dimension: int) -> np.ndarray:
    """Return vectors ``(D,)`` as one array ``(rows, D) float32``, which has D = `dimension` where there are no rows."""
    return np.stack(vectors).astype(np.float32, copy=False) if len(vectors) else np.zeros((0, dimension), np.float32)


def cosines(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return the cosines of vectors ``(rows, D)``, row by row, in fp64; 0 where one has no length."""
    return np.asarray((_unit(a) * _unit(b)).sum(1))


def nearness(vectors: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Return the cosines of vectors with what is expected, row by row. A sparse vector may have no weight at all: 1 where neither has."""
    empty = ~(vectors.any(1) | expected.any(1))
    return np.where(empty, 1.0, cosines(vectors, expected))


def agreement(vectors: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Say of each row of ``(rows, D)`` whether it is still nearer to its own text than to any other, ``(rows,) bool``.

    That is so where its cosine with what is expected is above that of half the angle to the nearest other text. So the bound comes
    from the texts. A text alone has no other; the same vector twice counts as one.
    """
    unit = _unit(expected)
    between = np.clip(unit @ unit.T, -1, 1)
    angles = np.where(between >= 1 - 8 * np.finfo(vectors.dtype).eps, np.inf, np.arccos(between))
    bound = np.cos(np.minimum(angles.min(1), np.pi) / 2)
    return nearness(vectors, expected) > bound


def similarity_kept(vectors: np.ndarray, expected: np.ndarray) -> float:
    """Return Spearman's correlation between the cosines of all pairs of rows ``(rows, D)`` and the expected ones, from -1 to 1.

    It is 1 where all pairs stay in the same order; so it is where there is one pair at most, or all are expected to be equally near.
    """
    above = np.triu_indices(len(vectors), 1)
    if len(above[0]) < 2:
        return 1.0
    found, wanted = ((_unit(side) @ _unit(side).T)[above] for side in (vectors, expected))
    return order_kept(found[:, None], wanted[:, None])


def quality(found: np.ndarray, true: np.ndarray) -> dict[str, float]:
    """Compare cosines of pairs ``(pairs,)`` with what people judged: "spearman" and "pearson", from -1 to 1."""
    return correlations(found[:, None], true)


def _unit(vectors: np.ndarray) -> np.ndarray:
    """Return vectors ``(rows, D)`` in fp64, of length 1; those without length stay."""
    precise = vectors.astype(np.float64)
    lengths = np.linalg.norm(precise, axis=1, keepdims=True)
    return precise / np.where(lengths > 0, lengths, 1)
