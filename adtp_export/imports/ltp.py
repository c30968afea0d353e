"""Learned Token Pruning, as its own code saves it: I-BERT's modules, which are RoBERTa's, with a threshold in each layer.

Source: Kim et al., KDD 2022; code at github.com/kssteven418/LTP. Its `prune_mode` says how tokens are chosen:

- `absolute_threshold`: a layer's threshold is its weight `keep_threshold` plus ``final_token_threshold * layer / layers`` of the
  configuration, at least 1e-5; exactly 0 switches the layer's pruning off.
- `threshold`: all layers share ``token_threshold`` of the configuration; 0 switches pruning off.
- `topk`: rates fall linearly to ``token_keep_rate``, and the first layers keep all.

Its fourth mode, `rising_threshold`, raises a TypeError in that code before it answers anything.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..contract import HEAD_SEQUENCE
from ..errors import InputError, ellipsize, quoted
from ..model.checkpoint import Checkpoint, assemble, make_config
from ..model.config import PrunedEncoderConfig
from ..model.plain import architectures
from ..model.pruners.ltp import ABSOLUTE, MODES, TOPK
from ..model.weights import read_weights, weight_files
from ..options import ReadOptions

NAME, OPTIONS = "LTP", ("padded_length",)
USUAL_LENGTH = 128
MIN_THRESHOLD = 1e-5
MIN_RATE = 0.01
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
    mode = _check(config, path)
    if options.head not in (None, HEAD_SEQUENCE):
        raise InputError(f"--head: got {quoted(options.head)}; accepted of LTP is {HEAD_SEQUENCE}, so leave it out")
    _check_padded_length(directory, mode, options.padded_length)
    files = weight_files(directory, options.allow_pickle)
    stored = {name: tensor for name, tensor in read_weights(files).items() if not _QUANTIZATION.search(name)}
    weights = {_renamed(name): tensor for name, tensor in stored.items() if not _THRESHOLD.search(name)}
    pruning: dict[str, Any] = {"method": "ltp", "mode": mode, "first_may_fall": True}
    if mode == TOPK:
        rates = _rates(config, path)
        pruning |= {"sites": [f"{layer}.ffn" for layer in rates], "rates": list(rates.values())}
    else:
        thresholds = _thresholds(stored, config, path) if mode == ABSOLUTE else _shares(config, path)
        weights |= {f"pruners.{layer}_ffn.threshold": torch.tensor(value) for layer, value in thresholds.items()}
        pruning |= {"sites": [f"{layer}.ffn" for layer in thresholds]}
        pruning |= {"padded_length": options.padded_length} if mode == ABSOLUTE else {}
    labels = {name: config[name] for name in ("id2label", "label2id", "problem_type") if name in config}
    fields = {
        "model_type": PrunedEncoderConfig.model_type,
        "backbone": _backbone(config),
        "head": HEAD_SEQUENCE,
        "pruning": pruning if pruning["sites"] else {},
        **labels,
    }
    notes = _notes(directory, mode, options, config["num_hidden_layers"] - len(pruning["sites"]))
    return assemble(directory, config, make_config(fields, path), weights, files, notes)


def _check(config: Mapping[str, Any], path: Path) -> str:
    """Return the mode."""
    names = architectures(config)
    if names and "LTPForSequenceClassification" not in names:
        raise InputError(f"{path}: got {ellipsize(', '.join(names))}; accepted of LTP is LTPForSequenceClassification")
    if (mode := config.get("prune_mode", ABSOLUTE)) not in MODES:
        raise InputError(f"{path}: prune_mode is {quoted(mode)}; accepted are {', '.join(map(repr, MODES))}")
    if config.get("quant_mode"):
        raise InputError(f"{path}: quant_mode is on; accepted are checkpoints in floating point")
    layers = config.get("num_hidden_layers")
    if isinstance(layers, bool) or not isinstance(layers, int) or not abs(layers) < 2**31:
        raise InputError(f"{path}: num_hidden_layers is {quoted(layers)}; accepted is an integer")
    return str(mode)


def _number(config: Mapping[str, Any], path: Path, name: str, least: float, most: float) -> float:
    value = config.get(name)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value <= most:
        bounds = "" if most == 2**31 else f" from {least:g} to {most:g}"
        raise InputError(f"{path}: {name} is {quoted(value)}; accepted is a number{bounds}")
    return value


def _check_padded_length(directory: Path, mode: str, padded_length: int | None) -> None:
    if mode == ABSOLUTE and padded_length is None:
        raise InputError(
            f"{directory} is a checkpoint of LTP. Its scores are divided by the padded length of its evaluation, which is stored "
            f"nowhere; type: --padded-length {USUAL_LENGTH} (the usual one), or the length that you evaluated with"
        )
    if mode != ABSOLUTE and padded_length is not None:
        raise InputError(
            f"--padded-length is for LTP's prune_mode {ABSOLUTE!r}; that of {directory} is {mode!r}, where no padded length counts: "
            "leave it out"
        )


def _notes(directory: Path, mode: str, options: ReadOptions, off: int) -> tuple[str, ...]:
    how = (
        f"evaluated at a padded length of {options.padded_length}" if mode == ABSOLUTE else f"with prune_mode {mode!r}"
    )
    less = (
        ". Where rounding leaves a text no token, the original masks nothing in it; here one stays"
        if mode == TOPK
        else ""
    )
    return (
        f"{directory.name} was taken for LTP on RoBERTa, {how}"
        + (f"; {off} of its layers drop nothing" if off else ""),
        "LTP lets the first token fall, and masks it from then on; here it always stays. A text whose first token stays in the original "
        f"has the same answer{less}",
    )


def _shares(config: Mapping[str, Any], path: Path) -> dict[int, float]:
    """Return the share of the largest score that each layer asks for."""
    share = _number(config, path, "token_threshold", 0, 1)
    return {layer: float(share) for layer in range(config["num_hidden_layers"])} if share else {}


def _rates(config: Mapping[str, Any], path: Path) -> dict[int, float]:
    """Return the share of the tokens that each layer keeps, of those that drop some; in the order of the original's operations."""
    final, layers = _number(config, path, "token_keep_rate", 0, 1), config["num_hidden_layers"]
    whole = max(3, math.ceil(0.15 * layers))
    rates = {i: max(MIN_RATE, (final - 1) / (layers - whole) * (i - whole + 1) + 1) for i in range(whole, layers)}
    return {i: rate for i, rate in rates.items() if rate != 1}


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
    final = _number(config, path, "final_token_threshold", -(2**31), 2**31)
    # In fp32, as the original adds them: whether a sum is exactly 0 decides.
    summed = {i: (torch.tensor(final * i / layers) + torch.tensor(learned[i])).item() for i in sorted(learned)}
    return {i: max(MIN_THRESHOLD, value) for i, value in summed.items() if value != 0}


def _renamed(name: str) -> str:
    """The encoder's modules are called as RoBERTa's, after another first word."""
    first, _, rest = name.partition(".")
    return name if first == "classifier" else f"roberta.{rest}"


def _backbone(config: Mapping[str, Any]) -> dict[str, Any]:
    own = (
        "final_token_threshold",
        "token_threshold",
        "token_keep_rate",
        "prune_kwargs",
        "prune_mode",
        "quant_mode",
        "force_dequant",
        "architectures",
        "model_type",
    )
    return {**{name: value for name, value in config.items() if name not in own}, "model_type": "roberta"}
