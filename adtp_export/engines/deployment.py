"""An exported directory, opened: tokenize, check, run on the best target this machine has, answer with labels.

Needs numpy, tokenizers and one runtime; neither torch nor transformers is imported.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping, Set
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from tokenizers import Tokenizer

from .. import answers
from ..answers.sequence import Answer
from ..contract import KEPT_SITE, LOGITS, MOST_THREADS
from ..directory import checked_model, read_manifest
from ..errors import AdtpError, InputError, at_least, cut, needs_extras
from ..files import read_json
from ..records import PORTABLE, Profile, convert
from ..text import Batch, Encoded, Text, check_batch, encode, pad
from . import Engine
from .batches import by_length, divide
from .choice import PRECISION, choose
from .targets import CPU, RUNTIMES

DEFAULT_BATCH = 32
ATTEMPTS = 10
"""To read a directory that exporters keep replacing."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """What an output directory's ``config.json`` says to those who run it: labels, sites, and the ids that the model takes.

    Raises:
        ValueError: the labels are not numbered from 0 on, two share a name, or there are none.
    """

    id2label: dict[int, str]
    vocab_size: int
    type_vocab_size: int
    max_position_embeddings: int
    adtp: Pruned
    pad_token_id: int | None = None
    problem_type: Literal["regression", "single_label_classification", "multi_label_classification"] | None = None

    def __post_init__(self) -> None:
        if not self.id2label or sorted(self.id2label) != list(range(len(self.id2label))):
            raise ValueError(f"id2label has the ids {str(sorted(self.id2label))[:200]}; accepted are 0, 1, ...")
        if len(set(self.id2label.values())) < len(self.id2label):
            raise ValueError("two labels of id2label share a name")

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Config:
        """Take it from the fields of a ``config.json``; raises ValueError where one is missing or of another type."""
        return convert(fields, cls)

    @property
    def labels(self) -> list[str]:
        return [self.id2label[i] for i in range(len(self.id2label))]

    @property
    def kind(self) -> str:
        """The kind of problem; where the field is missing, transformers' default."""
        return self.problem_type or ("regression" if len(self.id2label) == 1 else "single_label_classification")

    @property
    def max_tokens(self) -> int:
        return self.adtp.max_tokens or self.max_position_embeddings


