"""A vector for each token: how well a query's vectors are met by a document's, and how far vectors are those that are expected.

Source: Khattab and Zaharia, ColBERT (SIGIR 2020).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from ...errors import InputError, quoted
from . import embedding
from .sequence import order_kept

MAX_SCORES = 1 << 24
"""Of tokens with tokens that are held at once: 64 MB."""
_PAIRS, _DOCUMENTS = 64 * 64, 16
"""Scores that are compared, and with how many documents each text has one, at least."""

Several = Sequence[np.ndarray] | np.ndarray
"""Texts' vectors, ``(n_i, D)`` each."""


def answers(vectors: Sequence[np.ndarray], counts: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return the vectors of texts that count: of ``(n, D)`` those of the tokens ``counts (n,) bool`` that were not dropped."""
    return [found[some & found.any(1)] for found, some in zip(vectors, counts, strict=True)]


def maxsim(queries: Several, documents: Several) -> np.ndarray:
    """Score queries with documents: for each vector of a query its largest product with any of the document's, in sum.

    Args:
        queries, documents: fp32 ``(n_i, D)`` each, as `encode_query` and `encode_document` give them; one array is one text.

    Returns:
        ``(queries, documents) float32``; 0 for a query without vectors, and -inf for a document without any.

    Raises:
        InputError: arrays of another shape, or vectors of different lengths.
    """
    sides = [_several(side, name) for side, name in ((queries, "queries"), (documents, "documents"))]
    lengths = {each.shape[1] for side in sides for each in side}
    if len(lengths) > 1:
        raise InputError(
            f"maxsim: got vectors of {', '.join(map(str, sorted(lengths)))} numbers; accepted are those of one model"
        )
    scores = np.full((len(sides[0]), len(sides[1])), -np.inf, np.float32)
    longest = max((len(query) for query in sides[0]), default=0)
    for chosen in _blocks(sides[1], max(1, MAX_SCORES // max(1, longest))):
        found = [sides[1][i] for i in chosen]
        starts = np.cumsum([0, *(len(document) for document in found[:-1])])
        whole = np.concatenate(found).T
        for row, query in zip(scores, sides[0]):
            row[chosen] = np.maximum.reduceat(query @ whole, starts, axis=1).sum(0) if len(query) else 0
    return scores


def _several(side: Several, name: str) -> list[np.ndarray]:
    if not isinstance(side, Iterable):
        raise InputError(f"maxsim: got {quoted(side)} for {name}; accepted is a list of arrays (n, D), or one array")
    found = [side] if isinstance(side, np.ndarray) and side.ndim == 2 else list(side)
    for i, each in enumerate(found):
        if not isinstance(each, np.ndarray) or each.ndim != 2 or not np.issubdtype(each.dtype, np.floating):
            got = f"{each.dtype} {each.shape}" if isinstance(each, np.ndarray) else type(each).__name__
            raise InputError(
                f"maxsim: got {got} at index {i} of {name}; accepted are floating arrays (n, D), one for each text"
            )
    return found


def _blocks(documents: Sequence[np.ndarray], most: int) -> Iterator[list[int]]:
    """Yield which documents are scored at once: with so many vectors at most, or one document. Those without vectors are left out."""
    chosen: list[int] = []
    total = 0
    for i, document in enumerate(documents):
        if not len(document):
            continue
        if chosen and total + len(document) > most:
            yield chosen
            chosen, total = [], 0
        chosen.append(i)
        total += len(document)
    if chosen:
        yield chosen


def agreement(found: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> float:
    """Return the share of vectors that are nearer to what is expected than half the angle to any other vector of their text."""
    same = [
        embedding.agreement(vectors[live], wanted[live])
        for vectors, wanted, live in ((v, w, w.any(1)) for v, w in zip(found, expected, strict=True))
        if live.any()
    ]
    return float(np.concatenate(same).mean()) if same else 1.0


def smallest_cosine(found: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> float:
    """Return the smallest cosine of a vector with what is expected; vectors of dropped tokens, which are 0, do not count."""
    cosines = [
        embedding.cosines(vectors[live], wanted[live]).min()
        for vectors, wanted, live in ((v, w, w.any(1)) for v, w in zip(found, expected, strict=True))
        if live.any()
    ]
    return float(min(cosines, default=1.0))


def similarity_kept(found: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> float:
    """Return Spearman's correlation between the scores of all texts with the first ones and the expected scores, from -1 to 1. Of up to 64
    texts these are all pairs.

    It is 1 where nothing can change its place: of one text, or of scores that are all expected to be equal.
    """
    live = [[row[row.any(1)] for row in side] for side in (found, expected)]
    told = [i for i, (a, b) in enumerate(zip(*live)) if len(a) and len(b)]
    if len(told) < 2:
        return 1.0
    first = told[: max(_DOCUMENTS, _PAIRS // len(told))]
    scores, wanted = (maxsim([side[i] for i in told], [side[i] for i in first]).ravel() for side in live)
    return order_kept(scores[:, None], wanted[:, None])
