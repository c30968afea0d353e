"""One vector per text: states of its tokens, pooled, projected and normalized as a sentence-transformers pipeline does.

Source: Reimers and Gurevych, Sentence-BERT (EMNLP 2019); pooling and normalization as in sentence-transformers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import AutoModel
from transformers.modeling_outputs import BaseModelOutput

from ...contract import HEAD_EMBEDDING
from ...errors import InputError
from ..backbones.base import Backbone
from ..config import EmbeddingSettings, PrunedEncoderConfig
from ..encoder import PrunedEncoder
from ..sequences import Packed, restore
from . import Kept, pooled


@dataclass
class PrunedEmbeddingOutput(BaseModelOutput, Kept):
    """`BaseModelOutput`, the text's vector ``(B, D)``, and what was kept."""

    sentence_embedding: Tensor | None = None


class PrunedEncoderForEmbedding(PrunedEncoder):
    """A padded student that gives vectors: `sentence_embedding` ``(B, D)`` and `last_hidden_state` ``(B, S, H)``.

    Inputs as of `PrunedEncoderForSequenceClassification`, without labels. Padding has zeros in `last_hidden_state`.

    Raises:
        ValueError: the mask is not right padding.
    """

    auto_class = AutoModel

    def __init__(self, config: PrunedEncoderConfig) -> None:
        super().__init__(config)
        if (
            type(self) is PrunedEncoderForEmbedding and config.head != HEAD_EMBEDDING
        ):  # AutoModel makes this of any head
            raise InputError(
                f"head: got {config.head!r}, and this class is for {HEAD_EMBEDDING!r}; type in Python: "
                f"adtp_export.model.heads.head_class({config.head!r}).from_pretrained(...)"
            )
        without_pooler(self)
        self.projections = nn.ModuleList(
            UnitLength() if isinstance(each, str) else Projection(*each) for each in self.settings.projections
        )

    @property
    def settings(self) -> EmbeddingSettings:
        """How a vector is made of states."""
        assert isinstance(self.config, PrunedEncoderConfig)
        return EmbeddingSettings.read(self.config.embedding)

    def needs_first(self, backbone: Backbone) -> bool:
        return self.settings.pooling == "first"

    @property
    def pools_last(self) -> bool:
        return self.settings.pooling == "last"

    def packed_head(self) -> nn.Module:
        return PackedEmbedding(self.settings, self.projections)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        return_dict: bool | None = None,
    ) -> PrunedEmbeddingOutput | tuple:
        x, kept_site, decisions = self.encode(input_ids, attention_mask, token_type_ids)
        live = kept_site >= 0
        output = PrunedEmbeddingOutput(
            last_hidden_state=x * live[:, :, None],
            sentence_embedding=self.embed(x, live),
            kept_site=kept_site,
            decisions=decisions,
        )
        return output.to_tuple() if return_dict is False else output

    def of_states(self, states: Tensor, live: Tensor) -> dict[str, Tensor]:
        return {"sentence_embedding": self.embed(states, live)}

    def embed(self, states: Tensor, live: Tensor) -> Tensor:
        """Turn states ``(B, S, H)`` of the tokens ``live (B, S) bool`` into vectors ``(B, D)``."""
        return finished(pooled(states, live, self.settings.pooling), self.projections, self.settings.normalize)


MODULES: dict[str, type[nn.Module]] = {
    "tanh": nn.Tanh,
    "none": nn.Identity,
    "relu": nn.ReLU,
    "gelu": nn.GELU,
    "silu": nn.SiLU,
    "sigmoid": nn.Sigmoid,
}
"""Modules of `config.ACTIVATIONS`, as sentence-transformers makes them: without arguments."""


class Projection(nn.Module):
    """A dense layer after pooling, with the pipeline's activation."""

    def __init__(self, inputs: int, outputs: int, bias: bool, activation: str) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs, bias=bias)
        self.activation = MODULES[activation]()

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.activation(self.linear(x))
        return result


class UnitLength(nn.Module):
    """Vectors ``(B, D)`` of length 1, where a dense layer follows."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.normalize(x, dim=1)


def without_pooler(student: PrunedEncoder) -> None:
    """Remove the pooler of BERT's pretraining, which no vectors are made of."""
    if getattr(student.dense, "pooler", None) is not None:
        del student._modules["pooler"]
        student.dense._modules["pooler"] = None


def finished(vectors: Tensor, projections: nn.ModuleList, normalize: bool) -> Tensor:
    """Project pooled states ``(B, H)`` to ``(B, D)``, and give them length 1 on request."""
    for projection in projections:
        vectors = projection(vectors)
    return nn.functional.normalize(vectors, dim=1) if normalize else vectors


class PackedEmbedding(nn.Module):
    """Vectors of packed texts, and the states of all tokens ``(T, H)`` spread over ``(B, S, H)`` as `restore` has it."""

    def __init__(self, settings: EmbeddingSettings, projections: nn.ModuleList) -> None:
        super().__init__()
        self.settings, self.projections = settings, projections

    def forward(self, tokens: Packed, shape: torch.Size | None) -> tuple[Tensor, Tensor]:
        return self.vector(tokens), restore(tokens.states, tokens.origin, shape)

    def vector(self, tokens: Packed) -> Tensor:
        """Return the vector of each text, ``(B, D)``."""
        return finished(self.pool(tokens), self.projections, self.settings.normalize)

    def pool(self, tokens: Packed) -> Tensor:
        """Pool to ``(B, H)``."""
        pooling = self.settings.pooling
        if pooling == "first":
            return tokens.states.index_select(0, tokens.start)
        if pooling == "last":
            return tokens.states.index_select(0, tokens.last)
        return tokens.max() if pooling == "max" else tokens.mean()


AutoModel.register(PrunedEncoderConfig, PrunedEncoderForEmbedding)
