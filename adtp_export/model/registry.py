"""Which backbones, pruners and heads there are: three literal tables, whose modules are imported when asked for.

A new one is one file in `backbones/`, `pruners/` or `heads/`, and one line here (`docs/extending.md`).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from ..errors import InputError, did_you_mean, quoted

if TYPE_CHECKING:
    from .backbones import Backbone
    from .encoder import PrunedEncoder
    from .pruners import Pruner

BACKBONES = {
    "bert": ("backbones.bert", "Bert"),
    "roberta": ("backbones.roberta", "Roberta"),
    "xlm-roberta": ("backbones.roberta", "Roberta"),
    "camembert": ("backbones.roberta", "Roberta"),
    "distilbert": ("backbones.distilbert", "DistilBert"),
    "electra": ("backbones.electra", "Electra"),
    "mpnet": ("backbones.mpnet", "MPNet"),
    "modernbert": ("backbones.modernbert", "ModernBert"),
}
"""transformers' `model_type` -> module and class."""

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
}
"""`head` -> module and class."""


def backbone(name: object) -> type[Backbone]:
    """Return the class of a backbone; raises InputError for an unknown one."""
    return _load(BACKBONES, name, "backbone.model_type")


def pruner(name: object) -> type[Pruner]:
    """Return the class of a pruner; raises InputError for an unknown one."""
    return _load(PRUNERS, name, "pruning.method")


def head(name: object) -> type[PrunedEncoder]:
    """Return the model class of a head; raises InputError for an unknown one."""
    return _load(HEADS, name, "head")


def _load(table: dict[str, tuple[str, str]], name: object, field: str) -> type:
    if not isinstance(name, str) or name not in table:
        hint = did_you_mean(name, table) if isinstance(name, str) else ""
        raise InputError(f"{field}: got {quoted(name)}; accepted are {', '.join(table)}{hint}")
    module, attribute = table[name]
    found: type = getattr(importlib.import_module(f".{module}", __package__), attribute)
    return found
