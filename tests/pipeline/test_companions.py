"""What an output directory says to clients that read its tokenizer files: `load` sets all of that by itself, and they do not."""

import dataclasses
import json
import sys

import numpy as np
import pytest
import transformers
from plain_models import TEXTS, add_tokenizer, edit_json, write_plain, write_sentence_transformer
from tokenizers import Tokenizer

import adtp_export
from adtp_export import io as files
from adtp_export.data.tokenize import encode
from adtp_export.data.windows import Windows
from adtp_export.imports import open_checkpoint
from adtp_export.inference.config import Config
from adtp_export.pipeline.companions import write_companions
from benchmarks.serving import rag

LONG = [*TEXTS, "", "many words of a long text " * 40]
PAIRS = [("a short one", "many words of a long text " * 40), ("many words of a long text " * 40, "a short one")]


def companions(directory, out, windows=None):
    """What an export would write beside models; and the checkpoint."""
    checkpoint = open_checkpoint(directory)
    out.mkdir()
    write_companions(checkpoint, out, windows)
    return checkpoint


@pytest.fixture
def saved(tmp_path):
    """A model of vectors that reads 20 tokens, and whose tokenizer was saved after a call with other lengths, as real ones are."""
    directory = write_sentence_transformer(tmp_path / "model")
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.enable_padding(length=12)
    tokenizer.enable_truncation(12, direction="left")
    tokenizer.save(str(directory / "tokenizer.json"))
    call = {"max_length": 12, "stride": 0, "truncation_strategy": "longest_first", "pad_to_multiple_of": None}
    edit_json(
        directory / "tokenizer_config.json", **call, model_max_length=64, padding_side="left", truncation_side="left"
    )
    return directory


def test_the_tokenizer_reads_as_load_does(saved, tmp_path):
    checkpoint = companions(saved, tmp_path / "out")
    tokenizer = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    for texts in (LONG, PAIRS):
        expected = [row.input_ids for row in encode(checkpoint.tokenizer, texts, 20)]
        assert [row.ids for row in tokenizer.encode_batch(texts)] == expected


def test_transformers_reads_as_load_does(saved, tmp_path):
    checkpoint = companions(saved, tmp_path / "out")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    for texts in (LONG, PAIRS):
        rows = tokenizer(texts, truncation=True, padding=True, return_tensors="np")
        found = [ids[mask == 1].tolist() for ids, mask in zip(rows["input_ids"], rows["attention_mask"])]
        assert found == [row.input_ids for row in encode(checkpoint.tokenizer, texts, 20)]
        assert (np.diff(rows["attention_mask"], axis=1) <= 0).all()


def test_settings_of_a_saved_call_are_left_out(saved, tmp_path):
    """fastembed reads `max_length`, and takes the smaller one."""
    companions(saved, tmp_path / "out")
    before, after = (json.loads((folder / "tokenizer_config.json").read_text()) for folder in (saved, tmp_path / "out"))
    changed = {"model_max_length": 20, "padding_side": "right", "truncation_side": "right"}
    gone = ("max_length", "stride", "truncation_strategy", "pad_to_multiple_of")
    assert after == {name: value for name, value in (before | changed).items() if name not in gone}


def test_tokenizers_and_onnx_runtime_alone_answer_as_load_does(saved, tmp_path):
    """With the recipe of docs/rag.md."""
    out = tmp_path / "out"
    adtp_export.export(saved, out, skip_parity_check=True)
    recipe = rag.recipes()["tokenizers and ONNX Runtime alone"]
    found = rag.run(recipe, sys.executable, tmp_path, out, LONG)
    np.testing.assert_allclose(found, adtp_export.load(out).encode(LONG), atol=1e-5)


def test_tokens_that_stand_beside_the_file_are_in_it(saved, tmp_path):
    """`load` and most clients read `tokenizer.json` alone."""
    fields = json.loads((saved / "tokenizer.json").read_text())
    word, number = max(fields["model"]["vocab"].items(), key=lambda item: item[1])
    del fields["model"]["vocab"][word]
    (saved / "tokenizer.json").write_text(json.dumps(fields))
    (saved / "added_tokens.json").write_text(json.dumps({"<new>": number}))
    checkpoint = companions(saved, tmp_path / "out")
    texts = ["a <new> word", "<new>"]
    rows = encode(checkpoint.tokenizer, texts, 20)
    own = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    assert [number in row.input_ids for row in rows] == [True, True]
    assert [own.encode(text).ids for text in texts] == [row.input_ids for row in rows]


def test_nothing_else_of_the_tokenizer_changes(saved, tmp_path):
    companions(saved, tmp_path / "out")
    before, after = (json.loads((folder / "tokenizer.json").read_text()) for folder in (saved, tmp_path / "out"))
    cut = {"direction": "Right", "max_length": 20, "strategy": "LongestFirst", "stride": 0}
    assert after == before | {"truncation": cut, "padding": None}
    assert list(after) == list(before)


@pytest.mark.parametrize(("windows", "longest"), [(None, 64), (Windows(32, 8), 32), (Windows(384, 128), 64)])
def test_questions_are_read_as_long_as_windows_are(tmp_path, windows, longest):
    """The pipelines of transformers take that from the tokenizer."""
    companions(write_plain(tmp_path / "model", "spans"), tmp_path / "out", windows)
    settings, config = (
        json.loads((tmp_path / "out" / name).read_text()) for name in ("tokenizer_config.json", "config.json")
    )
    assert settings["model_max_length"] == longest
    asked = (windows or Windows()).within(64)
    assert config["adtp"]["windows"] == dataclasses.asdict(asked)
    assert asked.stride == (
        windows.stride if windows == Windows(32, 8) else 32
    )  # tokenizers take no stride as long as a window
    assert config["adtp"]["max_tokens"] == 64


@pytest.mark.parametrize("present", [["tokenizer.json"], ["vocab.txt"]])
def test_settings_that_are_missing_are_written(tmp_path, present):
    directory = add_tokenizer(write_plain(tmp_path / "model", "sequence"))
    for name in ("tokenizer.json", "vocab.txt", "tokenizer_config.json"):
        if name not in present:
            (directory / name).unlink()
    checkpoint = companions(directory, tmp_path / "out")
    settings = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert settings == {"pad_token": "[PAD]", "model_max_length": 64}
    rows = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")(LONG, truncation=True, padding=True)
    expected = [row.input_ids for row in encode(checkpoint.tokenizer, LONG, 64)]
    assert [[i for i, m in zip(*row) if m] for row in zip(rows["input_ids"], rows["attention_mask"])] == expected


def test_a_tokenizer_may_be_large(saved, tmp_path, monkeypatch):
    """XLM-R's has 17 MB; `tokenizers` has read it already."""
    checkpoint = open_checkpoint(saved)
    (tmp_path / "out").mkdir()
    monkeypatch.setattr(files, "JSON_BYTES", (saved / "tokenizer.json").stat().st_size - 1)
    write_companions(checkpoint, tmp_path / "out")
    assert Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json")).truncation["max_length"] == 20


@pytest.mark.parametrize(
    "left",
    [{"id2label": {"0": 0, "1": 1}}, {"id2label": None}, {"id2label": {"1": "a", "2": "b"}}, {"problem_type": "text"}],
)
def test_labels_that_a_classifier_left_behind_say_nothing_of_vectors(saved, tmp_path, left):
    edit_json(saved / "config.json", **left)
    companions(saved, tmp_path / "out")
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert not {"id2label", "label2id", "problem_type"} & set(written)
    assert Config.of(written).labels == []
