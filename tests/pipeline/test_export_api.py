"""The Python API of export: values in and out, the command's errors as exceptions, plain encoders and other systems."""

import dataclasses
import inspect
import json
import os
import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from known_graphs import taking_known_graphs
from testbed import make_encoder, shared_or_skip
from transformers import AutoModelForSequenceClassification

import adtp_export
from adtp_export.artifacts.records import Manifest
from adtp_export.errors import InputError
from adtp_export.io import sha256
from adtp_export.pipeline.export.options import ExportOptions
from adtp_export.plugins import binaries
from adtp_export.report import html

TEXTS = ["a wonderful film", "the soup was cold and so was the waiter", "ok", "it was " + "very " * 30 + "long"]


def test_the_signature_shows_every_option():
    fields = {field.name: field.default for field in dataclasses.fields(ExportOptions)}
    shown = inspect.signature(adtp_export.export).parameters
    assert list(shown)[:2] == ["model_dir", "out"]
    assert list(shown)[-1] == "steps"
    assert shown["model_dir"].default is inspect.Parameter.empty
    assert {name: shown[name].default for name in shown if name != "model_dir"} == {
        name: default for name, default in fields.items() if name != "model_dir"
    }
    assert all(f"\n    {name}: " in adtp_export.export.__doc__ for name in fields if name != "steps")


def test_export_is_the_function_whatever_was_imported():
    import adtp_export.pipeline.export.export

    assert callable(adtp_export.export)
    assert callable(adtp_export.bench)
    assert callable(adtp_export.train)


def test_it_returns_the_manifest_and_is_silent_and_an_update_times_all_again(tmp_path, small, capfd):
    """A target that is written anew, to the same bytes, is still the one that was measured; times of two runs are not compared."""
    with taking_known_graphs():
        manifest = adtp_export.export(small, tmp_path / "out", precisions=["fp32", "fp16"], inline=True)
    assert isinstance(manifest, Manifest)
    assert json.loads(json.dumps(manifest.to_json())) == json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert {target.status for target in manifest.targets.values()} == {"verified"}
    files = {name: target.file for name, target in manifest.targets.items() if name.endswith("-inline")}
    assert files == {
        "onnxruntime-cpu-fp32-inline": "model.inline.onnx",
        "onnxruntime-cpu-fp16-inline": "model.inline.fp16.onnx",
    }
    assert not any(onnx.load(tmp_path / "out" / file).functions for file in files.values())
    assert not adtp_export.load(tmp_path / "out").target.endswith("-inline")  # it is for tools
    assert capfd.readouterr() == ("", "")
    names, slow = ("onnxruntime-cpu-fp32", "onnxruntime-cpu-fp16"), 1e6
    document = json.loads((tmp_path / "out" / "manifest.json").read_text())
    for name in names:
        document["targets"][name]["p50_ms"] = slow
    (tmp_path / "out" / "manifest.json").write_text(json.dumps(document))
    kept = adtp_export.export(small, tmp_path / "out", update=True, skip_parity_check=True)
    assert {kept.targets[name].details["p50_ms"] for name in names} == {slow}
    after = adtp_export.export(small, tmp_path / "out", update=True)
    assert all(0 < after.targets[name].details["p50_ms"] < slow for name in names)


def test_errors_are_exceptions_and_write_nothing(tmp_path, small):
    with pytest.raises(InputError, match="did you mean 'precisions'"):
        adtp_export.export(small, tmp_path / "out", precision="fp16")
    with pytest.raises(InputError, match="--precision: got 'fp61'"):
        adtp_export.export(small, tmp_path / "out", precisions="fp61")
    with pytest.raises(InputError, match="leave one out"):
        adtp_export.export(small, tmp_path / "out", force=True, update=True)
    with pytest.raises(InputError, match="--attention: got 'flash'; accepted are auto, plugin, decomposed"):
        adtp_export.export(small, tmp_path / "out", trt=True, attention="flash")
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def plain_out(tmp_path_factory, demo):
    """A plain transformers classifier, and its export."""
    from testbed import write_plain_bert

    directory = write_plain_bert(demo, tmp_path_factory.mktemp("plain") / "model")
    out = directory.with_name("out")
    with taking_known_graphs():
        adtp_export.export(directory, out, openvino=True)
    return directory, out


