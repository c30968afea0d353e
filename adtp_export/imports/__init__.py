"""Checkpoints of other systems, read as format 2. One reader a system; those of token-pruning systems have a line in the table.

`Reader` says what a module of the table has. No code of the directory is run.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, cast

from ..contract import HEAD_EMBEDDING, HEAD_SEQUENCE, HEAD_SPANS, HEAD_TOKENS
from ..errors import InputError, quoted
from ..model.checkpoint import Checkpoint, load_checkpoint, read_config
from ..model.tokenizer_settings import TOKENIZER_SETTINGS, ignored_settings, settings_of
from ..options import ReadOptions
from . import bge_m3, colbert, sentence_transformers

READERS = ("ltp", "top", "transkimmer", "lat", "power")
"""Modules of this room, imported when a directory is opened."""


class Reader(Protocol):
    """What a module of a token-pruning system has.

    NAME: of the system. OPTIONS: fields of `ReadOptions` that are for it, beside `allow_pickle` and `head`. `recognise` says by what
    a directory is taken for that system's, or None; `config` is its `config.json`, empty where it has none.
    """

    NAME: str
    OPTIONS: tuple[str, ...]

    def recognise(self, directory: Path, config: Mapping[str, Any], options: ReadOptions) -> str | None: ...
    def read(self, directory: Path, config: Mapping[str, Any], options: ReadOptions) -> Checkpoint: ...


def options_for(directory: Path, known: Mapping[str, Any], allow_pickle: bool = False) -> ReadOptions:
    """Return the options that a directory was read with before.

    Args:
        known: what was found out about it then, as a manifest's `checkpoint` has it.
    """
    options = ReadOptions(allow_pickle=allow_pickle, length_config=known.get("length_config"), head=known.get("head"))
    taken_by = _recognised(directory, _config(directory), options)
    needed: dict[str, Any] = {name: known.get(name) for reader, _ in taken_by for name in reader.OPTIONS}
    return replace(options, **needed)


def open_checkpoint(directory: Path, options: ReadOptions | None = None) -> Checkpoint:
    """Load a checkpoint: format 1 or 2, a plain transformers encoder, a sentence-transformers model, or one of another system.

    Raises:
        InputError: the directory does not hold one, it could be of two systems, it lacks an option that its system needs, or has one
            that is for another.
    """
    options = options or ReadOptions()
    config = _config(directory)
    taken_by = _recognised(directory, config, options)
    if len(taken_by) > 1:  # an option is a weaker sign than a file
        taken_by = [(reader, sign) for reader, sign in taken_by if not sign.startswith("--")]
    if len(taken_by) > 1:
        signs = " and ".join(f"{reader.NAME} ({sign})" for reader, sign in taken_by)
        raise InputError(
            f"{directory} could be a checkpoint of {signs}; accepted are the files of one system, so move the other's elsewhere"
        )
    own = taken_by[0][0].OPTIONS if taken_by else ()
    for reader in map(_reader, READERS):
        for name in reader.OPTIONS:
            if getattr(options, name) is not None and name not in own:
                option = name.replace("_", "-")
                raise InputError(
                    f"--{option} is for checkpoints of {reader.NAME}, which {directory} is not; leave it out"
                )
    return taken_by[0][0].read(directory, config, options) if taken_by else _dense(directory, config, options)


def _dense(directory: Path, config: Mapping[str, Any], options: ReadOptions) -> Checkpoint:
    """Load what no system for pruning wrote, and say which settings of its tokenizer are ignored."""
    checkpoint, longest = _own(directory, config, options)
    home = checkpoint.tokenizer_home or directory
    told = ignored_settings(
        home, checkpoint.tokenizer, checkpoint.student.dense.config, longest, checkpoint.tokenizer_edited
    )
    if checkpoint.student.config.head == HEAD_SPANS and settings_of(home).get("padding_side") == "left":
        told = (
            *told,
            f"{home.name}/{TOKENIZER_SETTINGS}: padding_side is ignored: questions are read before their contexts",
        )
    labelled = checkpoint.student.config.head in (HEAD_SEQUENCE, HEAD_TOKENS)
    contradicting = _contradicting(config, directory) if labelled else ()
    return replace(checkpoint, notes=(*checkpoint.notes, *told, *contradicting))


def _contradicting(config: Mapping[str, Any], directory: Path) -> Iterator[str]:
    """Say where `label2id` has other numbers than `id2label`: a pipeline of transformers may take it for one label."""
    names, back = (found if isinstance(found := config.get(name), dict) else {} for name in ("id2label", "label2id"))
    wrong = next((name for i, name in names.items() if back.get(name, int(i)) not in (i, int(i))), None)
    if wrong is not None:
        yield (
            f"{directory.name}/config.json: label2id gives {quoted(wrong)} another number than id2label, which is followed here; "
            "correct one of them"
        )


def _own(directory: Path, config: Mapping[str, Any], options: ReadOptions) -> tuple[Checkpoint, int | None]:
    """Return a checkpoint, and what it reads of a text where that is not what its tokenizer's settings say."""
    if (kind := colbert.recognise(directory, config)) is not None:
        return colbert.read(directory, kind, options), None
    if bge_m3.recognise(directory, options):
        return bge_m3.read(directory, options), None
    if sentence_transformers.recognise(directory):
        return sentence_transformers.read(directory, options), None
    checkpoint = load_checkpoint(directory, options.allow_pickle, options.head)
    if checkpoint.student.config.head == HEAD_EMBEDDING and sentence_transformers.reading(directory).files:
        return sentence_transformers.as_its_teacher(checkpoint), None
    student, longest = checkpoint.student, checkpoint.max_tokens
    if student.config.head == HEAD_SPANS:
        longest = student.windows.within(longest).max_tokens
    return checkpoint, longest


def _config(directory: Path) -> dict[str, Any]:
    return read_config(directory) if (directory / "config.json").is_file() else {}


def _recognised(directory: Path, config: Mapping[str, Any], options: ReadOptions) -> list[tuple[Reader, str]]:
    """Return the readers that take a directory for their system's, each with the sign that it goes by."""
    return [(r, sign) for r in map(_reader, READERS) if (sign := r.recognise(directory, config, options))]


def _reader(name: str) -> Reader:
    reader: Any = importlib.import_module(f".{name}", __package__)
    return cast(Reader, reader)
