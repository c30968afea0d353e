"""The layout of the Hub, and repositories: pushed to, loaded from, and refused, by huggingface_hub on a small Hub of this machine."""

import json
import os
import re
import shutil
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import huggingface_hub
import numpy as np
import pytest
import yaml
from hub_endpoint import TOKEN, serving
from known_graphs import taking_known_graphs
from testbed import listing

import adtp_export
from adtp_export.artifacts import hub as hub_room
from adtp_export.artifacts.records import Manifest
from adtp_export.cli.run_texts import head_of
from adtp_export.contract import LAYOUTS, MODEL, layout_of, layout_path
from adtp_export.errors import InputError
from adtp_export.pipeline.bench import bench
from adtp_export.pipeline.bench.options import BenchOptions

REPO = "somebody/small"
TEXTS = ["a wonderful film", "the soup was cold and so was the waiter"]
CARD = "---\nlicense: mit\ntags: [old]\n---\n"  # as the Hub makes it for a licence


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
    """A student's export that was pushed, to a repository that had a card and files of its user."""
    model = Path(shutil.copytree(small, tmp_path_factory.mktemp("hub") / "small"))
    (model / "README.md").write_text("---\nlanguage: no\nlicense: apache-2.0\nbase_model: somebody/base\n---\n")
    old = {"README.md": CARD, "onnx/decoder.onnx": "mine", "notes.txt": "mine"}
    hub.repositories[REPO] = {name: text.encode() for name, text in old.items()}
    out = model.with_name("out")
    with taking_known_graphs():
        adtp_export.export(model, out, precisions=["fp32", "fp16"], push_to_hub=REPO)
    return model, out


def test_files_have_the_names_that_others_look_for(pushed):
    manifest = Manifest.read(pushed[1])
    files = {name: target.file for name, target in manifest.targets.items()}
    assert files == {"onnxruntime-cpu-fp32": "onnx/model.onnx", "onnxruntime-cpu-fp16": "onnx/model_fp16.onnx"}
    assert layout_path("model.ort-cpu.int8.onnx", "hub") == "onnx/model_quantized.onnx"
    assert [layout_of([layout_path(MODEL, layout)]) for layout in LAYOUTS] == list(LAYOUTS)
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


def test_a_repository_holds_the_export_and_answers(pushed, hub, tmp_path, monkeypatch):
    _, out = pushed
    mine = {"notes.txt": b"mine", "onnx/decoder.onnx": b"mine"}
    assert hub.repositories[REPO] == {**mine, **listing(out)}
    expected = adtp_export.load(out, check_hashes=False).run(
        batch := {"input_ids": [[2, 9, 3]], "attention_mask": [[1, 1, 1]], "token_type_ids": [[0] * 3]}
    )
    fetched = adtp_export.load(REPO)
    np.testing.assert_array_equal(fetched.run(batch), expected)
    assert fetched.kept(TEXTS[0])[0].kept == adtp_export.load(out).kept(TEXTS[0])[0].kept
    hub.asked.clear()
    assert adtp_export.load(f"{REPO}@main").directory == fetched.directory
    assert hub.asked == [f"HEAD /{REPO}/resolve/main/manifest.json"]  # all else is in the cache
    assert adtp_export.artifacts.hub.located(Path(REPO)) == Path(REPO)  # a path is no name
    monkeypatch.chdir(tmp_path)
    shutil.copytree(out, tmp_path / REPO)
    assert adtp_export.load(REPO).directory == Path(REPO).absolute()  # what is here wins


