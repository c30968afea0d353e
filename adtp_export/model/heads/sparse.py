"""One sparse vector per text, with a weight for each token of the vocabulary: logits of a masked-language head, activated and pooled.

Source: Formal et al., SPLADE v2 (arXiv 2109.10086); Geng et al. (arXiv 2504.14839) for "log1p_relu"; `SpladePooling` of
sentence-transformers. All tokens of a text count, special ones too.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModelForMaskedLM
from transformers.modeling_outputs import ModelOutput

from .. import registry
from ..config import PrunedEncoderConfig
from ..encoder import PrunedEncoder
from ..predictions import MAX, Decoder, Predictions, SparseSettings
from ..sequences import Packed
from . import Kept


@dataclass
class PrunedSparseOutput(Kept, ModelOutput):
    """The text's vector ``(B, V)``, and what was kept."""

    sparse_embedding: Tensor | None = None


class PrunedEncoderForSparse(PrunedEncoder):
    """A padded student that gives sparse vectors: `sparse_embedding` ``(B, V)``, at least 0, for a vocabulary of V tokens.

    Inputs as of `PrunedEncoderForSequenceClassification`, without labels. A dropped token takes part with the state that reached its cut.

    Raises:
        ValueError: the mask is not right padding.
    """

    auto_class = AutoModelForMaskedLM

    def __init__(self, config: PrunedEncoderConfig) -> None:
        super().__init__(config)
        family = registry.backbone(self.dense.config.model_type)
        # Not `self.backbone`, which is kept, and some have norms that hold weights: those of before others are loaded.
        self.to_vocabulary = Decoder(family(self.dense).predictions.decoder)

    @property
    def settings(self) -> SparseSettings:
        """How a vector is made of logits."""
        assert isinstance(self.config, PrunedEncoderConfig)
        return SparseSettings.read(self.config.sparse)

    def get_output_embeddings(self) -> nn.Module:
        """transformers 4 ties this module's weights to those of `get_input_embeddings`."""
        return self.dense.get_output_embeddings()

    def set_output_embeddings(self, value: nn.Module) -> None:
        self.dense.set_output_embeddings(value)

    def flops(self, tokens: np.ndarray) -> np.ndarray:
        """The decoder's product counts here: it is as large as several layers."""
        return super().flops(tokens) + 2.0 * tokens * self.to_vocabulary.linear.weight.numel()

    def packed_head(self) -> nn.Module:
        return PackedSparse(self.settings, self.backbone.predictions)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        return_dict: bool | None = None,
    ) -> PrunedSparseOutput | tuple:
        x, kept_site, decisions = self.encode(input_ids, attention_mask, token_type_ids)
        output = PrunedSparseOutput(
            sparse_embedding=self.weigh(x, kept_site >= 0), kept_site=kept_site, decisions=decisions
        )
        return output.to_tuple() if return_dict is False else output

    def weigh(self, states: Tensor, live: Tensor) -> Tensor:
        """Turn states ``(B, S, H)`` of the tokens ``live (B, S) bool`` into vectors ``(B, V)``."""
        settings, transform = self.settings, self.backbone.predictions.transform
        dead = ~live[:, :, None]
        if settings.pooling == MAX:
            return settings.activate(
                self.to_vocabulary(transform(states), lambda x: x.masked_fill(dead, -torch.inf).amax(1))
            )
        return self.to_vocabulary(transform(states), lambda x: settings.activate(x).masked_fill(dead, 0).sum(1))


class PackedSparse(nn.Module):
    """Vectors ``(B, V)`` of packed texts. ReLU and logarithms rise, so the largest logit is found first, and is activated alone."""

    def __init__(self, settings: SparseSettings, predictions: Predictions) -> None:
        super().__init__()
        self.settings, self.transform = settings, predictions.transform
        self.decoder, self.to_vocabulary = predictions.decoder, Decoder(predictions.decoder)

    def forward(self, tokens: Packed, shape: torch.Size | None) -> tuple[Tensor]:
        states, settings, zero = self.transform(tokens.states), self.settings, tokens.cu_seqlens[0]
        if settings.pooling == MAX:
            return (settings.activate(self.to_vocabulary(states, tokens.maxima(), zero)),)
        return (self.to_vocabulary(states, lambda x: tokens.sum(settings.activate(x)), zero),)


AutoModelForMaskedLM.register(PrunedEncoderConfig, PrunedEncoderForSparse)
