"""Where an answer begins and ends in a text: extractive question answering. The head reads all tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import AutoModelForQuestionAnswering
from transformers.modeling_outputs import QuestionAnsweringModelOutput

from ..config import PrunedEncoderConfig
from ..encoder import PrunedEncoder
from ..sequences import Packed, restore
from . import Kept


@dataclass
class PrunedQuestionAnsweringOutput(QuestionAnsweringModelOutput, Kept):
    """`QuestionAnsweringModelOutput` plus what was kept."""


class PrunedEncoderForQuestionAnswering(PrunedEncoder):
    """A padded student that finds spans: `start_logits` and `end_logits` ``(B, S)``, zeros for padding.

    Inputs as of `PrunedEncoderForSequenceClassification`; `start_positions` and `end_positions` are ``(B,) int64``.

    Raises:
        ValueError: the mask is not right padding.
    """

    auto_class = AutoModelForQuestionAnswering

    def packed_head(self) -> nn.Module:
        return PackedSpans(self.backbone.span_classifier)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        start_positions: Tensor | None = None,
        end_positions: Tensor | None = None,
        return_dict: bool | None = None,
    ) -> PrunedQuestionAnsweringOutput | tuple:
        x, kept_site, decisions = self.encode(input_ids, attention_mask, token_type_ids)
        live = kept_site >= 0
        start, end = (self.backbone.span_classifier(x) * live[:, :, None]).unbind(-1)
        loss = None
        if start_positions is not None and end_positions is not None:
            sides = ((start, start_positions), (end, end_positions))
            losses = [nn.functional.cross_entropy(side.masked_fill(~live, -torch.inf), gold) for side, gold in sides]
            loss = torch.stack(losses).mean()
        output = PrunedQuestionAnsweringOutput(
            loss=loss, start_logits=start, end_logits=end, kept_site=kept_site, decisions=decisions
        )
        return output.to_tuple() if return_dict is False else output


class PackedSpans(nn.Module):
    """Logits of start and end of all tokens ``(T, H)``, each spread over ``(B, S)`` as `restore` has it."""

    def __init__(self, classifier: nn.Module) -> None:
        super().__init__()
        self.classifier = classifier

    def forward(self, tokens: Packed, shape: torch.Size | None) -> tuple[Tensor, Tensor]:
        start, end = restore(self.classifier(tokens.states), tokens.origin, shape).unbind(-1)
        return start, end


AutoModelForQuestionAnswering.register(PrunedEncoderConfig, PrunedEncoderForQuestionAnswering)
