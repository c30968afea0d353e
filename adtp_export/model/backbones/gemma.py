"""Gemma 3 without images: norms before and after each sublayer, other rotary angles in layers with a window, and wide heads.

Source: Gemma Team, Gemma 3 (arXiv 2503.19786); module names are those of transformers' `Gemma3TextModel`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from ...errors import check_int
from ..positions import Rotary
from .base import BIDIRECTIONAL, CAUSAL_FIELD, Rms
from .llama import rotary
from .qwen import Qwen3

SCALAR = "query_pre_attn_scalar"


class Gemma3(Qwen3):
    """Causal, or not with `use_bidirectional_attention`. `attn_logit_softcapping` is a field of Gemma 2, which Gemma 3 does not use."""

    own_names = {**Qwen3.own_names, "hidden_act": "hidden_activation"}
    since = (5, 0)

    def _rotations(self, turning: Any) -> list[Rotary]:
        kinds, length = self.config.layer_types, self.max_tokens(self.config)
        made = {kind: rotary(turning, length, f"{kind}_") for kind in sorted(set(kinds))}
        return [made[kind] for kind in kinds]

    def _norm(self, own: nn.Module) -> nn.Module:
        return GemmaNorm(own, self.config.rms_norm_eps)

    def _norms_of(self, layer: Any) -> tuple[nn.Module, nn.Module | None, nn.Module, nn.Module | None]:
        before, after = layer.input_layernorm, layer.post_attention_layernorm
        before_ffn, after_ffn = layer.pre_feedforward_layernorm, layer.post_feedforward_layernorm
        return self._norm(before), self._norm(after), self._norm(before_ffn), self._norm(after_ffn)

    @classmethod
    def readable(cls, stored: Mapping[str, Any]) -> dict[str, Any]:
        """transformers halves the window of a bidirectional model when it reads one, and doubles it when it writes one."""
        if stored.get(BIDIRECTIONAL) and "sliding_window" in stored:
            check_int("sliding_window", stored["sliding_window"], 2)
        return dict(stored)

    @classmethod
    def causal(cls, config: Any) -> bool:
        return super().causal(config) and not config.use_bidirectional_attention

    @classmethod
    def counts_itself(cls, config: Any) -> bool:
        """The halved window counts it as well. Only `is_causal: false` has transformers take windows that do not."""
        return getattr(config, CAUSAL_FIELD, True) is not False

    @classmethod
    def rotations(cls, config: Any) -> list[Mapping[str, Any]]:
        return [config.rope_parameters.get(kind) or {} for kind in sorted(set(config.layer_types))]

    @classmethod
    def check(cls, config: Any) -> None:
        check_int(SCALAR, config.query_pre_attn_scalar, 1)
        super().check(config)

    @classmethod
    def fp16_obstacle(cls, config: Any) -> str | None:
        return "states of trained Gemma models exceed 65,504, the largest number of fp16"


class GemmaNorm(nn.Module):
    """Root mean square norm with the weight ``1 + w``, ``w (H,)``: rounded once, after it is multiplied.

    Args:
        own: transformers' module, whose `weight` this reads. eps: added to the mean of squares.
    """

    def __init__(self, own: Any, eps: float) -> None:
        super().__init__()
        self.rms = WeightedRms(own.weight, eps)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.rms(x)
        return result


class WeightedRms(Rms):
    """`Rms` and the weight, all of it in fp32."""

    def __init__(self, weight: nn.Parameter, eps: float) -> None:
        super().__init__(eps)
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        precise = self.precise(x)
        return (precise * (1.0 + self.weight.to(precise.dtype))).to(x.dtype)