@dataclass(frozen=True, kw_only=True)
class Pruned:
    """The block ``adtp`` of ``config.json``. max_tokens: None in those of older versions."""

    prune_sites: list[str]
    head: str = answers.SEQUENCE
    max_tokens: int | None = None
    retention_ratios: list[float] | None = None
    min_tokens: int = 1


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Answer for one text.

    label: the best label (None for regression). score: its probability, or the value in regression. scores: every
    label's. truncated: the text was longer than the model reads. tokens and kept: on request, the tokens and whether
    each stayed to the end. dropped_at: the site that dropped each token, None for those that stayed.
    """

    label: str | None
    score: float
    scores: dict[str, float]
    truncated: bool
    tokens: list[str] | None = None
    kept: list[bool] | None = None
    dropped_at: list[str | None] | None = None

    def to_json(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value is not None}


class Deployment:
    """An output directory of adtp-export, ready to answer; make one with `adtp_export.load`.

    Args:
        directory: holds `manifest.json`, `model.onnx`, tokenizer files.
        target: a target's name in the manifest; default: the best that runs here, as `choice.choose` has it.
        threads: CPU threads, 0 for the runtime's default.
        prefer: "precision": of the default, the highest precision alone. "speed": lower ones, too.
        verify: compare the SHA-256 of every file that is opened with the manifest's; False saves 0.05 to 0.3 s for 100 MB.

    Attributes:
        target: the name of what was taken. reason: why, in one short sentence.

    Raises:
        InputError: not an output directory, a file that is not the one in its manifest, an unknown preference, an unknown
            target, or one that cannot run here.
        MissingDependencyError: no runtime for any target is installed.
        EngineBuildError: the runtime refuses the file.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        target: str | None = None,
        threads: int = 0,
        prefer: str = PRECISION,
        verify: bool = True,
    ) -> None:
        _check_arguments(directory, target, threads)
        self.directory, self._threads, self._verify = Path(directory), threads, verify
        for _ in range(ATTEMPTS):
            self.manifest = read_manifest(self.directory)
            try:
                self._open(target, prefer)
            except AdtpError:
                if not self._replaced():
                    raise
            else:
                if not self._replaced():
                    return
        raise InputError(f"{self.directory} was replaced {ATTEMPTS} times while it was read; try again later")

    def _open(self, target: str | None, prefer: str) -> None:
        config_file, tokenizer_file = self._file("config.json"), self._file("tokenizer.json")
        try:
            config = Config.of(read_json(config_file))
            self.tokenizer = Tokenizer.from_file(str(tokenizer_file))
        except Exception as error:  # tokenizers raises bare Exception
            raise InputError(f"{self.directory} is damaged ({cut(str(error))}); export again with --force") from error
        self.labels, self.problem_type, self.sites = config.labels, config.kind, config.adtp.prune_sites
        self._vocab_size, self._type_vocab_size = config.vocab_size, config.type_vocab_size
        self._pad_id, self.max_tokens = config.pad_token_id or 0, config.max_tokens
        self._head = answers.for_head(config.adtp.head)
        choice = choose(self.manifest.targets, target, prefer, self.directory)
        self.target, self.reason, self._spec = choice.name, choice.reason, choice.spec
        logging.getLogger("adtp_export").info("%s: %s", self.target, self.reason)
        chosen = self.manifest.targets[self.target]
        self._profile = {
            axis: Profile.parse(text, axis)
            for axis, text in chosen.details.get("profile", {}).items()
            if axis in ("batch", "seq")
        }
        if self._profile:  # an engine takes no more than it was built for
            self.max_tokens = min(self.max_tokens, self._profile["seq"].max)
        self._engine = RUNTIMES[self._spec.runtime].open(self._file(chosen.file), self._spec, self._threads)
        self._inspector: Engine | None = None

    def _replaced(self) -> bool:
        """Say whether another directory is in this one's place since the manifest was read."""
        return read_manifest(self.directory) != self.manifest

    def _file(self, name: str) -> Path:
        """Return a file's path, compared with the manifest, and so is the file that holds its weights."""
        return checked_model(self.directory, self.manifest, name, self._verify)

    def __call__(
        self, texts: Text | Iterable[Text], *, return_kept: bool = False, batch_size: int = DEFAULT_BATCH
    ) -> list[Prediction]:
        """Classify texts, or pairs given as tuples; answers come in the order of the texts.

        Args:
            texts: one text or pair, or a list, a generator, or anything else that gives them in an order.
            return_kept: also say which tokens stayed, by running the debug form of the same target as well. Making that form
                needs the extra "export".
            batch_size: texts run at once, at most; on CPUs their lengths decide how many (`batches.divide`).

        Raises:
            InputError: something else than texts and pairs, no valid Unicode, or a batch size below 1.
            MissingDependencyError: `return_kept` without the extra "export".
        """
        texts = _as_texts(texts)
        at_least("batch_size", batch_size, 1)
        if self._profile:
            batch_size = min(batch_size, self._profile["batch"].max)
        rows = encode(self.tokenizer, texts, self.max_tokens)
        predictions: dict[int, Prediction] = {}
        lengths = [len(row.input_ids) for row in rows]
        on_cpu, pads = self._spec.device == CPU, self._spec.attention == PORTABLE
        for chosen in divide(lengths, batch_size, pads) if on_cpu else by_length(lengths, batch_size):
            batch = pad([rows[i] for i in chosen], self._pad_id, self._engine.inputs)
            found = self._head.answers(self.run(batch), self.labels, self.problem_type)
            kept_site = self.kept_site(batch) if return_kept else [None] * len(chosen)
            for i, answer, row_kept in zip(chosen, found, kept_site):
                predictions[i] = self._prediction(answer, rows[i], row_kept)
        return [predictions[i] for i in range(len(rows))]

    def run(self, batch: Batch) -> np.ndarray:
        """Run one tokenized batch of int64 ``(B, S)`` inputs; return ``logits (B, num_labels)`` fp32.

        Raises:
            InputError: no mapping of arrays, missing inputs, left padding, an empty row, ids out of range, or rows that are too
                long.
        """
        return self._engine.run(self._checked(batch))[LOGITS]

    def kept_site(self, batch: Batch) -> np.ndarray:
        """Say what became of each token: ``(B, S) int32``, the index of the site that dropped it,
        ``len(sites)`` if it stayed, -1 for padding. Checks as `run` does.
        """
        return self.inspector().run(self._checked(batch))[KEPT_SITE]

    def inspector(self) -> Engine:
        """Return an engine with the output ``kept_site`` as well, made on first use."""
        if self._inspector is None:
            self._inspector = self._engine if KEPT_SITE in self._engine.outputs else self._open_debug_form()
        return self._inspector

    def _checked(self, batch: Batch) -> Batch:
        if not isinstance(batch, Mapping):
            raise InputError(f"batch: got {type(batch).__name__}; accepted is a dict of arrays by input name")
        missing = [name for name in self._engine.inputs if name not in batch]
        if missing:
            raise InputError(f"batch: {', '.join(missing)} missing; the model takes {', '.join(self._engine.inputs)}")
        try:
            batch = {name: np.asarray(batch[name]) for name in self._engine.inputs}
        except ValueError as error:
            raise InputError(
                f"batch: rows of different lengths; accepted are arrays (B, S), padded on the right ({error})"
            ) from error
        check_batch(batch, self._vocab_size, self._type_vocab_size, self.max_tokens)
        return {name: array.astype(np.int64, copy=False) for name, array in batch.items()}

    def _prediction(self, answer: Answer, row: Encoded, kept_site: np.ndarray | None) -> Prediction:
        kept: dict[str, Any] = {}
        if kept_site is not None:
            sites = [int(site) for site in kept_site[: len(row.tokens)]]
            kept = {
                "tokens": row.tokens,
                "kept": [site == len(self.sites) for site in sites],
                "dropped_at": [self.sites[site] if site < len(self.sites) else None for site in sites],
            }
        return Prediction(**vars(answer), truncated=row.truncated, **kept)

    def _open_debug_form(self) -> Engine:
        with needs_extras("telling which tokens stay (--kept)"):
            from ..graph.debug import debug_form
        chosen = self.manifest.targets[self.target]
        try:
            model = self._file(chosen.details.get("model", chosen.file))  # an engine names its model
        except InputError:
            if self._replaced():
                raise InputError(f"{self.directory} was replaced since it was loaded; load it again") from None
            raise
        with debug_form(model) as path:
            return RUNTIMES[self._spec.runtime].open_model(path, self._spec, self._profile, self._threads)


