"""One answer per text: a class, several labels, or a score. The head reads the first token, the last, or the mean of all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification
from transformers.modeling_outputs import SequenceClassifierOutput

from ..backbones.base import Backbone
from ..config import AdtpBertConfig, PrunedEncoderConfig
from ..encoder import PrunedEncoder
from ..sequences import Packed
from . import Kept, pooled


@dataclass
class PrunedSequenceClassifierOutput(SequenceClassifierOutput, Kept):
    """`SequenceClassifierOutput` plus what was kept."""


class PrunedEncoderForSequenceClassification(PrunedEncoder):
    """A padded student, a `transformers` model: `from_pretrained`, `save_pretrained` and `pipeline` work.

    Forward takes int64 ``(B, S)`` `input_ids`, `attention_mask` (right padding; all ones when absent),
    `token_type_ids` (zeros when absent) and `labels`; it returns `PrunedSequenceClassifierOutput` with
    ``logits (B, num_labels)``. A row without live tokens counts as one token.

    Raises:
        ValueError: the mask is not right padding.
    """

    auto_class = AutoModelForSequenceClassification

    @property
    def reads_first(self) -> bool:
        return self.needs_first(self.backbone)

    @property
    def reads_last(self) -> bool:
        return self.backbone.classifier_pooling == "last"

    def needs_first(self, backbone: Backbone) -> bool:
        return backbone.classifier_pooling == "first"

    def packed_head(self) -> nn.Module:
        classifier = self.backbone.classifier
        return classifier if self.reads_first or self.reads_last else PackedMeanClassifier(self.backbone)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        labels: Tensor | None = None,
        return_dict: bool | None = None,
    ) -> PrunedSequenceClassifierOutput | tuple:
        x, kept_site, decisions = self.encode(input_ids, attention_mask, token_type_ids)
        live, pooling, pad = kept_site >= 0, self.backbone.classifier_pooling, self.dense.config.pad_token_id
        if pooling == "last" and pad is not None:
            live = live & (input_ids != pad)
        elif pooling == "mean":
            x = self.backbone.before_pooling(x)
        logits = self.backbone.classifier(pooled(x, live, pooling))
        loss = None if labels is None else self._loss(logits, labels)
        output = PrunedSequenceClassifierOutput(loss=loss, logits=logits, kept_site=kept_site, decisions=decisions)
        return output.to_tuple() if return_dict is False else output

    def _loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        kind: str | None = self.config.problem_type
        if kind is None:
            integral = not labels.is_floating_point()
            kind = "regression" if self.num_labels == 1 else f"{'single' if integral else 'multi'}_label_classification"
        if kind == "regression":
            return nn.functional.mse_loss(logits.squeeze(-1), labels.to(logits.dtype).view(logits.squeeze(-1).shape))
        if kind == "single_label_classification":
            return nn.functional.cross_entropy(logits, labels.view(-1))
        return nn.functional.binary_cross_entropy_with_logits(logits, labels.to(logits.dtype))


class PackedMeanClassifier(nn.Module):
    """Logits ``(B, num_labels)`` of the mean of each text's states."""

    def __init__(self, backbone: Backbone) -> None:
        super().__init__()
        self.before, self.classifier = backbone.before_pooling, backbone.classifier

    def forward(self, tokens: Packed, shape: torch.Size | None) -> tuple[Tensor]:
        return (self.classifier(tokens._replace(states=self.before(tokens.states)).mean()),)


class AdtpBertForSequenceClassification(PrunedEncoderForSequenceClassification):
    """The same model as checkpoint format 1 stores it: pruners are inside the encoder, as ``retainers``."""

    config_class = AdtpBertConfig
    base_model_prefix = "bert"

    @property
    def _encoder(self) -> Any:  # torch types what is inside as Tensor | Module
        return self.dense.base_model.encoder

    def house(self, pruners: nn.ModuleDict) -> None:
        self._encoder.retainers = pruners

    @property
    def pruners(self) -> nn.ModuleDict:  # type: ignore[override] # an attribute of the base
        retainers: nn.ModuleDict = self._encoder.retainers
        return retainers


AutoModelForSequenceClassification.register(PrunedEncoderConfig, PrunedEncoderForSequenceClassification)
AutoModelForSequenceClassification.register(AdtpBertConfig, AdtpBertForSequenceClassification)
