"""The contenders of `end_to_end.py`, each as its users run it: texts in, probabilities of classes out. Peers are dense BERT."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

OURS = "adtp-export"
SIZES = (8, 32, 128)
"""Batch sizes of which each contender has its best."""
MAX_TOKENS = 512


class Ours:
    """An output directory, as `load` opens it."""

    def __init__(self, folder: Path, _depth: str) -> None:
        from adtp_export import load

        self.deployment = load(folder / "out")
        self.about = {"target": self.deployment.target, "reason": self.deployment.reason}

    def answer(self, texts: list[str], size: int) -> Any:
        return self.deployment(texts, batch_size=size)

    def batches(self, texts: list[str], size: int) -> list[Any]:
        """Divide texts as `load` does."""
        from adtp_export.data.tokenize import encode, pad
        from adtp_export.inference.batch_runner import BatchRunner

        deployment = self.deployment
        rows = encode(deployment.tokenizer, texts, deployment.max_tokens)
        divided = BatchRunner(deployment, size, False).divided(rows)
        return [pad([rows[i] for i in chosen], deployment.pad_id, deployment.inputs) for chosen in divided]

    def model(self, batch: Any) -> Any:
        return self.deployment.run(batch)

    @staticmethod
    def probabilities(answers: Any) -> list[list[float]]:
        return [[score for _, score in sorted(answer.scores.items())] for answer in answers]


class Pipelined:
    """A pipeline of transformers around a model, its own or optimum's."""

    about: dict[str, str] = {}

    def __init__(self, folder: Path, depth: str) -> None:
        from transformers import AutoTokenizer, pipeline

        home = str(folder / f"dense-{depth}")
        self.tokenizer = AutoTokenizer.from_pretrained(home)
        self.dense = self.load(home)
        self.pipeline = pipeline("text-classification", model=self.dense, tokenizer=self.tokenizer, device="cpu")

    @staticmethod
    def load(home: str) -> Any:
        from transformers import AutoModelForSequenceClassification

        return AutoModelForSequenceClassification.from_pretrained(home).eval()

    def answer(self, texts: list[str], size: int) -> Any:
        order = _by_characters(texts)
        found = self.pipeline(
            [texts[i] for i in order], batch_size=size, top_k=None, truncation=True, max_length=MAX_TOKENS
        )
        return [answer for _, answer in sorted(zip(order, found), key=lambda pair: pair[0])]

    def batches(self, texts: list[str], size: int) -> list[Any]:
        order = _by_characters(texts)
        cut = {"padding": True, "truncation": True, "max_length": MAX_TOKENS, "return_tensors": "pt"}
        return [self.tokenizer([texts[i] for i in order[b : b + size]], **cut) for b in range(0, len(order), size)]

    def model(self, batch: Any) -> Any:
        import torch

        with torch.inference_mode():
            return self.dense(**batch).logits

    @staticmethod
    def probabilities(answers: Any) -> list[list[float]]:
        return [[each["score"] for each in sorted(answer, key=lambda each: each["label"])] for answer in answers]


class Optimum(Pipelined):
    @staticmethod
    def load(home: str) -> Any:
        from optimum.onnxruntime import ORTModelForSequenceClassification

        return ORTModelForSequenceClassification.from_pretrained(home, export=True)


