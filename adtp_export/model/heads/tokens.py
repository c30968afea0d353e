"""One answer per token: tags, entities. The head reads all tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import AutoModelForTokenClassification
from transformers.modeling_outputs import TokenClassifierOutput

from ..config import PrunedEncoderConfig
from ..encoder import PrunedEncoder
from ..sequences import Packed, restore
from . import Kept


@dataclass
class PrunedTokenClassifierOutput(TokenClassifierOutput, Kept):
    """`TokenClassifierOutput` plus what was kept."""


class PrunedEncoderForTokenClassification(PrunedEncoder):
    """A padded student that tags tokens: ``logits (B, S, num_labels)``, zeros for padding.

    Inputs as of `PrunedEncoderForSequenceClassification`; `labels` are ``(B, S) int64``, -100 where there is none.

    Raises:
        ValueError: the mask is not right padding.
    """

    auto_class = AutoModelForTokenClassification

    def packed_head(self) -> nn.Module:
        return PackedTokens(self.backbone.token_classifier)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        labels: Tensor | None = None,
        return_dict: bool | None = None,
    ) -> PrunedTokenClassifierOutput | tuple:
        x, kept_site, decisions = self.encode(input_ids, attention_mask, token_type_ids)
        logits = self.backbone.token_classifier(x) * (kept_site >= 0)[:, :, None]
        loss = None if labels is None else nn.functional.cross_entropy(logits.transpose(1, 2), labels)
        output = PrunedTokenClassifierOutput(loss=loss, logits=logits, kept_site=kept_site, decisions=decisions)
        return output.to_tuple() if return_dict is False else output


class PackedTokens(nn.Module):
    """Logits of all tokens ``(T, H)``, spread over ``(B, S, num_labels)`` as `restore` has it."""

    def __init__(self, classifier: nn.Module) -> None:
        super().__init__()
        self.classifier = classifier

    def forward(self, tokens: Packed, shape: torch.Size | None) -> tuple[Tensor]:
        return (restore(self.classifier(tokens.states), tokens.origin, shape),)


AutoModelForTokenClassification.register(PrunedEncoderConfig, PrunedEncoderForTokenClassification)
