"""Learned Token Pruning, as its own code saves it: I-BERT's modules, which are RoBERTa's, with a threshold in each layer.

Source: Kim et al., KDD 2022; code at github.com/kssteven418/LTP. A layer's threshold is its weight `keep_threshold` plus
``final_token_threshold * layer / layers`` of the configuration, at least 1e-5; exactly 0 switches the layer's pruning off.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..contract import HEAD_SEQUENCE
from ..errors import InputError, shown
from ..model.checkpoint import Checkpoint, assemble, make_config, read_weights, weight_files
from ..model.config import PrunedEncoderConfig
from ..model.plain import architectures

if TYPE_CHECKING:
    from . import ReadOptions

NAME, OPTIONS = "LTP", ("padded_length",)
USUAL_LENGTH = 128
LEAST_THRESHOLD = 1e-5
MODE = "absolute_threshold"
_QUANTIZATION = re.compile(r"(_integer|_scaling_factor|\.x_min|\.x_max|\.shift|\.position_ids)$")
"""Buffers of I-BERT's integer arithmetic, which LTP leaves off."""
_THRESHOLD = re.compile(r"encoder\.layer\.(\d+)\.attention\.self\.pruner\.keep_threshold$")


def recognise(directory: Path, config: Mapping[str, Any], options: ReadOptions) -> str | None:
    """Say by what a directory is taken for LTP's, or None."""
    return "model_type ltp" if config.get("model_type") == "ltp" else None


def read(directory: Path, config: Mapping[str, Any], options: ReadOptions) -> Checkpoint:
    """Read an LTP classifier.

    Raises:
        InputError: `padded_length` is not given; another head, another way of pruning, or integer arithmetic; no thresholds.
    """
    path = directory / "config.json"
    _check(config, path)
    if options.head not in (None, HEAD_SEQUENCE):
        raise InputError(f"--head: got {shown(options.head)}; accepted of LTP is {HEAD_SEQUENCE}, so leave it out")
    if options.padded_length is None:
        raise InputError(
            f"{directory} is a checkpoint of LTP. Its scores are divided by the padded length of its evaluation, which is stored "
            f"nowhere; type: --padded-length {USUAL_LENGTH} (the usual one), or the length that you evaluated with"
        )
    files = weight_files(directory, options.allow_pickle)
    stored = {name: tensor for name, tensor in read_weights(files).items() if not _QUANTIZATION.search(name)}
    thresholds = _thresholds(stored, config, path)
    weights = {_renamed(name): tensor for name, tensor in stored.items() if not _THRESHOLD.search(name)}
    weights |= {f"pruners.{layer}_ffn.threshold": torch.tensor(value) for layer, value in thresholds.items()}
    pruning = {
        "method": "ltp",
        "sites": [f"{layer}.ffn" for layer in thresholds],
        "padded_length": options.padded_length,
        "first_may_fall": True,
    }
    labels = {name: config[name] for name in ("id2label", "label2id", "problem_type") if name in config}
    fields = {
        "model_type": PrunedEncoderConfig.model_type,
        "backbone": _backbone(config),
        "head": HEAD_SEQUENCE,
        **labels,
    }
    off = config["num_hidden_layers"] - len(thresholds)
    notes = (
        f"{directory.name} was taken for LTP on RoBERTa, evaluated at a padded length of {options.padded_length}"
        + (f"; {off} of its layers drop nothing" if off else ""),
        "LTP lets the first token fall below a threshold, and masks it from then on; here it always stays. A text whose first "
        "token stays in the original has the same answer",
    )
    return assemble(directory, config, make_config({**fields, "pruning": pruning}, path), weights, files, notes)


def _check(config: Mapping[str, Any], path: Path) -> None:
    names = architectures(config)
    if names and "LTPForSequenceClassification" not in names:
        raise InputError(f"{path}: got {', '.join(names)}; accepted of LTP is LTPForSequenceClassification")
    if (mode := config.get("prune_mode", MODE)) != MODE:
        raise InputError(f"{path}: prune_mode is {shown(mode)}; accepted is {MODE!r}, what LTP's paper trains")
    if config.get("quant_mode"):
        raise InputError(f"{path}: quant_mode is on; accepted are checkpoints in floating point")
    for name, kinds, accepted in (
        ("num_hidden_layers", int, "an integer"),
        ("final_token_threshold", (int, float), "a number"),
    ):
        value = config.get(name)
        if isinstance(value, bool) or not isinstance(value, kinds) or not abs(value) < 2**31:
            raise InputError(f"{path}: {name} is {shown(value)}; accepted is {accepted}")


def _thresholds(stored: Mapping[str, Tensor], config: Mapping[str, Any], path: Path) -> dict[int, float]:
    """Return the threshold of each layer that drops tokens."""
    found = {int(m[1]): tensor for name, tensor in stored.items() if (m := _THRESHOLD.search(name))}
    if wrong := [i for i, tensor in found.items() if tensor.numel() != 1]:
        raise InputError(
            f"{path}: the threshold of layer {wrong[0]} is {tuple(found[wrong[0]].shape)}; accepted is one number"
        )
    learned = {i: tensor.item() for i, tensor in found.items()}
    layers = config["num_hidden_layers"]
    if len(learned) != layers or sorted(learned) != list(range(layers)):
        raise InputError(f"{path}: got thresholds of layers {sorted(learned)}; accepted are all {layers} layers")
    final = config["final_token_threshold"]
    # In fp32, as the original adds them: whether a sum is exactly 0 decides.
    summed = {i: (torch.tensor(final * i / layers) + torch.tensor(learned[i])).item() for i in sorted(learned)}
    return {i: max(LEAST_THRESHOLD, value) for i, value in summed.items() if value != 0}


def _renamed(name: str) -> str:
    """The encoder's modules are called as RoBERTa's, after another first word."""
    first, _, rest = name.partition(".")
    return name if first == "classifier" else f"roberta.{rest}"


def _backbone(config: Mapping[str, Any]) -> dict[str, Any]:
    own = (
        "final_token_threshold",
        "prune_kwargs",
        "prune_mode",
        "quant_mode",
        "force_dequant",
        "architectures",
        "model_type",
    )
    return {**{name: value for name, value in config.items() if name not in own}, "model_type": "roberta"}
