"""Load a checkpoint (format 1, format 2, or a plain encoder), with every mistake named before any work starts."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers.activations import ACT2FN

from ..artifacts.records import convert
from ..contract import (
    HEAD_EMBEDDING,
    HEAD_MASKED,
    HEAD_SEQUENCE,
    HEAD_TOKENS,
)
from ..data.sides import Sides
from ..data.template import ChatTemplate
from ..errors import InputError, did_you_mean, ellipsize, quoted
from ..io import check_model_directory, directory_name, read_json, sha256
from . import registry, tied
from .config import AdtpBertConfig, PrunedEncoderConfig, check_labels, without_loading
from .encoder import PrunedEncoder
from .heads import head_class
from .heads.sequence import AdtpBertForSequenceClassification
from .plain import FORMATS, check_code, plain_vectors, with_format
from .structured import read_sizes
from .text_settings import RECORDS, check_sides, text_settings
from .tokenizer import load_tokenizer, special_token
from .tokenizer_settings import TOKENIZER
from .weights import check_adapter, read_weights, weight_files

_BENIGN_SUFFIX = (".position_ids", "embeddings.token_type_ids", "emb.inv_freq", "emb.original_inv_freq")
_UNUSED = re.compile(
    r"^(cls|lm_head|qa_outputs|predictions|loss(_fct)?|(discriminator|generator)_\w+|vocab_\w+|(mask|lm)_predictions|decoder)\.|(^|\.)pooler\."
)
_CLASSIFIER = re.compile(r"^(classifier|pre_classifier|head|score)\.")
"""Parts of other heads, and of poolers that a head has no use for: left behind by pretraining, or by another task."""
_LAYER = re.compile(r"(?:^|\.)layers?\.(\d{1,9})\.")
_SHOWN = 4


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A loaded student.

    student: the oracle, weights in fp32, in eval mode. raw_config: `config.json`, without what says how to load it. sha256: over the
    configuration and the weight files. stored_dtype: dtype of the weights on disk. notes: what a user should know about how
    it was read. tokenizer_home: where the tokenizer's files are; None: in the directory. tokenizer_edited: it differs from them.
    settings: fields for the block "adtp" of OUT/config.json; "max_tokens" is among them where it reads fewer than its positions.
    read_with: options that it had to be read with.
    """

    directory: Path
    student: PrunedEncoder
    tokenizer: Tokenizer
    raw_config: Mapping[str, Any]
    sha256: str
    stored_dtype: str
    notes: tuple[str, ...] = ()
    tokenizer_home: Path | None = None
    tokenizer_edited: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)
    read_with: Mapping[str, Any] = field(default_factory=dict)

    @property
    def max_tokens(self) -> int:
        """Longest text that it reads."""
        return min(self.student.max_tokens, self.settings.get("max_tokens", self.student.max_tokens))

    @property
    def sides(self) -> Sides | None:
        """How queries and documents are read, where they have vectors of tokens."""
        return convert(self.settings["vectors"], Sides) if "vectors" in self.settings else None

    @property
    def template(self) -> ChatTemplate | None:
        """The chat template that stands around its texts."""
        stored = self.settings.get("template")
        return None if stored is None else convert(stored, ChatTemplate)

    def describe(self) -> dict[str, Any]:
        """Say in the manifest what was exported: name, hash, backbone, head, method, sites and the method's settings."""
        config = self.student.config
        return {
            "name": directory_name(self.directory),
            "sha256": self.sha256,
            "stored_dtype": self.stored_dtype,
            "backbone": config.encoder_config.model_type,
            "head": config.head,
            "method": config.method,
            "prune_sites": list(self.student.site_names),
            **(dataclasses.asdict(config.settings) if config.settings else {}),
            **{name: value for name, value in self.settings.items() if name not in RECORDS},
            **self.read_with,
        }


