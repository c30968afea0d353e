"""The layout of the Hub, and repositories: pushed to, loaded from, and refused, by huggingface_hub on a small Hub of this machine."""

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import numpy as np
import onnx_ir as ir
import pytest
import yaml
from conftest import listing
from hub_endpoint import TOKEN, serving

import adtp_export
from adtp_export.contract import LAYOUTS, MODEL, layout_of, placed
from adtp_export.errors import InputError
from adtp_export.graph import program
from adtp_export.pipeline import bench
from adtp_export.pipeline.bench_options import BenchOptions
from adtp_export.records import Manifest
from adtp_export.report import card

REPO = "somebody/small"
TEXTS = ["a wonderful film", "the soup was cold and so was the waiter"]
CARD = "---\nlicense: mit\ntags: [old]\n---\nwords of the user\n"


def ask(patch, address):
    """Have huggingface_hub take an address for the Hub's."""
    patch.setattr(huggingface_hub.constants, "ENDPOINT", address)
    template = address + "/{repo_id}/resolve/{revision}/{filename}"
    patch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """A Hub that huggingface_hub takes for its own, with a user who is logged in, and an empty cache."""
    with serving() as (hub, address), pytest.MonkeyPatch.context() as patch:
        hub.address = address
        ask(patch, address)
        patch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("HF_TOKEN", TOKEN)
        yield hub


@pytest.fixture(scope="module")
def pushed(hub, small, tmp_path_factory):
    """A student's export that was pushed, to a repository that had a card and a file of an earlier export."""
    model = Path(shutil.copytree(small, tmp_path_factory.mktemp("hub") / "small"))
    (model / "README.md").write_text("---\nlanguage: no\nlicense: apache-2.0\nbase_model: somebody/base\n---\n")
    old = {"README.md": CARD, "onnx/model_quantized.onnx": "old", "notes.txt": "mine"}
    hub.repositories[REPO] = {name: text.encode() for name, text in old.items()}
    out = model.with_name("out")
    adtp_export.export(model, out, precisions=["fp32", "fp16"], push_to_hub=REPO)
    return model, out


def test_files_have_the_names_that_others_look_for(pushed):
    manifest = Manifest.read(pushed[1])
    files = {name: target.file for name, target in manifest.targets.items()}
    assert files == {"onnxruntime-cpu-fp32": "onnx/model.onnx", "onnxruntime-cpu-fp16": "onnx/model_fp16.onnx"}
    assert placed("model.ort-cpu.int8.onnx", "hub") == "onnx/model_quantized.onnx"
    assert [layout_of([placed(MODEL, layout)]) for layout in LAYOUTS] == list(LAYOUTS)
    assert {"config.json", "tokenizer.json", "README.md"} <= manifest.files.keys()


def test_the_card_says_what_was_found(pushed):
    """Its own fields are those of this export; of the old card and the checkpoint's it keeps what they alone know."""
    text, manifest = (pushed[1] / "README.md").read_text(), Manifest.read(pushed[1])
    fields = yaml.safe_load(re.match(r"---\n(.*?)\n---\n", text, re.DOTALL)[1])
    assert fields == {
        "language": "no",  # Norwegian; YAML 1.1 has it for false
        "base_model": "somebody/base",
        "license": "mit",  # the repository's own: its user gave it
        "pipeline_tag": "text-classification",
        "library_name": "transformers.js",
        "tags": ["onnx", "adtp-export", "token-pruning"],
    }
    for name, target in manifest.targets.items():
        assert f"| `{name}` | verified | {target.parity.max_abs_logit_diff:.1e} |" in text
        assert f"| {target.details['p50_ms']:.2f} | {target.details['machine']} |" in text
    assert f"| `1.attention` | {manifest.retention['1.attention']['mean_ratio']:.3f} |" in text
    assert f'adtp_export.load("{REPO}")' in text


