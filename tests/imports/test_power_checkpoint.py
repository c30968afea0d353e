"""What is read of PoWER-BERT's HDF5, and what is asked and refused on the way to it."""

import json
import re
import sys

import numpy as np
import pytest
import torch
from originals import Original
from testbed import run_cli

import adtp_export
from adtp_export.errors import InputError, MissingDependencyError
from adtp_export.imports import ReadOptions, open_checkpoint
from adtp_export.imports.power import EPSILON

h5py = pytest.importorskip("h5py", reason="h5py is not installed")
READ = ReadOptions(length_config=[40, 30, 20, 8])
WEIGHTS = "retrained.hdf5"


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    return Original.open("power", tmp_path_factory, READ)


def test_what_no_file_says_is_kerass(original):
    config = original.checkpoint.student.dense.config
    assert config.layer_norm_eps == EPSILON == original.told["layer_norm_eps"]
    assert config.id2label == {0: "LABEL_0", 1: "LABEL_1", 2: "LABEL_2"}
    assert config.max_position_embeddings == 48
    assert original.checkpoint.tokenizer.encode("W1").ids == original.checkpoint.tokenizer.encode("w1").ids
    assert [name in original.checkpoint.notes[0] for name in ("PoWER-BERT", "3 classes", "40, 30, 20, 8")] == [True] * 3


def test_a_matrix_the_other_way_round_is_noticed(original):
    weight = original.checkpoint.student.dense.bert.encoder.layer[1].attention.self.key.weight
    weight.copy_(weight.T.clone())
    try:
        logits = original.checkpoint.student(**original.batch).logits.numpy()
    finally:
        weight.copy_(weight.T.clone())
    assert np.abs(logits - original.golden["ref_logits"]).max() > original.tolerance


@pytest.fixture
def copied(tmp_path, original):
    return original.copy(tmp_path / "power")


@pytest.mark.slow
def test_it_is_exported(copied, tmp_path):
    """With its log; the graph has the operator in all layers, so kernels have nothing to do, and are refused."""
    log = copied / "log_file.txt"
    manifest = adtp_export.export(copied, tmp_path / "out", length_config=log, precompute_embedding_projections=True)
    assert {target.status for target in manifest.targets.values()} == {"verified"}
    assert manifest.checkpoint["lengths"] == [40, 30, 20, 8]
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["model_type"], config["layer_norm_eps"]) == ("bert", EPSILON)
    answers = adtp_export.load(tmp_path / "out")(["w1 w2", "w3"])
    assert {answer.label for answer in answers} <= {"LABEL_0", "LABEL_1", "LABEL_2"}
    with pytest.raises(
        InputError, match="from others, and there is no kernel that gives it; use --attention decomposed"
    ):
        adtp_export.export(copied, tmp_path / "two", length_config=log, trt=True, attention="plugin")
    with pytest.raises(InputError, match="--update: .*was exported with .*, and this is"):
        adtp_export.export(copied, tmp_path / "out", length_config="40,30,20,9", update=True)
    assert not (tmp_path / "two").exists()


def test_it_asks_for_the_lengths(copied):
    with pytest.raises(InputError, match="type: --length-config .*power/log_file.txt"):
        open_checkpoint(copied)
    (copied / "log_file.txt").unlink()
    with pytest.raises(InputError, match="type: --length-config 40,30,20,8 "):
        open_checkpoint(copied)


def test_it_says_what_to_install(copied, monkeypatch):
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(MissingDependencyError, match="type: pip install"):
        open_checkpoint(copied, READ)


def edit(change):
    def apply(directory):
        with h5py.File(directory / WEIGHTS, "r+") as file:
            change(file)

    return apply


def replaced(name, make):
    """Put another dataset in the place of one."""

    def change(file):
        values = file[name][()]
        del file[name]
        make(file, name, values)

    return edit(change)


def with_config(**changes):
    def apply(directory):
        path = directory / "bert_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return apply


