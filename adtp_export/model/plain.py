"""A plain transformers directory: which head its `config.json` says it has, that read as checkpoint format 2, and what is refused."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ..contract import HEAD_EMBEDDING, HEAD_MASKED, HEAD_SEQUENCE, HEAD_SPANS, HEAD_SPARSE, HEAD_TOKENS
from ..errors import InputError, did_you_mean, ellipsize, quoted
from . import registry
from .backbones.base import BIDIRECTIONAL, CAUSAL_FIELD
from .config import AdtpBertConfig, PrunedEncoderConfig

FOREIGN = ("ltp",)
"""Model types of other systems, which `imports/` reads."""
FORMATS = (AdtpBertConfig.model_type, PrunedEncoderConfig.model_type)
_ENDINGS = {
    "ForSequenceClassification": HEAD_SEQUENCE,
    "ForTokenClassification": HEAD_TOKENS,
    "ForQuestionAnswering": HEAD_SPANS,
    "Model": HEAD_EMBEDDING,
}
"""What the names of transformers' model classes end with, and the head that they have."""
_GENERATE = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "EncoderDecoderModel", "DoubleHeadsModel")
_LABELS = ("id2label", "label2id", "problem_type", "num_labels")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_every_n_layers")
"""Fields of models with mixture-of-experts layers."""
_QUANTIZED = (".qweight", ".weight_packed", ".weight_scale", ".weight_scale_inv", ".absmax", ".SCB")
"""What names end with beside weights that GPTQ, AWQ, compressed-tensors, fp8 or bitsandbytes quantized."""


def with_format(raw: Mapping[str, Any], path: Path, head: str | None = None) -> dict[str, Any]:
    """Return the fields of a configuration of format 1 or 2; a plain encoder is format 2 without sites.

    Args:
        path: of the configuration, for messages.
        head: what `--head` says; None: nothing.

    Raises:
        InputError: an unknown model type, fields of both formats, a head that is not known, or one that is not the directory's.
    """
    if head is not None and head not in registry.HEADS:
        raise InputError(
            f"--head: got {quoted(head)}; accepted are {', '.join(registry.HEADS)}{did_you_mean(str(head), registry.HEADS)}"
        )
    kind = raw.get("model_type")
    both = [name for name in ("backbone", "pruning") if name in raw]
    if both and any(name in raw for name in AdtpBertConfig.OWN_FIELDS):
        own = next(name for name in AdtpBertConfig.OWN_FIELDS if name in raw)
        raise InputError(
            f"{path}: {own!r} is a field of format 1 and {both[0]!r} one of format 2; keep those of one format"
        )
    if kind in FORMATS:
        stored = HEAD_SEQUENCE if kind == AdtpBertConfig.model_type else raw.get("head", head)
        _check_same(head, stored, path)
        return dict(raw)
    check_encoder(raw, path, pooled=head == HEAD_EMBEDDING)
    found = head_of(raw, path, head)
    language = any(name.endswith("ForCausalLM") for name in architectures(raw)) and raw.get(CAUSAL_FIELD) is not False
    pooling = {"embedding": {"pooling": "last"}} if found == HEAD_EMBEDDING and language else {}
    return as_format_2(raw, found, **pooling)


def plain_vectors(config: PrunedEncoderConfig | AdtpBertConfig) -> str | None:
    """Say what vectors a directory without `modules.json` gives; None where it gives none."""
    if config.head == HEAD_SPARSE:
        return "SPLADE's, by the maximum"
    if config.head != HEAD_EMBEDDING:
        return None
    last = (getattr(config, "embedding", None) or {}).get("pooling") == "last"
    return "the state of its last token" if last else "the mean of its tokens' states"


