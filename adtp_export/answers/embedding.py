"""One vector for each text."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def answers(vectors: Sequence[np.ndarray], dimension: int) -> np.ndarray:
    """Return vectors ``(D,)`` as one array ``(rows, D) float32``, which has D = `dimension` where there are no rows."""
    return np.stack(vectors).astype(np.float32, copy=False) if len(vectors) else np.zeros((0, dimension), np.float32)