NSP, KERNEL = "model_weights/NSP/NSP/kernel:0", "model_weights/NSP-Dense/NSP-Dense/kernel:0"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            edit(lambda f: f.move(NSP, "model_weights/NSP/NSP/weights:0")),
            "1 unknown (NSP/NSP/weights:0); 1 missing (NSP/NSP/kernel:0)",
        ),
        (edit(lambda f: f.__delitem__("model_weights/Encoder-4-FeedForward")), "4 missing (Encoder-4-FeedForward/"),
        (edit(lambda f: f.create_dataset("other/step", data=1)), "1 unknown (other/step)"),
        (replaced(NSP, lambda f, n, v: f.create_dataset(n, data=v[:-1])), "NSP/NSP/kernel:0 is (95, 3), not (96, any)"),
        (replaced(NSP, lambda f, n, v: f.create_dataset(n, data=v[:, 0])), "NSP/NSP/kernel:0 is (96,), not (96, any)"),
        (
            replaced(NSP, lambda f, n, v: f.create_dataset(n, data=v[:, :2])),
            "classifier.weight is (2, 96), not (3, 96)",
        ),
        (
            replaced(KERNEL, lambda f, n, v: f.create_dataset(n, data=v.astype("f8"))),
            "is float64; accepted are float32",
        ),
        (replaced(KERNEL, lambda f, n, v: f.create_dataset(n, data=v * np.nan)), "NaN or infinite weights"),
        (
            replaced(
                KERNEL, lambda f, n, v: f.create_dataset(n, (96, 96), "f4", external=[("/etc/hostname", 0, 4 * 96**2)])
            ),
            "is compressed, or kept elsewhere",
        ),
        (replaced(KERNEL, lambda f, n, v: f.create_dataset(n, (96, 96), "f4")), "is compressed, or kept elsewhere"),
        (
            replaced(KERNEL, lambda f, n, v: f.__setitem__(n, h5py.ExternalLink("other.hdf5", "x"))),
            "1 missing (NSP-Dense/NSP-Dense/kernel:0)",
        ),
        (with_config(num_hidden_layers=5), "got 4 lengths, and the model has 5 layers"),
        (with_config(num_hidden_layers=2**31 - 1), "got 4 lengths, and the model has 2147483647 layers"),
        (with_config(hidden_size=48), "Embedding-Norm/Embedding-Norm/beta:0 is (96,), not (48,)"),
        (with_config(hidden_size="x"), "hidden_size"),
        (with_config(intermediate_size=10**9), "is (96, 192), not (96, 1000000000)"),
        (with_config(model_type="roberta"), "accepted is the configuration of a BERT"),
        (lambda d: (d / "bert_config.json").write_text("[]"), "accepted is the configuration of a BERT"),
        (lambda d: (d / "bert_config.json").unlink(), "has retrained.hdf5 and no bert_config.json"),
        (lambda d: (d / "vocab.txt").unlink(), "has no tokenizer"),
        (lambda d: (d / WEIGHTS).write_bytes((d / WEIGHTS).read_bytes()[:10_000]), "is not HDF5, truncated or corrupt"),
        (lambda d: (d / WEIGHTS).write_bytes(b"not at all"), "is not HDF5, truncated or corrupt"),
    ],
)
def test_bad_checkpoints_are_named(copied, change, message):
    change(copied)
    with pytest.raises(InputError, match=re.escape(message)) as raised:
        open_checkpoint(copied, READ)
    assert "\n" not in str(raised.value)


def test_other_options_are_refused(copied):
    with pytest.raises(InputError, match="--head: got spans; accepted of PoWER-BERT is sequence|--head: got 'spans'"):
        open_checkpoint(copied, ReadOptions(length_config=[40, 30, 20, 8], head="spans"))
    with pytest.raises(InputError, match="--padded-length is for checkpoints of LTP"):
        open_checkpoint(copied, ReadOptions(length_config=[40, 30, 20, 8], padded_length=64))


def test_positions_are_as_many_as_keras_had(copied):
    """It cuts the table to the length that it trained with; no longer text can be read."""
    edit(lambda file: cut_positions(file, 20))(copied)
    checkpoint = open_checkpoint(copied, READ)
    assert checkpoint.max_tokens == 20
    assert checkpoint.student.site_names == ("3.ffn",)  # 40, 30 and 20 drop nothing of 20


def test_a_file_of_weights_alone_is_read_too(original, copied):
    """Without Keras' folder of the model; with one of the optimizer."""

    def change(file):
        for name in list(file["model_weights"]):
            file.move(f"model_weights/{name}", name)
        file.create_dataset("optimizer_weights/step", data=1)

    edit(change)(copied)
    found, expected = open_checkpoint(copied, READ).student.state_dict(), original.checkpoint.student.state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def cut_positions(file, rows):
    name = "model_weights/Embedding-Position/Embedding-Position/embeddings:0"
    values = file[name][:rows]
    del file[name]
    file.create_dataset(name, data=values)


@pytest.mark.parametrize("arguments", [["--length-config", "8,20,30,40"], ["--length-config", "40,30,20"], []])
def test_the_command_refuses_in_one_message(copied, tmp_path, arguments):
    result = run_cli("adtp-export", copied, "--out", tmp_path / "out", *arguments)
    assert result.returncode == 2, result.stderr
    assert "Traceback" not in result.stderr
    assert "--length-config" in result.stderr.splitlines()[-1]
    assert not (tmp_path / "out").exists()
