"""How figures are called in reports, head by head."""

from __future__ import annotations

from dataclasses import dataclass

from ..contract import HEAD_EMBEDDING, HEAD_SEQUENCE, HEAD_SPANS, HEAD_TOKENS
from ..records import Manifest, Parity


@dataclass(frozen=True)
class Names:
    """value: what the first output holds. answers: what is counted where both give the same. views: title of the texts. extra: more
    columns, by what `Parity.answers` calls them."""

    value: str
    answers: str
    views: str
    extra: tuple[str, ...] = ()

    def shown(self, parity: Parity) -> list[str]:
        """Return the figures of the extra columns, as tables show them."""
        return [f"{parity.answers[name]:.6f}" if name in parity.answers else "" for name in self.extra]

    @property
    def columns(self) -> list[str]:
        """Return the titles of the extra columns."""
        return [name.replace("_", " ") for name in self.extra]


NAMES = {
    HEAD_SEQUENCE: Names("logit", "predictions", "Tokens"),
    HEAD_TOKENS: Names("logit", "tags", "Tags"),
    HEAD_SPANS: Names("logit", "answers", "Answers"),
    HEAD_EMBEDDING: Names("vector", "vectors", "Nearest texts", ("smallest_cosine",)),
}


def names(manifest: Manifest) -> Names:
    """Return how a manifest's figures are called; those of earlier versions are of classes."""
    return NAMES[manifest.checkpoint.get("head", HEAD_SEQUENCE)]
