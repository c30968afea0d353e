"""Transkimmer, as its own code saves it: a BERT or RoBERTa of transformers with a skim predictor before each layer.

Source: Guan et al., ACL 2022; code at github.com/ChandlerGuan/Transkimmer. Its classes have transformers' names, so the weights say
what it is.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from ..errors import InputError
from ..model.checkpoint import Checkpoint, assemble, make_config
from ..model.plain import as_format_2, check_encoder, head_of
from ..model.weights import read_weights, weight_files
from ..options import ReadOptions
from .stored import weight_names

NAME, OPTIONS = "Transkimmer", ()
_PREDICTOR = re.compile(r"(?:^|\.)skim_predictors\.(\d{1,9})\.(.+)$")


def recognise(directory: Path, config: Mapping[str, Any], options: ReadOptions) -> str | None:
    """Say by what a directory is taken for Transkimmer's, or None."""
    return "weights called skim_predictors" if any(map(_PREDICTOR.search, weight_names(directory))) else None


def read(directory: Path, config: Mapping[str, Any], options: ReadOptions) -> Checkpoint:
    """Read an encoder of Transkimmer with any head.

    Raises:
        InputError: a layer without a skim predictor, or one without a layer; all that plain encoders are refused for.
    """
    path = directory / "config.json"
    check_encoder(config, path)
    raw = {name: value for name, value in config.items() if name != "skim_coefficient"}
    plain = as_format_2(raw, head_of(raw, path, options.head))
    layers = make_config(plain, path).encoder_config.num_hidden_layers
    files = weight_files(directory, options.allow_pickle)
    weights: dict[str, Tensor] = {}
    skimmed: set[int] = set()
    for name, tensor in read_weights(files).items():
        if found := _PREDICTOR.search(name):
            skimmed.add(int(found[1]))
            name = f"pruners.{int(found[1])}_attention.{found[2]}"
        weights[name] = tensor
    if len(skimmed) != layers or max(skimmed) >= layers:
        raise InputError(
            f"{directory}: got skim predictors of layers {sorted(skimmed)}; accepted are all {layers} layers"
        )
    pruning = {"method": "transkimmer", "sites": [f"{layer}.attention" for layer in range(layers)]}
    notes = (
        f"{directory.name} was taken for Transkimmer on {raw['model_type']}, with a skim predictor before each of {layers} layers",
        "Transkimmer adds Gumbel noise to its decisions in evaluation, too, and lets skipped tokens count in attention's denominator. Here "
        "the larger score decides, and skipped tokens are gone. So answers differ, and it has to be measured again (--verify-data FILE "
        "--label-column C), or finetuned",
    )
    return assemble(directory, config, make_config({**plain, "pruning": pruning}, path), weights, files, notes)
