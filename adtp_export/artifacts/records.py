"""What a run leaves behind: manifest, parity and latency records, all frozen and JSON-ready."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, TypedDict, TypeVar

import msgspec

from ..errors import InputError, quoted, typed
from ..io import is_file, sha256, unreadable

_Kind = TypeVar("_Kind")

MANIFEST_NAME = "manifest.json"
SCHEMA = 3

VERIFIED, UNVERIFIED, BUILT_NOT_RUN = "verified", "unverified", "built-not-run"
INCONCLUSIVE = "inconclusive"  # compared, and nothing found, but on too few rows
EMULATED = "emulated"  # built and not run, too, see `report.names`
DECOMPOSED, PLUGIN, ORT_PACKED = "decomposed", "plugin", "ort-packed"
"""What a target runs attention with: the graph's own body, our kernels, ONNX Runtime's packed attention."""


@dataclass(frozen=True)
class ShapeRange:
    """Range of one dynamic axis, as (smallest, tuned for, largest)."""

    min: int
    opt: int
    max: int

    def __str__(self) -> str:
        return f"{self.min}:{self.opt}:{self.max}"

    @classmethod
    def parse(cls, text: str, option: str) -> ShapeRange:
        """Parse ``MIN:OPT:MAX``.

        Raises:
            InputError: not three integers with 1 <= MIN <= OPT <= MAX.
        """
        parts = text.split(":")
        if len(parts) != 3 or not all(p.isascii() and p.isdigit() and len(p) < 10 for p in parts):
            raise InputError(
                f"{option}: got {quoted(text)}; accepted is MIN:OPT:MAX in integers, such as {option} 1:8:32"
            )
        low, opt, high = map(int, parts)
        if not 1 <= low <= opt <= high:
            raise InputError(
                f"{option}: got {quoted(text)}; accepted is 1 <= MIN <= OPT <= MAX, such as {option} 1:8:32"
            )
        return cls(low, opt, high)

    @classmethod
    def stored(cls, text: str, axis: str) -> ShapeRange:
        """Parse what a manifest says of an axis; raises ValueError."""
        try:
            return cls.parse(text, axis)
        except InputError as error:
            raise ValueError(f"profile: {error}") from error


@dataclass(frozen=True)
class ExcusedFlip:
    """A row that keeps other tokens than the oracle, at a decision that rounding can turn. margin: how clear it is in fp64."""

    row: int
    site: str
    margin: float
    bound: float


@dataclass(frozen=True)
class OutputParity:
    """Absolute differences of one output to the fp32 oracle, and by how much it may be off the fp64 one."""

    max_abs_diff: float
    mean_abs_diff: float
    tolerance: float


@dataclass(frozen=True, kw_only=True)
class Parity:
    """How far a target is from the oracle (the stored weights upcast to fp32), on `rows` sequences.

    `rows_compared`: those whose outputs were compared: the target answered them itself and kept the same tokens. Logit differences are
    absolute, and those of the head's first output. `tolerance` bounds the difference to the fp64 oracle; it is a small multiple of
    the error that the fp32 oracle itself makes on the same rows. `prediction_agreement`: share of answers that agree; tags count
    token by token. `accuracy`: share of rows, or of words, whose label is met, where classes are known. `quality`: all measures
    against known labels, as `quality` in the head's module of `answers` names them. `failure` is None when everything holds.
    `outputs`: all outputs by name, where there are several. `answers`: what else is said of answers: of vectors "smallest_cosine"
    and "similarity_kept", see `inference.answers.embedding`; of numbers the latter is `inference.answers.sequence.order_kept`.
    `debug_diff`: by how much, at most, the graph with the output kept_site answered otherwise, absolute.
    """

    rows: int
    rows_compared: int
    max_abs_logit_diff: float
    mean_abs_logit_diff: float
    prediction_agreement: float
    kept_token_agreement: float
    tolerance: float
    accuracy: float | None = None
    quality: Mapping[str, float] = field(default_factory=dict)
    excused_flips: tuple[ExcusedFlip, ...] = ()
    failure: str | None = None
    debug_diff: float = 0.0
    outputs: Mapping[str, OutputParity] = field(default_factory=dict)
    answers: Mapping[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return all fields, those alone that are empty for most targets left out."""
        fields = dataclasses.asdict(self)
        return {name: value for name, value in fields.items() if value or name not in _OFTEN_EMPTY}

    def shown(self, measures: Iterable[str]) -> list[str]:
        """Return measures as tables show them."""
        known = {"accuracy": self.accuracy, **self.quality}
        return [show_measure(name, known.get(name)) for name in measures]


