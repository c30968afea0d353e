"""The files that hold a checkpoint's weights: which these are, and how they are read."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers.utils import logging

from ..artifacts.records import MANIFEST_NAME
from ..errors import InputError, ellipsize, quoted
from ..io import check_readable_name, read_json
from .plain import check_float

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLE, PICKLE_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
ADAPTER, ADAPTER_WEIGHTS = "adapter_config.json", ("adapter_model.safetensors", "adapter_model.bin")
_OLD_NAMES = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}


def check_adapter(directory: Path, where: str = "without its model") -> None:
    """Raises InputError where a directory holds what PEFT learned, which no weights of a model have in them yet."""
    if (directory / ADAPTER).is_file():
        raise InputError(
            f"{directory} holds an adapter ({ADAPTER}) {where}; merge them in Python, and export MERGED: "
            f'PeftModel.from_pretrained(model, "{directory}").merge_and_unload().save_pretrained("MERGED")'
        )


def first_file(directory: Path) -> Path | None:
    """Return the file that holds the weights, or the index of those that do; None where there is none."""
    names = (WEIGHTS, INDEX, PICKLE, PICKLE_INDEX)
    return next((directory / name for name in names if (directory / name).is_file()), None)


@contextlib.contextmanager
def no_bars() -> Iterator[None]:
    """Keep transformers' progress bars off in a block."""
    shows = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shows:
            logging.enable_progress_bar()


def only_pickled(place: Path | None) -> str:
    """Begin the message for a directory whose `first_file` is pickled; "" where it is not."""
    if place is None or place.name not in (PICKLE, PICKLE_INDEX):
        return ""
    return f"{place.parent} has pickled weights only ({place.name}), and unpickling can run code. "


def weight_files(directory: Path, allow_pickle: bool) -> list[Path]:
    """Return the files that hold the weights; raises InputError where there are none, or only a pickle without leave, or in a directory
    whose name is no text."""
    check_readable_name(directory)
    if any((directory / name).is_file() for name in ADAPTER_WEIGHTS):
        check_adapter(directory, "beside its model")
    place = first_file(directory)
    if place is None:
        check_adapter(directory)
        export = "is an export; give the model that it was made from" if (directory / MANIFEST_NAME).is_file() else ""
        raise InputError(
            f"{directory} {export or f'has no weights; accepted are {WEIGHTS} or {INDEX} with its shards'}"
        )
    pickled = only_pickled(place)
    if pickled and not allow_pickle:
        raise InputError(f"{pickled}Convert them to safetensors, or add --allow-pickle if you trust the file")
    if place.name in (INDEX, PICKLE_INDEX):
        return _shards(place, ".bin" if pickled else ".safetensors")
    return [place]


def _shards(index: Path, ending: str) -> list[Path]:
    """Return the files that an index names; raises InputError where it is none, or one is missing."""
    try:
        names = sorted({str(name) for name in read_json(index)["weight_map"].values()})
    except (KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{index} is not an index of weights: {quoted(error)}") from error
    if not names:
        raise InputError(f"{index} names no file; accepted are {ending} files of the same directory")
    for name in names:
        if Path(name).name != name or not name.endswith(ending):
            raise InputError(f"{index} names {quoted(name)}; accepted are {ending} files of the same directory")
        if not os.path.isfile(index.parent / name):
            raise InputError(f"{index} names {name}, which is missing")
    return [index.parent / name for name in names]


def read_weights(files: list[Path]) -> dict[str, Tensor]:
    """Read tensors by name; raises InputError for files that are truncated, corrupt, or hold something else."""
    weights: dict[str, Tensor] = {}
    for path in files:
        try:
            if path.suffix == ".bin":
                shard = torch.load(path, map_location="cpu", weights_only=True)
                if not isinstance(shard, dict) or not all(isinstance(t, Tensor) for t in shard.values()):
                    raise InputError(f"{path} does not hold a dictionary of tensors")
            else:
                with safe_open(path, framework="pt") as stream:
                    shard = {name: stream.get_tensor(name) for name in stream.keys()}  # noqa: SIM118 - not a dict
        except InputError:
            raise
        except SafetensorError as error:
            raise InputError(f"{path} is truncated or corrupt: {ellipsize(str(error))}") from error
        except Exception as error:  # unpickling fails in many ways
            raise InputError(f"{path} cannot be read: {ellipsize(str(error))}") from error
        weights.update({_modern(name): tensor for name, tensor in shard.items()})
    check_float(weights, files[0].parent)
    return weights


def _modern(name: str) -> str:
    """Rename LayerNorm's weights as transformers does where they have their names of 2018."""
    for old, new in _OLD_NAMES.items():
        name = name.removesuffix(old) + new if name.endswith(old) else name
    return name