@pytest.mark.parametrize(
    ("head", "config", "task", "use"),
    [
        ("tokens", {}, "token-classification", 'pipeline("token-classification", "a/b"'),
        ("spans", {}, "question-answering", 'model([("one text", "another")])'),
        ("embedding", {}, "sentence-similarity", 'SentenceTransformer("a/b", backend="onnx")'),
        ("sequence", {"sentence_transformers": {"version": "5"}}, "text-ranking", 'model([("one text", "another")])'),
    ],
)
def test_cards_of_other_heads(pushed, tmp_path, head, config, task, use):
    manifest = Manifest.read(pushed[1])
    manifest = dataclasses.replace(manifest, checkpoint={**manifest.checkpoint, "head": head, "prune_sites": []})
    fields = card.metadata(manifest, tmp_path, {**config, "_name_or_path": "somebody/named"}, None)
    assert fields["pipeline_tag"] == task
    assert (fields["base_model"], fields["tags"]) == ("somebody/named", ["onnx", "adtp-export"])
    text = card.render(manifest, fields, "a/b")
    assert use in text
    assert "# license: name that of your weights" in text


def test_what_a_card_cannot_take_is_left_out(pushed, tmp_path):
    (tmp_path / "README.md").write_text("---\nlicense: [\n---\n")
    fields = card.metadata(Manifest.read(pushed[1]), tmp_path, {"_name_or_path": "./model"}, tmp_path / "README.md")
    assert fields.keys() == {"pipeline_tag", "library_name", "tags"}


def test_a_repository_holds_the_export_and_answers(pushed, hub, tmp_path, monkeypatch):
    _, out = pushed
    assert {"notes.txt": b"mine", **listing(out)} == hub.repositories[REPO]  # what an earlier export left is gone
    expected = adtp_export.load(out, verify=False).run(
        batch := {"input_ids": [[2, 9, 3]], "attention_mask": [[1, 1, 1]], "token_type_ids": [[0] * 3]}
    )
    fetched = adtp_export.load(REPO)
    np.testing.assert_array_equal(fetched.run(batch), expected)
    assert fetched.kept(TEXTS[0])[0].kept == adtp_export.load(out).kept(TEXTS[0])[0].kept
    hub.asked.clear()
    assert adtp_export.load(f"{REPO}@main").directory == fetched.directory
    assert hub.asked == [f"HEAD /{REPO}/resolve/main/manifest.json"]  # all else is in the cache
    assert adtp_export.hub.located(Path(REPO)) == Path(REPO)  # a path is no name
    monkeypatch.chdir(tmp_path)
    shutil.copytree(out, tmp_path / REPO)
    assert adtp_export.load(REPO).directory == Path(REPO)  # what is here wins


def test_the_command_asks_the_hub_that_the_environment_names(pushed, hub, tmp_path):
    settings = {**os.environ, "HF_ENDPOINT": hub.address, "HF_HOME": str(tmp_path)}
    code = "import sys; from adtp_export.cli.run import main; main()"
    command = [sys.executable, "-c", code, REPO, "--text", TEXTS[0]]
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=settings)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["label"] == adtp_export.load(pushed[1])(TEXTS[0])[0].label


