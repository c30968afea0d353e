"""Which backbones, pruners and heads there are: three literal tables, whose modules are imported when asked for.

A new one is one file in `backbones/`, `pruners/` or `heads/`, and one line here (`docs/extending.md`).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ..contract import ATTENTION_MASK, INPUT_IDS, TOKEN_TYPE_IDS
from ..errors import InputError, did_you_mean, quoted

if TYPE_CHECKING:
    from torch import Tensor

    from .backbones.base import Backbone
    from .pruners import Pruner

BACKBONES = {
    "bert": ("backbones.bert", "Bert"),
    "roberta": ("backbones.roberta", "Roberta"),
    "xlm-roberta": ("backbones.roberta", "Roberta"),
    "camembert": ("backbones.roberta", "Roberta"),
    "distilbert": ("backbones.distilbert", "DistilBert"),
    "electra": ("backbones.electra", "Electra"),
    "mpnet": ("backbones.mpnet", "MPNet"),
    "deberta-v2": ("backbones.deberta", "Deberta"),
    "modernbert": ("backbones.modernbert", "ModernBert"),
    "llama": ("backbones.llama", "Llama"),
    "mistral": ("backbones.mistral", "Mistral"),
    "qwen2": ("backbones.qwen", "Qwen2"),
    "qwen3": ("backbones.qwen", "Qwen3"),
    "eurobert": ("backbones.eurobert", "EuroBert"),
    "gemma3_text": ("backbones.gemma", "Gemma3"),
    "gte": ("backbones.gte", "Gte"),
    "nomic_bert": ("backbones.gte", "NomicBert"),
    "jina_embeddings_v3": ("backbones.gte", "JinaV3"),
}
"""transformers' `model_type` -> module and class."""

LANGUAGE_MODELS = {
    "qwen2_vl_text": ("backbones.qwen", "Qwen2Vl"),
    "qwen2_5_vl_text": ("backbones.qwen", "Qwen2Vl"),
}
"""The same for those that are a part of models with images, and no encoders: their positions have several axes."""

PRUNERS = {
    "adtp": ("pruners.adtp", "AdtpPruner"),
    "ltp": ("pruners.ltp", "LtpPruner"),
    "schedule": ("pruners.schedule", "SchedulePruner"),
    "top": ("pruners.top", "TopPruner"),
    "transkimmer": ("pruners.transkimmer", "TranskimmerPruner"),
}
"""`pruning.method` -> module and class."""

HEADS = {
    "sequence": ("heads.sequence", "PrunedEncoderForSequenceClassification"),
    "tokens": ("heads.tokens", "PrunedEncoderForTokenClassification"),
    "spans": ("heads.spans", "PrunedEncoderForQuestionAnswering"),
    "embedding": ("heads.embedding", "PrunedEncoderForEmbedding"),
    "sparse": ("heads.sparse", "PrunedEncoderForSparse"),
    "masked": ("heads.masked", "PrunedEncoderForMasked"),
    "vectors": ("heads.vectors", "PrunedEncoderForVectors"),
    "hybrid": ("heads.hybrid", "PrunedEncoderForHybrid"),
}
"""`head` -> module and class."""


def backbone(name: object) -> type[Backbone]:
    """Return the class of a backbone; raises InputError for an unknown one."""
    return load(BACKBONES, name, "backbone.model_type")


def language_model(name: object) -> type[Backbone]:
    """Return the class of what reads text in a model that generates it; raises InputError for an unknown one."""
    return load({**BACKBONES, **LANGUAGE_MODELS}, name, "text_config.model_type")


def pruner(name: object) -> type[Pruner]:
    """Return the class of a pruner; raises InputError for an unknown one."""
    return load(PRUNERS, name, "pruning.method")


def fields(config: Any) -> dict[str, Any]:
    """Return `backbones.base.FIELDS` of the transformers configuration of any backbone."""
    return backbone(config.model_type).fields(config)


def described(config: Any, weights: dict[str, Tensor]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return `fields`, and weights of a file under the names that transformers' modules have: the same dictionary."""
    return fields(config), backbone(config.model_type).stored(weights, config)


def input_names(config: Any) -> tuple[str, ...]:
    """Names of the inputs of a model, in order; token types only where the model tells them apart."""
    return (INPUT_IDS, ATTENTION_MASK, *([TOKEN_TYPE_IDS] if fields(config)["type_vocab_size"] > 1 else []))


def check(table: dict[str, tuple[str, str]], name: object, field: str) -> str:
    """Return a name of one of the tables; raises InputError, which begins with `field`, for an unknown one."""
    if not isinstance(name, str) or name not in table:
        hint = did_you_mean(name, table) if isinstance(name, str) else ""
        raise InputError(f"{field}: got {quoted(name)}; accepted are {', '.join(table)}{hint}")
    return name


def load(table: dict[str, tuple[str, str]], name: object, field: str) -> type:
    """Return the class that a name of one of the tables stands for; raises InputError as `check` does."""
    module, attribute = table[check(table, name, field)]
    found: type = getattr(importlib.import_module(f".{module}", __package__), attribute)
    return found