def test_a_plain_encoder_answers_as_transformers(plain_out):
    directory, out = plain_out
    manifest = Manifest.read(out)
    assert manifest.checkpoint["prune_sites"] == []
    assert manifest.checkpoint["method"] is None
    assert {t.status for t in manifest.targets.values()} == {"verified"}
    load = adtp_export.load(out, target="onnxruntime-cpu-fp32")
    model = AutoModelForSequenceClassification.from_pretrained(directory).eval()
    rows = [load.tokenizer.encode(text).ids for text in TEXTS]
    longest = max(map(len, rows))
    ids = np.array([row + [0] * (longest - len(row)) for row in rows])
    batch = {"input_ids": ids, "attention_mask": np.array([[1] * len(r) + [0] * (longest - len(r)) for r in rows])}
    batch["token_type_ids"] = ids * 0
    with torch.inference_mode():
        expected = model(**{name: torch.from_numpy(array) for name, array in batch.items()}).logits.numpy()
    tolerance = manifest.targets["onnxruntime-cpu-fp32"].parity.tolerance
    assert np.abs(load.run(batch) - expected).max() <= tolerance
    (answer,) = load("a wonderful film", return_kept=True)
    assert answer.label in ("bad", "good")
    assert all(answer.kept)


def test_a_plain_encoders_graph_has_no_cut(plain_out):
    model = onnx.load(plain_out[1] / "model.onnx")
    kinds = [node.op_type for node in model.graph.node]
    assert "TopK" not in kinds
    assert kinds.count("AdtpRaggedAttention") == 4
    assert not any(node.name.startswith("cuts.") for node in model.graph.node)


@pytest.fixture(scope="module")
def ltp_checkpoint():
    """LTP's own."""
    return shared_or_skip("originals/ltp/checkpoint")


@pytest.mark.slow
def test_ltp_tells_how_many_first_tokens_would_fall(ltp_checkpoint, tmp_path):
    """With thresholds learned for long texts, padded here to 8 queries: nothing falls. To 4,096: all first tokens would."""
    manifest = adtp_export.export(ltp_checkpoint, tmp_path / "out", padded_length=4096, allow_pickle=True)
    (note,) = [n.text for n in manifest.notes if "below a threshold" in n.text and n.text.startswith("in ")]
    fallen, rows = int(note.split()[1]), int(note.split()[3])
    assert 0 < fallen <= rows == manifest.verification["rows"]
    assert manifest.targets["onnxruntime-cpu-fp32"].status == "verified"
    assert manifest.checkpoint["method"] == "ltp"
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["model_type"], config["adtp"]["max_tokens"]) == ("roberta", 128)


@pytest.mark.slow
@pytest.mark.usefixtures("has_rtx", "no_gpu")
def test_ltp_has_the_plugin_in_every_layer(ltp_checkpoint, tmp_path, monkeypatch):
    """All its kernels count as executed here; no report says that the engine was."""
    compiled = [b for v in binaries.manifest()["variants"] for b in v["binaries"].values()]
    monkeypatch.setattr(binaries, "executed", lambda: {b["sha256"] for b in compiled})
    options = {"padded_length": 64, "allow_pickle": True, "gpu": "sm_86", "attention": "plugin"}
    manifest = adtp_export.export(ltp_checkpoint, tmp_path / "out", trt=True, **options)
    (target,) = [target for name, target in manifest.targets.items() if name.endswith("-plugin")]
    assert (target.status, target.details["plugin_layers"]) == ("emulated", 6)
    assert target.details["kernels"] == ["fp32-d32-received"]
    told = "its attention kernels were executed in an emulator; the engine has not run on a GPU"
    assert f"`emulated`: {told}." in (tmp_path / "out" / "report.md").read_text()
    assert f"<b>emulated</b>: {told}." in (tmp_path / "out" / "report.html").read_text()


def test_projections_after_a_cut_are_not_precomputed(tmp_path, demo):
    model = make_encoder("bert", "schedule")
    model.config.pruning["sites"] = ["0.attention", "2.attention"]
    type(model)(model.config).save_pretrained(tmp_path / "model")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{i}" for i in range(90))]
    (tmp_path / "model" / "vocab.txt").write_text("\n".join(words))
    with pytest.raises(InputError, match="--precompute-embedding-projections: .* after a cut at '0.attention'"):
        adtp_export.export(tmp_path / "model", tmp_path / "out", precompute_embedding_projections=True)
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def ltp_out(ltp_checkpoint, tmp_path_factory):
    """Its export for 64 queries."""
    out = tmp_path_factory.mktemp("ltp") / "out"
    asked = {"padded_length": 64, "allow_pickle": True, "skip_parity_check": True, "ort_cuda": True}
    with taking_known_graphs():
        adtp_export.export(ltp_checkpoint, out, **asked)
    return out


