"""Graphs that were traced once for all tests and all workers.

A trace takes seconds, and its result depends on the student and the form alone (`graph/test_graph.py` compares two). So whoever
looks at something behind it takes the graph that the first one traced: by `known_graph`, or by the fixture `known_graphs`, with which
the package itself and the commands do. Tests of what is traced, of ends in the middle of it, and all that change how it is done, trace.
"""

import contextlib
import functools
import hashlib
from pathlib import Path

import onnx_ir as ir
import pytest
from filelock import FileLock

from adtp_export.contract import METADATA
from adtp_export.graph import program

FOLDER: Path | None = None
"""Where the graphs of this run are: `shared_graphs` sets it."""
TRACE = program.export_portable


def known_graph(student, metadata=None, form=program.padded_form) -> ir.Model:
    """What `program.export_portable` returns, which traces where no process of this run has yet."""
    metadata = metadata or {"version": "test"}
    function, given = (form.func, form.args) if isinstance(form, functools.partial) else (form, ())
    if function not in (program.padded_form, program.packed_form, program.fixed_form):
        return TRACE(student, metadata, form)
    name = "-".join([function.__name__, *(f"{size}-{'-'.join(map(str, size.kept))}" for size in given)])
    path = FOLDER / f"{_digest(student)}.{name}.onnx"
    with FileLock(f"{path}.lock"):
        if not path.exists():
            model = TRACE(student, metadata, form)
            program.save(model, path.with_suffix(".partial"))
            path.with_suffix(".partial").rename(path)
            return model
    model = ir.load(path)
    for key in [key for key in model.metadata_props if key.startswith(METADATA)]:
        del model.metadata_props[key]
    return program.describe(model, metadata)


def _digest(student) -> str:
    """Hash a student's class, configuration and weights."""
    digest = hashlib.sha256(f"{type(student)} {student.config.to_json_string(use_diff=False)}".encode())
    for name, tensor in student.state_dict().items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()


@contextlib.contextmanager
def taking_known_graphs():
    """Have the package take known graphs in a block, and so the commands that are started there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(program, "export_portable", known_graph)
        yield


def prelude() -> str:
    """Python with which a command does as this process does."""
    return f"import known_graphs; known_graphs.use({str(FOLDER)!r})\n" if program.export_portable is known_graph else ""


def use(folder) -> None:
    """Take known graphs from now on: for a command, in a process of its own."""
    global FOLDER
    FOLDER = Path(folder)
    program.export_portable = known_graph
