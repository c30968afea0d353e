"""Configurations of pruned encoders: checkpoint format 2 (`PrunedEncoderConfig`) and format 1 (`AdtpBertConfig`).

Both answer the same questions: `encoder_config`, `method`, `sites` and `settings`. The rest of the package asks those.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from transformers import AutoConfig, BertConfig, PretrainedConfig

from ..contract import (
    HEAD_EMBEDDING,
    HEAD_HYBRID,
    HEAD_MASKED,
    HEAD_SEQUENCE,
    HEAD_SPANS,
    HEAD_SPARSE,
    HEAD_VECTORS,
)
from ..data.windows import Windows
from ..errors import InputError, check_int, did_you_mean, quoted
from . import registry
from .predictions import SparseSettings, check_masked
from .projections import check_widths, dimension, projection
from .pruners import PrunerSettings
from .structured import PRUNED_HEADS, pruned_heads
from .vectors import VectorSettings

_PROBLEM_TYPES = (None, "regression", "single_label_classification", "multi_label_classification")
LABEL_FIELDS = ("id2label", "label2id", "problem_type")
_STORAGE_FIELDS = (
    "dtype", "torch_dtype", "num_labels", "architectures", "transformers_version",
    "attn_implementation", "_attn_implementation", "return_dict", "output_attentions", "output_hidden_states", "chunk_size_feed_forward",
)  # fmt: skip
"""Fields that say how a model was saved or run, and not what it is."""
_LOADING_FIELDS = (
    "auto_map", "custom_pipelines", "quantization_config", "trust_remote_code", "use_kernels", "kernel_config", "dtype", "torch_dtype",
)  # fmt: skip
"""Fields that tell transformers what to load a model with: code, kernels, types; so do private ones, and those that end in
``_implementation``. None is obeyed, and none is passed on."""
MAX_LABELS = 1 << 20


class PruneSite(NamedTuple):
    """One cut: before layer `layer`'s self-attention (``"attention"``) or its feed-forward (``"ffn"``)."""

    layer: int
    sublayer: str

    def __str__(self) -> str:
        return f"{self.layer}.{self.sublayer}"

    @property
    def key(self) -> str:
        """The site's name inside weight names, where a dot would split the path: ``"1_attention"``."""
        return f"{self.layer}_{self.sublayer}"

    @property
    def layer_read(self) -> int:
        """The layer whose attention comes last before the cut; 0 where none does."""
        return max(0, self.layer - (self.sublayer == "attention"))


def parse_sites(
    sites: Sequence[str], num_layers: int, earliest: tuple[str, str] | None = None, field: str = "prune_sites"
) -> list[PruneSite]:
    """Parse the sites of a configuration, in order.

    Args:
        earliest: a site that is too early for the method, and why (`Pruner.earliest`).
        field: its name in messages.

    Raises:
        InputError: no list, or a malformed, unknown, repeated, unordered or too early site.
    """
    if not isinstance(sites, (list, tuple)):
        raise InputError(f"{field} must be a list, got {quoted(sites)}")
    first = 1 if earliest else 0
    accepted = (
        f"accepted are 'i.attention' (i from {first} to {num_layers - 1}) and 'i.ffn' (i from 0 to {num_layers - 1})"
    )
    parsed: list[PruneSite] = []
    for site in sites:
        match = re.fullmatch(r"(0|[1-9]\d{0,8})\.(attention|ffn)", site) if isinstance(site, str) else None
        if match is None:
            raise InputError(f"{field}: got {quoted(site)}; {accepted}")
        if earliest and site == earliest[0]:
            raise InputError(f"{field}: got {quoted(site)}; {earliest[1]}")
        place = PruneSite(int(match[1]), match[2])
        if place.layer >= num_layers:
            raise InputError(f"{field}: got {quoted(site)} in a model of {num_layers} layers; {accepted}")
        if parsed and place <= parsed[-1]:  # "attention" < "ffn" is also the order of execution
            raise InputError(
                f"{field}: got {quoted(site)} after '{parsed[-1]}'; list each site once, in order of execution"
            )
        parsed.append(place)
    return parsed