_OFTEN_EMPTY = ("debug_diff", "outputs", "answers")


def show_measure(name: str, value: float | None) -> str:
    """Return a measure as text: accuracy in percent, others with four digits, nothing where it is not known."""
    if value is None:
        return ""
    return f"{value:.2%}" if name == "accuracy" else f"{value:.4f}"


@dataclass(frozen=True, kw_only=True)
class Target:
    """One runnable thing in an output directory: a file, the runtime that takes it, and what is known about it.

    verification: the rows that `parity` is about, and how good PyTorch's answers to them are. calibration: the rows that its ranges are
    from. Both are empty where there are none.
    """

    file: str
    status: str
    attention: str
    parity: Parity | None = None
    details: Mapping[str, Any] = field(default_factory=dict)
    verification: Mapping[str, Any] = field(default_factory=dict)
    calibration: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        parity = self.parity.to_json() if self.parity else dict.fromkeys(_CONTRACT_PARITY)
        rows = {"verification": dict(self.verification), "calibration": dict(self.calibration)}
        known = {name: value for name, value in rows.items() if value}
        own = {"file": self.file, "status": self.status, "attention": self.attention}
        return {**own, **parity, **self.details, **known}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Target:
        """Read it; raises ValueError where a field is missing or of another type."""
        judged = {f.name for f in dataclasses.fields(Parity)}
        own = {f.name: data[f.name] for f in dataclasses.fields(cls) if f.name in data}
        details = {k: v for k, v in data.items() if k not in judged and k not in own}
        for axis, text in convert(convert(details, _Details).get("profile", {}), dict[str, str]).items():
            ShapeRange.stored(text, axis)
        convert(own, _StoredRows)
        parity = {k: v for k, v in data.items() if k in judged}
        return convert({**own, "parity": parity if parity.get("rows") is not None else None, "details": details}, cls)


@dataclass(frozen=True)
class Note:
    """Something to know about an export.

    about: a target's name, a file of the output directory, `VERIFICATION`, `TIMING`, or "" for what the newest run says of itself.
    """

    text: str
    about: str = ""


VERIFICATION, TIMING = "verification", "timing"
"""What notes on the rows of a verification, and on times, are about."""

_CONTRACT_PARITY = ("max_abs_logit_diff", "mean_abs_logit_diff", "prediction_agreement", "kept_token_agreement")


class FileEntry(TypedDict):
    """What the manifest says of a file: the SHA-256 of its bytes in hex, and their number."""

    sha256: str
    bytes: int


class _StoredCheckpoint(TypedDict):
    name: str
    sha256: str
    stored_dtype: str
    prune_sites: list[str]


RANDOM_IDS = "random_ids"
"""What a verification says of rows of token ids drawn at random, beside `rows`, those of texts."""


class _StoredRandomIds(TypedDict):
    rows: int
    lengths: list[int]


class _StoredVerification(TypedDict, total=False):
    text: str
    rows: int
    languages: list[str]
    random_ids: _StoredRandomIds
    sha256: str
    accuracy: float | None
    quality: dict[str, float] | None
    explanation: dict[str, float]


class _StoredCalibration(TypedDict, total=False):
    rows: int
    of_rows: int
    text: str
    tokens: int
    sha256: str


class _StoredRows(TypedDict, total=False):
    """Of a target: what it was compared and calibrated on."""

    verification: _StoredVerification
    calibration: _StoredCalibration


class _Sensitivity(TypedDict):
    product: str
    mean_abs_logit_diff: float
    max_abs_logit_diff: float


class _Details(TypedDict, total=False):
    """Details of a target that others than their writer read."""

    gpus: list[str]
    left_in_base: list[str]
    machine: str
    model: str
    p50_ms: float
    profile: _Profiles
    recipe: str
    sensitivity: list[_Sensitivity]
    timed_on: str


class _Profiles(TypedDict):
    batch: str
    seq: str


class _Retained(TypedDict):
    mean_ratio: float
    mean_kept_tokens: float


