"""One vector per text, a weight for each token, and a vector for each token but the first, from one run.

Source: Chen et al., BGE M3-Embedding (ACL Findings 2024), and FlagEmbedding's `M3Embedder`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..config import PrunedEncoderConfig
from ..sequences import Packed, restore
from ..vectors import VectorSettings
from .embedding import PackedEmbedding, PrunedEmbeddingOutput, PrunedEncoderForEmbedding, finished
from .vectors import check_expansion, projections_of


@dataclass
class PrunedHybridOutput(PrunedEmbeddingOutput):
    """`PrunedEmbeddingOutput`, and for each token a weight ``(B, S)`` and a vector ``(B, S, D)``."""

    token_weights: Tensor | None = None
    token_embeddings: Tensor | None = None


class PrunedEncoderForHybrid(PrunedEncoderForEmbedding):
    """A padded student that gives `sentence_embedding` ``(B, D)``, `token_weights` ``(B, S)``, at least 0, and `token_embeddings`
    ``(B, S, D)``. The last two have zeros for padding and for tokens that were dropped; so has the vector of each first token.

    Inputs as of `PrunedEncoderForSequenceClassification`, without labels.

    Raises:
        ValueError: the mask is not right padding.
    """

    restores_dropped = False

    def __init__(self, config: PrunedEncoderConfig) -> None:
        super().__init__(config)
        self.sparse_linear = nn.Linear(config.encoder_config.hidden_size, 1)
        self.token_projections = projections_of(self.token_settings)
        check_expansion(self)

    @property
    def token_settings(self) -> VectorSettings:
        """How vectors of tokens are made of states."""
        assert isinstance(self.config, PrunedEncoderConfig)
        return VectorSettings.read(self.config.vectors)

    def packed_head(self) -> nn.Module:
        return PackedHybrid(self)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        return_dict: bool | None = None,
    ) -> PrunedHybridOutput | tuple:
        x, kept_site, decisions = self.encode(input_ids, attention_mask, token_type_ids)
        made: dict[str, Any] = self.of_states(x, kept_site == len(self.pruners))
        output = PrunedHybridOutput(
            last_hidden_state=x * (kept_site >= 0)[:, :, None],
            **made,
            kept_site=kept_site,
            decisions=decisions,
        )
        return output.to_tuple() if return_dict is False else output

    def of_states(self, states: Tensor, live: Tensor) -> dict[str, Tensor]:
        weights = self.sparse_linear(states).squeeze(2).relu() * live
        vectors = finished(states.flatten(0, 1), self.token_projections, self.token_settings.normalize)
        later = live & (torch.arange(live.shape[1], device=live.device) > 0)
        vectors = torch.where(later[:, :, None], vectors.unflatten(0, live.shape), 0)
        return {**super().of_states(states, live), "token_weights": weights, "token_embeddings": vectors}


class PackedHybrid(nn.Module):
    """The three outputs for the tokens that are left ``(T, H)``: those of tokens are spread over ``(B, S)`` as `restore` has it."""

    def __init__(self, student: PrunedEncoderForHybrid) -> None:
        super().__init__()
        self.whole = PackedEmbedding(student.settings, student.projections)
        self.sparse_linear, self.token_projections = student.sparse_linear, student.token_projections
        self.token_normalize = student.token_settings.normalize

    def forward(self, tokens: Packed, shape: torch.Size | None) -> tuple[Tensor, Tensor, Tensor]:
        weights = self.sparse_linear(tokens.states).squeeze(1).relu()
        vectors = finished(tokens.states, self.token_projections, self.token_normalize)
        vectors = vectors * (tokens.positions > 0).to(vectors.dtype)[:, None]
        weights, vectors = (restore(values, tokens.origin, shape) for values in (weights, vectors))
        return self.whole.vector(tokens), weights, vectors
