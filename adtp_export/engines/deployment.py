"""An exported directory, opened: tokenize, check, run on the best target this machine has, answer with labels.

Needs numpy, tokenizers and one runtime; neither torch nor transformers is imported.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from .. import answers
from ..answers.sequence import Answer
from ..contract import KEPT_SITE, LOGITS
from ..errors import InputError
from ..records import Manifest, Profile
from ..text import Batch, Encoded, Text, check_batch, encode, pad
from . import Engine
from .choice import PRECISION, choose
from .targets import RUNTIMES

DEFAULT_BATCH = 32


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

    Attributes:
        target: the name of what was taken. reason: why, in one short sentence.

    Raises:
        InputError: not an output directory, an unknown preference, an unknown target, or one that cannot run here.
        MissingDependencyError: no runtime for any target is installed.
        EngineBuildError: the runtime refuses the file.
    """

    def __init__(
        self, directory: str | Path, target: str | None = None, threads: int = 0, prefer: str = PRECISION
    ) -> None:
        self.directory = Path(directory)
        self.manifest = Manifest.read(self.directory)
        self.max_tokens = 0
        try:
            config = json.loads((self.directory / "config.json").read_text(encoding="utf-8"))
            self.tokenizer = Tokenizer.from_file(str(self.directory / "tokenizer.json"))
            self._read_config(config)
        except Exception as error:  # tokenizers raises bare Exception
            raise InputError(f"{self.directory} is damaged ({error}); export again with --force") from error
        self._head = answers.for_head(config["adtp"].get("head", answers.SEQUENCE))
        self._threads = threads
        choice = choose(self.manifest.targets, target, prefer, self.directory)
        self.target, self.reason, self._spec = choice.name, choice.reason, choice.spec
        logging.getLogger("adtp_export").info("%s: %s", self.target, self.reason)
        chosen = self.manifest.targets[self.target]
        self._profile = {axis: Profile.parse(text, axis) for axis, text in chosen.details.get("profile", {}).items()}
        if self._profile:  # an engine takes no more than it was built for
            self.max_tokens = min(self.max_tokens, self._profile["seq"].max)
        self._engine = RUNTIMES[self._spec.runtime].open(self.directory / chosen.file, self._spec, threads)
        self._inspector: Engine | None = None

    def _read_config(self, config: dict[str, Any]) -> None:
        self.labels = [label for _, label in sorted((int(i), label) for i, label in config["id2label"].items())]
        self.problem_type = config.get("problem_type") or (
            "regression" if len(self.labels) == 1 else "single_label_classification"
        )
        self.sites: list[str] = config["adtp"]["prune_sites"]
        self._vocab_size, self._type_vocab_size = config["vocab_size"], config["type_vocab_size"]
        self._pad_id = config.get("pad_token_id") or 0
        self.max_tokens = config["adtp"].get("max_tokens", config["max_position_embeddings"])

    def __call__(
        self, texts: Text | Sequence[Text], *, return_kept: bool = False, batch_size: int = DEFAULT_BATCH
    ) -> list[Prediction]:
        """Classify texts, or pairs given as tuples; answers come in the order of the texts.

        Args:
            return_kept: also say which tokens stayed, by running the debug form of the same target as well.
            batch_size: texts run at once; they are sorted by length, so that batches hold little padding.
        """
        if isinstance(texts, (str, tuple)):
            texts = [texts]
        if not all(_is_text(text) for text in texts):
            raise InputError("texts: accepted are strings, or pairs of strings as tuples")
        if batch_size < 1:
            raise InputError(f"batch_size: got {batch_size}; accepted is at least 1")
        if self._profile:
            batch_size = min(batch_size, self._profile["batch"].max)
        rows = encode(self.tokenizer, texts, self.max_tokens)
        order = sorted(range(len(rows)), key=lambda i: len(rows[i].input_ids))
        predictions: dict[int, Prediction] = {}
        for begin in range(0, len(order), batch_size):
            chosen = order[begin : begin + batch_size]
            batch = pad([rows[i] for i in chosen], self._pad_id, self._engine.inputs)
            found = self._head.answers(self.run(batch), self.labels, self.problem_type)
            kept_site = self.kept_site(batch) if return_kept else [None] * len(chosen)
            for i, answer, row_kept in zip(chosen, found, kept_site):
                predictions[i] = self._prediction(answer, rows[i], row_kept)
        return [predictions[i] for i in range(len(rows))]

    def run(self, batch: Batch) -> np.ndarray:
        """Run one tokenized batch of int64 ``(B, S)`` inputs; return ``logits (B, num_labels)`` fp32.

        Raises:
            InputError: missing inputs, left padding, an empty row, ids out of range, or rows that are too long.
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
        missing = [name for name in self._engine.inputs if name not in batch]
        if missing:
            raise InputError(f"batch: {', '.join(missing)} missing; the model takes {', '.join(self._engine.inputs)}")
        batch = {name: np.asarray(batch[name]) for name in self._engine.inputs}
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
        from ..graph.debug import debug_form

        chosen = self.manifest.targets[self.target]
        with debug_form(self.directory / chosen.details.get("model", chosen.file)) as path:  # an engine names its model
            return RUNTIMES[self._spec.runtime].open_model(path, self._spec, self._profile, self._threads)


def load(directory: str | Path, target: str | None = None, threads: int = 0, prefer: str = PRECISION) -> Deployment:
    """Open an output directory of adtp-export; ``load(OUT)(["a text", "another"])`` answers with labels and scores.

    See `Deployment` for the arguments and errors.
    """
    return Deployment(directory, target, threads, prefer)


def _is_text(text: object) -> bool:
    return isinstance(text, str) or (
        isinstance(text, tuple) and len(text) == 2 and all(isinstance(part, str) for part in text)
    )
