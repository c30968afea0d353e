"""How figures are called in reports, head by head."""

from __future__ import annotations

from dataclasses import dataclass

from ..contract import HEAD_EMBEDDING, HEAD_SEQUENCE, HEAD_SPANS, HEAD_TOKENS
from ..records import BUILT_NOT_RUN, EMULATED, Manifest, Parity


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


NOT_RUN = {
    EMULATED: "its attention kernels were executed in an emulator; the engine has not run on a GPU",
    BUILT_NOT_RUN: "the engine is for a GPU that this machine does not have, so it was not run",
}
"""What statuses of targets mean that nothing has run."""


def not_run(manifest: Manifest) -> dict[str, str]:
    """Return those of `NOT_RUN` that a target of the manifest has."""
    found = {target.status for target in manifest.targets.values()}
    return {status: meaning for status, meaning in NOT_RUN.items() if status in found}


def names(manifest: Manifest) -> Names:
    """Return how a manifest's figures are called; those of earlier versions are of classes."""
    return NAMES[manifest.checkpoint.get("head", HEAD_SEQUENCE)]