class _Stored(TypedDict):
    """The types of a manifest's fields. Tables may have more fields than are named here."""

    versions: dict[str, str]
    checkpoint: _StoredCheckpoint
    profile: _Profiles
    retention: dict[str, _Retained]
    targets: dict[str, dict[str, Any]]
    durations_s: dict[str, float]
    verification: _StoredVerification
    notes: list[Note]
    files: dict[str, FileEntry]


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """`manifest.json` of an output directory.

    verification, retention: the rows that the newest verification was on, and how PyTorch's student answers and prunes them. Each
    target says what it was compared on itself.
    """

    versions: Mapping[str, str]
    checkpoint: Mapping[str, Any]
    profile: Mapping[str, ShapeRange]
    retention: Mapping[str, Mapping[str, float]]
    targets: Mapping[str, Target]
    durations_s: Mapping[str, float]
    verification: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[Note, ...] = ()
    files: Mapping[str, FileEntry] = field(default_factory=dict)

    @property
    def measures(self) -> Mapping[str, float]:
        """Measures of the PyTorch student against known labels, on the rows of the newest verification."""
        return self.verification.get("quality") or {}

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "versions": dict(self.versions),
            "checkpoint": dict(self.checkpoint),
            "profile": {axis: str(profile) for axis, profile in self.profile.items()},
            "retention": {site: dict(figures) for site, figures in self.retention.items()},
            "targets": {name: target.to_json() for name, target in self.targets.items()},
            "verification": dict(self.verification),
            "notes": [dataclasses.asdict(note) for note in self.notes],
            "durations_s": dict(self.durations_s),
            "files": {path: dict(entry) for path, entry in sorted(self.files.items())},
        }

    @classmethod
    def read(cls, directory: Path) -> Manifest:
        """Read the manifest of an output directory.

        Raises:
            InputError: `directory` is not an output directory of adtp-export, or of a schema this version cannot read.
        """
        path = directory / MANIFEST_NAME
        try:
            if not is_file(path):
                raise _missing(directory)
            data = convert(json.loads(path.read_text(encoding="utf-8")), dict[str, Any])
            if data.get("schema") != SCHEMA:
                raise InputError(
                    f"{path}: schema {quoted(data.get('schema'))} is not {SCHEMA}, as another version of adtp-export wrote it; remove "
                    f"{directory} and export again"
                )
            stored = convert(data, _Stored)
            targets = {name: Target.from_json(target) for name, target in stored["targets"].items()}
            _check_names(stored["files"], targets)
            return cls(
                versions=stored["versions"],
                checkpoint=data["checkpoint"],
                profile={axis: ShapeRange.stored(data["profile"][axis], axis) for axis in ("batch", "seq")},
                retention=data["retention"],
                targets=targets,
                durations_s=stored["durations_s"],
                verification=data["verification"],
                notes=tuple(stored["notes"]),
                files=stored["files"],
            )
        except PermissionError as error:
            raise unreadable(path, error) from error
        except (ValueError, OSError, RecursionError) as error:
            if isinstance(error, InputError):
                raise
            raise InputError(f"{path} is damaged ({error}); remove {directory} and export again") from error


def _missing(directory: Path) -> InputError:
    """Return the error for a path that is no output directory. It suggests an export only where nothing would be replaced."""
    then = "Make one with: adtp-export MODEL_DIR --out OUT"
    with contextlib.suppress(OSError, ValueError):  # it may be a file, or no name of one
        if any((directory / name).is_file() for name in ("config.json", "modules.json")):
            then = f"If it is a checkpoint, type: adtp-export {typed(directory)}"
        elif not directory.exists() or not any(directory.iterdir()):
            then = f"Make one with: adtp-export MODEL_DIR --out {typed(directory)}"
    return InputError(f"{directory} is not an exported directory: it has no {MANIFEST_NAME}. {then}")


def _check_names(files: Mapping[str, FileEntry], targets: Mapping[str, Target]) -> None:
    """Raises ValueError where a file is not named inside the directory, or a target's file is not listed."""
    for name in files:
        parts = PurePosixPath(name).parts
        name.encode()  # as it takes to look for it: a lone surrogate cannot be
        if not parts or ".." in parts or parts[0] == "/" or name != "/".join(parts) or set(name) & set("\\:\0"):
            raise ValueError(f"{quoted(name)} does not name a file inside the directory")
    for name, target in targets.items():
        if target.file not in files:
            raise ValueError(f"the file of the target {quoted(name)}, {quoted(target.file)}, is not among its files")


def convert(data: object, kind: type[_Kind]) -> _Kind:
    """Return JSON data as a typed record; a dataclass, a TypedDict, or containers of them.

    Raises:
        ValueError: a field is missing or of another type; the message names it.
    """
    return msgspec.convert(data, kind, str_keys=True)


def file_entry(path: Path) -> FileEntry:
    """Describe a file for the manifest: ``{"sha256": hex, "bytes": int}``."""
    return {"sha256": sha256(path), "bytes": path.stat().st_size}
