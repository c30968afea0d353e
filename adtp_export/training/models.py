"""Models of a training run: what is loaded as teacher, how a student is made of it, and how both are written."""

from __future__ import annotations

import copy
import os
import re
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    set_seed,
)

from ..contract import HEAD_EMBEDDING, HEAD_SEQUENCE, HEAD_SPANS
from ..data.truncate import unset
from ..data.windows import MINIMUM
from ..errors import InputError, did_you_mean, ellipsize, quoted
from ..imports import ReadOptions, open_checkpoint
from ..io import check_readable_name, share
from ..model import registry
from ..model.config import LABEL_FIELDS, AdtpBertConfig, PrunedEncoderConfig
from ..model.encoder import PrunedEncoder
from ..model.heads import head_class
from ..model.heads.embedding import PrunedEncoderForEmbedding
from ..model.heads.sequence import AdtpBertForSequenceClassification
from ..model.structured import INTERMEDIATE_SIZES, PRUNED_HEADS, pruned_heads
from ..model.tokenizer_settings import follow_inputs
from ..model.weights import first_file, only_pickled
from .data import Labels
from .methods import for_method
from .objectives import Objective
from .settings import TrainOptions

LAYER = re.compile(r"(?:^|\.)layers?\.(\d+)\.")
"""The number of a layer inside the names of its weights."""
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
    if len(tokenizer) <= len(tokenizer.all_special_ids):  # transformers makes such a one where there are no files
        raise InputError(f"{source}: its tokenizer knows no words; copy tokenizer.json of the model there")
    follow_inputs(tokenizer.backend_tokenizer, tokenizer.model_input_names)  # as an export of it does
    return tokenizer  # type: ignore[return-value] # typed as every backend there is


def load_config(source: str) -> PretrainedConfig:
    """Load the configuration of an encoder; of a checkpoint of ours that gives vectors, the one inside.

    Raises:
        InputError: it cannot be loaded, is of no known backbone, or has pickled weights alone.
    """
    check_readable_name(source)
    if not os.path.exists(source) and (
        source.count("/") > 1 or source.startswith((".", "/", "~"))
    ):  # no name of the Hub's
        raise InputError(
            f"{source}: there is no such directory; accepted are a model's directory, and its name on the Hub"
        )
    try:
        config = AutoConfig.from_pretrained(source)
    except Exception as error:  # missing files, no network, unknown types: many types
        raise InputError(f"{source}: the model cannot be loaded: {ellipsize(str(error))}") from error
    if isinstance(config, PrunedEncoderConfig) and config.head == HEAD_EMBEDDING and not config.sites:
        config = config.encoder_config
    if isinstance(config, (PrunedEncoderConfig, AdtpBertConfig)):
        raise InputError(f"{source}: is a student that drops tokens already; give the model that it was made from")
    if config.model_type not in registry.BACKBONES:
        known, hint = ", ".join(registry.BACKBONES), did_you_mean(config.model_type, registry.BACKBONES)
        raise InputError(
            f"{source}: model_type is {quoted(config.model_type)}; accepted are {known}, which students are made of{hint}"
        )
    try:
        registry.backbone(config.model_type).check(config)
    except InputError as error:
        raise InputError(f"{source}: {error}") from None
    if pickled := only_pickled(first_file(Path(source))):
        raise InputError(
            f"{pickled}If you trust the file, write it as safetensors with transformers: model.save_pretrained, after from_pretrained with "
            "use_safetensors=False"
        )
    return config


def labels_of_teacher(source: str, config: PretrainedConfig, labels: Labels, head: str = HEAD_SEQUENCE) -> Labels:
    """Return the data's labels in the teacher's order.

    Raises:
        InputError: the teacher does not know one, or answers with several for a text.
    """
    if not labels.names and head != HEAD_SEQUENCE:
        return labels  # spans and vectors have none
    kind = "regression" if labels.regression else "single_label_classification"
    if head == HEAD_SEQUENCE and config.problem_type not in (None, kind):
        raise InputError(
            f"{source}: the teacher's problem_type is {quoted(config.problem_type)}; accepted is {kind!r}, as in the data"
        )
    names = {int(number): str(name) for number, name in (config.id2label or {}).items()}
    known = tuple(names[number] for number in sorted(names))
    if labels.names and set(labels.names) <= set(known):  # rows may lack a rare one
        return Labels(known)
    as_many = len(known) == len(labels.names or ("score",))
    if as_many and (labels.regression or all(name.startswith("LABEL_") for name in known)):
        return labels
    raise InputError(
        f"{source}: the teacher does not match: it knows {', '.join(known)}, the data has "
        f"{', '.join(labels.names) or 'numbers'}; write the data's labels as the teacher names them, name its classes so in id2label of "
        "its config.json, or give a model that was fine-tuned for these"
    )


