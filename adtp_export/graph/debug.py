"""The debug form of any exported file: the same graph with the output ``kept_site`` as well."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import onnx_ir as ir
from onnx_ir.passes.common import InlinePass

from ..contract import ENCODER, KEPT_SITE
from ..errors import InputError
from .passes import DEBUG_OUTPUTS, run_passes


@contextlib.contextmanager
def debug_form(path: Path) -> Iterator[Path]:
    """Write the debug form of an exported ONNX file into a temporary directory, for the time of a block.

    Yields:
        Its path; `path` itself where that file has the output already.

    Raises:
        InputError: the temporary directory is full or cannot be written.
    """
    model = ir.load(path)
    if any(output.name == KEPT_SITE for output in model.graph.outputs):
        yield path
        return
    InlinePass(lambda function: function.name == ENCODER)(model)
    run_passes(model, DEBUG_OUTPUTS)
    with contextlib.ExitStack() as stack:
        try:
            scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="adtp-debug-"))
            copy = Path(scratch) / path.name
            ir.save(model, copy, external_data=copy.name + ".data")  # weights apart: faster to write and to load
        except OSError as error:
            place = tempfile.tempdir or os.environ.get("TMPDIR", "/tmp")
            raise InputError(
                f"{place}: a temporary copy of the model cannot be written there ({error.strerror or error}); "
                "free some space, or type TMPDIR=DIR before the command, with a directory that has room"
            ) from error
        for value in model.graph.initializers.values():
            value.const_value = None  # a graph refers to itself, so its weights would stay in memory for long
        yield copy
