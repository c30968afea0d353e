"""Checkpoints of other systems, read as format 2. One reader a system; those of token-pruning systems have a line in the table.

A reader of the table has `recognise(config)`, whether a `config.json` is that system's, and `read(directory, config, options)`, which
gives a `Checkpoint`. No code of the directory is run.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import InputError
from ..model.checkpoint import Checkpoint, load_checkpoint, read_config
from . import sentence_transformers

READERS = ("ltp",)
"""Modules of this room, imported when a directory is opened."""


@dataclass(frozen=True)
class ReadOptions:
    """What a checkpoint may need to be read.

    allow_pickle: accept `pytorch_model.bin` where there are no safetensors. padded_length: for LTP, the length that its
    evaluation padded to. head: what the model answers with, where the directory leaves it open.
    """

    allow_pickle: bool = False
    padded_length: int | None = None
    head: str | None = None


def open_checkpoint(directory: Path, options: ReadOptions | None = None) -> Checkpoint:
    """Load a checkpoint: format 1 or 2, a plain transformers encoder, a sentence-transformers model, or one of another system.

    Raises:
        InputError: the directory does not hold one, it lacks an option that its system needs, or has one that it does not.
    """
    options = options or ReadOptions()
    if sentence_transformers.recognise(directory):
        _check_length(directory, options)
        return sentence_transformers.read(directory, options)
    config = read_config(directory)
    for name in READERS:
        reader: Any = importlib.import_module(f".{name}", __package__)
        if reader.recognise(config):
            checkpoint: Checkpoint = reader.read(directory, config, options)
            return checkpoint
    _check_length(directory, options)
    return load_checkpoint(directory, options.allow_pickle, options.head)


def _check_length(directory: Path, options: ReadOptions) -> None:
    if options.padded_length is not None:
        raise InputError(f"--padded-length is for checkpoints of LTP, which {directory} is not; leave it out")
