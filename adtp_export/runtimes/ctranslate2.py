"""CTranslate2 on the CPU: a dense peer that benchmarks time. It drops padding by itself."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ..data.tokenize import Batch
from ..environment import thread_count
from ..errors import EngineBuildError, MissingDependencyError


def installed() -> str | None:
    """Return CTranslate2's version, or None."""
    return importlib.metadata.version("ctranslate2") if importlib.util.find_spec("ctranslate2") else None


class CTranslate2Engine:
    """A BERT encoder in CTranslate2; it answers with the states of [CLS], ``states (B, H)``, and has no classifier.

    Args:
        path: a folder of transformers' BERT (`save_pretrained`); it is converted when it is loaded.
        threads: 0 takes one for each core that may be used.
        precision: ``fp32`` or ``int8``.

    Raises:
        MissingDependencyError: CTranslate2 is not installed.
        EngineBuildError: it does not convert the model.
    """

    inputs: tuple[str, ...] = ("input_ids", "attention_mask", "token_type_ids")
    outputs: tuple[str, ...] = ("states",)

    def __init__(self, path: Path, threads: int = 0, precision: str = "fp32") -> None:
        if installed() is None:
            raise MissingDependencyError("CTranslate2 is not installed; type: pip install 'adtp-export[peers]'")
        import ctranslate2
        from ctranslate2.converters import TransformersConverter

        kind = {"fp32": "float32", "int8": "int8"}[precision]
        try:
            with tempfile.TemporaryDirectory() as scratch:
                _add_tokenizer(path)
                TransformersConverter(str(path)).convert(f"{scratch}/model", quantization=kind)
                self._encoder = ctranslate2.Encoder(
                    f"{scratch}/model", compute_type=kind, intra_threads=thread_count(threads)
                )
        except Exception as error:  # the converter raises whatever transformers does
            raise EngineBuildError(f"CTranslate2 {installed()} refuses {path.name}: {error}") from error

    def run(self, batch: Batch, wanted: Sequence[str] | None = None) -> dict[str, np.ndarray]:
        lengths = batch["attention_mask"].sum(1)
        ids, types = (
            [row[:n].tolist() for row, n in zip(batch[name], lengths)] if name in batch else None
            for name in ("input_ids", "token_type_ids")
        )
        states = self._encoder.forward_batch(ids, token_type_ids=types).last_hidden_state
        return {"states": np.asarray(states)[:, 0]}


def _add_tokenizer(path: Path) -> None:
    """The converter wants a vocabulary, though benchmarks give ids; one of made-up words does."""
    if (path / "tokenizer.json").exists():
        return
    from transformers import AutoTokenizer

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    size = json.loads((path / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    (path / "vocab.txt").write_text("\n".join(words + [f"w{i}" for i in range(size - len(words))]), encoding="utf-8")
    AutoTokenizer.from_pretrained(path).save_pretrained(path)
