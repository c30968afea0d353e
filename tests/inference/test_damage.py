"""Nothing is answered from a file that is not the one in the manifest, and wrong types are one message."""

import json
import os
import shutil

import numpy as np
import pytest
from testbed import relist, replaced_during

import adtp_export
from adtp_export.artifacts.manifest import read_manifest
from adtp_export.artifacts.records import Note
from adtp_export.errors import InputError
from adtp_export.graph import program
from adtp_export.inference import session as module

TARGET = "onnxruntime-cpu-fp32"


@pytest.fixture
def out(exported, tmp_path):
    return shutil.copytree(exported, tmp_path / "out")


@pytest.fixture
def edit(out):
    """Return a function that changes the fields of a JSON file of the directory: a path of keys, and a value."""

    def change(name, *path, value):
        document = json.loads((out / name).read_text())
        inner = document
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = value
        (out / name).write_text(json.dumps(document))
        return out if name == "manifest.json" else relist(out)

    return change


def flip(path, place=0.5):
    data = bytearray(path.read_bytes())
    data[int(len(data) * place)] ^= 1
    path.write_bytes(bytes(data))


@pytest.mark.parametrize("name", ["model.onnx", "tokenizer.json", "config.json"])
def test_one_flipped_bit_is_noticed(out, name):
    flip(out / name)
    with pytest.raises(InputError, match=rf"{name} is damaged: its SHA-256"):
        adtp_export.load(out, TARGET)


def test_those_who_count_milliseconds_may_leave_hashes_out(out):
    flip(out / "model.onnx", 0.9)  # among the weights
    adtp_export.load(out, TARGET, check_hashes=False)("a good film")
    (out / "model.onnx").write_bytes(b"short")
    with pytest.raises(InputError, match="has 5 bytes"):
        adtp_export.load(out, TARGET, check_hashes=False)


def test_weights_beside_the_model_are_compared_too(out):
    model = program.ir.load(out / "model.onnx")
    program.save(model, out / "model.onnx", inline_limit_bytes=0)
    assert adtp_export.load(relist(out), TARGET)("a good film")[0].label == "positive"
    flip(out / "model.onnx.data")
    with pytest.raises(InputError, match=r"model\.onnx\.data is damaged"):
        adtp_export.load(out, TARGET)


def test_the_model_that_shows_what_was_kept_is_compared_too(out):
    deployment = adtp_export.load(out, TARGET)
    flip(out / "model.onnx")
    with pytest.raises(InputError, match="model.onnx is damaged"):
        deployment("a good film", return_kept=True)


def test_a_directory_that_was_exported_anew_is_to_be_loaded_again(out):
    deployment = adtp_export.load(out, TARGET)
    document = json.loads((out / "manifest.json").read_text())
    program.save(program.ir.load(out / "model.onnx"), out / "model.onnx", inline_limit_bytes=0)
    (out / "manifest.json").write_text(json.dumps({**document, "notes": [{"about": "", "text": "another"}]}))
    relist(out)
    with pytest.raises(InputError, match="was replaced since it was loaded; load it again"):
        deployment("a good film", return_kept=True)


def test_a_pipe_in_place_of_a_file_is_refused(out):
    (out / "model.onnx").unlink()
    os.mkfifo(out / "model.onnx")
    with pytest.raises(InputError, match="not a regular file"):
        adtp_export.load(out, TARGET)


@pytest.mark.parametrize("name", ["../elsewhere/model.onnx", "/tmp/model.onnx", "a//b", "", "a\\b", "./model.onnx"])
def test_files_are_named_inside_the_directory(edit, name):
    entry = {"sha256": "0" * 64, "bytes": 1}
    edit("manifest.json", "files", name, value=entry)
    broken = edit("manifest.json", "targets", TARGET, "file", value=name)
    with pytest.raises(InputError, match="does not name a file inside the directory"):
        adtp_export.load(broken)