def check_code(raw: Mapping[str, Any], path: Path) -> None:
    """Raises InputError for a configuration of a model whose code is not transformers' own; says which class of transformers it has."""
    kind = raw.get("model_type")
    if isinstance(kind, (dict, list)):
        raise InputError(f"{path}: model_type is {quoted(kind)}; accepted is the name of one")
    if (native := _native(raw)) is not None:
        family, name, sign = native
        since = ".".join(map(str, registry.backbone(family).since))
        raise InputError(
            f"{path}: got {sign}, of a model with code of its own, which is never run here; accepted is the same model as transformers' "
            f"{name} saves it: model_type '{family}', transformers>={since}"
        )
    if raw.get("auto_map") and isinstance(kind, str) and kind not in (*FORMATS, *registry.BACKBONES, *FOREIGN):
        raise InputError(
            f"{path}: model_type is {quoted(kind)}, a model with code of its own (auto_map), which is never run here; accepted are "
            f"transformers' {', '.join(registry.BACKBONES)}"
        )
    if (named := _own_attention(raw)) is not None:
        raise InputError(
            f"{path}: auto_map names code of the model's own ({ellipsize(named)}), which is never run here, and with which tokens may see "
            f"later ones; accepted is what transformers' own {kind} reads: remove auto_map, and set {CAUSAL_FIELD} to false if all tokens "
            "see each other, else to true"
        )


def _own_attention(raw: Mapping[str, Any]) -> str | None:
    """Return the class that `auto_map` names of a causal model, unless the configuration says what its tokens see.

    Code of some models of vectors leaves the causal mask out. transformers reads such a directory as another model, and says nothing.
    """
    kind, named = raw.get("model_type"), raw.get("auto_map")
    if kind not in registry.BACKBONES or not isinstance(named, dict) or CAUSAL_FIELD in raw:
        return None
    family = registry.backbone(kind)
    if not family.generates or not family.causal(SimpleNamespace(**{BIDIRECTIONAL: None, **raw})):
        return None
    return next((str(name) for auto, name in named.items() if str(auto).startswith("AutoModel")), None)


def _native(raw: Mapping[str, Any]) -> tuple[str, str, str] | None:
    """Return model type and class that transformers has of a model that is older than these, and the field that shows which it is."""
    kind, positions = raw.get("model_type"), raw.get("position_embedding_type")
    if kind == "new":
        return "gte", "GteModel", "the model_type 'new'"
    if kind == "nomic_bert" and "n_embd" in raw and "hidden_size" not in raw and not _why(raw):
        return "nomic_bert", "NomicBertModel", "the field n_embd"
    if kind == "xlm-roberta" and (positions == "rotary" or "lora_adaptations" in raw):
        return "jina_embeddings_v3", "JinaEmbeddingsV3Model", "rotary positions or adapters in an XLM-R"
    return None


def check_float(stored: Mapping[str, Tensor], directory: Path) -> None:
    """Raises InputError for weights that were quantized, and for adapters that were not merged."""
    eight_bits = (torch.int8, torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2)
    if name := next((n for n, t in stored.items() if n.endswith(_QUANTIZED) or t.dtype in eight_bits), None):
        raise InputError(
            f"{directory}: the weights are quantized ({name} is {stored[name].dtype}); accepted are fp32, fp16 and bf16. Give the model "
            "that they were made of; --precision int8 quantizes it here"
        )
    if name := next((n for n in stored if "lora_" in n), None):
        raise InputError(
            f"{directory}: the weights hold adapters ({name}); accepted are models that they are merged into"
        )


