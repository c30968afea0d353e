"""The debug form of any exported file: the same graph with the output ``kept_site`` as well."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

import onnx_ir as ir
from onnx_ir.passes.common import InlinePass

from ..contract import ENCODER, KEPT_SITE
from ..io import writing_scratch
from .passes import DEBUG_OUTPUTS, run_passes


def shows_kept(path: Path) -> bool:
    """Say whether an exported ONNX file has the output ``kept_site``."""
    return _shows_kept(ir.load(path))


def _shows_kept(model: ir.Model) -> bool:
    return any(output.name == KEPT_SITE for output in model.graph.outputs)


@contextlib.contextmanager
def debug_form(path: Path) -> Iterator[Path]:
    """Write the debug form of an exported ONNX file into a temporary directory, for the time of a block.

    Yields:
        Its path; `path` itself where that file has the output already.

    Raises:
        InputError: the temporary directory is full or cannot be written.
    """
    model = ir.load(path)
    if _shows_kept(model):
        yield path
        return
    InlinePass(lambda function: function.name == ENCODER)(model)
    run_passes(model, DEBUG_OUTPUTS)
    with contextlib.ExitStack() as stack:
        with writing_scratch("a temporary copy of the model"):
            scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="adtp-debug-"))
            copy = Path(scratch) / path.name
            ir.save(model, copy, external_data=copy.name + ".data")  # weights apart: faster to write and to load
        for value in model.graph.initializers.values():
            value.const_value = None  # a graph refers to itself, so its weights would stay in memory for long
        yield copy
