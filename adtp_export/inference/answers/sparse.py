"""One sparse vector per text: the weights of the vocabulary's tokens that are not 0."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class SparseEmbedding:
    """A sparse vector, in the form that Qdrant and fastembed take.

    indices: ``(n,) int32``, ids of tokens, rising. values: ``(n,) float32``, their weights, all above 0.
    """

    indices: np.ndarray
    values: np.ndarray

    def to_json(self) -> dict[str, list[Any]]:
        """Return both as lists, for JSON and ``qdrant_client.models.SparseVector(**fields)``."""
        return {"indices": self.indices.tolist(), "values": self.values.tolist()}

    def tokens(self, tokenizer: Any) -> Mapping[str, float]:
        """Return the weight of each token by its text, the largest first; `tokenizer` is that of `load(OUT).tokenizer`.

        Vocabularies of models are often rounded up. An id that the tokenizer does not know is named ``[id]``.
        """
        order = np.argsort(-self.values, kind="stable")
        named = ((int(self.indices[i]), float(self.values[i])) for i in order)
        return {f"[{i}]" if (token := tokenizer.id_to_token(i)) is None else token: value for i, value in named}


def answer(weights: np.ndarray, most: int | None = None) -> SparseEmbedding:
    """Return a text's vector of the weights of all tokens, ``(V,)``.

    Args:
        most: of the weights the largest ones stay, so many; of equal ones those with the lower ids. None: all.
    """
    (indices,) = np.nonzero(weights > 0)
    if most is not None and len(indices) > most:
        largest = np.argsort(-weights[indices], kind="stable")[:most]
        indices = np.sort(indices[largest])
    return SparseEmbedding(indices.astype(np.int32), weights[indices].astype(np.float32))
