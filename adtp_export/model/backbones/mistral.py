"""Mistral: Llama's layers, all of which see a window of the text where the configuration has one.

Source: Jiang et al., Mistral 7B (arXiv 2310.06825).
"""

from __future__ import annotations

from typing import Any

from ...errors import InputError, quoted
from .llama import Llama
from .qwen import GLOBAL, LOCAL


class Mistral(Llama):
    """`sliding_window` counts for every layer."""

    @classmethod
    def sliding(cls, config: Any) -> list[int]:
        return [getattr(config, "sliding_window", None) or 0] * config.num_hidden_layers

    @classmethod
    def check(cls, config: Any) -> None:
        kinds, window = getattr(config, "layer_types", None), getattr(config, "sliding_window", None)
        alike = LOCAL if window else GLOBAL
        if kinds is not None and any(kind != alike for kind in kinds):
            raise InputError(
                f"layer_types: got {quoted(kinds)}; transformers reads such a configuration as ministral, which is not accepted. Accepted "
                f"for mistral is '{alike}' in all layers, which the sliding_window {quoted(window)} says, too"
            )
        super().check(config)
