"""Load a student checkpoint (format 1), with every mistake named before any work starts."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from tokenizers import BertWordPieceTokenizer, Tokenizer
from torch import Tensor
from transformers.activations import ACT2FN

from ..errors import InputError, did_you_mean
from ..records import sha256
from .config import AdtpBertConfig
from .student import AdtpBertForSequenceClassification

WEIGHTS, INDEX, PICKLE = "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.txt",
)

OWN_FIELDS = ("prune_sites", "retention_ratios", "saliency_hidden_size", "min_tokens")
_BENIGN_SUFFIX = ".position_ids"
_SHOWN = 4


@dataclass(frozen=True)
class Checkpoint:
    """A loaded student.

    student: the oracle, weights in fp32, in eval mode. raw_config: `config.json` as stored. sha256: over the
    configuration and the weight files. stored_dtype: dtype of the weights on disk.
    """

    directory: Path
    student: AdtpBertForSequenceClassification
    config: AdtpBertConfig
    tokenizer: Tokenizer
    raw_config: Mapping[str, Any]
    sha256: str
    stored_dtype: str


def load_checkpoint(directory: Path, allow_pickle: bool = False) -> Checkpoint:
    """Load and validate a checkpoint of format 1.

    Args:
        directory: holds `config.json`, weights (`model.safetensors`, sharded or not) and tokenizer files.
        allow_pickle: accept `pytorch_model.bin` when there is no safetensors file. Off by default, because
            unpickling has had remote-code holes even with ``weights_only``.

    Raises:
        InputError: anything missing, malformed, out of range, not finite, or surplus; the message names it.
    """
    raw_config = _read_config(directory)
    config = _make_config(raw_config, directory / "config.json")
    tokenizer = _load_tokenizer(directory, config)
    files = _weight_files(directory, allow_pickle)
    stored = _read_weights(files)
    try:
        with torch.device("meta"):  # shapes only: the weights come from the checkpoint
            student = AdtpBertForSequenceClassification(config)
    except Exception as error:  # values that only the layers themselves refuse
        raise InputError(f"{directory / 'config.json'} does not describe a model: {error}") from error
    _check_weights(stored, {name: t.shape for name, t in student.state_dict().items()}, directory)
    dtypes = sorted({str(t.dtype).removeprefix("torch.") for t in stored.values()})
    upcast = {name: stored.pop(name).float() for name in list(stored) if not name.endswith(_BENIGN_SUFFIX)}
    student.load_state_dict(upcast, assign=True)
    student.eval().requires_grad_(False)
    digest = sha256(directory / "config.json", *files)
    return Checkpoint(directory, student, config, tokenizer, raw_config, digest, "+".join(dtypes))


def _read_config(directory: Path) -> dict[str, Any]:
    if not os.path.isdir(directory):  # unlike Path.is_dir, no exception for a name that cannot be
        what = "is not a directory" if os.path.exists(directory) else "does not exist"
        raise InputError(
            f"{directory} {what}; give the directory of an AD-TP student (config.json, model.safetensors, ...)"
        )
    path = directory / "config.json"
    if not path.is_file():
        raise InputError(f"{directory} has no config.json; give the directory of an AD-TP student")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path} is not readable JSON: {error}") from error
    if not isinstance(raw, dict):
        raise InputError(f"{path} holds {type(raw).__name__}; accepted is a JSON object")
    return raw


def _make_config(raw: dict[str, Any], path: Path) -> AdtpBertConfig:
    accepted = AdtpBertConfig.model_type
    if (kind := raw.get("model_type")) != accepted:
        hint = "; a dense BERT needs a retainer first: train one with adtp-train" if kind == "bert" else ""
        raise InputError(f"{path}: model_type is {kind!r}; accepted is {accepted!r}{hint}")
    for name in OWN_FIELDS:
        if name not in raw:
            raise InputError(f"{path}: field {name!r} is missing; checkpoint format 1 needs {', '.join(OWN_FIELDS)}")
    try:
        config = AdtpBertConfig(**raw)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    except Exception as error:  # transformers validates the fields it owns, with exceptions of its own
        raise InputError(f"{path}: {error}") from error
    if config.hidden_act not in ACT2FN:
        raise InputError(f"{path}: hidden_act is {config.hidden_act!r}{did_you_mean(config.hidden_act, ACT2FN)}")
    return config


def _load_tokenizer(directory: Path, config: AdtpBertConfig) -> Tokenizer:
    try:
        if (directory / "tokenizer.json").is_file():
            tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        elif (directory / "vocab.txt").is_file():
            tokenizer = _from_vocabulary(directory)
        else:
            raise InputError(
                f"{directory} has no tokenizer; accepted are tokenizer.json or vocab.txt beside the weights"
            )
    except InputError:
        raise
    except Exception as error:  # tokenizers raises bare Exception
        raise InputError(f"{directory}: the tokenizer cannot be loaded: {error}") from error
    if (last := max(tokenizer.get_vocab().values(), default=0)) >= config.vocab_size:
        raise InputError(
            f"{directory}: the tokenizer gives ids up to {last}, the model knows {config.vocab_size}; they do not match"
        )
    return tokenizer


def _from_vocabulary(directory: Path) -> Tokenizer:
    """Make BERT's WordPiece tokenizer from `vocab.txt`, without asking the directory which class to import."""
    settings: dict[str, Any] = {}
    if (path := directory / "tokenizer_config.json").is_file():
        settings = json.loads(path.read_text(encoding="utf-8"))
    return BertWordPieceTokenizer(
        str(directory / "vocab.txt"),
        lowercase=settings.get("do_lower_case", True),
        strip_accents=settings.get("strip_accents"),
        handle_chinese_chars=settings.get("tokenize_chinese_chars", True),
    )._tokenizer


