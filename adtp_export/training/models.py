"""Models of a training run: what is loaded as teacher, how a student is made of it, and how both are written."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    set_seed,
)

from ..errors import InputError, shown
from ..model.config import AdtpBertConfig, PrunedEncoderConfig
from ..model.encoder import PrunedEncoder
from ..model.heads.sequence import AdtpBertForSequenceClassification, PrunedEncoderForSequenceClassification
from .data import Labels
from .settings import Settings

LAYER = re.compile(r"\.layer\.(\d+)\.")
"""The number of a layer inside the names of its weights."""
LABEL_FIELDS = ("id2label", "label2id", "problem_type")
NOT_OF_THE_MODEL = ("model_type", "architectures", "transformers_version", "dtype", "torch_dtype")


def load_tokenizer(source: str) -> PreTrainedTokenizerFast:
    """Load a fast tokenizer.

    Raises:
        InputError: there is none.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(source)
    except Exception as error:  # missing files, no network, unknown classes: many types
        raise InputError(f"{source}: the tokenizer cannot be loaded: {error}") from error
    if not tokenizer.is_fast or tokenizer.pad_token_id is None:
        raise InputError(f"{source}: accepted is a fast tokenizer with a padding token; BERT's has both")
    return tokenizer  # type: ignore[return-value] # typed as every backend there is


def load_config(source: str) -> PretrainedConfig:
    """Load the configuration of an encoder.

    Raises:
        InputError: it cannot be loaded, or is no BERT.
    """
    try:
        config = AutoConfig.from_pretrained(source)
    except Exception as error:  # missing files, no network, unknown types: many types
        raise InputError(f"{source}: the model cannot be loaded: {error}") from error
    if config.model_type != "bert":
        raise InputError(
            f"{source}: model_type is {shown(config.model_type)}; accepted is 'bert', which students are made of"
        )
    return config


def labels_of_teacher(source: str, config: PretrainedConfig, labels: Labels) -> Labels:
    """Return the data's labels in the teacher's order.

    Raises:
        InputError: the teacher knows others, or another number of them, or answers with several for a text.
    """
    kind = "regression" if labels.regression else "single_label_classification"
    if config.problem_type not in (None, kind):
        raise InputError(
            f"{source}: the teacher's problem_type is {shown(config.problem_type)}; accepted is {kind!r}, as in the data"
        )
    names = {int(number): str(name) for number, name in (config.id2label or {}).items()}
    known = tuple(names[number] for number in sorted(names))
    if len(known) == len(labels.names or ("score",)):
        if labels.regression or all(name.startswith("LABEL_") for name in known):
            return labels
        if set(known) == set(labels.names):
            return Labels(known)
    raise InputError(
        f"{source}: the teacher does not match: it knows {', '.join(known)}, the data has "
        f"{', '.join(labels.names) or 'numbers'}; leave --teacher out to fine-tune one"
    )


def load_classifier(source: str, labels: Labels, tuned: bool) -> PreTrainedModel:
    """Load an encoder of BERT's kind as a classifier for `labels`.

    Args:
        tuned: it is a teacher that knows these labels already (`labels_of_teacher`).

    Raises:
        InputError: it cannot be loaded, or has no head where it should.
    """
    names = dict(enumerate(labels.names or ("score",)))
    fields: dict[str, Any] = {"id2label": names, "label2id": {name: i for i, name in names.items()}}
    if not tuned:
        fields["problem_type"] = "regression" if labels.regression else "single_label_classification"
    try:
        model, found = AutoModelForSequenceClassification.from_pretrained(
            source,
            dtype=torch.float32,
            use_safetensors=True,
            ignore_mismatched_sizes=not tuned,  # a base may have the head of another task, which is made anew
            output_loading_info=True,
            **fields,
        )
    except Exception as error:
        raise InputError(f"{source}: the model cannot be loaded: {error}") from error
    if tuned and found["missing_keys"]:
        missing = ", ".join(sorted(found["missing_keys"])[:4])
        raise InputError(f"{source}: no teacher: its file has no {missing}; leave --teacher out and give it as --base")
    return model


def student_config(encoder: PretrainedConfig, settings: Settings) -> AdtpBertConfig | PrunedEncoderConfig:
    """Return the configuration of a student of `encoder`: format 1, or format 2 where one ratio serves all texts.

    Raises:
        InputError: sites, ratios or sizes that it refuses, or more layers than the encoder has.
    """
    fields = {name: value for name, value in encoder.to_dict().items() if name not in NOT_OF_THE_MODEL}
    if settings.layers is not None and settings.layers > fields["num_hidden_layers"]:
        raise InputError(f"--layers: got {settings.layers}; the teacher has {fields['num_hidden_layers']}")
    fields["num_hidden_layers"] = settings.layers or fields["num_hidden_layers"]
    sizes = {"saliency_hidden_size": settings.saliency_hidden_size, "min_tokens": settings.min_tokens}
    if settings.ratio == "adaptive":
        return AdtpBertConfig(
            **fields | {"prune_sites": settings.sites, "retention_ratios": settings.candidates, **sizes}
        )
    labels = {name: fields.pop(name) for name in LABEL_FIELDS if name in fields}
    schedule = {"ratios": [round(ratio, 3) for ratio in settings.wanted], "order": "saliency", **sizes}
    return PrunedEncoderConfig(
        backbone={"model_type": encoder.model_type, **fields},
        pruning={"method": "schedule", "sites": settings.sites, **schedule},
        **labels,
    )


def make_student(teacher: PreTrainedModel, settings: Settings) -> PrunedEncoder:
    """Start a student from its teacher: the same weights, or those of some layers, and new pruners.

    Raises:
        InputError: as in `student_config`; or the teacher has other weights.
    """
    set_seed(settings.seed)
    config = student_config(teacher.config, settings)
    adaptive = isinstance(config, AdtpBertConfig)
    student = (AdtpBertForSequenceClassification if adaptive else PrunedEncoderForSequenceClassification)(config)
    available, layers = teacher.config.num_hidden_layers, config.encoder_config.num_hidden_layers
    chosen = [round((i + 1) * available / layers) - 1 for i in range(layers)]
    weights = {}
    for name, weight in teacher.state_dict().items():
        if layer := LAYER.search(name):
            if int(layer[1]) not in chosen:
                continue
            name = f"{name[: layer.start(1)]}{chosen.index(int(layer[1]))}{name[layer.end(1) :]}"
        weights[name] = weight
    missing, surplus = student.load_state_dict(weights, strict=False)
    own = {id(weight) for weight in student.pruners.parameters()}
    new = {name for name, weight in student.named_parameters() if id(weight) in own}
    wrong = [n for n in missing if n not in new] + [n for n in surplus if not n.endswith("position_ids")]
    if wrong:
        raise InputError(f"the teacher does not match: its weights differ from the student's in {', '.join(wrong[:4])}")
    return student


def save_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Write a checkpoint that transformers and `adtp-export` load."""
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.backend_tokenizer.no_padding()
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