def test_the_command_reads_pictures_and_prompts_from_where_they_were_fetched(pushed, hub, monkeypatch):
    files = dict(hub.repositories[REPO])
    manifest = json.loads(files["manifest.json"])
    manifest["checkpoint"]["head"] = "images"
    monkeypatch.setitem(hub.repositories, "somebody/tower", {**files, "manifest.json": json.dumps(manifest).encode()})
    options = Namespace(out="somebody/tower")
    assert head_of(options) == "images"
    assert (Path(options.out) / "manifest.json").is_file()
    options = Namespace(out=REPO)
    assert (head_of(options), options.out) == ("sequence", REPO)  # which workers elsewhere can fetch, too


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
    config = (pushed[1] / "config.json").read_bytes()
    files = {"manifest.json": json.dumps(manifest).encode(), "config.json": config, "notes.txt": b"not listed"}
    monkeypatch.setitem(hub.repositories, "somebody/pattern", files)
    fetched = adtp_export.artifacts.hub.located("somebody/pattern")
    assert sorted(listing(fetched)) == ["config.json", "manifest.json"]


ELSEWHERE = "PLACE/outside"
"""A path outside the cache: PLACE stands for the test's folder."""
TERABYTES = str(50 * 10**12)


@pytest.mark.filterwarnings("ignore:Not enough free disk space")
@pytest.mark.parametrize(
    ("name", "header", "value", "message"),
    [
        ("manifest.json", "ETag", f'"{ELSEWHERE}"', "accepted are hexadecimal digits. Nothing of it was written"),
        ("manifest.json", "ETag", '"../../../../outside"', "has the ETag '../../../../outside'"),
        ("onnx/model.onnx", "X-Linked-Etag", f'"{ELSEWHERE}"', "answer for onnx/model.onnx has the ETag"),
        ("manifest.json", "X-Repo-Commit", "../..", "has the commit '../..'; accepted is 40 hexadecimal digits"),
        ("manifest.json", "X-Repo-Commit", ELSEWHERE, "accepted is 40 hexadecimal digits"),
        (
            "config.json",
            "X-Repo-Commit",
            "0" * 40,
            "answer for config.json has the commit '0000.*; accepted is [0-9a-f]{40}",
        ),
        ("none.json", "X-Repo-Commit", ELSEWHERE, "answer for none.json has the commit"),
        ("manifest.json", "Content-Length", TERABYTES, f"has {TERABYTES} bytes; accepted are at most 16777216"),
        ("config.json", "Content-Length", TERABYTES, f"has {TERABYTES} bytes; accepted are those 3 of its manifest"),
        (
            "large.onnx",
            "X-Linked-Size",
            TERABYTES,
            r"cannot read what the Hub answers \(ValueError: The file is too large",
        ),
    ],
)
def test_answers_of_a_hub_name_no_place_outside_the_cache(
    pushed, hub, tmp_path, monkeypatch, name, header, value, message
):
    """Whoever answers in the Hub's place may answer anything; a listed file that is not there is answered, too."""
    manifest = json.loads((pushed[1] / "manifest.json").read_text())
    sizes = {"config.json": 3, "onnx/model.onnx": 3, "none.json": 3, "large.onnx": int(TERABYTES)}
    manifest["files"] = {each: {"sha256": "0" * 64, "bytes": size} for each, size in sizes.items()}
    manifest["targets"] = {}
    files = dict.fromkeys(("config.json", "onnx/model.onnx"), b"new")
    if name == "large.onnx":
        files[name] = b"large"
    monkeypatch.setitem(hub.repositories, "odd/hub", {"manifest.json": json.dumps(manifest).encode(), **files})
    cache = tmp_path / "deep" / "cache"
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setitem(hub.headers, name, {header: value.replace("PLACE", str(tmp_path))})
    with pytest.raises(InputError, match=message):
        adtp_export.load("odd/hub")
    assert [*tmp_path.iterdir()] in ([], [cache.parent])
    assert [*cache.parent.glob("*")] in ([], [cache])
    assert {path.name for path in cache.glob("*/*")} <= {"refs", "blobs", "snapshots", ".no_exist", "models--odd--hub"}
    assert not [*cache.glob("**/outside*")]


