"""Queries and documents with a vector for each token, and all three answers of a hybrid model, through a session."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ..contract import DEFAULT_BATCH, HEAD_HYBRID, OUTPUTS, SENTENCE_EMBEDDING, TOKEN_EMBEDDINGS, TOKEN_WEIGHTS
from ..data.sides import DOCUMENT, Sides
from ..data.tokenize import TokenizedText, pad
from ..errors import InputError
from .answers import embedding, vectors
from .answers.sparse import SparseEmbedding
from .asked import as_strings
from .batch_runner import BatchRunner
from .session import Session, put_before
from .sparse_encoding import SparseEncoding


class Hybrid(NamedTuple):
    """Three answers to the same texts. dense: ``(rows, D) float32``. sparse: weights of tokens, one `SparseEmbedding` for each text.
    vectors: ``(n_i, D) float32`` for each text, one row for each token but the first."""

    dense: np.ndarray
    sparse: list[SparseEmbedding]
    vectors: list[np.ndarray]


class MultiVector:
    """One call of a predictor.

    Args:
        side: "query" or "document". prompt, batch_size: as of `BatchRunner`.
    """

    def __init__(self, session: Session, batch_size: int, prompt: str, side: str = DOCUMENT) -> None:
        self._of, self._prompt, self._side = session, prompt, side
        self._runs, self._sides = BatchRunner(session, batch_size, False), session.sides or Sides()

    def vectors(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the vectors of each text that count, ``(n_i, D) float32``: none for tokens that were dropped, or that are skipped."""
        rows = self._rows(texts)
        return self._counted(rows, self._run(rows, [TOKEN_EMBEDDINGS]))

    def sparse(self, texts: Sequence[str]) -> list[SparseEmbedding]:
        """Return the weights of each text's tokens; of a token that comes several times the largest."""
        rows = self._rows(texts)
        return self._weighted(rows, self._run(rows, [TOKEN_WEIGHTS]))

    def hybrid(self, texts: Sequence[str], dimension: int, first: int) -> Hybrid:
        """Return all three from one run of each text; `dimension`: length of the dense vectors, of which the `first` numbers are taken."""
        rows = self._rows(texts)
        found = self._run(rows, list(OUTPUTS[HEAD_HYBRID]))
        dense = embedding.answers([each[SENTENCE_EMBEDDING] for each in found], dimension)[:, :first]
        return Hybrid(np.ascontiguousarray(dense), self._weighted(rows, found), self._counted(rows, found))

    def _rows(self, texts: Sequence[str]) -> list[TokenizedText]:
        prompted: Sequence[str] = put_before(self._prompt, texts)  # type: ignore[assignment] # of strings alone
        return self._sides.encode(self._of.tokenizer, prompted, self._side, self._of.max_tokens)

    def _run(self, rows: Sequence[TokenizedText], names: Sequence[str]) -> list[Mapping[str, np.ndarray]]:
        """Return outputs of each text, those of tokens without padding."""
        answers: dict[int, Mapping[str, np.ndarray]] = {}
        for chosen in self._runs.divided(rows):
            found = self._of.outputs(pad([rows[i] for i in chosen], self._of.pad_id, self._of.inputs), names)
            for place, i in enumerate(chosen):
                n = len(rows[i].input_ids)
                answers[i] = {
                    name: found[name][place] if name == SENTENCE_EMBEDDING else found[name][place, :n].copy()
                    for name in names
                }
        return [answers[i] for i in range(len(rows))]

    def _counted(self, rows: Sequence[TokenizedText], found: Sequence[Mapping[str, np.ndarray]]) -> list[np.ndarray]:
        counts = [self._sides.counts(row.input_ids, self._side) for row in rows]
        return vectors.answers([each[TOKEN_EMBEDDINGS] for each in found], counts)

    def _weighted(
        self, rows: Sequence[TokenizedText], found: Sequence[Mapping[str, np.ndarray]]
    ) -> list[SparseEmbedding]:
        return [self._heaviest(row.input_ids, each[TOKEN_WEIGHTS]) for row, each in zip(rows, found)]

    def _heaviest(self, ids: Sequence[int], weights: np.ndarray) -> SparseEmbedding:
        indices, place = np.unique(np.asarray(ids, np.int64), return_inverse=True)
        values = np.zeros(len(indices), np.float32)
        np.maximum.at(values, place, weights)
        stay = (values > 0) & ~np.isin(indices, self._sides.unweighted)
        return SparseEmbedding(indices[stay].astype(np.int32), values[stay])


class MultiVectorEncoding(SparseEncoding):
    """What a `Predictor` has for models with vectors of tokens, beside `encode_query`, `encode_document` and `rank`."""

    def encode_hybrid(
        self,
        texts: str | Iterable[str],
        *,
        prompt_name: str | None = None,
        prompt: str | None = None,
        batch_size: int = DEFAULT_BATCH,
        truncate_dim: int | None = None,
    ) -> Hybrid:
        """Give a dense vector, weights of tokens and vectors of tokens of each text, from one run, as `BGEM3FlagModel.encode` does.

        Args:
            texts, prompt_name, prompt, batch_size: as of `encode`. truncate_dim: as of `encode`; of the dense vectors.

        Raises:
            InputError: the model has another head; or as `encode` does.
        """
        self._expect(HEAD_HYBRID, what="encode_hybrid is")
        runs = MultiVector(self, batch_size, self._prompt(prompt_name, prompt))
        return runs.hybrid(as_strings(texts, "texts"), *self._dimensions(truncate_dim))

    def encode_sparse(
        self,
        texts: str | Iterable[str],
        *,
        prompt_name: str | None = None,
        prompt: str | None = None,
        batch_size: int = DEFAULT_BATCH,
        max_active_dims: int | None = None,
    ) -> list[SparseEmbedding]:
        """Turn texts into sparse vectors, as `SparseEncoding.encode_sparse` says; of a hybrid model these are the weights of its tokens."""
        if self.head != HEAD_HYBRID:
            return super().encode_sparse(
                texts, prompt_name=prompt_name, prompt=prompt, batch_size=batch_size, max_active_dims=max_active_dims
            )
        if max_active_dims is not None:
            raise InputError(
                f"max_active_dims: got {max_active_dims}; a hybrid model has weights for a text's own tokens, so leave it out"
            )
        return MultiVector(self, batch_size, self._prompt(prompt_name, prompt)).sparse(as_strings(texts, "texts"))

    def _vectors(
        self, texts: str | Iterable[str], side: str, prompt: str, batch_size: int, truncate_dim: int | None
    ) -> list[np.ndarray]:
        """Return the vectors of each text's tokens."""
        if truncate_dim is not None:
            raise InputError(
                f"truncate_dim: got {truncate_dim}; a vector for each token is taken whole, so leave it out"
            )
        return MultiVector(self, batch_size, prompt, side).vectors(as_strings(texts, "texts"))
