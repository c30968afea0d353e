"""A vector for each token, for late interaction: states projected one by one, mostly to length 1. A dropped token has none.

Source: Khattab and Zaharia, ColBERT (SIGIR 2020); projections as in PyLate and sentence-transformers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModel
from transformers.modeling_outputs import BaseModelOutput

from ...errors import InputError
from ..config import PrunedEncoderConfig
from ..encoder import PrunedEncoder
from ..sequences import Packed, restore
from ..vectors import VectorSettings
from . import Kept
from .embedding import MODULES, UnitLength, finished, without_pooler


@dataclass
class PrunedVectorsOutput(BaseModelOutput, Kept):
    """`BaseModelOutput`, a vector for each token ``(B, S, D)``, and what was kept."""

    token_embeddings: Tensor | None = None


class PrunedEncoderForVectors(PrunedEncoder):
    """A padded student that gives `token_embeddings` ``(B, S, D)``, zeros for padding and for tokens that were dropped.

    Inputs as of `PrunedEncoderForSequenceClassification`, without labels. Where the configuration names a token as `expansion`, those of
    its id that follow a text with an `attention_mask` of 0 have vectors as well: they attend to the text, and nothing attends to them.

    Raises:
        ValueError: the mask is not right padding.
    """

    auto_class = AutoModel
    restores_dropped = False

    def __init__(self, config: PrunedEncoderConfig) -> None:
        super().__init__(config)
        without_pooler(self)
        self.projections = projections_of(self.settings)
        check_expansion(self)

    @property
    def settings(self) -> VectorSettings:
        """How vectors are made of states."""
        assert isinstance(self.config, PrunedEncoderConfig)
        return VectorSettings.read(self.config.vectors)

    @property
    def expansion(self) -> int | None:
        return self.settings.expansion

    def packed_head(self) -> nn.Module:
        return PackedVectors(self.settings, self.projections)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        return_dict: bool | None = None,
    ) -> PrunedVectorsOutput | tuple:
        x, kept_site, decisions = self.encode(input_ids, attention_mask, token_type_ids)
        made: dict[str, Any] = self.of_states(x, kept_site == len(self.pruners))
        output = PrunedVectorsOutput(
            last_hidden_state=x * (kept_site >= 0)[:, :, None],
            **made,
            kept_site=kept_site,
            decisions=decisions,
        )
        return output.to_tuple() if return_dict is False else output

    def of_states(self, states: Tensor, live: Tensor) -> dict[str, Tensor]:
        vectors = finished(states.flatten(0, 1), self.projections, self.settings.normalize)
        # Not a product: in fp16 a vector of padding may be 0 divided by 0.
        return {"token_embeddings": torch.where(live[:, :, None], vectors.unflatten(0, live.shape), 0)}


class TokenProjection(nn.Module):
    """A dense layer on states, with its activation; on request with its input added, projected where the sizes differ."""

    def __init__(self, inputs: int, outputs: int, bias: bool, activation: str, residual: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs, bias=bias)
        self.activation = MODULES[activation]()
        self.adds = residual
        if residual and inputs != outputs:
            self.residual = nn.Linear(inputs, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.activation(self.linear(x))
        if not self.adds:
            return result
        return result + (self.residual(x) if hasattr(self, "residual") else x)


class PackedVectors(nn.Module):
    """Vectors of the tokens that are left ``(T, H)``, spread over ``(B, S, D)`` as `restore` has it."""

    def __init__(self, settings: VectorSettings, projections: nn.ModuleList) -> None:
        super().__init__()
        self.normalize, self.projections = settings.normalize, projections

    def forward(self, tokens: Packed, shape: torch.Size | None) -> tuple[Tensor]:
        return (restore(finished(tokens.states, self.projections, self.normalize), tokens.origin, shape),)


def projections_of(settings: VectorSettings) -> nn.ModuleList:
    """Make the modules that settings list."""
    return nn.ModuleList(
        UnitLength() if isinstance(each, str) else TokenProjection(*each) for each in settings.projections
    )


def check_expansion(student: PrunedEncoder) -> None:
    """Raises InputError where tokens are to be queries alone, and the backbone or the pruner has no form for that."""
    if student.expansion is None:
        return
    backbone = student.backbone
    parts = [backbone.attention(i) for i in range(backbone.num_layers)]
    if any(each.bias is not None or each.distances is not None for each in parts):
        raise InputError(
            f"vectors.expansion: got {student.expansion}, and in {student.dense.config.model_type} models attention has a bias for each "
            "distance, for which there is no form with tokens that only query; accepted is null: expansion that is attended to"
        )
    if len(student.pruners) and any(backbone.attention(i).reach[0] >= 0 for i in range(backbone.num_layers)):
        raise InputError(
            f"pruning: got the method {student.config.method!r} in a {student.dense.config.model_type} model whose layers see a window. "
            "Tokens that only query (vectors.expansion) may see nothing there after a cut; accepted is a model without windows, or "
            "expansion null"
        )
    if any(pruner.from_others for pruner in student.pruners.values()):
        raise InputError(
            "pruning.order: got 'received-from-others', and tokens that only query (vectors.expansion) leave no diagonal to take out; "
            "accepted are the other orders"
        )