def load_teacher(
    source: str, objective: Objective, labels: Labels, tokenizer: PreTrainedTokenizerFast, tuned: bool
) -> PreTrainedModel:
    """Load an encoder with the head of an objective, as transformers has it.

    Args:
        tokenizer: that pads batches.
        tuned: it is a teacher that knows the task already (`labels_of_teacher`).

    Raises:
        InputError: it cannot be loaded, or has no head where it should.
    """
    if objective.head == HEAD_EMBEDDING:
        return load_embedder(source)
    fields = objective.fields(labels)
    if tuned:
        fields.pop("problem_type", None)
    auto = head_class(objective.head).auto_class
    try:
        model, found = auto.from_pretrained(
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
        raise InputError(
            f"{source}: no teacher: its file has no {missing}, so it is not fine-tuned for this task. adtp-train with --base {source} "
            "writes a teacher into its --out"
        )
    loaded: PreTrainedModel = model
    ending = auto.__name__.removeprefix("AutoModel")
    made_as = [str(name) for name in loaded.config.architectures or ()]
    if tuned and made_as and not any(name.endswith(ending) for name in made_as):
        raise InputError(f"{source}: no teacher: the model is {', '.join(made_as)}; accepted is one ...{ending}")
    if objective.head == HEAD_SEQUENCE and registry.backbone(loaded.config.model_type).generates:
        # By it transformers' classifiers of decoders find the last token of a text.
        loaded.config.pad_token_id = tokenizer.pad_token_id
    return loaded


def load_embedder(source: str) -> PrunedEncoderForEmbedding:
    """Load a model that gives vectors: a sentence-transformers directory, a plain encoder, or a checkpoint of ours without sites.

    Raises:
        InputError: it cannot be loaded, has another head, or drops tokens itself.
    """
    student = open_checkpoint(Path(source), ReadOptions(head=HEAD_EMBEDDING)).student
    if not isinstance(student, PrunedEncoderForEmbedding) or student.site_names:
        raise InputError(
            f"{source}: no teacher of vectors: its head is {student.config.head!r}, and it cuts at {len(student.site_names)} sites; "
            "accepted are sentence-transformers directories, and encoders that drop no token"
        )
    return student


def _own_fields(config: PretrainedConfig) -> dict[str, Any]:
    return {name: value for name, value in config.to_dict().items() if name not in NOT_OF_THE_MODEL}


def student_config(
    encoder: PretrainedConfig,
    settings: TrainOptions,
    head: str = HEAD_SEQUENCE,
    embedding: dict[str, Any] | None = None,
) -> AdtpBertConfig | PrunedEncoderConfig:
    """Return the configuration of a student of `encoder`.

    It is format 1 for an adaptive BERT that answers for a text as a whole, and else format 2.

    Args:
        embedding: how vectors are made, for the head "embedding" (`PrunedEncoderConfig`).

    Raises:
        InputError: sites, ratios or sizes that it refuses, or more layers than the encoder has.
    """
    available = encoder.num_hidden_layers
    if settings.layers is not None and settings.layers > available:
        raise InputError(f"--layers: got {settings.layers}; the teacher has {available}")
    sizes = {"saliency_hidden_size": settings.saliency_hidden_size, "min_tokens": settings.min_tokens}
    if settings.adaptive and head == HEAD_SEQUENCE and encoder.model_type in AdtpBertConfig.encoders:
        fields = _own_fields(encoder) | {"num_hidden_layers": settings.layers or available}
        return AdtpBertConfig(
            **fields | {"prune_sites": settings.sites, "retention_ratios": settings.candidates, **sizes}
        )
    fields = _own_fields(_with_layers(encoder, spread(encoder, settings.layers or available)))
    labels = {name: fields.pop(name) for name in LABEL_FIELDS if name in fields}
    pruning = for_method(settings.method).pruning(settings)
    windows = {name: number for name in MINIMUM if (number := getattr(settings, name)) is not None}
    return PrunedEncoderConfig(
        backbone={"model_type": encoder.model_type, **fields},
        pruning={"sites": settings.sites, **pruning} if pruning else None,
        head=head,
        embedding=embedding,
        windows=windows if head == HEAD_SPANS else None,
        **labels,
    )


FIRST_DIFFERS = {"modernbert"}
"""Model types whose first layer has no norm before its attention, so that no other can be the first."""


def spread(encoder: PretrainedConfig, layers: int) -> list[int]:
    """Return the numbers of `layers` of an encoder's layers, evenly spread, the last one among them, and the first where it differs."""
    first = [0] if encoder.model_type in FIRST_DIFFERS else []
    rest, available = layers - len(first), encoder.num_hidden_layers - len(first)
    return first + [len(first) + round((i + 1) * available / rest) - 1 for i in range(rest)]


PER_LAYER = ("layer_types", INTERMEDIATE_SIZES)
"""Fields of a configuration with one value per layer."""


def _with_layers(encoder: PretrainedConfig, chosen: list[int]) -> PretrainedConfig:
    """Return the configuration with these layers alone; families name their number differently, and some say what each layer is."""
    copied = copy.deepcopy(encoder)
    copied.num_hidden_layers = len(chosen)
    for name in PER_LAYER:
        if (values := getattr(encoder, name, None)) is not None:
            setattr(copied, name, [values[i] for i in chosen])
    if gone := pruned_heads(getattr(encoder, PRUNED_HEADS, None)):
        setattr(copied, PRUNED_HEADS, {i: sorted(gone[layer]) for i, layer in enumerate(chosen) if layer in gone})
    return copied


def make_student(teacher: PreTrainedModel, settings: TrainOptions, head: str = HEAD_SEQUENCE) -> PrunedEncoder:
    """Start a student from its teacher: the same weights, or those of some layers, and new pruners.

    Args:
        head: of the teacher, a key of `registry.HEADS`.

    Raises:
        InputError: as in `student_config`; or the teacher has other weights.
    """
    set_seed(settings.seed)
    encoder: PretrainedConfig = getattr(teacher, "dense", teacher).config
    config = student_config(encoder, settings, head, getattr(teacher.config, "embedding", None))
    first = isinstance(config, AdtpBertConfig)
    student: PrunedEncoder = (AdtpBertForSequenceClassification if first else head_class(head))(config)
    chosen = spread(encoder, config.encoder_config.num_hidden_layers)
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
    unset(tokenizer.backend_tokenizer)
    model.save_pretrained(out)
    share(*out.glob("*.safetensors"))
    tokenizer.save_pretrained(out)