def _weight_files(directory: Path, allow_pickle: bool) -> list[Path]:
    if (directory / WEIGHTS).is_file():
        return [directory / WEIGHTS]
    if (index := directory / INDEX).is_file():
        try:
            names = sorted({str(n) for n in json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()})
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise InputError(f"{index} is not a safetensors index: {error!r}") from error
        for name in names:
            if Path(name).name != name or not name.endswith(".safetensors"):
                raise InputError(f"{index} names {name!r}; accepted are .safetensors files of the same directory")
            if not os.path.isfile(directory / name):
                raise InputError(f"{index} names {name}, which is missing")
        return [directory / name for name in names]
    if (pickled := directory / PICKLE).is_file():
        if allow_pickle:
            return [pickled]
        raise InputError(
            f"{directory} has pickled weights only ({PICKLE}), and unpickling can run code. "
            "Convert them to safetensors, or add --allow-pickle if you trust the file"
        )
    raise InputError(f"{directory} has no weights; accepted are {WEIGHTS} or {INDEX} with its shards")


def _read_weights(files: list[Path]) -> dict[str, Tensor]:
    weights: dict[str, Tensor] = {}
    for path in files:
        try:
            if path.name == PICKLE:
                shard = torch.load(path, map_location="cpu", weights_only=True)
                if not isinstance(shard, dict) or not all(isinstance(t, Tensor) for t in shard.values()):
                    raise InputError(f"{path} does not hold a dictionary of tensors")
            else:
                with safe_open(path, framework="pt") as stream:
                    shard = {name: stream.get_tensor(name) for name in stream.keys()}  # noqa: SIM118 - not a dict
        except InputError:
            raise
        except SafetensorError as error:
            raise InputError(f"{path} is truncated or corrupt: {error}") from error
        except Exception as error:  # unpickling fails in many ways
            raise InputError(f"{path} cannot be read: {error}") from error
        weights.update(shard)
    return weights


def _check_weights(stored: Mapping[str, Tensor], expected: Mapping[str, torch.Size], directory: Path) -> None:
    surplus = [n for n in stored if n not in expected and not n.endswith(_BENIGN_SUFFIX)]
    missing = [n for n in expected if n not in stored]
    if missing or surplus:
        parts = []
        if missing:
            parts.append(f"{len(missing)} missing ({_some(missing)}{did_you_mean(missing[0], surplus)})")
        if surplus:
            parts.append(f"{len(surplus)} not part of the model ({_some(surplus)})")
        raise InputError(f"{directory}: the weights do not match config.json: " + "; ".join(parts))
    shapes = [f"{n} is {tuple(stored[n].shape)}, not {tuple(s)}" for n, s in expected.items() if stored[n].shape != s]
    if shapes:
        raise InputError(f"{directory}: the weights do not match config.json: {_some(shapes)}")
    accepted = (torch.float32, torch.float16, torch.bfloat16)
    typed = [f"{n} is {stored[n].dtype}" for n in expected if stored[n].dtype not in accepted]
    if typed:
        raise InputError(f"{directory}: {_some(typed)}; accepted are fp32, fp16 and bf16")
    broken = [n for n in expected if not torch.isfinite(stored[n]).all()]
    if broken:
        raise InputError(f"{directory}: NaN or infinite weights in {_some(broken)}")


def _some(names: list[str]) -> str:
    rest = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + rest
