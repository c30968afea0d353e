"""What a user says of a checkpoint to read."""

from __future__ import annotations

from dataclasses import dataclass

from .lengths import Given


@dataclass(frozen=True)
class ReadOptions:
    """What a checkpoint may need to be read.

    allow_pickle: accept `pytorch_model.bin` where there are no safetensors. padded_length: for LTP, the length that its
    evaluation padded to. length_config: for Length-Adaptive Transformer and PoWER-BERT, the tokens that each layer keeps, or a file
    that holds them. head: what the model answers with, where the directory leaves it open.
    """

    allow_pickle: bool = False
    padded_length: int | None = None
    length_config: Given | None = None
    head: str | None = None