def test_what_came_over_the_network_is_compared_with_the_manifest(pushed, hub, monkeypatch):
    files = dict(hub.repositories[REPO])
    model = bytearray(files["onnx/model.onnx"])
    model[len(model) // 2] ^= 1
    monkeypatch.setitem(hub.repositories, "somebody/changed", {**files, "onnx/model.onnx": bytes(model)})
    with pytest.raises(InputError, match=r"onnx/model.onnx is damaged: its SHA-256 .* or fetch the directory anew"):
        adtp_export.load("somebody/changed", target="onnxruntime-cpu-fp32")


def test_names_in_a_manifest_are_no_patterns(pushed, hub, monkeypatch):
    manifest = json.loads((pushed[1] / "manifest.json").read_text())
    manifest["files"]["*"] = manifest["files"]["config.json"]
    files = {"manifest.json": json.dumps(manifest).encode(), "config.json": b"{}", "notes.txt": b"not listed"}
    monkeypatch.setitem(hub.repositories, "somebody/pattern", files)
    fetched = adtp_export.hub.located("somebody/pattern")
    assert sorted(listing(fetched)) == ["config.json", "manifest.json"]


def test_updates_keep_the_layout_and_other_commands_know_it(pushed, tmp_path, monkeypatch):
    model, out = pushed
    traced = ir.load(out / "onnx" / "model.onnx")
    monkeypatch.setattr(program, "export_portable", lambda *_: traced)  # another trace takes 4 s, and is the same
    out = Path(shutil.copytree(out, tmp_path / "out"))
    with pytest.raises(InputError, match="has the layout hub, and this is plain; use --force"):
        adtp_export.export(model, out, update=True, layout="plain")
    before = listing(out)
    manifest = adtp_export.export(model, out, update=True, verify=False)
    assert manifest.targets["onnxruntime-cpu-fp16"].file == "onnx/model_fp16.onnx"
    assert listing(out)["onnx/model.onnx"] == before["onnx/model.onnx"]
    assert "license: mit" in (out / "README.md").read_text()  # as the card that was there says
    assert bench._exported(out, BenchOptions()).student.path == out / "onnx" / "model.onnx"


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ("somebody/none", r"no directory somebody/none here, and the Hub has no .*somebody/none, or hides it from you"),
        ("build/my-export", r"no directory build/my-export here"),
        (f"{REPO}@v7", r"has no such revision; leave out what comes after the @"),
        ("somebody/plain", r"somebody/plain has no manifest.json, so adtp-export did not make it"),
        (
            "somebody/foreign",
            r"somebody/foreign: this version of adtp-export cannot read its manifest.json; export its model",
        ),
        ("somebody/a--b", r"the Hub has no repositories of such names: .*somebody/a--b; check the name"),
        ("somebody/gated", r"is open to those alone who were granted access"),
        ("somebody/secret", r"hides it from you; check the name, or type: hf auth login"),
    ],
)
def test_what_cannot_be_loaded_is_one_message(pushed, hub, asked, message, monkeypatch):
    for name in ("plain", "gated", "secret"):
        monkeypatch.setitem(hub.repositories, f"somebody/{name}", {"config.json": b"{}"})
    monkeypatch.setitem(hub.repositories, "somebody/foreign", {"manifest.json": b'{"name": "another application"}'})
    hub.gated.add("somebody/gated")
    hub.private.add("somebody/secret")
    if asked == "somebody/secret":
        monkeypatch.setenv("HF_TOKEN", "another")
    with pytest.raises(InputError, match=message):
        adtp_export.load(asked)


def test_without_a_network_the_cache_answers_and_all_else_is_one_message(pushed, hub, small, tmp_path, monkeypatch):
    cached = adtp_export.load(REPO).directory
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda _: None)  # it tries again, for 20 s
    ask(monkeypatch, "http://127.0.0.1:9")  # nobody listens there
    assert adtp_export.load(REPO).directory == cached
    with pytest.raises(InputError, match="cannot be reached for .*other, which the cache has not; check the network"):
        adtp_export.load("somebody/other")
    with pytest.raises(InputError, match=r"the Hub cannot be reached for .*; check the network"):
        adtp_export.export(small, tmp_path / "out", push_to_hub=REPO)
    assert list(tmp_path.iterdir()) == []  # found out before any work


def test_a_push_that_cannot_be_is_found_out_before_any_work(hub, small, tmp_path, monkeypatch):
    with pytest.raises(
        InputError, match="--push-to-hub: got 'a b'; accepted is a repository's name, such as somebody/my-model"
    ):
        adtp_export.export(small, tmp_path / "out", push_to_hub="a b")
    monkeypatch.setenv("HF_TOKEN", "another")
    with pytest.raises(InputError, match="type: hf auth login"):
        adtp_export.export(small, tmp_path / "out", push_to_hub=REPO)
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    with pytest.raises(InputError, match="there is no token; type: hf auth login, or set HF_TOKEN"):
        adtp_export.export(small, tmp_path / "out", push_to_hub=REPO)
    assert list(tmp_path.iterdir()) == []


def test_a_push_that_fails_leaves_the_export_and_a_new_repository_is_private(pushed, hub, tmp_path, monkeypatch):
    _, out = pushed
    assert adtp_export.hub.push(out, "new").endswith("/somebody/new")
    assert "somebody/new" in hub.private
    monkeypatch.setitem(hub.repositories, "somebody/locked", {})
    hub.gated.add("somebody/locked")
    with pytest.raises(
        InputError, match=r"out is complete; to push it later, type: hf upload somebody/locked .*out \."
    ):
        adtp_export.hub.push(out, "somebody/locked")