class EmbeddingSettings(NamedTuple):
    """How a vector is made of a text's states.

    pooling: of `POOLINGS`. normalize: to length 1, at the end. projections: what comes in between: dense layers, each with its input size,
    its output size, whether it has a bias, and its activation, of `ACTIVATIONS`; and `NORMALIZE` where vectors get length 1 before
    another dense layer.
    """

    pooling: str = "mean"
    normalize: bool = False
    projections: tuple[tuple[int, int, bool, str] | str, ...] = ()

    @classmethod
    def read(cls, fields: Mapping[str, Any]) -> EmbeddingSettings:
        """Check the field `embedding` of a configuration; raises InputError for what cannot be."""
        for name in fields:
            if name not in cls._fields:
                raise InputError(
                    f"embedding: got the field {quoted(name)}; accepted are {', '.join(cls._fields)}{did_you_mean(name, cls._fields)}"
                )
        settings = cls(**{**fields, "projections": tuple(map(projection, fields.get("projections", ())))})
        if settings.pooling not in POOLINGS:
            raise InputError(
                f"embedding.pooling: got {quoted(settings.pooling)}; accepted are {', '.join(POOLINGS)}"
                f"{did_you_mean(str(settings.pooling), POOLINGS)}"
            )
        if not isinstance(settings.normalize, bool):
            raise InputError(f"embedding.normalize: got {quoted(settings.normalize)}; accepted are true and false")
        return settings

    def check(self, hidden_size: int) -> None:
        """Raises InputError where a projection does not take what comes before it."""
        check_widths("embedding.projections", self.projections, hidden_size)

    def dimension(self, hidden_size: int) -> int:
        """Length of a vector."""
        return dimension(self.projections, hidden_size)


POOLINGS = ("mean", "first", "last", "max")


