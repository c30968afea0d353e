"""Whether a file has the checkpoint's token embeddings: all of them, where a verification looks up only some."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
from torch import Tensor


def wrong_embeddings(file: Path, embeddings: Tensor) -> str | None:
    """Say how a file's table of embeddings differs from these, rounded to the file's precision; None where it does not.

    Args:
        embeddings: of the student, ``(vocabulary, width)``, fp32.
    """
    wanted = embeddings.detach().numpy()
    found = "has no table of the token embeddings"
    for value in ir.load(file).graph.initializers.values():
        tensor = value.const_value
        if tensor is None or tuple(tensor.shape) != wanted.shape:
            continue
        table = tensor.numpy()
        differs = (table != wanted.astype(table.dtype)).any(1)
        if not differs.any():
            return None
        found = f"has another embedding of token {int(np.flatnonzero(differs)[0])}"
    return found