def load_checkpoint(directory: Path, allow_pickle: bool = False, head: str | None = None) -> Checkpoint:
    """Load and validate a checkpoint of format 1 or 2, or a plain transformers encoder.

    Args:
        directory: holds `config.json`, weights (`model.safetensors`, sharded or not) and tokenizer files.
        allow_pickle: accept `pytorch_model.bin` when there is no safetensors file. Off by default, because
            unpickling has had remote-code holes even with ``weights_only``.
        head: what the model answers with, where the directory leaves it open.

    Raises:
        InputError: anything missing, malformed, out of range, not finite, or surplus; the message names it.
    """
    raw = read_config(directory)
    path = directory / "config.json"
    config = make_config(with_format(raw, path, head), path)
    files = weight_files(directory, allow_pickle)
    notes: tuple[str, ...] = ()
    if (vectors := plain_vectors(config)) and raw.get("model_type") != config.model_type:
        notes = (
            f"{directory.name} has no modules.json: its vectors are {vectors}, as sentence-transformers makes them "
            "of such a directory",
        )
    settings = text_settings(raw, path)
    templated = "template" in settings
    if templated and config.head == HEAD_EMBEDDING:
        notes += (
            f"{directory.name} has its chat template in pieces: load(OUT) puts texts into it, and sentence-transformers does not; for "
            "that, export the directory that it was imported from",
        )
    checkpoint = assemble(directory, raw, config, read_weights(files), files, notes, templated=templated)
    checkpoint = dataclasses.replace(checkpoint, settings=settings)
    if config.head == HEAD_MASKED and checkpoint.student.config.mask_token_id is None:
        checkpoint.student.config.mask_token_id = _mask_id(checkpoint)
    check_sides(checkpoint.sides, checkpoint.student, path)
    return checkpoint


def _mask_id(checkpoint: Checkpoint) -> int:
    """Return the id of the tokenizer's mask token; raises InputError where it has none."""
    named = special_token(checkpoint.tokenizer, checkpoint.directory, "mask_token")
    number = None if named is None else checkpoint.tokenizer.token_to_id(named)
    if number is None:
        raise InputError(
            f"{checkpoint.directory}: got the mask_token {quoted(named)}, which is no token of the tokenizer; accepted for the head "
            "masked are models with one"
        )
    if number not in checkpoint.tokenizer.encode(str(named)).ids:
        raise InputError(
            f"{checkpoint.directory}: {TOKENIZER} reads {quoted(named)} as ordinary letters, so no text has the model's mask token; add "
            "it to added_tokens there, or name it as mask_token in tokenizer_config.json"
        )
    return int(number)


def assemble(
    directory: Path,
    raw: Mapping[str, Any],
    config: PrunedEncoderConfig | AdtpBertConfig,
    stored: dict[str, Tensor],
    files: list[Path],
    notes: tuple[str, ...] = (),
    *,
    templated: bool = False,
) -> Checkpoint:
    """Make the student of a configuration and its weights; `stored` is emptied on the way.

    Args:
        directory: has the tokenizer.
        files: of weights, and others that decide what the model is.
        templated: texts stand in a template, so that the tokenizer need not give a token for an empty one.

    Raises:
        InputError: the weights are not those of the configuration, or the tokenizer does not fit.
    """
    if isinstance(config, PrunedEncoderConfig):  # the other one is a BERT of one size
        config.backbone |= read_sizes(*registry.described(config.encoder_config, stored), directory)
    encoder = config.encoder_config
    tokenizer = load_tokenizer(directory, encoder, templated)
    make = AdtpBertForSequenceClassification if isinstance(config, AdtpBertConfig) else head_class(config.head)
    _check_layers(stored, encoder.num_hidden_layers, directory)
    try:
        with torch.device("meta"):  # nothing is allocated before the shapes are known to be right
            empty = make(config)
        expected, ties = {name: t.shape for name, t in empty.state_dict().items()}, tied.shared(empty)
    except Exception as error:  # values that only the layers themselves refuse
        raise InputError(f"{directory / 'config.json'} does not describe a model: {ellipsize(str(error))}") from error
    tied.complete(_rename(stored, expected, empty.dense.base_model_prefix), ties)
    foreign = not config.sites or raw.get("model_type") not in FORMATS
    if foreign and (unused := _unused(stored, expected, config.head)):
        notes = (*notes, f"{directory.name} holds weights that the head {config.head} does not use: {_some(unused)}")
        for name in unused:
            del stored[name]
    _check_weights(stored, expected, directory)
    stored = {name: t for name, t in stored.items() if not name.endswith(_BENIGN_SUFFIX)}
    dtypes = sorted({str(t.dtype).removeprefix("torch.") for t in stored.values()})
    # Copies: in a file weights lie anywhere, and the last bit of an answer may depend on where they lie in memory.
    upcast = {name: stored.pop(name).to(torch.float32, copy=True) for name in list(stored)}
    with Uninitialised():  # the weights come from the checkpoint
        student = make(config)
    tied.load(student, upcast, ties)
    student.eval().requires_grad_(False)
    decides = [path for path in (directory / "config.json", *files) if path.is_file()]
    return Checkpoint(
        directory=directory,
        student=student,
        tokenizer=tokenizer,
        raw_config=raw,
        sha256=sha256(*decides),
        stored_dtype="+".join(dtypes),
        notes=notes,
    )


