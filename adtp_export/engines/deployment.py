"""An exported directory, opened: tokenize, check, run on the best target this machine has, answer with labels.

Needs numpy, tokenizers and one runtime; neither torch nor transformers is imported.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from ..errors import InputError, MissingDependencyError, did_you_mean
from ..plugins import library
from ..records import BUILT_NOT_RUN, FAILED, VERIFIED, Manifest, Profile, Target
from ..text import Batch, Encoded, Text, check_batch, encode, pad
from . import Engine, onnxruntime, openvino, tensorrt

DEFAULT_BATCH = 32


@dataclass(frozen=True)
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
        target: a target's name in the manifest; default: the best that runs here, verified ones first, engines on a
            matching GPU before CPU runtimes.
        threads: CPU threads, 0 for the runtime's default.

    Raises:
        InputError: not an output directory, or an unknown target, or one that cannot run here.
        MissingDependencyError: no runtime for any target is installed.
        EngineBuildError: the runtime refuses the file.
    """

    def __init__(self, directory: str | Path, target: str | None = None, threads: int = 0) -> None:
        self.directory = Path(directory)
        self.manifest = Manifest.read(self.directory)
        self.max_tokens = 0
        try:
            config = json.loads((self.directory / "config.json").read_text(encoding="utf-8"))
            self.tokenizer = Tokenizer.from_file(str(self.directory / "tokenizer.json"))
            self._read_config(config)
        except Exception as error:  # tokenizers raises bare Exception
            raise InputError(f"{self.directory} is damaged ({error}); export again with --force") from error
        self._threads = threads
        self.target, load = self._choose(target)
        chosen = self.manifest.targets[self.target]
        self._max_batch: int | None = None
        if (profile := chosen.details.get("profile")) is not None:  # an engine takes no more than it was built for
            self._max_batch = Profile.parse(profile["batch"], "batch").max
            self.max_tokens = min(self.max_tokens, Profile.parse(profile["seq"], "seq").max)
        self._engine = load(self.directory / chosen.file)
        self._inspector: Engine | None = None

    def _read_config(self, config: dict[str, Any]) -> None:
        self.labels = [label for _, label in sorted((int(i), label) for i, label in config["id2label"].items())]
        self.problem_type = config.get("problem_type") or (
            "regression" if len(self.labels) == 1 else "single_label_classification"
        )
        self.sites: list[str] = config["adtp"]["prune_sites"]
        self._vocab_size, self._type_vocab_size = config["vocab_size"], config["type_vocab_size"]
        self._pad_id = config.get("pad_token_id") or 0
        self.max_tokens = config["max_position_embeddings"]

    def __call__(
        self, texts: Text | Sequence[Text], *, return_kept: bool = False, batch_size: int = DEFAULT_BATCH
    ) -> list[Prediction]:
        """Classify texts, or pairs given as tuples; answers come in the order of the texts.

        Args:
            return_kept: also say which tokens stayed (runs the ONNX file's debug form on the CPU).
            batch_size: texts run at once; they are sorted by length, so that batches hold little padding.
        """
        if isinstance(texts, (str, tuple)):
            texts = [texts]
        if not all(_is_text(text) for text in texts):
            raise InputError("texts: accepted are strings, or pairs of strings as tuples")
        if batch_size < 1:
            raise InputError(f"batch_size: got {batch_size}; accepted is at least 1")
        batch_size = min(batch_size, self._max_batch or batch_size)
        rows = encode(self.tokenizer, texts, self.max_tokens)
        order = sorted(range(len(rows)), key=lambda i: len(rows[i].input_ids))
        answers: dict[int, Prediction] = {}
        for begin in range(0, len(order), batch_size):
            chosen = order[begin : begin + batch_size]
            batch = pad([rows[i] for i in chosen], self._pad_id, self._engine.inputs)
            logits = self.run(batch)
            kept_site = self.kept_site(batch) if return_kept else [None] * len(chosen)
            for i, row_logits, row_kept in zip(chosen, logits, kept_site):
                answers[i] = self._answer(row_logits, rows[i], row_kept)
        return [answers[i] for i in range(len(rows))]

    def run(self, batch: Batch) -> np.ndarray:
        """Run one tokenized batch of int64 ``(B, S)`` inputs; return ``logits (B, num_labels)`` fp32.

        Raises:
            InputError: missing inputs, left padding, an empty row, ids out of range, or rows that are too long.
        """
        return self._engine.run(self._checked(batch))["logits"]

    def kept_site(self, batch: Batch) -> np.ndarray:
        """Say what became of each token: ``(B, S) int32``, the index of the site that dropped it,
        ``len(sites)`` if it stayed, -1 for padding. Checks as `run` does.
        """
        return self.inspector().run(self._checked(batch))["kept_site"]

    def inspector(self) -> Engine:
        """Return an engine with the output ``kept_site`` as well, made on first use."""
        if self._inspector is None:
            self._inspector = self._engine if "kept_site" in self._engine.outputs else self._debug_engine()
        return self._inspector

    def _checked(self, batch: Batch) -> Batch:
        missing = [name for name in self._engine.inputs if name not in batch]
        if missing:
            raise InputError(f"batch: {', '.join(missing)} missing; the model takes {', '.join(self._engine.inputs)}")
        batch = {name: np.asarray(batch[name]) for name in self._engine.inputs}
        check_batch(batch, self._vocab_size, self._type_vocab_size, self.max_tokens)
        return {name: array.astype(np.int64, copy=False) for name, array in batch.items()}

    def _answer(self, logits: np.ndarray, row: Encoded, kept_site: np.ndarray | None) -> Prediction:
        logits = logits.astype(np.float64)
        if self.problem_type == "single_label_classification":
            exponents = np.exp(logits - logits.max())
            values = exponents / exponents.sum()
        elif self.problem_type == "multi_label_classification":
            values = 1 / (1 + np.exp(-logits))
        else:
            values = logits
        best = int(values.argmax())
        kept: dict[str, Any] = {}
        if kept_site is not None:
            sites = [int(site) for site in kept_site[: len(row.tokens)]]
            kept = {
                "tokens": row.tokens,
                "kept": [site == len(self.sites) for site in sites],
                "dropped_at": [self.sites[site] if site < len(self.sites) else None for site in sites],
            }
        return Prediction(
            label=None if self.problem_type == "regression" else self.labels[best],
            score=float(values[best]),
            scores={label: float(value) for label, value in zip(self.labels, values)},
            truncated=row.truncated,
            **kept,
        )

    def _choose(self, wanted: str | None) -> tuple[str, Callable[[Path], Engine]]:
        targets = self.manifest.targets
        if wanted is not None and wanted not in targets:
            raise InputError(
                f"target: got {wanted!r}; {self.directory} has {', '.join(targets)}{did_you_mean(wanted, targets)}"
            )
        usable = {name: load for name, target in targets.items() if (load := self._loader(name, target)) is not None}
        if wanted is not None:
            if wanted not in usable:
                raise InputError(
                    f"target: {wanted} cannot run on this machine; {', '.join(usable) or 'nothing else'} can"
                )
            return wanted, usable[wanted]
        if not usable:
            raise MissingDependencyError("no runtime is installed for any target; type: pip install 'adtp-export[cpu]'")
        best = min(usable, key=lambda name: _preference(name, targets[name]))
        return best, usable[best]

    def _loader(self, name: str, target: Target) -> Callable[[Path], Engine] | None:
        """Return how to load a target here, or None where it cannot run."""
        runtime = name.split("-")[0]
        if target.status == FAILED:
            return None
        if name.startswith("onnxruntime-cuda"):
            on_gpu = onnxruntime.cuda_runs_here()
            return (lambda path: onnxruntime.OnnxRuntimeEngine(path, cuda=True)) if on_gpu else None
        if runtime == "onnxruntime" and onnxruntime.installed():
            return lambda path: onnxruntime.OnnxRuntimeEngine(path, self._threads)
        if runtime == "openvino" and openvino.installed():
            return lambda path: openvino.OpenVinoEngine(path, self._threads)
        for flavor in tensorrt.FLAVORS.values():
            if runtime == flavor.short and tensorrt.runs_here(flavor, target.details.get("gpus", ())):
                return lambda path: tensorrt.TensorRtEngine(path, flavor, target.attention, library.built())
        return None

    def _debug_engine(self) -> Engine:
        import onnx_ir as ir

        from ..export.passes import DEBUG_OUTPUTS, run_passes

        source = self.directory / "model.onnx"
        model = ir.load(source)
        run_passes(model, DEBUG_OUTPUTS)
        load = onnxruntime.OnnxRuntimeEngine if onnxruntime.installed() else openvino.OpenVinoEngine
        with tempfile.TemporaryDirectory() as scratch:
            path = Path(scratch) / source.name
            ir.save(model, path, external_data=source.name + ".data")
            return load(path, self._threads)


def load(directory: str | Path, target: str | None = None, threads: int = 0) -> Deployment:
    """Open an output directory of adtp-export; ``load(OUT)(["a text", "another"])`` answers with labels and scores.

    See `Deployment` for the arguments and errors.
    """
    return Deployment(directory, target, threads)


def _is_text(text: object) -> bool:
    return isinstance(text, str) or (
        isinstance(text, tuple) and len(text) == 2 and all(isinstance(part, str) for part in text)
    )


def _preference(name: str, target: Target) -> tuple[int, int]:
    """Sort key: what ran and was verified, what was not checked, what was only built; GPU engines, then CPU runtimes."""
    trust = {VERIFIED: 0, BUILT_NOT_RUN: 2}.get(target.status, 1)
    order = ("trt", "rtx", "onnxruntime-cuda", "onnxruntime-cpu-fp32-lookup", "onnxruntime", "openvino")
    return trust, next(i for i, runtime in enumerate(order) if name.startswith(runtime))
