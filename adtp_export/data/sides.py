"""Queries and documents of models with a vector for each token: a marker before them, how long they are, and what queries are filled with.

Sources: Khattab and Zaharia, ColBERT (SIGIR 2020); PyLate 1.6; `MultiVectorEncoder` of sentence-transformers 6.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from ..errors import InputError, check_int, quoted
from .tokenize import TokenizedText, encode
from .windows import TextWithOffsets, encode_placed

QUERY, DOCUMENT = "query", "document"
SIDES = (QUERY, DOCUMENT)


@dataclass(frozen=True, kw_only=True)
class Side:
    """marker: id of the token that is put after a text's first one; None: there is none. max_tokens: of a text with it; None: as many as
    the model reads. expand_to: tokens that a text is filled up to; 0: to none."""

    marker: int | None = None
    max_tokens: int | None = None
    expand_to: int = 0

    def __post_init__(self) -> None:
        for name, least in (("marker", 0), ("max_tokens", 4), ("expand_to", 0)):
            if (value := getattr(self, name)) is not None:
                check_int(name, value, least)

    def longest(self, model: int) -> int:
        """Return how many tokens a text may have in a model that reads so many."""
        return min(self.max_tokens or model, model)


@dataclass(frozen=True, kw_only=True)
class Sides:
    """How queries and documents are read, and which of their vectors count.

    expansion: id of the token that texts are filled up with. attends: whether it is attended to. skip: ids of tokens whose vectors do not
    count where skips_queries or skips_documents says so. unweighted: ids of tokens that have no weight.
    """

    query: Side = field(default_factory=Side)
    document: Side = field(default_factory=Side)
    expansion: int | None = None
    attends: bool = False
    skip: list[int] = field(default_factory=list)
    skips_queries: bool = False
    skips_documents: bool = True
    unweighted: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.expansion is None and (self.query.expand_to or self.document.expand_to):
            raise ValueError("expand_to is set, and expansion names no token")

    @property
    def only_queries(self) -> int | None:
        """Id of the expansion where it is not attended to."""
        return None if self.attends else self.expansion

    def side(self, name: str) -> Side:
        """Return one of them by its name."""
        if name not in SIDES:
            raise InputError(f"side: got {quoted(name)}; accepted are {' and '.join(SIDES)}")
        return self.query if name == QUERY else self.document

    def longest(self, model: int) -> int:
        """Return how many tokens the longest text of either has in a model that reads so many."""
        return max(side.longest(model) for side in (self.query, self.document))

    def encode(self, tokenizer: Tokenizer, texts: Sequence[str], name: str, max_tokens: int) -> list[TokenizedText]:
        """Tokenize queries or documents, as `data.tokenize.encode` does, for a model or an engine that reads so many tokens.

        Raises:
            InputError: as there; or `max_tokens` does not hold what queries are filled up to.
        """
        side = self.side(name)
        if side.expand_to > max_tokens:
            raise InputError(
                f"texts: the model fills a {name} up to {side.expand_to} tokens, and this target reads at most {max_tokens}; take another "
                f"target, or export again with --seq 1:{side.expand_to}:{side.expand_to}"
            )
        rows = encode(tokenizer, texts, side.longest(max_tokens) - (side.marker is not None))
        return [self._completed(row, side) for row in rows]

    def placed(self, tokenizer: Tokenizer, texts: Sequence[str], name: str, max_tokens: int) -> list[TextWithOffsets]:
        """Tokenize as `encode` does, and say where each token is in its text; markers and what texts are filled up with are at 0."""
        side, found = self.side(name), []
        for placed in encode_placed(tokenizer, texts, side.longest(max_tokens) - (side.marker is not None)):
            row = self._completed(placed.row, side)
            lists: list[list[Any]] = [list(placed.offsets), list(placed.words), list(placed.sides)]
            for values, none in zip(lists, ((0, 0), None, None)):
                if side.marker is not None:
                    values.insert(1, none)
                values += [none] * (len(row.input_ids) - len(values))
            found.append(TextWithOffsets(row, *lists))
        return found

    def _completed(self, row: TokenizedText, side: Side) -> TokenizedText:
        ids, types = list(row.input_ids), list(row.token_type_ids)
        if side.marker is not None:
            ids.insert(1, side.marker)
            types.insert(1, 0)
        lacks = max(0, side.expand_to - len(ids))
        ids += [self.expansion or 0] * lacks
        return replace(row, input_ids=ids, token_type_ids=types + [0] * lacks, only_query=0 if self.attends else lacks)

    def counts(self, ids: Sequence[int], name: str) -> np.ndarray:
        """Say which tokens of a query or a document have vectors that count, ``(n,) bool``."""
        if not (self.skips_queries if name == QUERY else self.skips_documents):
            return np.ones(len(ids), bool)
        return ~np.isin(np.asarray(ids), self.skip)


def padding_id(own: int | None, expansion: int | None) -> int:
    """Return the id to pad with: a model's own, else 0. It is never that of tokens that only query, which a graph knows by their id."""
    pad = own or 0
    return pad if pad != expansion else int(expansion == 0)
