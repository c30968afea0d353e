"""Run calibration data through the packed student and watch what its matrix products are given."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from ..data.tokenize import Batch, TokenizedText, pad
from ..errors import InputError
from ..model.encoder import PrunedEncoder
from ..model.packed import PackedStudent, in_eval_mode
from .observers import Histogram

RANDOM_ROWS, RANDOM_TOKENS = 8, 64
"""Of `collect_random`: rows, and tokens of each at most."""


def collect(
    student: PrunedEncoder,
    batches: Sequence[Batch],
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Histogram]:
    """Return what each matrix product of the encoder is given, by the name it has in the graph: ``layers.0.attention.qkv``.

    The student runs packed, as it is exported, so padding and pruned tokens enter no range. Activations are counted where
    they appear and never kept: memory does not grow with the data.

    Args:
        student: weights in fp32.
        batches: int64 arrays by input name.
        progress: called with (batches done, batches in all).

    Raises:
        InputError: activations that are not finite, or all the same.
    """
    seen = _watch(student, batches, progress)
    for name, histogram in seen.items():
        if histogram.low == histogram.high:
            raise InputError(
                f"calibration: every value that reaches {name} is {histogram.low:g}, so it has no range; is the calibration "
                "data real text, and the checkpoint trained?"
            )
    return seen


def collect_random(student: PrunedEncoder) -> dict[str, Histogram]:
    """Return the same of tokens drawn evenly from the vocabulary, always the same ones: they tell which channels are large. No range is
    refused.
    """
    vocabulary = np.arange(student.dense.config.vocab_size)
    size = RANDOM_ROWS, min(RANDOM_TOKENS, student.max_tokens)
    others = vocabulary[vocabulary != student.pad_id]
    drawn = np.random.default_rng(0).choice(others if len(others) else vocabulary, size)
    rows = [TokenizedText(ids, [0] * len(ids), truncated=False) for ids in drawn.tolist()]
    return _watch(student, [pad(rows, student.pad_id, student.input_names)])


def _watch(
    student: PrunedEncoder, batches: Sequence[Batch], progress: Callable[[int, int], None] = lambda done, total: None
) -> dict[str, Histogram]:
    packed = PackedStudent(student)
    products = packed.products
    seen = {name: Histogram() for name in products}

    def watch(histogram: Histogram) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        return lambda module, inputs: histogram.add(inputs[0])

    with (
        contextlib.ExitStack() as hooks,
        torch.inference_mode(),
        in_eval_mode(student),
    ):  # most modules are the student's own
        for name, module in products.items():
            hooks.callback(module.register_forward_pre_hook(watch(seen[name])).remove)
        for done, batch in enumerate(batches, start=1):
            packed(**{name: torch.from_numpy(array) for name, array in batch.items()})
            progress(done, len(batches))
    return seen
