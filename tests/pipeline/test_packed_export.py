"""`adtp-export --packed-inputs`: one more file, judged and served as all others."""

import shutil

import numpy as np
import pytest
from testbed import relist

import adtp_export
from adtp_export.artifacts.records import Manifest
from adtp_export.targets.specs import TargetSpec

TEXTS = [
    "fine",
    "a waste of an evening",
    "the second act sags, but the last twenty minutes are as good as anything " * 2,
]


@pytest.fixture(scope="module")
def out(packed_export):
    return packed_export / "out"


def test_each_precision_has_a_packed_file_that_is_verified(out):
    manifest = Manifest.read(out)
    files = {name: target.file for name, target in manifest.targets.items()}
    assert files["onnxruntime-cpu-fp32-packed"] == "model.packed.onnx"
    assert files["onnxruntime-cpu-fp16-packed"] == "model.packed.fp16.onnx"
    assert {target.status for target in manifest.targets.values()} == {"verified"}
    packed, padded = (manifest.targets[f"onnxruntime-cpu-fp32{end}"] for end in ("-packed", ""))
    assert packed.parity.rows == padded.parity.rows
    assert {"p50_ms", "timed_on"} <= packed.details.keys()  # so that `load` takes it where it is the faster one


def test_load_answers_with_it_as_with_the_padded_file(out):
    packed, padded = (adtp_export.load(out, target=f"onnxruntime-cpu-fp32{end}") for end in ("-packed", ""))
    assert packed.spec == TargetSpec.parse("onnxruntime-cpu-fp32-packed")
    for found, expected in zip(packed(TEXTS, return_kept=True), padded(TEXTS, return_kept=True), strict=True):
        assert (found.label, found.tokens, found.kept) == (expected.label, expected.tokens, expected.kept)
        assert found.score == pytest.approx(expected.score, abs=1e-5)
        assert not all(found.kept) or len(found.tokens) < 5
    assert packed.inputs == padded.inputs  # whoever brings rectangles of his own brings the same ones


def test_where_nothing_was_measured_the_padded_file_comes_before_it(out, tmp_path):
    """`load` brings rectangles, and gains nothing from it."""
    manifest = Manifest.read(out)
    targets = {n: t for n, t in manifest.to_json()["targets"].items() if "fp32" in n}
    copy = shutil.copytree(out, tmp_path / "copy")
    relist(copy, {name: {**target, "fingerprint": "another"} for name, target in targets.items()})
    assert adtp_export.load(copy).target == "onnxruntime-cpu-fp32"


def test_rows_of_one_token_only(out):
    packed, padded = (adtp_export.load(out, target=f"onnxruntime-cpu-fp32{end}") for end in ("-packed", ""))
    batch = {"input_ids": np.array([[5, 0], [6, 0]]), "attention_mask": np.array([[1, 0], [1, 0]])}
    batch["token_type_ids"] = batch["input_ids"] * 0
    np.testing.assert_allclose(packed.run(batch), padded.run(batch), rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(packed.kept_site(batch), padded.kept_site(batch))
