"""Whether a file has the checkpoint's token embeddings: all of them, where a verification looks up only some."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
from torch import Tensor


def wrong_token(file: Path, embeddings: Tensor) -> int | None:
    """Return the first token id whose row an ONNX file has otherwise, rounded to the file's precision; None where there is none. It is 0
    where the file has no table of that shape.

    Args:
        embeddings: of the student, ``(vocabulary, width)``, fp32.
    """
    wanted = embeddings.detach().numpy()
    found = 0
    for value in ir.load(file).graph.initializers.values():
        tensor = value.const_value
        if tensor is None or tuple(tensor.shape) != wanted.shape:
            continue
        table = tensor.numpy()
        differs = (table != wanted.astype(table.dtype)).any(1)
        if not differs.any():
            return None
        found = int(np.flatnonzero(differs)[0])
    return found