def test_a_commit_of_a_hub_names_no_place_outside_the_cache(pushed, hub, tmp_path, monkeypatch):
    monkeypatch.setitem(hub.repositories, "odd/commit", {"manifest.json": b"{}"})
    monkeypatch.setattr(hub, "commit", lambda _: "../../outside")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "deep" / "cache"))
    with pytest.raises(InputError, match=r"the commit '\.\./\.\./outside'; accepted is 40 hexadecimal digits"):
        adtp_export.artifacts.hub.prepare("odd/commit")
    assert [*tmp_path.iterdir()] == []
    assert (
        adtp_export.artifacts.hub.located("odd/commit@v/../../..") == "odd/commit@v/../../.."
    )  # no name of a revision


def test_others_in_this_process_take_what_answers_they_like(pushed, hub, tmp_path, monkeypatch):
    adtp_export.load(REPO)
    monkeypatch.setitem(hub.headers, "notes.txt", {"ETag": '"of-another-kind"'})
    path = huggingface_hub.hf_hub_download(REPO, "notes.txt", cache_dir=tmp_path)
    assert Path(path).read_text() == "mine"


def test_a_listed_file_that_is_not_there_is_asked_for_once(pushed, hub, monkeypatch):
    files = with_listed(
        {"manifest.json": (pushed[1] / "manifest.json").read_bytes(), "config.json": b"{}"}, "gone.json"
    )
    monkeypatch.setitem(hub.repositories, "somebody/fewer", files)
    manifest = json.loads(files["manifest.json"])
    manifest["files"]["config.json"]["bytes"] = 2
    files["manifest.json"] = json.dumps(manifest).encode()
    fetched = adtp_export.artifacts.hub.located("somebody/fewer")
    assert sorted(listing(fetched)) == ["config.json", "manifest.json"]
    hub.asked.clear()
    assert adtp_export.artifacts.hub.located("somebody/fewer") == fetched
    assert hub.asked == ["HEAD /somebody/fewer/resolve/main/manifest.json"]


@pytest.mark.usefixtures("known_graphs")
def test_a_name_without_an_owner_is_one_s_own_and_updates_keep_their_layout_when_they_are_pushed(hub, small, tmp_path):
    adtp_export.export(small, tmp_path / "out", skip_parity_check=True)
    adtp_export.export(small, tmp_path / "out", update=True, skip_parity_check=True, push_to_hub="my-own")
    assert "model.onnx" in hub.repositories["somebody/my-own"]
    adtp_export.export(small, tmp_path / "other", skip_parity_check=True, push_to_hub="my-other")
    card = hub.repositories["somebody/my-other"]["README.md"].decode()
    assert 'load("somebody/my-other")' in card
    assert '"my-other"' not in card


@pytest.mark.usefixtures("known_graphs")
def test_updates_keep_the_layout_and_other_commands_know_it(pushed, tmp_path):
    model, out = pushed
    out = Path(shutil.copytree(out, tmp_path / "out"))
    with pytest.raises(InputError, match="has the layout hub, and this is plain; use --force"):
        adtp_export.export(model, out, update=True, layout="plain")
    before = listing(out)
    manifest = adtp_export.export(model, out, update=True, skip_parity_check=True)
    assert manifest.targets["onnxruntime-cpu-fp16"].file == "onnx/model_fp16.onnx"
    assert listing(out)["onnx/model.onnx"] == before["onnx/model.onnx"]
    assert "license: mit" in (out / "README.md").read_text()  # as the card that was there says
    assert bench._exported(out, BenchOptions(out)).student.path == out / "onnx" / "model.onnx"


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


def with_listed(files, *names):
    """Files of an export whose manifest lists more."""
    manifest = json.loads(files["manifest.json"])
    manifest["files"] |= {name: {"sha256": "0" * 64, "bytes": 3} for name in names}
    return {**files, "manifest.json": json.dumps(manifest).encode()}


