"""Length-Adaptive Transformer: a plain encoder whose layers keep so many tokens each, which no file of transformers says.

Intel's Dynamic-TinyBERT and QuaLA-MiniLM are such models, for questions.

Source: Kim and Cho, ACL 2021, section 3; code at github.com/clovaai/length-adaptive-transformer. After a layer's attention the
tokens stay that received most. [CLS] always stays, but not where the model answers questions. A dropped token keeps what the layer
before gave it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..contract import HEAD_SPANS
from ..errors import InputError
from ..model import registry
from ..model.checkpoint import Checkpoint, assemble, make_config
from ..model.plain import with_format
from ..model.weights import read_weights, weight_files
from ..options import ReadOptions
from .lengths import about_padding, read_lengths, sites_of, taken_for

NAME, OPTIONS = "Length-Adaptive Transformer", ("length_config",)
LENGTHS = "length_config.txt"
"""Where people keep the lengths beside the weights."""


def recognise(directory: Path, config: Mapping[str, Any], options: ReadOptions) -> str | None:
    """Say by what a directory is taken for this system's, or None: a plain encoder for which lengths are given, or lie there."""
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in registry.BACKBONES or (directory / "modules.json").is_file():
        return None
    if options.length_config is not None:
        return "--length-config"
    return LENGTHS if (directory / LENGTHS).is_file() else None


def read(directory: Path, config: Mapping[str, Any], options: ReadOptions) -> Checkpoint:
    """Read an encoder with any head.

    Raises:
        InputError: no lengths are given, or they do not fit the model; it is not a plain encoder.
    """
    path = directory / "config.json"
    fields = with_format(config, path, options.head)
    encoder = make_config(fields, path).encoder_config
    if options.length_config is None:
        raise InputError(
            f"{directory} is a checkpoint of {NAME} ({LENGTHS}); type: --length-config {directory / LENGTHS}, or the lengths that you "
            "want, one per layer. To drop no token, take that file away"
        )
    family = registry.backbone(encoder.model_type)
    layers = family.fields(encoder)["num_hidden_layers"]
    lengths = read_lengths(options.length_config, layers)
    sites = sites_of(lengths, family.max_tokens(encoder))
    questions = fields["head"] == HEAD_SPANS
    pruning = {
        "method": "schedule",
        "sites": list(sites),
        "lengths": list(sites.values()),
        "order": "received",
        "keep_first": not questions,
        "restore": "layer",
    }
    files = weight_files(directory, options.allow_pickle)
    notes = (
        taken_for(directory, f"{NAME} on {encoder.model_type}", lengths, sites),
        "the first token may be dropped, as in the original for questions"
        if questions
        else "the first token always stays, as in the original for classification",
        about_padding(NAME),
    )
    made = make_config({**fields, "pruning": pruning if sites else None}, path)
    checkpoint = assemble(directory, config, made, read_weights(files), files, notes)
    return replace(checkpoint, read_with={"length_config": lengths})