def test_a_target_has_a_file_that_is_listed(edit):
    with pytest.raises(InputError, match=r"'other\.onnx', is not among its files"):
        adtp_export.load(edit("manifest.json", "targets", TARGET, "file", value="other.onnx"))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("targets", TARGET, "gpus"), 1),
        (("targets", TARGET, "profile"), {"seq": "1:2:3"}),
        (("targets", TARGET, "p50_ms"), "fast"),
        (("targets", TARGET, "rows"), "many"),
        (("targets", TARGET, "status"), None),
        (("targets", TARGET, "excused_flips"), [{"row": 1}]),
        (("targets", TARGET), []),
        (("targets",), None),
        (("files", "model.onnx"), "abc"),
        (("files",), []),
        (("checkpoint", "prune_sites"), "0.ffn"),
        (("retention",), {"0.ffn": 0.5}),
        (("versions",), {"adtp-export": 1}),
        (("profile",), {"batch": "1:2:3", "seq": 4}),
        (("notes",), "one"),
        (("notes",), ["one"]),
        (("targets", "onnxruntime-cpu-fp32", "verification"), {"text": 3}),
        (("verification",), {"text": 3}),
        (("schema",), "1"),
        (("profile",), {"batch": "1:2:3"}),
    ],
)
def test_types_in_the_manifest(edit, path, value):
    broken = edit("manifest.json", *path, value=value)
    with pytest.raises(InputError, match=r"manifest\.json"):
        read_manifest(broken)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("max_position_embeddings",), None),
        (("vocab_size",), "many"),
        (("id2label",), {"0": "no", "2": "yes"}),
        (("id2label",), {}),
        (("id2label",), {"0": "yes", "1": "yes"}),
        (("id2label",), {"0": "no", "x": "yes"}),
        (("problem_type",), "aaaa"),
        (("adtp",), {"prune_sites": "0.ffn"}),
        (("adtp", "max_tokens"), "7"),
        (("pad_token_id",), "0"),
    ],
)
def test_types_in_the_config(edit, path, value):
    with pytest.raises(InputError, match=r"is damaged .*export again with --force"):
        adtp_export.load(edit("config.json", *path, value=value))


def test_labels_that_the_model_does_not_have(edit):
    deployment = adtp_export.load(edit("config.json", "id2label", value={"0": "no", "1": "maybe", "2": "yes"}), TARGET)
    with pytest.raises(InputError, match="2 values a row, and there are 3 labels"):
        deployment("a good film")


@pytest.mark.parametrize("prefer", [3, None, "sped", ["speed"]])
def test_a_preference_is_one_of_two(exported, prefer):
    with pytest.raises(InputError, match="accepted are precision and speed"):
        adtp_export.load(exported, prefer=prefer)


@pytest.mark.parametrize("target", [3, b"x", ["onnxruntime-cpu-fp32"]])
def test_a_target_is_a_name(exported, target):
    with pytest.raises(InputError, match="accepted is a target's name"):
        adtp_export.load(exported, target)


@pytest.mark.parametrize("threads", [-1, 100_000, "4", 1.5, True, None])
def test_threads_are_a_sensible_number(exported, threads):
    with pytest.raises(InputError, match="threads: got .*; accepted is an integer from 0 to 1024"):
        adtp_export.load(exported, threads=threads)


def test_a_directory_is_a_path():
    with pytest.raises(InputError, match="directory: got int; accepted is a path"):
        adtp_export.load(3)


def _failing():
    """What goes wrong in a caller's own texts is the caller's to see."""
    yield "a"
    raise TypeError("own")


def test_what_texts_may_be(exported):
    deployment = adtp_export.load(exported)
    texts = ["a good film", ("a good film", "a bad one")]
    expected = [answer.scores for answer in deployment(texts)]
    for same in (iter(texts), (text for text in texts), tuple(texts)):
        assert [answer.scores for answer in deployment(same)] == expected
    assert deployment(iter([])) == []
    with pytest.raises(TypeError, match="own"):
        deployment(_failing())
    for wrong in ({"a", "b"}, {"a": 1}, b"text", 3, None, {"a": 1}.keys(), np.array("a good film")):
        with pytest.raises(InputError, match="texts: got .*accepted are a string, a pair"):
            deployment(wrong)
    for wrong in ([3], ["a", None], [("a", "b", "c")], ("a", "b", "c", 4), [["a", "b"]]):
        with pytest.raises(InputError, match=r"at index \d; accepted are strings"):
            deployment(wrong)
    for size in (0, -1, "3", 2.5, True):
        with pytest.raises(InputError, match="batch_size: got .*; accepted is an integer of at least 1"):
            deployment("a", batch_size=size)
    with pytest.raises(InputError, match="batch_size: got 1099511627776; accepted is an integer from 1 to 2147483647"):
        deployment("a", batch_size=2**40)
    with pytest.raises(InputError, match="batch_size: got .*; accepted is a Python int of at least 1"):
        deployment("a", batch_size=np.int64(4))
    with pytest.raises(InputError, match="batch: got list; accepted is a dict of arrays"):
        deployment.run([1])
    with pytest.raises(InputError, match="batch: rows of different lengths"):
        deployment.run({key: [[1, 2], [1]] for key in ("input_ids", "attention_mask", "token_type_ids")})


def test_a_directory_that_is_replaced_while_it_is_read_is_read_again(out, exported, monkeypatch):
    """The tokenizer of one export and the model of the next would answer wrongly."""
    calls = replaced_during(monkeypatch, module, "choose", out)
    deployment = adtp_export.load(out)
    assert (len(calls), deployment.manifest.notes) == (2, (Note("another export"),))