def test_a_push_deletes_what_an_earlier_export_put_there_and_no_more(pushed, hub, monkeypatch):
    files = listing(pushed[1])
    mine = {"onnx/decoder.onnx": b"mine", "engines/own.engine": b"mine", "plugins/p.so": b"mine", ".gitattributes": b""}
    earlier = {"onnx/model_quantized.onnx": b"old", "notes.md": b"old"}
    there = with_listed(files, *earlier, "onnx/gone.onnx") | earlier | mine | {"config.json": b"old"}
    monkeypatch.setitem(hub.repositories, "somebody/earlier", there)
    adtp_export.artifacts.hub.push(pushed[1], "somebody/earlier")
    assert hub.repositories["somebody/earlier"] == {**files, **mine}


def test_a_push_never_replaces_what_no_export_put_there(pushed, hub, small, tmp_path, monkeypatch):
    files = listing(pushed[1])
    same = {name: files[name] for name in ("tokenizer.json", "onnx/model_fp16.onnx")}
    theirs = dict.fromkeys(("README.md", "config.json", "report.md", "onnx/model.onnx"), b"theirs")
    for name, there, named in (
        ("many", theirs | same, "README.md, config.json, onnx/model.onnx and more; type: hf upload ANOTHER-NAME .*out"),
        ("few", {"config.json": b"theirs"} | same, "config.json; type"),
        ("unlisted", {**with_listed(files), "own.md": b"theirs"}, None),
        ("app", {"manifest.json": b'{"name": "another application"}'}, "push to another repository"),
    ):
        monkeypatch.setitem(hub.repositories, f"somebody/{name}", dict(there))
        if named is None:
            adtp_export.artifacts.hub.push(pushed[1], f"somebody/{name}")
            continue
        with pytest.raises(InputError, match=named):
            adtp_export.artifacts.hub.push(pushed[1], f"somebody/{name}")
        assert hub.repositories[f"somebody/{name}"] == there
    message = r"somebody/many has files .* replace them: README.md, onnx/model.onnx; type --push-to-hub ANOTHER-NAME"
    with pytest.raises(InputError, match=message):
        adtp_export.export(small, tmp_path / "out", push_to_hub="somebody/many")
    with pytest.raises(InputError, match="somebody/app has a manifest.json that .* push to another repository"):
        adtp_export.export(small, tmp_path / "out", push_to_hub="somebody/app")
    assert list(tmp_path.iterdir()) == []  # found out before any work


def test_what_somebody_pushes_meanwhile_is_not_replaced(pushed, hub, monkeypatch):
    monkeypatch.setitem(hub.repositories, "somebody/busy", {})
    monkeypatch.setattr(hub, "meanwhile", {"config.json": b"theirs"})
    with pytest.raises(InputError, match=r"somebody/busy was changed by somebody else meanwhile\. .*out is complete"):
        adtp_export.artifacts.hub.push(pushed[1], "somebody/busy")
    assert hub.repositories["somebody/busy"] == {"config.json": b"theirs"}


def test_a_push_that_fails_leaves_the_export_and_a_new_repository_is_private(pushed, hub, tmp_path, monkeypatch):
    _, out = pushed
    assert adtp_export.artifacts.hub.push(out, "new").endswith("/somebody/new")
    assert "somebody/new" in hub.private
    monkeypatch.setitem(hub.repositories, "somebody/locked", {})
    hub.gated.add("somebody/locked")
    with pytest.raises(
        InputError, match=r"out is complete; to push it later, type: hf upload somebody/locked .*out \."
    ):
        adtp_export.artifacts.hub.push(out, "somebody/locked")


def test_a_result_that_was_moved_aside_is_not_looked_for_on_the_hub(pushed, tmp_path, monkeypatch):
    """A two-part path is spelled as a repository is."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hub_room, "_fetched", lambda repo, revision: pytest.fail(f"{repo} was asked for"))
    shutil.copytree(pushed[1], tmp_path / "models" / ".out.adtp-old-abc")
    assert hub_room.located("models/out") == "models/out"
    assert (tmp_path / "models" / "out" / "manifest.json").is_file()
