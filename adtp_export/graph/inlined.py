"""A graph without functions of its own, for runtimes and tools that do not know them."""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir
from onnx_ir.passes.common import InlinePass


def inlined(path: Path) -> ir.Model:
    """Read an exported file, and put the body of each function in the place of the nodes that call it."""
    model = ir.load(path)
    InlinePass()(model)
    return model
