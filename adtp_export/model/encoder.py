"""`PrunedEncoder`: a transformers model whose tokens are dropped on the way, padded. It is the oracle of every export.

Its weights have transformers' own names, and the pruners' are under ``pruners.<site>.``; so teachers and plain models load
as they are.
"""

from __future__ import annotations

import dataclasses
import functools
from abc import abstractmethod
from collections.abc import Iterable
from typing import Any, ClassVar, cast

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..data.sides import padding_id
from ..data.windows import Windows
from ..errors import InputError
from . import registry
from .backbones.base import AttentionParts, Backbone
from .config import AdtpBertConfig, PrunedEncoderConfig
from .flops import Shape, row_flops
from .padded import Decision, Marked, run_padded
from .pruners import Pruner
from .structured import PRUNED_HEADS


class PrunedEncoder(PreTrainedModel):
    """Base of the model classes in `heads/`.

    Args:
        config: of format 2 or 1.

    Attributes:
        dense: transformers' own model on the same weights; its forward drops nothing.
        pruners: one per site, by `PruneSite.key`, in order.
    """

    config_class: type[PrunedEncoderConfig] | type[AdtpBertConfig] = PrunedEncoderConfig
    auto_class: ClassVar[Any]
    """transformers' Auto class that makes the dense model."""

    restores_dropped: ClassVar[bool] = True
    """Whether a head that reads all tokens gets those that were dropped, too."""

    dense: PreTrainedModel
    pruners: nn.ModuleDict

    def __init__(self, config: PrunedEncoderConfig | AdtpBertConfig) -> None:
        super().__init__(config)
        encoder, settings = config.encoder_config, config.settings
        gone = getattr(encoder, PRUNED_HEADS, None)
        if (
            gone
        ):  # transformers 4 would prune by itself, which does not work on the meta device; transformers 5 ignores it
            setattr(encoder, PRUNED_HEADS, {})
        if type(encoder) not in self.auto_class._model_mapping:
            heads: dict[str, Any] = {name: registry.load(registry.HEADS, name, "head") for name in registry.HEADS}
            known = [name for name, head in heads.items() if type(encoder) in head.auto_class._model_mapping]
            raise InputError(
                f"head: got {config.head!r}, for which transformers has no {encoder.model_type} model; accepted are {', '.join(known)}"
            )
        dense = self.auto_class.from_config(encoder)
        if gone:
            setattr(dense.config, PRUNED_HEADS, gone)
        self.num_labels = config.num_labels
        self._tied_weights_keys = getattr(dense, "_tied_weights_keys", None) or {}  # names are those of the dense model
        self.__dict__["dense"] = dense  # its modules are registered here, under the same names
        for name, module in dense.named_children():
            self._modules[name] = (
                module  # EuroBERT's classifier has a `dense` of its own, which `add_module` would refuse
            )
        backbone = registry.backbone(encoder.model_type)(
            dense
        )  # for now: transformers may load weights into other tensors
        backbone.fit()
        self.house(nn.ModuleDict({
            site.key: registry.pruner(config.method)(
                settings, str(site), i, encoder.hidden_size, backbone.attention(site.layer_read).heads
            )
            for i, site in enumerate(config.sites)
        }))  # fmt: skip
        self._check_pruners(backbone)
        self.post_init()

    @property
    def reads_first(self) -> bool:
        """Whether the head reads the first token alone, so that the last layer works for that one."""
        return False

    @property
    def reads_last(self) -> bool:
        """The same of a text's last token; where the head is a classifier, the last one that is no padding by its id."""
        return False

    @property
    def windows(self) -> Windows:
        """How contexts of questions are read."""
        return Windows().changed(getattr(self.config, "windows", {}))  # format 1 has no such head

    @property
    def expansion(self) -> int | None:
        """Id of tokens that follow a text with an attention mask of 0, attend to it, and are never attended to; None: there are none."""
        return None

    @property
    def asked_id(self) -> int | None:
        """Id of the tokens that the head answers for; None: for all, or for the text."""
        return None

    def expanded(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor | None:
        """Say which tokens are such, ``(B, S) bool``; None where the model has none."""
        return None if self.expansion is None else (input_ids == self.expansion) & (attention_mask == 0)

    def of_states(self, states: Tensor, live: Tensor) -> dict[str, Tensor]:
        """Return outputs that are made of finished states ``(B, S, H)`` and that transformers' own forward does not give, by name.

        Args:
            live: ``(B, S) bool``, tokens that are left.
        """
        return {}

    def needs_first(self, backbone: Backbone) -> bool:
        """Whether what the model answers with is made of the first token's state, so that this one has to stay."""
        return False

    @property
    def pools_last(self) -> bool:
        """Whether what the model answers with is made of a text's last token, or its last one that is no padding by its id."""
        return self.reads_last

    @property
    def keeps_first(self) -> bool:
        """Whether the first token of each text always stays; else it competes with the others at some site."""
        return all(pruner.keeps_first for pruner in cast("Iterable[Pruner]", self.pruners.values()))

    @property
    def keeps_last(self) -> bool:
        """Whether a token of each text stays beside the first: in causal models, where the last token alone has seen the whole text, and in
        families of decoders whose head reads it. It is `read_token`.
        """
        backbone = self.backbone
        return backbone.causal(self.dense.config) or (backbone.generates and self.pools_last)

    def read_token(self, input_ids: Tensor, live: Tensor) -> Tensor:
        """Return the column of each text's last token, or of the one that `reads_last` names, ``(B,) int64``; `live` ``(B, S) bool``."""
        pad = self.dense.config.pad_token_id
        real = live & (input_ids != pad) if self.reads_last and pad is not None else live
        return (torch.arange(live.shape[1], device=live.device) * real).argmax(1)

    def _check_pruners(self, backbone: Backbone) -> None:
        """Raises InputError where a pruner asks for what this backbone does not give, or drops what this head reads."""
        pruners = cast("Iterable[Pruner]", self.pruners.values())
        if not self.keeps_first and backbone.causal(self.dense.config):
            raise InputError(
                "pruning.keep_first: got false, and in causal models all tokens attend to the first; accepted is true"
            )
        if not self.keeps_first and self.needs_first(backbone):
            raise InputError(
                f"pruning.keep_first: got false, and this model answers with the first token (head {self.config.head!r}); accepted is true"
            )
        reads = backbone.max_tokens(self.dense.config)
        decides = min((pruner.longest for pruner in pruners if pruner.longest is not None), default=reads)
        if decides < reads:
            raise InputError(
                f"pruning: the model reads up to {reads} tokens, and the method {self.config.method!r} decides about {decides} at most; "
                "accepted are models that read no more"
            )
        if any(pruner.from_others for pruner in pruners):
            for site in self.config.sites:
                parts = backbone.attention(site.layer_read)
                if parts.positional or parts.grouped:
                    why = "depends on positions" if parts.positional else "has groups of queries"
                    raise InputError(
                        f"pruning: tokens are scored by what they received from others, and at {str(site)!r} attention {why}, where that "
                        "is not known; accepted is what they received from all"
                    )

    def house(self, pruners: nn.ModuleDict) -> None:
        """Register the pruners under the name that their weights have."""
        self.pruners = pruners

    @functools.cached_property
    def backbone(self) -> Backbone:
        """What is where in `dense`. One object, because a backbone may have modules of its own, which others put hooks on."""
        return registry.backbone(self.dense.config.model_type)(self.dense)

    @abstractmethod
    def packed_head(self) -> nn.Module:
        """A module that gives the outputs of `contract.OUTPUTS` for all tokens of the texts, dropped ones included, and the
        shape ``(B, S)`` of the input; where `reads_first`, one that gives the only output for first states ``(B, H)``.
        """

    def attention(self, i: int) -> AttentionParts:
        """Return the attention sublayer of layer i, as `Backbone.attention` describes it."""
        return dataclasses.replace(self.backbone.attention(i), only_query=self.expansion is not None)

    @property
    def site_names(self) -> tuple[str, ...]:
        """Sites in order, such as ``("0.ffn",)``."""
        return tuple(key.replace("_", ".") for key in self.pruners)

    @property
    def input_names(self) -> tuple[str, ...]:
        """Names of the inputs, in order."""
        return registry.input_names(self.dense.config)

    @property
    def pad_id(self) -> int:
        """The id in padding, which nothing reads: 0 where the configuration has none. It is not that of `expansion`."""
        return padding_id(self.dense.config.pad_token_id, self.expansion)

    @property
    def max_tokens(self) -> int:
        """Longest text that it reads."""
        return self.backbone.max_tokens(self.dense.config)

    def flops(self, tokens: np.ndarray) -> np.ndarray:
        """Count the FLOPs of texts of so many tokens, ``(texts,)`` both, where none is dropped."""
        flops: np.ndarray = row_flops(Shape.of(registry.fields(self.dense.config)), [tokens.astype(np.float64)])
        return flops

    def get_input_embeddings(self) -> nn.Module:
        return self.dense.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.dense.set_input_embeddings(value)

    def _init_weights(self, module: nn.Module) -> None:
        """transformers calls this for what a checkpoint does not hold: buffers, and pruners that start anew."""
        self.dense._init_weights(module)
        if isinstance(module, Pruner):
            module.restore_buffers()

    def encode(
        self, input_ids: Tensor, attention_mask: Tensor | None, token_type_ids: Tensor | None
    ) -> tuple[Tensor, Tensor, tuple[Decision, ...]]:
        """Run embeddings and layers on right-padded int64 ``(B, S)`` inputs; return states, kept_site and decisions.

        Raises:
            ValueError: the mask is not right padding.
        """
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids)
        if token_type_ids is None:
            token_type_ids = torch.zeros_like(input_ids)
        lengths = attention_mask.sum(1).clamp(min=1)
        live = torch.arange(input_ids.shape[1], device=input_ids.device) < lengths[:, None]
        if not torch.equal(live[:, 1:], attention_mask[:, 1:].bool()):
            raise ValueError(
                "attention_mask must be right padding: ones, then zeros. Tokenize with padding_side='right'"
            )
        expanded = self.expanded(input_ids, attention_mask)
        also = self.read_token(input_ids, live) if self.keeps_last and len(self.pruners) else None
        marked = Marked(also, expanded)
        return run_padded(self.backbone, self.pruners, input_ids, token_type_ids, live, marked=marked)