class PrunedEncoderConfig(PretrainedConfig):
    """Checkpoint format 2: any backbone, any way to choose tokens, any head.

    Args:
        backbone: a transformers configuration as a mapping, with its `model_type`.
        pruning: `method`, `sites` and the method's fields; None or empty: no token is dropped.
        head: what the model answers with: a name of `registry.HEADS`.
        embedding: the fields of `EmbeddingSettings`, for the head "embedding".
        windows: the fields of `data.windows.Windows`, for the head "spans".
        sparse: the fields of `predictions.SparseSettings`, for the head "sparse".
        kwargs: `vectors`, the fields of `VectorSettings`, for the head "vectors"; `mask_token_id`, for the head "masked", by default the
            tokenizer's; labels (`id2label`, `label2id`, `problem_type`); and what
            every transformers configuration has.

    Raises:
        InputError: a value out of range, or a name that is not known (it is a `ValueError`, too).
    """

    model_type = "pruned_encoder"
    keys_to_ignore_at_inference = ["kept_site", "decisions"]

    def __init__(
        self,
        backbone: Mapping[str, Any] | None = None,
        pruning: Mapping[str, Any] | None = None,
        head: str = HEAD_SEQUENCE,
        embedding: Mapping[str, Any] | None = None,
        windows: Mapping[str, int] | None = None,
        sparse: Mapping[str, str] | None = None,
        **kwargs: Any,
    ) -> None:
        vectors, self.mask_token_id = kwargs.pop("vectors", None), kwargs.pop("mask_token_id", None)
        objects = {
            "backbone": backbone,
            "pruning": pruning,
            "embedding": embedding,
            "windows": windows,
            "vectors": vectors,
            "sparse": sparse,
        }
        for name, value in objects.items():
            if value is not None and not isinstance(value, Mapping):
                raise InputError(f"{name}: got {quoted(value)}; accepted is an object")
        self.backbone = dict(backbone or {"model_type": "bert"})
        self.pruning = dict(pruning or {})
        self.head = head
        self.embedding = dict(embedding or {})
        self.windows = dict(windows or {})
        self.vectors = dict(vectors or {})
        self.sparse = dict(sparse or {})
        family = registry.backbone(self.backbone.get("model_type"))
        family.check_version(self.backbone["model_type"])
        family.readable(self.backbone)  # before transformers looks at what it makes of it, and puts errors into its own
        super().__init__(**kwargs)
        registry.check(registry.HEADS, head, "head")
        if head in (HEAD_EMBEDDING, HEAD_HYBRID):
            EmbeddingSettings.read(self.embedding).check(self.encoder_config.hidden_size)
        if head in (HEAD_VECTORS, HEAD_HYBRID):
            VectorSettings.read(self.vectors).check(self.encoder_config)
        if head in (HEAD_SPARSE, HEAD_MASKED):
            SparseSettings.read(self.sparse)
            check_masked(head == HEAD_MASKED, self.mask_token_id, self.vocab_size, self.pruning)
            self.tie_word_embeddings = getattr(self.encoder_config, "tie_word_embeddings", True)
        heads = {
            "embedding": (HEAD_EMBEDDING, HEAD_HYBRID),
            "windows": (HEAD_SPANS,),
            "vectors": (HEAD_VECTORS, HEAD_HYBRID),
            "sparse": (HEAD_SPARSE,),
        }
        for name, own in heads.items():
            if getattr(self, name) and head not in own:
                raise InputError(
                    f"{name}: is for the head {' or '.join(map(repr, own))}, and this is {head!r}; leave it out"
                )
        Windows().changed(self.windows)
        check_problem_type(self.problem_type)
        family.check(self.encoder_config)
        if self.method is not None and self.settings is not None:
            self.settings.check([str(site) for site in self.sites])

    @property
    def vocab_size(self) -> int:
        """Of the backbone; transformers sets it when it resizes embeddings."""
        return int(self.encoder_config.vocab_size)

    @vocab_size.setter
    def vocab_size(self, value: int) -> None:
        self.backbone["vocab_size"] = value

    @property
    def encoder_config(self) -> PretrainedConfig:
        """The transformers configuration of the encoder, with the labels of this one."""
        fields = {name: value for name, value in self.backbone.items() if name not in (*LABEL_FIELDS, *_STORAGE_FIELDS)}
        if PRUNED_HEADS in fields:  # transformers 4 wants integers
            gone = pruned_heads(fields[PRUNED_HEADS])
            fields[PRUNED_HEADS] = {layer: sorted(heads) for layer, heads in gone.items()}
        labels = {name: getattr(self, name) for name in LABEL_FIELDS}
        return AutoConfig.for_model(**registry.backbone(self.backbone.get("model_type")).readable(fields), **labels)

    @property
    def method(self) -> str | None:
        """Name of the pruner, a key of `registry.PRUNERS`; None for a plain encoder."""
        if not self.pruning:
            return None
        if "method" not in self.pruning:
            raise InputError(f"pruning.method is missing; accepted are {', '.join(registry.PRUNERS)}")
        return str(self.pruning["method"])

    @property
    def sites(self) -> list[PruneSite]:
        """Where tokens are dropped, in order."""
        if self.method is None:
            return []
        if "sites" not in self.pruning:
            raise InputError("pruning.sites is missing; give a list such as ['0.ffn']")
        earliest = registry.pruner(self.method).earliest
        return parse_sites(self.pruning["sites"], self.encoder_config.num_hidden_layers, earliest, "pruning.sites")

    @property
    def settings(self) -> PrunerSettings | None:
        """The method's own fields."""
        if self.method is None:
            return None
        fields = {name: value for name, value in self.pruning.items() if name not in ("method", "sites")}
        return registry.pruner(self.method).Settings.read(self.method, fields)


