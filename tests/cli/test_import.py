"""`adtp-import` and `import_checkpoint`: what they write is the same model, for transformers and for `adtp-export`."""

import json
import shutil

import pytest
import torch
from plain_models import TEXTS, write_plain, write_pruned, write_sentence_transformer
from testbed import listing, run_cli, shared_or_skip
from transformers import (
    AutoModel,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
)

import adtp_export
from adtp_export.contract import OUTPUTS
from adtp_export.data.tokenize import encode
from adtp_export.errors import InputError
from adtp_export.imports import ReadOptions, open_checkpoint
from adtp_export.model import PrunedEncoderConfig
from adtp_export.model.checkpoint import load_checkpoint

AUTO = {
    "sequence": AutoModelForSequenceClassification,
    "tokens": AutoModelForTokenClassification,
    "spans": AutoModelForQuestionAnswering,
    "embedding": AutoModel,
}
PICKLE = {"allow_pickle": True}
SYSTEMS = {"ltp": {"padded_length": 64}, "top": {}, "transkimmer": {}}


@pytest.fixture
def source(request, tmp_path, demo, small):
    """A checkpoint to import, and what has to be said about it."""
    kind = request.param
    if kind in SYSTEMS:
        return shared_or_skip(f"originals/{kind}/checkpoint"), {**PICKLE, **SYSTEMS[kind]}
    if kind == "format 1":
        return small, {}
    if kind == "vectors":
        directory = write_sentence_transformer(tmp_path / "model")
        prompts = {"prompts": {"query": "film: "}, "default_prompt_name": "query"}
        (directory / "config_sentence_transformers.json").write_text(json.dumps(prompts))
        (directory / "sentence_bert_config.json").write_text('{"max_seq_length": 20, "do_lower_case": true}')
        return directory, {}
    if kind == "pruned":
        return write_pruned(tmp_path / "model", "spans"), {}
    return write_plain(tmp_path / "model", "tokens"), {}


@pytest.mark.parametrize("source", [*SYSTEMS, "format 1", "vectors", "pruned", "plain"], indirect=True)
def test_it_answers_the_same_to_the_bit(tmp_path, source):
    """Read again here, and by transformers' Auto classes with their own tokenizer."""
    directory, options = source
    before = open_checkpoint(directory, ReadOptions(**options))
    record = adtp_export.import_checkpoint(directory, tmp_path / "out", **options)
    after = load_checkpoint(tmp_path / "out")
    config = before.student.config
    assert isinstance(after.student.config, PrunedEncoderConfig)
    assert record["head"] == config.head
    assert tuple(record["sites"]) == before.student.site_names == after.student.site_names
    assert record["notes"] == list(before.notes)
    assert (after.max_tokens, after.settings) == (before.max_tokens, dict(before.settings))
    auto = AUTO[config.head].from_pretrained(tmp_path / "out")
    weights = {
        name: weight.clone() for name, weight in auto.state_dict().items()
    }  # mapped from a file they lie anywhere
    auto.load_state_dict(weights, assign=True)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    for text in TEXTS:
        (row,) = encode(before.tokenizer, [text], before.max_tokens)
        assert encode(after.tokenizer, [text], after.max_tokens)[0].input_ids == row.input_ids
        assert tokenizer(text, truncation=True, max_length=before.max_tokens).input_ids == row.input_ids
        batch = {"input_ids": torch.tensor([row.input_ids]), "token_type_ids": torch.tensor([row.token_type_ids])}
        expected = before.student(**batch)
        for student in (after.student, auto):
            found = student(**batch)
            assert torch.equal(found.kept_site, expected.kept_site)
            assert all(torch.equal(found[name], expected[name]) for name in OUTPUTS[config.head])
    assert auto.config.id2label == config.id2label


@pytest.fixture(scope="module")
def top():
    return shared_or_skip("originals/top/checkpoint")


def test_the_command_says_what_it_took_it_for(tmp_path, top):
    """And `adtp-export` takes what it wrote."""
    out = tmp_path / "student"
    result = run_cli("adtp-import", top, out, "--allow-pickle")
    assert result.returncode == 0, result.stderr
    assert "taken for ToP on bert, with masks for its last 4 layers, of which 1 drops nothing" in result.stderr
    assert "bert with the head sequence: top at 2.attention, 3.attention, 5.attention" in result.stderr
    assert result.stdout.strip() == str(out)
    again = run_cli("adtp-import", top, out, "--allow-pickle", "--force", "--json")
    assert again.returncode == 0, again.stderr
    record = json.loads(again.stdout)
    assert (record["method"], record["backbone"], len(record["notes"])) == ("top", "bert", 2)
    manifest = adtp_export.export(out, tmp_path / "export", openvino=True)
    assert {target.status for target in manifest.targets.values()} == {"verified"}
    assert len(manifest.targets) == 2
    assert manifest.checkpoint["method"] == "top"


def test_nothing_is_written_on_bad_input(tmp_path, top):
    for arguments, message in (
        ((top,), "type --allow-pickle|add --allow-pickle|Add --allow-pickle"),
        ((tmp_path / "nothing",), "does not exist"),
        ((top, "--allow-pickle", "--padded-length", 64), "--padded-length is for checkpoints of LTP"),
        ((top, "--allow-pickle", "--head", "tokens"), "leave --head out"),
    ):
        result = run_cli("adtp-import", arguments[0], tmp_path / "out", *arguments[1:])
        assert result.returncode == 2
        assert result.stderr.count("adtp-import: error: ") == 1
        assert any(part in result.stderr for part in message.split("|")), result.stderr
        assert list(tmp_path.iterdir()) == []


def test_what_is_there_is_replaced_on_request_and_only_a_student(tmp_path, demo, small):
    out = tmp_path / "out"
    adtp_export.import_checkpoint(small, out)
    before = listing(out)
    with pytest.raises(InputError, match="out exists; add --force to replace it, or give another place"):
        adtp_export.import_checkpoint(demo, out)
    with pytest.raises(InputError, match="is or holds the model directory"):
        adtp_export.import_checkpoint(out, out, force=True)
    (out / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match="holds more than a student, such as notes.txt"):
        adtp_export.import_checkpoint(demo, out, force=True)
    (out / "notes.txt").unlink()
    assert listing(out) == before
    adtp_export.import_checkpoint(demo, out, force=True)
    assert load_checkpoint(out).student.config.encoder_config.num_hidden_layers == 4
    copied = shutil.copytree(small, tmp_path / "format1")
    with pytest.raises(InputError, match="is no student of format 2; remove it yourself"):
        adtp_export.import_checkpoint(demo, copied, force=True)
    with pytest.raises(InputError, match="unknown option 'allow_pickles'; did you mean 'allow_pickle'"):
        adtp_export.import_checkpoint(small, tmp_path / "new", allow_pickles=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["format1", "out"]


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ([], "adtp is \\[\\]; accepted is an object of max_tokens, prompts"),
        ({"head": "sequence"}, "accepted is an object of max_tokens"),
        ({"max_tokens": 1}, "adtp.max_tokens: got 1; accepted is an integer of at least 4"),
        ({"prompts": ["a"]}, "accepted are texts, and prompts by their names"),
        ({"prompt": "query"}, "adtp.prompt is 'query'; accepted are none"),
    ],
)
def test_how_texts_are_read_is_checked(tmp_path, block, message):
    directory = write_pruned(tmp_path / "model", "embedding")
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "adtp": block}))
    with pytest.raises(InputError, match=message):
        load_checkpoint(directory)