def load(
    directory: str | os.PathLike[str],
    target: str | None = None,
    threads: int = 0,
    prefer: str = PRECISION,
    verify: bool = True,
) -> Deployment:
    """Open an output directory of adtp-export; ``load(OUT)(["a text", "another"])`` answers with labels and scores.

    See `Deployment` for the arguments and errors.
    """
    return Deployment(directory, target, threads, prefer, verify)


def _check_arguments(directory: object, target: object, threads: object) -> None:
    if not isinstance(directory, (str, os.PathLike)):
        raise InputError(f"directory: got {type(directory).__name__}; accepted is a path")
    if not isinstance(target, (str, type(None))):
        raise InputError(f"target: got {type(target).__name__}; accepted is a target's name, or None")
    at_least("threads", threads, 0, MOST_THREADS)


def _as_texts(texts: object) -> list[Text]:
    """Return one text or pair, or what gives several in an order, as a list."""
    if isinstance(texts, str) or _is_pair(texts):
        return [texts]  # type: ignore[list-item]
    unordered = isinstance(texts, (Set, Mapping, bytes, bytearray))
    if unordered or not isinstance(texts, Iterable):
        raise InputError(
            f"texts: got {type(texts).__name__}; accepted are a string, a pair of strings as a tuple, or a list of these"
        )
    listed = list(texts)
    for i, text in enumerate(listed):
        if not isinstance(text, str) and not _is_pair(text):
            raise InputError(
                f"texts: got {type(text).__name__} at index {i}; accepted are strings, or pairs of strings as tuples"
            )
    return listed


def _is_pair(text: object) -> bool:
    return isinstance(text, tuple) and len(text) == 2 and all(isinstance(part, str) for part in text)