class Runtime:
    """A runtime without tokenizer: the loop that its users write, with `tokenizers` and numpy."""

    about: dict[str, str] = {}

    def __init__(self, folder: Path, depth: str) -> None:
        from tokenizers import Tokenizer

        self.tokenizer = Tokenizer.from_file(str(folder / f"dense-{depth}" / "tokenizer.json"))
        self.tokenizer.enable_truncation(MAX_TOKENS)
        self.tokenizer.no_padding()
        self.engine = self.load(folder, depth)

    @staticmethod
    def load(folder: Path, depth: str) -> Any:
        from adtp_export.runtimes.openvino import OpenVinoEngine

        return OpenVinoEngine(folder / f"padded-{depth}.onnx")

    def _divided(self, texts: list[str], size: int) -> list[tuple[list[int], Any]]:
        import numpy as np

        rows = [row.ids for row in self.tokenizer.encode_batch_fast(texts)]
        order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
        found = []
        for chosen in (order[begin : begin + size] for begin in range(0, len(order), size)):
            ids = np.zeros((len(chosen), len(rows[chosen[-1]])), np.int64)
            mask = np.zeros_like(ids)
            for place, i in enumerate(chosen):
                ids[place, : len(rows[i])], mask[place, : len(rows[i])] = rows[i], 1
            found.append((chosen, {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}))
        return found

    def answer(self, texts: list[str], size: int) -> Any:
        import numpy as np

        logits: Any = [None] * len(texts)
        for chosen, batch in self._divided(texts, size):
            for i, row in zip(chosen, self.model(batch)):
                logits[i] = row
        values = np.exp(np.stack(logits) - np.max(logits, 1, keepdims=True))
        return values / values.sum(1, keepdims=True)

    def batches(self, texts: list[str], size: int) -> list[Any]:
        return [batch for _, batch in self._divided(texts, size)]

    def model(self, batch: Any) -> Any:
        return self.engine.run(batch)["logits"]

    @staticmethod
    def probabilities(answers: Any) -> list[list[float]]:
        return [list(map(float, row)) for row in answers]


class CTranslate2(Runtime):
    """Its encoder answers with states; the pooler and the classifier are two small products."""

    def __init__(self, folder: Path, depth: str) -> None:
        from safetensors.numpy import load_file

        super().__init__(folder, depth)
        weights = load_file(folder / f"dense-{depth}" / "model.safetensors")
        self.head = [(weights[f"{n}.weight"].T, weights[f"{n}.bias"]) for n in ("bert.pooler.dense", "classifier")]

    @staticmethod
    def load(folder: Path, depth: str) -> Any:
        from adtp_export.runtimes.ctranslate2 import CTranslate2Engine

        return CTranslate2Engine(folder / f"dense-{depth}")

    def model(self, batch: Any) -> Any:
        import numpy as np

        (pool, pool_bias), (classify, bias) = self.head
        return np.tanh(self.engine.run(batch)["states"] @ pool + pool_bias) @ classify + bias


LOADERS: dict[str, Callable[[Path, str], Any]] = {
    "transformers": Pipelined,
    "optimum": Optimum,
    "openvino": Runtime,
    "ctranslate2": CTranslate2,
}


def _by_characters(texts: Sequence[str]) -> list[int]:
    return sorted(range(len(texts)), key=lambda i: len(texts[i]))


def work(name: str, folder: Path) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Load a contender; return what answers the commands of `measure`."""
    streams = json.loads((folder / "streams.json").read_text(encoding="utf-8"))
    kind, _, depth = name.rpartition("-")
    contender = Ours(folder, "") if name == OURS else LOADERS[kind](folder, depth)
    prepared: dict[tuple[str, int], list[Any]] = {}

    def timed(run: Callable[[], Any]) -> tuple[Any, dict[str, float]]:
        began, cpu = time.perf_counter(), time.process_time()
        found = run()
        return found, {"seconds": time.perf_counter() - began, "cpu_seconds": time.process_time() - cpu}

    def answer(asked: dict[str, Any]) -> dict[str, Any]:
        texts, size = streams[asked["stream"]], asked.get("size", SIZES[0])
        if asked["what"] == "requests":
            several = [texts[i % len(texts)] for i in range(asked["begin"], asked["begin"] + asked["count"])]
            return {
                "ms": [1e3 * timed(lambda text=text: contender.answer([text], 1))[1]["seconds"] for text in several]
            }
        if asked["what"] == "model":
            if (asked["stream"], size) not in prepared:
                prepared[asked["stream"], size] = contender.batches(texts, size)
            batches = prepared[asked["stream"], size]
            return timed(lambda: [contender.model(batch) for batch in batches])[1]
        found, took = timed(lambda: contender.answer(texts, size))
        return {
            **took,
            **({"probabilities": contender.probabilities(found), **contender.about} if asked.get("show") else {}),
        }

    return answer
