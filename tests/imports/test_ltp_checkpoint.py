"""LTP's own checkpoint and its own answers, and what is asked and refused on the way to them."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import as_numpy, shared_or_skip

from adtp_export.engines.onnxruntime import OnnxRuntimeEngine
from adtp_export.engines.openvino import OpenVinoEngine
from adtp_export.errors import InputError
from adtp_export.graph import program
from adtp_export.graph.debug import debug_form
from adtp_export.imports import ReadOptions, open_checkpoint
from adtp_export.model.packed import PackedStudent
from adtp_export.verify.oracle import MULTIPLE, run_oracle

PADDED = 64
READ = ReadOptions(allow_pickle=True, padded_length=PADDED)


@pytest.fixture(scope="module")
def original() -> Path:
    return shared_or_skip("originals/ltp")


@pytest.fixture(scope="module")
def golden(original):
    return np.load(original / "golden.npz")


@pytest.fixture(scope="module")
def checkpoint(original):
    return open_checkpoint(original / "checkpoint", READ)


@pytest.fixture(scope="module")
def batch(checkpoint, golden):
    return {name: torch.from_numpy(golden[name]) for name in checkpoint.student.input_names}


@pytest.fixture(scope="module")
def tolerance(checkpoint, batch):
    """What fp32 may be off: the multiple that targets are judged by, of what PyTorch in fp32 is off on these rows."""
    return MULTIPLE * run_oracle(checkpoint.student, [as_numpy(batch)]).output_errors["logits"]


@pytest.fixture(scope="module")
def exported(checkpoint, tmp_path_factory):
    path = tmp_path_factory.mktemp("ltp") / "model.onnx"
    program.save(program.export_portable(checkpoint.student, {"version": "test"}), path)
    return path


def test_thresholds_are_those_of_the_original(checkpoint, original):
    """Learned part plus the base of the configuration; one is negative, and is 1e-5 then."""
    wanted = json.loads((original / "golden.json").read_text())["thresholds"]
    found = [pruner.threshold.item() for pruner in checkpoint.student.pruners.values()]
    assert found == pytest.approx([max(1e-5, value) for value in wanted], rel=1e-6)


def test_pytorch_in_fp64_is_the_reference(original, golden, batch):
    student = open_checkpoint(original / "checkpoint", READ).student.double()
    answer = student(**batch)
    np.testing.assert_allclose(answer.logits, golden["ref_logits"], rtol=0, atol=1e-12)
    for i, decision in enumerate(answer.decisions):
        assert np.array_equal(decision.kept, golden["ref_kept"][i])
        live = decision.live.numpy()
        np.testing.assert_allclose(decision.rule.order[live], golden["ref_score"][i][live], rtol=0, atol=1e-13)
        margin = decision.rule.margins(decision.live)[1].numpy()
        finite = np.isfinite(margin)
        np.testing.assert_allclose(margin[finite], golden["ref_margin"][i][finite], rtol=0, atol=1e-12)


def test_the_original_answers_alike(checkpoint, golden, batch, tolerance):
    """Its [CLS] stays in all rows, so true removal is its own masking: `golden.json` says 7.4e-07 between the two."""
    answer = checkpoint.student(**batch)
    assert np.array_equal(np.stack([d.kept for d in answer.decisions]), golden["orig_kept"])
    assert np.abs(answer.logits.numpy() - golden["orig_logits"]).max() <= tolerance + 7.4e-7


def test_packed_pytorch(checkpoint, golden, batch, tolerance):
    (logits,), _ = PackedStudent(checkpoint.student)(**batch)
    assert np.abs(logits.numpy() - golden["ref_logits"]).max() <= tolerance


def test_onnx_runtime(exported, golden, batch, tolerance):
    check(OnnxRuntimeEngine, exported, golden, batch, tolerance)


@pytest.mark.usefixtures("has_openvino")
def test_openvino(exported, golden, batch, tolerance):
    check(OpenVinoEngine, exported, golden, batch, tolerance)


def check(load, exported, golden, batch, tolerance):
    """After every site the tokens of the reference, and its logits to fp32 rounding."""
    with debug_form(exported) as debug:
        answer = load(debug).run(as_numpy(batch))
    assert len(golden["ref_kept"]) == 6
    for site, kept in enumerate(golden["ref_kept"]):
        assert np.array_equal(answer["kept_site"] > site, kept)
    assert np.abs(answer["logits"] - golden["ref_logits"]).max() <= tolerance


def test_a_planted_mistake_is_noticed(checkpoint, golden, batch):
    """Scores over another padded length keep other tokens."""
    student = checkpoint.student
    for pruner in student.pruners.values():
        pruner.queries *= 2
    try:
        kept = np.stack([d.kept for d in student(**batch).decisions])
    finally:
        for pruner in student.pruners.values():
            pruner.queries //= 2
    assert not np.array_equal(kept, golden["ref_kept"])


@pytest.fixture
def copied(tmp_path, original) -> Path:
    directory = Path(shutil.copytree(original / "checkpoint", tmp_path / "ltp"))
    for path in directory.iterdir():
        path.chmod(0o644)
    return directory


def edit(directory, **changes):
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return directory


def test_it_asks_for_the_padded_length(copied):
    with pytest.raises(InputError, match="type: --padded-length 128"):
        open_checkpoint(copied, ReadOptions(allow_pickle=True))


def test_it_asks_before_it_unpickles(copied):
    with pytest.raises(InputError, match="--allow-pickle"):
        open_checkpoint(copied, ReadOptions(padded_length=PADDED))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prune_mode": "topk"}, "prune_mode is 'topk'; accepted is 'absolute_threshold'"),
        ({"architectures": ["LTPForTokenClassification"]}, "accepted of LTP is LTPForSequenceClassification"),
        ({"quant_mode": True}, "quant_mode is on"),
        ({"final_token_threshold": None}, "final_token_threshold is None"),
        ({"num_hidden_layers": 7}, "accepted are all 7 layers"),
        ({"num_hidden_layers": 2**31 - 1}, "accepted are all 2147483647 layers"),
        ({"final_token_threshold": 10**400}, "final_token_threshold is 1000.*accepted is a number"),
        ({"max_position_embeddings": 5}, "no room for a text"),
        ({"hidden_size": 48}, "do not match config.json"),
    ],
)
def test_bad_checkpoints_are_named(copied, changes, message):
    with pytest.raises(InputError, match=message):
        open_checkpoint(edit(copied, **changes), READ)


def test_a_threshold_of_zero_switches_a_layer_off(copied):
    weights = torch.load(copied / "pytorch_model.bin", weights_only=True)
    for layer in (1, 4):
        name = f"ibert.encoder.layer.{layer}.attention.self.pruner.keep_threshold"
        weights[name] = -(torch.tensor(0.01 * layer / 6))
    torch.save(weights, copied / "pytorch_model.bin")
    checkpoint = open_checkpoint(copied, READ)
    assert checkpoint.student.site_names == ("0.ffn", "2.ffn", "3.ffn", "5.ffn")
    assert any("2 of its layers drop nothing" in note for note in checkpoint.notes)


def test_the_option_is_for_ltp_alone(demo):
    with pytest.raises(InputError, match="--padded-length is for checkpoints of LTP"):
        open_checkpoint(demo, ReadOptions(padded_length=128))