class AdtpBertConfig(BertConfig):
    """Checkpoint format 1: AD-TP on BERT with a sequence head.

    Args:
        prune_sites: where a retainer cuts, in order of execution: ``"i.attention"`` before layer i's self-attention,
            ``"i.ffn"`` after layer i's attention sublayer and before its feed-forward; i is 0-based.
        retention_ratios: candidate ratios, ascending multiples of 0.001 in (0, 1], the last 1.0.
        saliency_hidden_size: width of the saliency predictor's hidden layer.
        min_tokens: floor of kept tokens per sequence, at least 1.
        kwargs: every field of `BertConfig`.

    Raises:
        InputError: a value outside these ranges (it is a `ValueError`, too).
    """

    model_type = "adtp_bert"
    keys_to_ignore_at_inference = ["kept_site", "decisions"]
    method, head = "adtp", "sequence"
    encoders = ("bert",)
    """`model_type` of the encoders that it describes."""

    OWN_FIELDS = ("prune_sites", "retention_ratios", "saliency_hidden_size", "min_tokens")

    def __init__(
        self,
        prune_sites: Sequence[str] = ("0.ffn",),
        retention_ratios: Sequence[float] = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0),
        saliency_hidden_size: int = 96,
        min_tokens: int = 1,
        **kwargs: Any,
    ) -> None:
        self.prune_sites = list(prune_sites) if isinstance(prune_sites, tuple) else prune_sites
        self.retention_ratios = list(retention_ratios) if isinstance(retention_ratios, tuple) else retention_ratios
        self.saliency_hidden_size = saliency_hidden_size
        self.min_tokens = min_tokens
        super().__init__(**kwargs)
        registry.backbone("bert").check(self)
        check_problem_type(self.problem_type)
        self.settings.check([str(site) for site in self.sites])

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        # Its retainers would not be found, and be random.
        if config_dict.get("model_type") == PrunedEncoderConfig.model_type:
            raise InputError(
                "this student is of checkpoint format 2; load it with AutoModelForSequenceClassification, or AutoConfig"
            )
        return super().from_dict(config_dict, **kwargs)

    @property
    def encoder_config(self) -> BertConfig:
        """The plain BERT that this is with cuts."""
        own = (*self.OWN_FIELDS, *_STORAGE_FIELDS, "model_type")
        return BertConfig(**{name: value for name, value in self.to_dict().items() if name not in own})

    @property
    def sites(self) -> list[PruneSite]:
        """`prune_sites`, parsed."""
        return parse_sites(self.prune_sites, self.num_hidden_layers, registry.pruner(self.method).earliest)

    @property
    def settings(self) -> PrunerSettings:
        """The retainers' fields."""
        fields = {name: getattr(self, name) for name in self.OWN_FIELDS[1:]}
        return registry.pruner(self.method).Settings.read(self.method, fields)


def without_loading(fields: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return the fields of a `config.json` without those that tell transformers which code, kernels or types to load it with.

    Raises:
        InputError: a field has the name of a method of transformers' configurations.
    """
    kept: dict[str, Any] = {}
    for name, value in fields.items():
        if callable(getattr(PretrainedConfig, name, None)):
            raise InputError(f"{path}: got the field {quoted(name)}, which is no field of a configuration; remove it")
        if not name.startswith("_") and not name.endswith("_implementation") and name not in _LOADING_FIELDS:
            kept[name] = without_loading(value, path) if name == "backbone" and isinstance(value, dict) else value
    return kept


def check_labels(fields: dict[str, Any], path: Path) -> None:
    """See that labels are numbered from 0 on and have names of their own; where they are named, `num_labels` goes.

    Raises:
        InputError: they are not; the message begins with `path`.
    """
    number, names, back = (fields.get(name) for name in ("num_labels", "id2label", "label2id"))
    if back is not None and not isinstance(back, dict):
        raise InputError(f"{path}: label2id is {quoted(back)}; accepted is an object of names and numbers")
    if number is None or names is not None:
        fields.pop("num_labels", None)
    if names is None:
        if number is not None:
            check_int(f"{path}: num_labels", number, 1)
            if number > MAX_LABELS:
                raise InputError(f"{path}: num_labels is {number}; accepted are at most {MAX_LABELS}")
        return
    accepted = 'accepted is an object such as {"0": "negative", "1": "positive"}, numbered from 0 on'
    if not isinstance(names, dict) or not names or set(names) != {str(i) for i in range(len(names))}:
        raise InputError(f"{path}: id2label is {quoted(names)}; {accepted}")
    first: dict[str, str] = {}
    for i, name in names.items():
        if not isinstance(name, str):
            raise InputError(f"{path}: id2label names label {i} {quoted(name)}; {accepted}, with names in quotes")
        if name in first:
            raise InputError(
                f"{path}: id2label gives labels {first[name]} and {i} the name {quoted(name)}, so the scores would lose one; give each "
                "a name of its own"
            )
        first[name] = i


def check_problem_type(kind: object) -> None:
    """Raises InputError for a `problem_type` that transformers does not know."""
    if kind not in _PROBLEM_TYPES:
        hint = did_you_mean(kind, map(str, _PROBLEM_TYPES)) if isinstance(kind, str) else ""
        raise InputError(f"problem_type: got {quoted(kind)}; accepted are {', '.join(map(str, _PROBLEM_TYPES))}{hint}")


AutoConfig.register(PrunedEncoderConfig.model_type, PrunedEncoderConfig)
AutoConfig.register(AdtpBertConfig.model_type, AdtpBertConfig)