def check_encoder(raw: Mapping[str, Any], path: Path, pooled: bool = False) -> None:
    """Raises InputError unless a configuration is that of a plain encoder of `registry.BACKBONES`.

    Args:
        pooled: its states alone are asked for, so that it may be a model that generates text of them.
    """
    kind = raw.get("model_type")
    if not isinstance(kind, str) or kind not in registry.BACKBONES:
        known = ", ".join(map(repr, (*FORMATS, *registry.BACKBONES, *FOREIGN)))
        hint = did_you_mean(kind, registry.BACKBONES) if isinstance(kind, str) else ""
        raise InputError(f"{path}: model_type is {quoted(kind)}{_why(raw)}; accepted are {known}{hint}")
    if (what := _why(raw)) and not raw.get("is_encoder_decoder"):
        raise InputError(f"{path}: model_type is {quoted(kind)}{what}; accepted are dense models that read text alone")
    for field, owner in (*((name, FORMATS[0]) for name in AdtpBertConfig.OWN_FIELDS), ("pruning", FORMATS[1])):
        if field in raw:
            raise InputError(
                f"{path}: model_type is {quoted(kind)}, and {field!r} is a field of {owner!r}; set model_type to that"
            )
    names = architectures(raw)
    shown = ellipsize(", ".join(names))
    decoder = registry.backbone(kind).generates and all(name.endswith("ForCausalLM") for name in names)
    if decoder and names and not raw.get("is_encoder_decoder"):
        if pooled:
            return
        raise InputError(
            f"{path}: the model generates text ({shown}); accepted are classifiers; models of vectors, beside a modules.json "
            "that pools states or with --head embedding; and rerankers, beside a modules.json with LogitScore. To make one of those, type "
            f'in Python: sentence_transformers.CrossEncoder("{path.parent}").save_pretrained("RERANKER")'
        )
    if raw.get("is_encoder_decoder") or any(name.endswith(_GENERATE) for name in names):
        raise InputError(
            f"{path}: the model generates text ({shown or 'is_encoder_decoder'}); accepted are encoders, in which all "
            "tokens see each other"
        )


def _why(raw: Mapping[str, Any]) -> str:
    """Say in brackets what kind of model this is, where it is one that no backbone has; an empty text otherwise."""
    if "vision_config" in raw or "audio_config" in raw:
        inner = raw.get("text_config")
        own = inner.get("model_type") if isinstance(inner, Mapping) else None
        known = isinstance(own, str) and own in registry.BACKBONES
        return " (it reads images or sound" + (f"; save its language model alone, a {own}" if known else "") + ")"
    if str(raw.get("model_type")).endswith("_moe") or any(
        isinstance(raw.get(name), int) and raw[name] > 1 for name in _EXPERTS
    ):
        return " (it has mixture-of-experts layers)"
    return " (an encoder-decoder)" if raw.get("is_encoder_decoder") else ""


def as_format_2(raw: Mapping[str, Any], head: str, **fields: Any) -> dict[str, Any]:
    """Return the fields of a plain encoder with a head, and more fields, as checkpoint format 2 has them."""
    labels = {name: raw[name] for name in _LABELS if name in raw} if head in (HEAD_SEQUENCE, HEAD_TOKENS) else {}
    return {"model_type": PrunedEncoderConfig.model_type, "backbone": dict(raw), "head": head, **labels, **fields}


def head_of(raw: Mapping[str, Any], path: Path, head: str | None) -> str:
    """Return the head of a plain encoder: the one that `architectures` names, else the one that was asked for, else "sequence".

    Raises:
        InputError: it names another one than was asked for, or leaves it open where nothing was.
    """
    names = architectures(raw)
    shown = ellipsize(", ".join(names))
    stored = next((head for name in names for ending, head in _ENDINGS.items() if name.endswith(ending)), None)
    if stored is not None:
        _check_same(head, stored, path)
        return stored
    if head is None and any(name.endswith("ForMaskedLM") for name in names):
        raise InputError(
            f"{path}: the model is {shown}; type --head {HEAD_MASKED} to fill in masked tokens, {HEAD_SPARSE} for weights of the "
            f"vocabulary (SPLADE), or {HEAD_EMBEDDING} for vectors"
        )
    if names and head is None:
        raise InputError(
            f"{path}: the model is {shown}, which does not say what it is to answer with; type: --head NAME, accepted are "
            f"{', '.join(registry.HEADS)}. {HEAD_EMBEDDING} needs no more than the encoder; the others need weights of that head"
        )
    return head or HEAD_SEQUENCE


def architectures(raw: Mapping[str, Any]) -> list[str]:
    """Return the names of the model's classes."""
    listed = raw.get("architectures")
    return [str(name) for name in listed] if isinstance(listed, list) else []


def _check_same(asked: str | None, stored: object, path: Path) -> None:
    if asked not in (None, stored):
        raise InputError(
            f"--head: got {asked}, and {path} says that the model has the head {quoted(stored)}; leave --head out"
        )
