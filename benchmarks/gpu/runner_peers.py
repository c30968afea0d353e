"""The runner of this project: a student, and dense BERT of the same weights, each as one replay from padded ids to logits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from adtp_export.plugins.encoder import planner
from adtp_export.plugins.encoder.launches import Sizes
from adtp_export.plugins.runner import Runner
from adtp_export.runtimes.described import describe

if TYPE_CHECKING:
    from adtp_export.model.encoder import PrunedEncoder


class InRunner:
    """A model in the runner, from arrays on the host to logits on the host.

    Args:
        sizes: of the largest call, and of the GPU.
        library: the built one; None: that of `adtp-plugin build --cuda`.
    """

    outputs: tuple[str, ...] = ("logits",)

    def __init__(self, model: PrunedEncoder, precision: str, sizes: Sizes, library: Path | None = None) -> None:
        planned = planner.make(describe(model), precision, sizes)
        self.inputs, self._labels = model.input_names, model.num_labels
        self._runner = Runner(planned.plan, planned.weights, library=library)

    def run(self, batch: Mapping[str, np.ndarray], wanted: Sequence[str] | None = None) -> dict[str, np.ndarray]:
        texts, length = batch["input_ids"].shape
        logits = np.empty((texts, self._labels), np.float32)
        given = [np.ascontiguousarray(batch[name]) for name in self.inputs]
        self._runner.run(given, [logits], texts=texts, tokens=texts * length, length=length)
        return {"logits": logits}

    def close(self) -> None:
        self._runner.close()
