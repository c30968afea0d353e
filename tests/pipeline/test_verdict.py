"""What becomes of a verdict: a status, notes, or an error; and which errors are those of writing."""

import dataclasses
import errno
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from packed_engine import PackedEngine
from testbed import as_numpy, as_ties, make_batch, make_student

import adtp_export
from adtp_export.artifacts.records import INCONCLUSIVE, VERIFIED
from adtp_export.errors import InputError, VerificationError
from adtp_export.pipeline.export import context as run_module
from adtp_export.pipeline.export import model_files as variants
from adtp_export.pipeline.export import verify as targets
from adtp_export.pipeline.export.context import ExportContext, WrittenFile
from adtp_export.pipeline.export.file_plan import ModelFile
from adtp_export.pipeline.progress import Steps
from adtp_export.targets.specs import TargetSpec
from adtp_export.verify.oracle import run_oracle

NAME = "onnxruntime-cpu-fp32"


@pytest.fixture(scope="module")
def student():
    return make_student(["0.ffn", "1.ffn"])


@pytest.fixture(scope="module")
def oracle(student):
    """Of one row a batch, with decisions that are all too close to call."""
    found = run_oracle(student, [as_numpy(make_batch([9 + i], 9 + i, seed=i)) for i in range(4)])
    return dataclasses.replace(found, batches=tuple(map(as_ties, found.batches)))


@pytest.fixture
def judged(student, oracle, tmp_path):
    """Judge the student as a target, beside a debug form that is changed."""

    def judge(change, debug=None):
        run = ExportContext(checkpoint=SimpleNamespace(student=student), work=tmp_path, profile={}, steps=Steps())
        written = WrittenFile(file=ModelFile(name="model.onnx"), path=tmp_path / "model.onnx", oracle=oracle)
        both = PackedEngine(student, change), debug and PackedEngine(student, debug)
        found = targets.judge_engine(run, TargetSpec.parse(NAME), written, lambda: both)
        return found.targets[NAME], found.notes

    return judge


def flipping(count):
    """Let another token fall in the first rows."""
    seen = []

    def change(logits, kept):
        seen.append(1)
        if len(seen) <= count:
            kept[0, 1] = 0 if kept[0, 1] else 2

    return change


@pytest.mark.parametrize(("flips", "status"), [(0, VERIFIED), (2, VERIFIED), (3, INCONCLUSIVE)])
def test_a_verdict_takes_half_of_the_rows(judged, flips, status):
    target, notes = judged(flipping(flips))
    assert (target.status, target.parity.rows, target.parity.rows_compared) == (status, 4, 4 - flips)
    told = f"{NAME}: 1 of 4 rows could be compared, and a verdict takes 2"
    assert [note.text for note in notes if "could be compared" in note.text] == [told] * (status == INCONCLUSIVE)
    assert all(note.about == NAME for note in notes)


def test_bits_that_another_output_changes_are_noted(judged, oracle):
    def change(logits, kept):
        logits[0, 0] = np.nextafter(logits[0, 0], np.float32(np.inf))

    target, (note,) = judged(lambda logits, kept: None, change)
    assert target.status == VERIFIED
    assert note.text.startswith(
        f"{NAME}: on this processor the graph answers otherwise where it also says which tokens"
    )

    def wrong(logits, kept):
        logits[0, 0] += 2 * oracle.tolerances["logits"]

    with pytest.raises(VerificationError, match="does not equal the PyTorch model: logits: off by"):
        judged(lambda logits, kept: None, wrong)


def test_what_the_system_refuses_is_not_taken_for_a_place_that_cannot_be_written(tmp_path, small, monkeypatch):
    """Another place would not help."""

    def refused(*arguments):
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(variants.program, "export_portable", refused)
    with pytest.raises(OSError, match="Cannot allocate memory") as error:
        adtp_export.export(small, tmp_path / "out", skip_parity_check=True)
    assert not isinstance(error.value, InputError)
    assert list(tmp_path.iterdir()) == []


_WRITTEN: list[tuple[str, bool]] = []
_WATCHED: list[str] = []
_WRITING: list[bool] = []


def _hook(event, arguments):
    if not _WATCHED or event != "open" or not str(arguments[0]).startswith(_WATCHED[0]):
        return
    mode, flags = str(arguments[1] or ""), arguments[2]
    if mode.strip("rbt") or (isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR)):
        _WRITTEN.append((Path(arguments[0]).name, bool(_WRITING)))


@pytest.mark.slow
def test_all_that_is_written_says_where_it_cannot_be(tmp_path, small, monkeypatch):
    """Every file of an export is opened inside `writing`."""
    from contextlib import contextmanager

    from adtp_export.artifacts import directory

    original = directory.writing

    @contextmanager
    def writing(path):
        _WRITING.append(True)
        try:
            with original(path):
                yield
        finally:
            _WRITING.pop()

    for module in (directory, run_module):
        monkeypatch.setattr(module, "writing", writing)
    sys.addaudithook(_hook)  # it stays, and looks at nothing once the test is done
    (tmp_path / "rows.txt").write_text("fine\nnot so fine\n")
    _WATCHED.append(str(tmp_path))
    options = {
        "precompute_embedding_projections": True,
        "ort_cuda": True,
        "packed_inputs": True,
        "precisions": "fp32,fp16,int8",
        "layout": "hub",
    }
    adtp_export.export(
        small,
        tmp_path / "out",
        skip_parity_check=True,
        calibration_data=tmp_path / "rows.txt",
        attention="decomposed",
        **options,
    )
    _WATCHED.clear()
    names = {name for name, _ in _WRITTEN}
    assert names >= {
        "model.onnx",
        "model_fp16.onnx",
        "model_quantized.onnx",
        "model.packed.onnx",
        "manifest.json",
        "README.md",
    }
    assert names >= {
        "model.precomputed.fp32.onnx",
        "model.ort-cuda.fp32.onnx",
        "config.json",
        "tokenizer.json",
        "report.html",
    }
    assert [name for name, inside in _WRITTEN if not inside] == []
