"""PyTorch on the CPU: dense BERT of transformers as people run it, a peer that benchmarks time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ..data.tokenize import Batch


class TorchEngine:
    """A sequence classifier of transformers in PyTorch, on padded batches.

    Args:
        path: a folder written by `save_pretrained`.
        threads: 0 lets PyTorch choose.
        attention: ``eager`` or ``sdpa``, transformers' own names.
        compiled: run it through `torch.compile`, dynamic shapes from the first batch on.
    """

    inputs: tuple[str, ...] = ("input_ids", "attention_mask", "token_type_ids")
    outputs: tuple[str, ...] = ("logits",)

    def __init__(self, path: Path, threads: int = 0, attention: str = "sdpa", compiled: bool = False) -> None:
        import torch
        from transformers import AutoModelForSequenceClassification

        if threads:
            torch.set_num_threads(threads)
        model = AutoModelForSequenceClassification.from_pretrained(path, attn_implementation=attention).eval()
        self._torch, self._model = torch, torch.compile(model, dynamic=True) if compiled else model

    def run(self, batch: Batch, wanted: Sequence[str] | None = None) -> dict[str, np.ndarray]:
        with self._torch.inference_mode():
            inputs = {name: self._torch.from_numpy(batch[name]) for name in self.inputs if name in batch}
            return {"logits": self._model(**inputs).logits.numpy()}
