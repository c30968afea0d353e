"""Files that `polygraphy surgeon sanitize --fold-constants` has rewritten still load, and answer the same to the bit."""

import sys
import tempfile

import numpy as np
import onnx
import onnx.inliner
import polygraphy.tools
import pytest
from known_graphs import known_graph
from testbed import as_numpy, make_batch, make_encoder

from adtp_export.graph import program
from adtp_export.runtimes.onnxruntime import OnnxRuntimeEngine

FORMS = {
    "fp32": lambda source, path: path.write_bytes(source.read_bytes()),
    "fp16": lambda source, path: program.convert_precision(source, path, "fp16"),
    "precomputed": program.precompute_projections,
    "inlined": lambda source, path: onnx.save(onnx.inliner.inline_local_functions(onnx.load(source)), path),
}


@pytest.fixture(scope="module", params=["adtp", "from-others"])
def exported_file(request, tmp_path_factory):
    """A small model for each of the two attention operators, with the output kept_site."""
    path = tmp_path_factory.mktemp("polygraphy") / "model.onnx"
    model = known_graph(make_encoder("bert", request.param, num_labels=3))
    program.add_debug_outputs(model)
    program.save(model, path)
    return path


@pytest.mark.parametrize("form", FORMS)
def test_sanitized_files_answer_the_same(exported_file, tmp_path, monkeypatch, form):
    written, sanitized = tmp_path / "written.onnx", tmp_path / "sanitized.onnx"
    FORMS[form](exported_file, written)
    monkeypatch.setattr(
        sys, "argv", ["polygraphy", "surgeon", "sanitize", "--fold-constants", str(written), "-o", str(sanitized)]
    )
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # where it leaves a file
    assert polygraphy.tools.main() == 0
    assert sanitized.read_bytes() != written.read_bytes()
    batch = as_numpy(make_batch([9, 30, 1, 17], 30))
    expected, found = (OnnxRuntimeEngine(path).run(batch) for path in (written, sanitized))
    assert list(found) == ["logits", "kept_site"]
    for name, values in expected.items():
        np.testing.assert_array_equal(found[name], values)
