"""What a head's output means, in numpy: answers of one run, and how two runs or a run and its labels compare.

Each head has a module of its name. Its `answers` takes the outputs of texts, and what they point into.
"""

from __future__ import annotations

from types import ModuleType

from ...contract import (
    HEAD_EMBEDDING,
    HEAD_HYBRID,
    HEAD_MASKED,
    HEAD_SEQUENCE,
    HEAD_SPANS,
    HEAD_SPARSE,
    HEAD_TOKENS,
    HEAD_VECTORS,
)
from ...errors import InputError, did_you_mean, quoted
from . import embedding, masked, sequence, spans, sparse, tokens, vectors

HEADS: dict[str, ModuleType] = {
    HEAD_SEQUENCE: sequence,
    HEAD_TOKENS: tokens,
    HEAD_SPANS: spans,
    HEAD_EMBEDDING: embedding,
    HEAD_MASKED: masked,
    HEAD_SPARSE: sparse,
    HEAD_VECTORS: vectors,
    HEAD_HYBRID: embedding,
}


def for_head(name: str) -> ModuleType:
    """Return the module of a head.

    Raises:
        InputError: there is no such head.
    """
    if name not in HEADS:
        raise InputError(f"head: got {quoted(name)}; accepted are {', '.join(HEADS)}{did_you_mean(name, HEADS)}")
    return HEADS[name]
