"""Mistral: Llama's layers, all of which see a window of the text where the configuration has one.

Source: Jiang et al., Mistral 7B (arXiv 2310.06825).
"""

from __future__ import annotations

from typing import Any

from .llama import Llama


class Mistral(Llama):
    """`sliding_window` counts for every layer."""

    @classmethod
    def sliding(cls, config: Any) -> list[int]:
        return [getattr(config, "sliding_window", None) or 0] * config.num_hidden_layers
