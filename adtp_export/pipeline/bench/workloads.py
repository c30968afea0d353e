"""What `bench` runs models on: the grid as far as a model reads it, and a file's real lengths. Nothing here imports PyTorch."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from ...benchmarking.workloads import (
    GRID,
    SHAPES,
    SKEWED,
    Workload,
    is_shape,
    make_workloads,
    real_lengths,
    shape_of,
)
from ...data import rows
from ...data.readers import Text
from ...data.rows import TextSource
from ...errors import InputError, quoted
from ...options import listed
from ...verify.samples import built_in_texts
from ..progress import Steps
from .options import BenchOptions


@dataclass(frozen=True, kw_only=True)
class Read:
    """What a model takes. inputs: by name. vocabulary: its size. texts: what batches are made of; random ids without a tokenizer."""

    inputs: Sequence[str]
    vocabulary: int
    max_tokens: int
    tokenizer: Tokenizer | None = None
    texts: Sequence[Text] = ()


MOST_TEXTS = 8192
"""That are read of a file, at most. Workloads that need more begin again."""


def texts_for(head: str, chosen: BenchOptions) -> tuple[str, list[Text]]:
    """Return what is run through a model with this head, a file's rows or built-in sentences, and what to call it.

    Raises:
        InputError: the file cannot be read.
    """
    if chosen.data is None:
        return "built-in sentences", list(built_in_texts(pairs=False))
    data = Path(chosen.data)
    read = (row for row, _ in rows.read(head, TextSource(data, chosen.text_column)))
    first = itertools.islice(read, MOST_TEXTS)
    return data.name, [" ".join(row) if isinstance(row, list) else row for row in first]


def names_of(chosen: BenchOptions) -> Sequence[str]:
    """Return the names of the workloads that were asked for.

    Raises:
        InputError: one is neither a shape nor a skewed batch.
    """
    names = tuple(dict.fromkeys(listed(chosen.workloads))) or (*GRID, *SKEWED)
    for name in names:
        if name not in SKEWED and not is_shape(name):
            raise InputError(f"--workload: got {quoted(name)}; accepted are {', '.join(SKEWED)}, and {SHAPES}")
    return names


def workloads(read: Read, chosen: BenchOptions, steps: Steps) -> list[Workload]:
    """Make the grid's batches as far as the model reads them, and those of real lengths where a file is given.

    Raises:
        InputError: a name that no workload has, or nothing that the model can read.
    """
    names = names_of(chosen)
    short = [name for name in names if name in SKEWED or shape_of(name)[1] <= read.max_tokens]
    if len(short) < len(names):
        left_out = ", ".join(name for name in names if name not in short)
        steps.note(f"left out {left_out}: the model reads at most {read.max_tokens} tokens")
    if not short:
        raise InputError(f"--workload: nothing is left to time; the model reads at most {read.max_tokens} tokens")
    timed = make_workloads(short, read.inputs, read.vocabulary, read.tokenizer, read.texts, read.max_tokens)
    if chosen.data is not None:
        assert read.tokenizer is not None
        timed += real_lengths(read.tokenizer, read.texts, read.inputs, read.max_tokens)
    return timed