def _unused(stored: Mapping[str, Tensor], expected: Mapping[str, Any], head: str) -> list[str]:
    """Return the names of weights that belong to other heads than this one."""
    others = (_UNUSED,) if head in (HEAD_SEQUENCE, HEAD_TOKENS) else (_UNUSED, _CLASSIFIER)
    return [name for name in stored if name not in expected and any(other.search(name) for other in others)]


def _rename(stored: dict[str, Tensor], expected: Mapping[str, Any], prefix: str) -> dict[str, Tensor]:
    """Put the name of the encoder before the names of its weights, or take it away, as the model has it: the same dictionary."""
    for name in [name for name in stored if name not in expected]:
        for other in (name.removeprefix(f"{prefix}."), f"{prefix}.{name}"):
            if other in expected and other not in stored:
                stored[other] = stored.pop(name)
                break
    return stored


class Uninitialised(TorchFunctionMode):
    """Weights are allocated and not drawn; buffers are what their modules make them."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        if getattr(func, "__name__", "") in ("normal_", "uniform_", "trunc_normal_", "kaiming_uniform_"):
            tensor = args[0] if args else (kwargs or {})["tensor"]
            if func in (
                torch.Tensor.normal_,
                torch.Tensor.uniform_,
            ):  # a truncated normal is drawn until it fits, and 0 does
                tensor.detach().zero_()
            return tensor
        return func(*args, **(kwargs or {}))


def read_config(directory: Path) -> dict[str, Any]:
    """Read `config.json`; raises InputError where the directory or the file is not what it should be."""
    check_model_directory(directory)
    path = directory / "config.json"
    if not path.is_file():
        check_adapter(directory)
        raise InputError(f"{directory} has no config.json; give the directory of a model")
    raw = read_json(path)
    if not isinstance(raw, dict):
        raise InputError(f"{path} holds {type(raw).__name__}; accepted is a JSON object")
    check_code(raw, path)
    return without_loading(raw, path)


def make_config(fields: dict[str, Any], path: Path) -> PrunedEncoderConfig | AdtpBertConfig:
    """Make a configuration of its fields.

    Raises:
        InputError: a field is missing, unknown or out of range; the message begins with `path`.
    """
    first = fields["model_type"] == AdtpBertConfig.model_type
    needed = AdtpBertConfig.OWN_FIELDS if first else ("backbone", "head")
    for name in needed:
        if name not in fields:
            number = 1 if first else 2
            raise InputError(f"{path}: field {name!r} is missing; checkpoint format {number} needs {', '.join(needed)}")
    fields = dict(fields)
    check_labels(fields, path)
    try:
        config: PrunedEncoderConfig | AdtpBertConfig = (AdtpBertConfig if first else PrunedEncoderConfig)(**fields)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    except Exception as error:  # transformers validates the fields it owns, with exceptions of its own
        raise InputError(f"{path}: {ellipsize(str(error))}") from error
    encoder = config.encoder_config
    family = registry.backbone(encoder.model_type)
    if (activation := family.fields(encoder)["hidden_act"]) not in ACT2FN:
        name = family.own_name("hidden_act")
        raise InputError(f"{path}: {name} is {quoted(activation)}{did_you_mean(activation, ACT2FN)}")
    return config


def _check_layers(stored: Mapping[str, Tensor], layers: int, directory: Path) -> None:
    """See that there are weights for as many layers, before so many are made."""
    found = {int(number) for name in stored for number in _LAYER.findall(name)}
    if (first := next((i for i in range(layers) if i not in found), layers)) < layers:
        raise InputError(
            f"{directory}: the weights do not match config.json: num_hidden_layers is {layers}, and the weights of layer {first} are "
            "missing"
        )


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
