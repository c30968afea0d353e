"""ToP, as its own code saves it: a BERT of transformers, and `zs.pt` with the masks that say which ranks of tokens stay.

Source: Li et al., KDD 2023; code at github.com/microsoft/Moonlit. There the masks belong to the last layers, one row each.
`l0_module.pt`, from which the original makes them, is a pickled module. It is never opened.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import InputError, ellipsize, quoted
from ..model.checkpoint import Checkpoint, assemble, make_config
from ..model.plain import architectures, as_format_2, check_encoder, head_of
from ..model.pruners.top import MAX_BINS
from ..model.weights import read_weights, weight_files
from ..options import ReadOptions
from .stored import pickled_texts

NAME, OPTIONS = "ToP", ()
MASKS, MODULE = "zs.pt", "l0_module.pt"
RANKS, SWITCHES = "token_z", "pruner_z"
_TRAINING = re.compile(r"(\w+_)?transformation\.")
"""Weights of the loss that it is trained with."""
_NOT_OF_THE_MODEL = ("output_attentions", "output_hidden_states", "do_layer_distill", "finetuning_task")


def recognise(directory: Path, config: Mapping[str, Any], options: ReadOptions) -> str | None:
    """Say by what a directory is taken for ToP's, or None; CoFi has a `zs.pt`, too, with other masks."""
    if RANKS in pickled_texts(directory / MASKS):
        return f"{RANKS} in {MASKS}"
    return next((f"architectures {name}" for name in architectures(config) if "ToP" in name), None)


def read(directory: Path, config: Mapping[str, Any], options: ReadOptions) -> Checkpoint:
    """Read an encoder of ToP with any head.

    Raises:
        InputError: no leave to unpickle; masks that are missing, damaged, not of this model, or of more than tokens; all that plain
            encoders are refused for.
    """
    path = directory / "config.json"
    check_encoder(config, path)
    raw = {name: value for name, value in config.items() if name not in _NOT_OF_THE_MODEL}
    plain = as_format_2(raw, head_of(raw, path, options.head))
    layers = make_config(plain, path).encoder_config.num_hidden_layers
    masks = _masks(directory, options, layers)
    sites = {layers - len(masks) + i: kept for i, kept in enumerate(masks) if kept is not None}
    names = [f"{layer}.attention" for layer in sites]
    pruning = {"method": "top", "sites": names, "bins": list(sites.values())} if sites else {}
    files = [*weight_files(directory, options.allow_pickle), directory / MASKS]
    weights = {name: tensor for name, tensor in read_weights(files[:-1]).items() if not _TRAINING.match(name)}
    off = len(masks) - len(sites)
    notes = (
        f"{directory.name} was taken for ToP on {raw['model_type']}, with masks for its last {len(masks)} layers"
        + (f", of which {off} drop{'s' if off == 1 else ''} nothing" if off else ""),
        "ToP ranks tokens by the attention that they get, from padding and dropped tokens too; here only from tokens that are there. As "
        "many tokens stay, but not always the same ones, so measure its quality again (--verify-data FILE --label-column C)",
    )
    return assemble(directory, config, make_config({**plain, "pruning": pruning}, path), weights, files, notes)


def _masks(directory: Path, options: ReadOptions, layers: int) -> list[str | None]:
    """Return which bins of ranks stay, for each of the last layers; None for one that is switched off."""
    path = directory / MASKS
    stored = _unpickled(path, options)
    for name, mask in stored.items():
        if name not in (RANKS, SWITCHES) and not (isinstance(mask, Tensor) and bool((mask == 1).all())):
            raise InputError(
                f"{path}: got {quoted(name)}, which masks more than tokens; accepted are {RANKS} and {SWITCHES} alone"
            )
    shapes = {name: tuple(stored[name].shape) if name in stored else "missing" for name in (RANKS, SWITCHES)}
    told = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
    accepted = f"accepted are {RANKS} (sites, bins) and {SWITCHES} (sites,), for 1 to {layers - 1} sites of a model of {layers} layers"
    ranks, switches = (stored.get(name, torch.zeros(())) for name in (RANKS, SWITCHES))
    if ranks.ndim != 2 or switches.shape != ranks.shape[:1] or not 0 < len(ranks) < layers:
        raise InputError(f"{path}: got {told}; {accepted}")
    if not 0 < ranks.shape[1] <= MAX_BINS:
        raise InputError(f"{path}: got {told}; accepted are 1 to {MAX_BINS} bins")
    for name in (RANKS, SWITCHES):
        values = stored[name]
        if values.is_complex() or not bool(((values >= 0) & (values <= 1)).all()):  # false for NaN, too
            raise InputError(f"{path}: {name} holds values that are not from 0 to 1; accepted are masks")
    kept = ["".join("01"[value] for value in row) for row in (ranks > 0).int().tolist()]
    return [row if on else None for row, on in zip(kept, (switches > 0).tolist())]


def _unpickled(path: Path, options: ReadOptions) -> dict[Any, Any]:
    """Load the masks; raises InputError without leave to, and for what is no dictionary of tensors."""
    if not path.is_file():
        module = (
            f" {MODULE}, which runs code when it is loaded, is not opened." if path.with_name(MODULE).is_file() else ""
        )
        raise InputError(
            f"{path} is missing: ToP keeps there which tokens stay.{module} In ToP's own environment type: zs = "
            f"torch.load({MODULE!r}).forward(training=False); torch.save(zs, {MASKS!r})"
        )
    if not options.allow_pickle:
        raise InputError(f"{path} is a pickle, and unpickling can run code. Add --allow-pickle if you trust the file")
    try:
        stored = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # unpickling fails in many ways
        raise InputError(f"{path} cannot be read: {ellipsize(str(error))}") from error
    if not isinstance(stored, dict) or not all(
        isinstance(stored.get(name, torch.zeros(())), Tensor) for name in (RANKS, SWITCHES)
    ):
        raise InputError(
            f"{path} holds {type(stored).__name__}; accepted is a dictionary of the tensors {RANKS} and {SWITCHES}"
        )
    return stored
