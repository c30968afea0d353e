"""Logits over the vocabulary for masked tokens: what transformers' pipeline "fill-mask" reads. No other token has logits here.

A model without sites alone has this head: no pruner knows that a masked token has to stay.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModelForMaskedLM
from transformers.modeling_outputs import ModelOutput

from ..config import PrunedEncoderConfig
from ..predictions import Decoder, Predictions
from ..selection import compacted
from ..sequences import Packed, data_size, pack
from . import Kept
from .sparse import PrunedEncoderForSparse


@dataclass
class PrunedMaskedOutput(Kept, ModelOutput):
    """Logits of masked tokens ``(B, masks, V)``."""

    mask_logits: Tensor | None = None


class PrunedEncoderForMasked(PrunedEncoderForSparse):
    """A padded model that gives `mask_logits` ``(B, masks, V)``: a row for each masked token of a text, in order.

    `masks` is the largest number of masked tokens that a text has. Texts with fewer have zeros behind, and a text with none has the logits
    of its first token.

    Inputs as of `PrunedEncoderForSequenceClassification`, without labels.

    Raises:
        ValueError: the mask is not right padding.
    """

    auto_class = AutoModelForMaskedLM

    @property
    def asked_id(self) -> int:
        """Id of the tokens that have logits."""
        assert isinstance(self.config, PrunedEncoderConfig)
        return int(self.config.mask_token_id)

    def flops(self, tokens: np.ndarray) -> np.ndarray:
        """The decoder's product for masked tokens is left out: their number is not known."""
        return super(PrunedEncoderForSparse, self).flops(tokens)

    def packed_head(self) -> nn.Module:
        return PackedMasked(self.backbone.predictions)

    def forward(  # type: ignore[override] # another output
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        return_dict: bool | None = None,
    ) -> PrunedMaskedOutput | tuple:
        x, kept_site, decisions = self.encode(input_ids, attention_mask, token_type_ids)
        logits = self.predict(x, (input_ids == self.asked_id) & (kept_site >= 0))
        output = PrunedMaskedOutput(mask_logits=logits, kept_site=kept_site, decisions=decisions)
        return output.to_tuple() if return_dict is False else output

    def predict(self, states: Tensor, asked: Tensor) -> Tensor:
        """Turn states ``(B, S, H)`` into the logits ``(B, masks, V)`` of the tokens ``asked (B, S) bool``."""
        asked = asked.clone()
        asked[:, 0] |= ~asked.any(1)
        transform, decoder = self.backbone.predictions
        rows = [decoder(transform(x[own])) for x, own in zip(states, asked)]
        return nn.utils.rnn.pad_sequence(rows, batch_first=True)


class PackedMasked(nn.Module):
    """Logits ``(B, masks, V)`` of packed texts. The rows of masked tokens are picked before anything is multiplied by the vocabulary."""

    def __init__(self, predictions: Predictions) -> None:
        super().__init__()
        self.transform, self.to_vocabulary = predictions.transform, Decoder(predictions.decoder)
        self.decoder = predictions.decoder

    def forward(self, tokens: Packed, shape: torch.Size | None) -> tuple[Tensor]:
        assert tokens.asked is not None
        rows, bounds = compacted(some_of_each(tokens.asked, tokens.cu_seqlens), tokens.cu_seqlens)
        states = self.transform(tokens.states.index_select(0, rows))
        logits = self.to_vocabulary(states, lambda x: x, tokens.cu_seqlens[0])
        counts = bounds[1:] - bounds[:-1]
        texts, width = counts.shape[0], data_size(counts.max())
        _, places = pack(counts, width)
        flat = logits.new_zeros(texts * width, logits.shape[1])
        return (flat.index_copy(0, places, logits).unflatten(0, (texts, width)),)


def some_of_each(asked: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Return ``asked (T,) bool`` as ``(T,) int64``, with a 1 for the first token of each text that has none."""
    own = asked.to(torch.int64)
    before, start = nn.functional.pad(own.cumsum(0), (1, 0)), cu_seqlens[:-1]
    none = before.index_select(0, cu_seqlens[1:]) == before.index_select(0, start)
    return own.scatter(0, start, torch.maximum(own.index_select(0, start), none.to(torch.int64)))
