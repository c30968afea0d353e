"""Qwen2 and Qwen3: Llama's layers with windows in some, and in Qwen3 norms of queries and keys.

Source: Yang et al., Qwen2 (arXiv 2407.10671) and Qwen3 (arXiv 2505.09388).
"""

from __future__ import annotations

from typing import Any

from torch import nn

from ...errors import InputError, quoted
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
