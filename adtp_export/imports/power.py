"""PoWER-BERT, as its own code saves it: a BERT classifier of keras-bert in HDF5, whose layers keep so many tokens each.

Source: Goyal et al., ICML 2020; code at github.com/IBM/PoWER-BERT. After a layer's attention the tokens stay that received most from
others; [CLS] always stays. How many is in no weight: the search printed it as "Retention Configuration".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from ..contract import HEAD_SEQUENCE
from ..errors import InputError, MissingDependencyError, ellipsize, quoted
from ..io import check_regular, read_json
from ..model.checkpoint import Checkpoint, assemble, make_config
from ..model.config import PrunedEncoderConfig, without_loading
from ..model.registry import fields
from ..options import ReadOptions
from .lengths import about_padding, read_lengths, sites_of, taken_for

NAME, OPTIONS = "PoWER-BERT", ("length_config",)
WEIGHTS, CONFIG, LOG = "retrained.hdf5", "bert_config.json", "log_file.txt"
EPSILON = 9.999999999999998e-15
"""keras-bert's, the square of Keras' 1e-7; `bert_config.json` says nothing about it."""
POSITIONS = "embeddings.position_embeddings.weight"
MODEL, OPTIMIZER = "model_weights/", "optimizer_weights/"
"""Where Keras puts things in the file of a whole model; in a file of weights alone there is no such folder."""
_SHOWN = 3


def recognise(directory: Path, config: Mapping[str, Any], options: ReadOptions) -> str | None:
    """Say by what a directory is taken for PoWER-BERT's, or None."""
    return WEIGHTS if (directory / WEIGHTS).is_file() else None


def read(directory: Path, config: Mapping[str, Any], options: ReadOptions) -> Checkpoint:
    """Read a PoWER-BERT classifier.

    Raises:
        InputError: no lengths are given, or they do not fit the model; another head; no `bert_config.json`; other weights.
        MissingDependencyError: h5py is not installed.
    """
    if options.head not in (None, HEAD_SEQUENCE):
        raise InputError(f"--head: got {quoted(options.head)}; accepted of {NAME} is {HEAD_SEQUENCE}, so leave it out")
    if options.length_config is None:
        given = str(directory / LOG) if (directory / LOG).is_file() else "40,30,20,8"
        raise InputError(
            f"{directory} is a checkpoint of {NAME} ({WEIGHTS}). Its weights do not say how many tokens each layer keeps; type: "
            f'--length-config {given} (what its search printed as "Retention Configuration", one number per layer)'
        )
    path = directory / CONFIG
    if not path.is_file():
        raise InputError(
            f"{directory} has {WEIGHTS} and no {CONFIG}; put that of the BERT it was trained from beside it"
        )
    stored = _stored_config(path)
    plain = make_config(_format_2(stored, {}), path)
    layers = plain.encoder_config.num_hidden_layers
    lengths = read_lengths(options.length_config, layers)
    weights = _read(directory / WEIGHTS, _table(fields(plain.encoder_config)))
    longest = len(weights[POSITIONS])  # Keras has as many positions as its texts had
    sites = sites_of(lengths, longest)
    pruning = {
        "method": "schedule",
        "sites": list(sites),
        "lengths": list(sites.values()),
        "order": "received-from-others",
    }
    made = _format_2(
        {**stored, "max_position_embeddings": longest, "layer_norm_eps": EPSILON}, pruning if sites else {}
    )
    labels = {str(i): f"LABEL_{i}" for i in range(len(weights["classifier.bias"]))}
    notes = (
        taken_for(directory, f"{NAME} with {len(labels)} classes", lengths, sites),
        about_padding(NAME),
        "its classes have no names: they are LABEL_0 and so on, in the order of its training",
    )
    files = [path, directory / WEIGHTS]
    checkpoint = assemble(directory, made, make_config({**made, "id2label": labels}, path), weights, files, notes)
    return replace(checkpoint, read_with={"length_config": lengths})


def _stored_config(path: Path) -> dict[str, Any]:
    """Read Google's configuration of a BERT."""
    raw = read_json(path)
    if not isinstance(raw, dict) or raw.get("model_type", "bert") != "bert":
        raise InputError(f"{path}: got {quoted(raw)}; accepted is the configuration of a BERT, as Google publishes it")
    return without_loading(raw, path)


def _format_2(backbone: Mapping[str, Any], pruning: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "model_type": PrunedEncoderConfig.model_type,
        "backbone": {**backbone, "model_type": "bert"},
        "head": HEAD_SEQUENCE,
        "pruning": pruning,
    }


Table: TypeAlias = Mapping[str, tuple[str, tuple[int, ...]]]
"""transformers' name of a weight -> its name in the file, and its shape there, in which 0 stands for any size."""


