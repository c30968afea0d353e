"""How figures are called in reports, head by head."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..artifacts.records import BUILT_NOT_RUN, EMULATED, INCONCLUSIVE, Manifest, Parity
from ..contract import (
    HEAD_EMBEDDING,
    HEAD_HYBRID,
    HEAD_IMAGES,
    HEAD_MASKED,
    HEAD_SEQUENCE,
    HEAD_SPANS,
    HEAD_SPARSE,
    HEAD_TEXT,
    HEAD_TOKENS,
    HEAD_VECTORS,
)


@dataclass(frozen=True)
class Names:
    """value: what the first output holds. answers: title of the column that says how far answers are PyTorch's. views: title of the
    texts. figure: what of `Parity.answers` that column has; by default the share of answers that are the same."""

    value: str
    answers: str
    views: str
    figure: str = ""

    def alike(self, parity: Parity) -> float:
        """Return what the column of answers has; no number where that was not measured."""
        return parity.answers.get(self.figure, math.nan) if self.figure else parity.prediction_agreement

    def shown(self, alike: float) -> str:
        """Return that as text."""
        return f"{alike:.4f}" if self.figure else share(alike)


NAMES = {
    HEAD_SEQUENCE: Names("logit", "predictions", "Tokens"),
    HEAD_TOKENS: Names("logit", "tags", "Tags"),
    HEAD_SPANS: Names("logit", "answers", "Answers"),
    # That each vector is nearest to its own says little of vectors that are compared with one another.
    HEAD_EMBEDDING: Names("vector", "smallest cosine", "Nearest texts", "smallest_cosine"),
    HEAD_MASKED: Names("logit", "best tokens", "Masked tokens"),
    HEAD_SPARSE: Names("weight", "smallest cosine", "Heaviest tokens", "smallest_cosine"),
    HEAD_VECTORS: Names("vector", "smallest cosine", "Texts", "smallest_cosine"),
    HEAD_HYBRID: Names("vector", "smallest cosine", "Nearest texts", "smallest_cosine"),
    HEAD_IMAGES: Names("vector", "smallest cosine", "Pictures", "smallest_cosine"),
    HEAD_TEXT: Names("logit", "next tokens", "Texts"),
}


STATUSES = {
    INCONCLUSIVE: "nothing differs in the rows that were compared, but these are too few; verify on more texts with --verify-data",
    EMULATED: "its attention kernels were executed in an emulator; the engine has not run on a GPU",
    BUILT_NOT_RUN: "the engine is for a GPU that this machine does not have, so it was not run",
}
"""What statuses of targets mean that prove less than they seem to."""


def statuses(manifest: Manifest) -> dict[str, str]:
    """Return those of `STATUSES` that a target of the manifest has."""
    found = {target.status for target in manifest.targets.values()}
    return {status: meaning for status, meaning in STATUSES.items() if status in found}


def names(manifest: Manifest) -> Names:
    """Return how a manifest's figures are called."""
    return NAMES[manifest.checkpoint["head"]]


def shapes(manifest: Manifest) -> str:
    """Return for what inputs the files are."""
    batch, seq = manifest.profile["batch"], manifest.profile["seq"]
    if manifest.checkpoint["head"] == HEAD_IMAGES:
        return f"pictures of {seq.max} x {seq.max}"
    return f"batch {batch}, sequence {seq}"


def share(value: float) -> str:
    """Return a share in percent. What is not all of it does not read so."""
    text = f"{value:.2%}"
    return "99.99%" if text == "100.00%" and value < 1 else text
