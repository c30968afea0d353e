"""The table of targets that all reports show, divided by the rows on which targets were compared with PyTorch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..artifacts.records import RANDOM_IDS, Manifest, Parity, Target, show_measure
from ..contract import HEAD_TEXT
from .names import Names, names, share


@dataclass(frozen=True)
class Group:
    """Targets that were compared on the same texts, and what these are. Figures on other rows say something else, so they stand in
    another table."""

    rows: Mapping[str, Any]
    targets: Mapping[str, Target]

    @property
    def quality(self) -> Mapping[str, float]:
        """Measures of the PyTorch student on these rows; none where labels are not known."""
        return self.rows.get("quality") or {}

    @property
    def told(self) -> str:
        """A sentence about what the targets were compared on; "" where they were not."""
        if not self.rows:
            return ""
        reached = ", ".join(f"{name} {show_measure(name, value)}" for name, value in self.quality.items())
        labels = f", which reaches {reached} on the labels" if reached else ""
        languages = ", ".join(self.rows.get("languages", ()))
        texts = f"{self.rows['text']} ({self.rows['rows']:,} rows{languages and f' in {languages}'}){labels}"
        return f"Compared with the fp32 PyTorch model on {texts}{self._random}."

    @property
    def _random(self) -> str:
        """Say which rows were no texts."""
        drawn = [target.verification.get(RANDOM_IDS) for target in self.targets.values() if target.verification]
        random = next(filter(None, drawn), None)
        if random is None:
            return ""
        first, *_, last = random["lengths"]
        but = "" if all(drawn) else ". Some targets were compared on the texts alone"
        return f", and on {random['rows']} rows of random token ids, {first} to {last:,} tokens long{but}"

    def columns(self, manifest: Manifest) -> list[dict[str, str]]:
        """Return a row for each target: texts by the titles of the columns."""
        return [self._row(manifest, name, target) for name, target in self.targets.items()]

    def _row(self, manifest: Manifest, name: str, target: Target) -> dict[str, str]:
        called, parity = names(manifest), target.parity
        titles = (f"max {called.value} diff", ALLOWED, called.answers, KEPT, *self.quality, COMPARED)
        figures = self._figures(called, parity) if parity else [""] * len(titles)
        megabytes = f"{sum(manifest.files[file]['bytes'] for file in _files(manifest, target)) / 1e6:.1f}"
        return {TARGET: name, STATUS: target.status, **dict(zip(titles, figures)), FILE: target.file, SIZE: megabytes}

    def _figures(self, called: Names, parity: Parity) -> list[str]:
        return [
            f"{parity.max_abs_logit_diff:.1e}",
            f"{parity.tolerance:.1e}",
            called.shown(called.alike(parity)),
            share(parity.kept_token_agreement),
            *parity.shown(self.quality),
            f"{parity.rows_compared:,} of {parity.rows:,}",
        ]


TARGET, STATUS, ALLOWED, KEPT, COMPARED, FILE, SIZE = (
    "target",
    "status",
    "allowed",
    "kept tokens",
    "rows compared",
    "file",
    "MB",
)
"""Titles of columns."""


def _files(manifest: Manifest, target: Target) -> list[str]:
    """Return what a target reads: its file, the others of a model that generates text, and the weights that lie beside large ones."""
    others = target.details.values() if manifest.checkpoint.get("head") == HEAD_TEXT else ()
    names = {target.file, *map(str, others)}
    return [file for file in manifest.files if file in names or file.removesuffix(".data") in names]


def groups(manifest: Manifest) -> list[Group]:
    """Divide the targets of a manifest; those that were not compared stand with the others where these are one group."""
    found: list[tuple[Mapping[str, Any], dict[str, Target]]] = []
    for name, target in manifest.targets.items():
        texts = {key: value for key, value in target.verification.items() if key != RANDOM_IDS}
        into = next((targets for rows, targets in found if rows == texts), None)
        if into is None:
            found.append((texts, into := {}))
        into[name] = target
    compared = [rows for rows, _ in found if rows]
    if len(compared) == 1:
        return [Group(compared[0], manifest.targets)]
    return [Group(rows, targets) for rows, targets in sorted(found, key=lambda each: not each[0])]
