"""Qwen2 and Qwen3: Llama's layers with windows in some, and in Qwen3 norms of queries and keys.

Source: Yang et al., Qwen2 (arXiv 2407.10671) and Qwen3 (arXiv 2505.09388).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from ...errors import InputError, quoted
from ..positions import AxialRotary, Rotary
from .base import VERSION
from .llama import Llama

GLOBAL, LOCAL = "full_attention", "sliding_attention"


class Qwen2(Llama):
    """`layer_types` says which layers have a window."""

    @classmethod
    def sliding(cls, config: Any) -> list[int]:
        kinds, layers = config.layer_types, config.num_hidden_layers
        if len(kinds) != layers or not {GLOBAL, LOCAL}.issuperset(kinds):
            raise InputError(f"layer_types: got {quoted(kinds)}; accepted are {layers} of '{GLOBAL}' and '{LOCAL}'")
        if LOCAL in kinds and not config.sliding_window:
            raise InputError(
                "sliding_window is missing, and layer_types names layers that have one; set it, and in Qwen models use_sliding_window too"
            )
        return [config.sliding_window if kind == LOCAL else 0 for kind in kinds]


class Qwen3(Qwen2):
    """Each head's queries and keys are normalized before they are turned."""

    def _head_norms(self, attention: Any) -> tuple[nn.Module, nn.Module] | None:
        return self._norm(attention.q_norm), self._norm(attention.k_norm)


class Qwen2Vl(Qwen2):
    """The language model of Qwen2-VL and Qwen2.5-VL. A position is a time, a row and a column; those of text are three times the same."""

    axes = 3

    @classmethod
    def readable(cls, stored: Mapping[str, Any]) -> dict[str, Any]:
        """transformers 4 has the sections in `rope_scaling`."""
        fields = super().readable(stored)
        if VERSION < (5,) and isinstance(parameters := stored.get("rope_parameters"), Mapping):
            fields["rope_scaling"] = {**parameters, "type": parameters.get("rope_type", "default")}
        return fields

    @classmethod
    def sections(cls, config: Any) -> list[int]:
        """Return how many pairs of coordinates each axis turns."""
        return list(cls.rotations(config)[0].get("mrope_section", (16, 24, 24)))

    @classmethod
    def check(cls, config: Any) -> None:
        super().check(config)
        sections, size = cls.sections(config), config.hidden_size // config.num_attention_heads
        if len(sections) != cls.axes or not all(isinstance(each, int) and each > 0 for each in sections):
            raise InputError(f"mrope_section: got {quoted(sections)}; accepted are three integers from 1 on")
        if sum(sections) != size // 2:
            raise InputError(
                f"mrope_section: got {quoted(sections)}, which adds up to {sum(sections)}; accepted is half of a head, {size // 2}"
            )
        if any(cls.sliding(config)):
            raise InputError("use_sliding_window is true; accepted for positions of three axes is false")

    def _rotations(self, turning: Any) -> list[Rotary]:
        length, factor = self.max_tokens(self.config), float(turning.attention_scaling)
        return [AxialRotary(turning.inv_freq, length, self.sections(self.config), factor)] * self.num_layers