def test_no_cuda_file_where_every_layer_reads_what_tokens_received(ltp_out):
    manifest = Manifest.read(ltp_out)
    assert "onnxruntime-cuda-fp32" not in manifest.targets
    assert any("no file for ONNX Runtime's CUDA provider" in note.text for note in manifest.notes)


def test_an_update_knows_what_the_checkpoint_does_not_say(ltp_checkpoint, ltp_out):
    with pytest.raises(InputError, match="--update: .* was exported with padded_length 64, and this is 128"):
        adtp_export.export(ltp_checkpoint, ltp_out, padded_length=128, allow_pickle=True, update=True)


@pytest.mark.parametrize("beside", [False, True], ids=["one file", "a token beside it"])
def test_an_update_has_the_same_tokenizer_and_keeps_outputs_and_latencies(tmp_path, small, beside):
    """What the export before it was asked for stays: its files are written anew."""
    model, out = Path(shutil.copytree(small, tmp_path / "student")), tmp_path / "out"
    spelled = json.loads((model / "tokenizer.json").read_text())
    if beside:
        last = max(spelled["model"]["vocab"].items(), key=lambda item: item[1])
        del spelled["model"]["vocab"][last[0]]
        (model / "tokenizer.json").write_text(json.dumps(spelled))
        (model / "added_tokens.json").write_text(json.dumps(dict([last])))
    first = (model / "tokenizer.json").read_bytes()
    texts = tmp_path / os.fsdecode(b"donn\xe9es.txt")  # no UTF-8
    texts.write_text("\n".join(TEXTS))
    with taking_known_graphs():
        manifest = adtp_export.export(model, out, debug_outputs=True, verify_data=texts)
    assert manifest.verification["text"] == r"donn\udce9es.txt"
    report = out / "report.html"
    section = "<section>latencies</section>\n"
    report.write_text(report.read_text().replace(html.BENCH + "\n", html.BENCH + "\n" + section))
    document = json.loads((out / "manifest.json").read_text())
    document["files"]["report.html"] = {"sha256": sha256(report), "bytes": report.stat().st_size}
    (out / "manifest.json").write_text(json.dumps(document))
    model = model.rename(tmp_path / "renamed")
    assert adtp_export.export(model, out, update=True, skip_parity_check=True).checkpoint["name"] == "renamed"
    assert [o.name for o in onnx.load(out / "model.onnx").graph.output] == ["logits", "kept_site"]
    assert html.bench_of(report.read_text()) == section
    spelled["normalizer"]["lowercase"] = not spelled["normalizer"]["lowercase"]
    (model / "tokenizer.json").write_text(json.dumps(spelled))
    with pytest.raises(InputError, match="was exported with another tokenizer; use --force"):
        adtp_export.export(model, out, update=True, skip_parity_check=True)
    (model / "tokenizer.json").write_bytes(first)
    os.truncate(out / "model.onnx", 1000)
    with pytest.raises(InputError, match="model.onnx is damaged"):
        adtp_export.export(model, out, update=True, skip_parity_check=True)


@pytest.mark.slow
@pytest.mark.parametrize("system", ["top", "transkimmer"])
def test_systems_without_options_are_verified(system, tmp_path):
    """Their dropped tokens are as many as their own pruners say, and the notes are in the manifest."""
    manifest = adtp_export.export(shared_or_skip(f"originals/{system}/checkpoint"), tmp_path / "out", allow_pickle=True)
    target = manifest.targets["onnxruntime-cpu-fp32"]
    assert target.status == "verified"
    assert target.parity.kept_token_agreement == target.parity.prediction_agreement == 1
    assert manifest.checkpoint["method"] == system
    assert any("was taken for" in note.text for note in manifest.notes)
    assert any("measure" in note.text for note in manifest.notes)
    assert not any("first token" in note.text for note in manifest.notes)  # it stays in the original, too
