"""Texts as sparse vectors, as `SparseEncoder` of sentence-transformers gives them."""

from __future__ import annotations

from collections.abc import Iterable

from ..contract import DEFAULT_BATCH, HEAD_SPARSE
from ..data.sides import DOCUMENT, QUERY
from ..errors import check_int
from .answers.sparse import SparseEmbedding
from .asked import Asked, as_strings
from .batch_runner import BatchRunner


class SparseEncoding(Asked):
    """What a `Predictor` has for models with the head "sparse"."""

    def encode_sparse(
        self,
        texts: str | Iterable[str],
        *,
        prompt_name: str | None = None,
        prompt: str | None = None,
        batch_size: int = DEFAULT_BATCH,
        max_active_dims: int | None = None,
    ) -> list[SparseEmbedding]:
        """Turn texts into sparse vectors, as `SparseEncoder.encode` does.

        Args:
            texts: one text, or what gives several in an order.
            prompt_name, prompt: as of `encode`.
            batch_size: as in a call.
            max_active_dims: keep the largest weights of each vector, so many; default: the model's own default, mostly all.

        Returns:
            One vector for each text, in their order.

        Raises:
            InputError: the model gives no sparse vectors, more weights than tokens in the vocabulary; or as `encode` does.
        """
        self._expect(HEAD_SPARSE, what="encode_sparse is")
        listed, whole = as_strings(texts, "texts"), self._config.vocab_size
        if max_active_dims is not None:
            check_int("max_active_dims", max_active_dims, 1, whole)
        runs = BatchRunner(self, batch_size, False, self._prompt(prompt_name, prompt))
        return runs.sparse_vectors(listed, max_active_dims or self._config.adtp.max_active_dims)

    def encode_sparse_query(
        self,
        texts: str | Iterable[str],
        *,
        prompt_name: str | None = None,
        prompt: str | None = None,
        batch_size: int = DEFAULT_BATCH,
        max_active_dims: int | None = None,
    ) -> list[SparseEmbedding]:
        """Turn queries into sparse vectors: `encode_sparse` with the prompt that `encode_query` takes."""
        prompt_name, prompt = self._usual(QUERY, prompt_name, prompt)
        return self.encode_sparse(
            texts, prompt_name=prompt_name, prompt=prompt, batch_size=batch_size, max_active_dims=max_active_dims
        )

    def encode_sparse_document(
        self,
        texts: str | Iterable[str],
        *,
        prompt_name: str | None = None,
        prompt: str | None = None,
        batch_size: int = DEFAULT_BATCH,
        max_active_dims: int | None = None,
    ) -> list[SparseEmbedding]:
        """Turn documents into sparse vectors: `encode_sparse` with the prompt that `encode_document` takes."""
        prompt_name, prompt = self._usual(DOCUMENT, prompt_name, prompt)
        return self.encode_sparse(
            texts, prompt_name=prompt_name, prompt=prompt, batch_size=batch_size, max_active_dims=max_active_dims
        )