def _read(path: Path, table: Table) -> dict[str, Tensor]:
    """Read the weights of a file, under transformers' names; there matrices are (out, in).

    Raises:
        InputError: it is no HDF5, or its names, shapes or types are others. MissingDependencyError: h5py is not installed.
    """
    try:
        import h5py
    except ImportError as error:
        raise MissingDependencyError(
            f"{path} is HDF5, and reading that needs the package h5py, which is not installed; type: pip install h5py"
        ) from error
    check_regular(path)
    found: dict[str, Any] = {}

    def visit(name: str, item: Any) -> None:
        if isinstance(item, h5py.Dataset) and not name.startswith(OPTIMIZER):
            found[name.removeprefix(MODEL)] = item

    try:
        with h5py.File(path, "r") as file:
            file.visititems(visit)  # follows no links, so nothing is read from other files
            _check(found, table, path)
            tensors = {name: torch.from_numpy(found[place][()]) for name, (place, _) in table.items()}
    except InputError:
        raise
    except Exception as error:  # what h5py raises shares no base
        raise InputError(f"{path} is not HDF5, truncated or corrupt: {ellipsize(str(error))}") from error
    return {
        name: tensor if tensor.ndim == 1 or name.endswith("_embeddings.weight") else tensor.T.contiguous()
        for name, tensor in tensors.items()
    }


def _check(found: Mapping[str, Any], table: Table, path: Path) -> None:
    """Raises InputError where the datasets of a file are not those of the model."""
    shapes = dict(table.values())
    others, missing = ([name for name in a if name not in b] for a, b in ((found, shapes), (shapes, found)))
    if others or missing:
        parts = [
            f"{len(names)} {what} ({', '.join(map(ellipsize, names[:_SHOWN]))}{', ...' if len(names) > _SHOWN else ''})"
            for names, what in ((others, "unknown"), (missing, "missing"))
            if names
        ]
        raise InputError(
            f"{path}: the weights do not match {CONFIG}: {'; '.join(parts)}. Accepted is what {NAME}'s code saves after retraining"
        )
    for name, dataset in found.items():
        shape = shapes[name]
        if len(shape) != dataset.ndim or any(size not in (0, n) for size, n in zip(shape, dataset.shape)):
            told = str(tuple(size or "any" for size in shape)).replace("'", "")
            raise InputError(f"{path}: the weights do not match {CONFIG}: {name} is {dataset.shape}, not {told}")
        if dataset.dtype not in (np.float32, np.float16):
            raise InputError(f"{path}: {name} is {dataset.dtype}; accepted are float32 and float16")
        if dataset.external or dataset.is_virtual or dataset.id.get_storage_size() < dataset.nbytes:
            raise InputError(f"{path}: {name} is compressed, or kept elsewhere; accepted is as Keras saves it")


def _table(sizes: Mapping[str, Any]) -> Table:
    """Say where each weight of a BERT is; `sizes` are its fields."""
    h, wide = sizes["hidden_size"], sizes["intermediate_size"]
    table = {
        **_embedding("word", "Token", sizes["vocab_size"], h),
        **_embedding("position", "Position", 0, h),
        **_embedding("token_type", "Segment", sizes["type_vocab_size"], h),
        **_norm("embeddings", "Embedding", h),
        **_dense("pooler.dense", "NSP-Dense", (h, h)),
        **_dense("classifier", "NSP", (h, 0)),
    }
    for i in range(sizes["num_hidden_layers"]):
        inner, attention, wider = (
            f"encoder.layer.{i}",
            *(f"Encoder-{i + 1}-{name}" for name in ("MultiHeadSelfAttention", "FeedForward")),
        )
        for name in ("query", "key", "value"):
            table |= _dense(f"{inner}.attention.self.{name}", attention, (h, h), name[0])
        table |= _dense(f"{inner}.attention.output.dense", attention, (h, h), "o")
        table |= _norm(f"{inner}.attention.output", attention, h)
        table |= _dense(f"{inner}.intermediate.dense", wider, (h, wide), "1")
        table |= _dense(f"{inner}.output.dense", wider, (wide, h), "2")
        table |= _norm(f"{inner}.output", wider, h)
    return table


def _place(layer: str, name: str) -> str:
    return f"{layer}/{layer}/{name}:0"


def _embedding(own: str, layer: str, *shape: int) -> Table:
    return {f"embeddings.{own}_embeddings.weight": (_place(f"Embedding-{layer}", "embeddings"), shape)}


def _norm(own: str, layer: str, size: int) -> Table:
    weight, bias = (_place(f"{layer}-Norm", name) for name in ("gamma", "beta"))
    return {f"{own}.LayerNorm.weight": (weight, (size,)), f"{own}.LayerNorm.bias": (bias, (size,))}


def _dense(own: str, layer: str, shape: tuple[int, int], which: str = "") -> Table:
    """Say where a Linear is; a layer that has several tells `which`."""
    names = (f"{layer}_W{which}", f"{layer}_b{which}") if which else ("kernel", "bias")
    weight, bias = (_place(layer, name) for name in names)
    return {f"{own}.weight": (weight, shape), f"{own}.bias": (bias, shape[1:])}
