"""`adtp-export` as a user meets it: what it writes. How it fails is in test_export_failures.py."""

import json
import shutil
from pathlib import Path

import numpy as np
import onnx.inliner
import onnxruntime
import pytest
import torch
from known_graphs import taking_known_graphs
from safetensors.torch import load_file, save_file
from testbed import listing, one_thread, run_cli

from adtp_export.artifacts.records import Manifest
from adtp_export.explain.records import BY_CHANCE, FLOWED, HELD, ORDER, POSSIBLE
from adtp_export.io import sha256


def test_output_directory(exported, demo):
    manifest = json.loads((exported / "manifest.json").read_text())
    assert manifest["schema"] == 3
    assert {"model.onnx", "config.json", "tokenizer.json", "manifest.json", "report.md"} <= set(listing(exported))
    assert set(manifest["files"]) == set(listing(exported)) - {"manifest.json"}
    for name, entry in manifest["files"].items():
        path = exported / name
        assert entry == {"sha256": sha256(path), "bytes": path.stat().st_size}
    target = manifest["targets"]["onnxruntime-cpu-fp32"]
    assert target["file"] == "model.onnx"
    assert target["status"] == "verified"
    assert target["attention"] == "decomposed"
    assert target["prediction_agreement"] == target["kept_token_agreement"] == 1
    assert 0 < target["max_abs_logit_diff"] < target["tolerance"] < 1e-3
    assert list(manifest["retention"]) == json.loads((demo / "config.json").read_text())["prune_sites"]
    for figures in manifest["retention"].values():
        assert 0 < figures["mean_ratio"] < 1 < figures["mean_kept_tokens"]
    assert json.loads(json.dumps(Manifest.read(exported).to_json())) == manifest


@pytest.mark.usefixtures("has_openvino")
def test_openvino_verifies_the_same_file(exported):
    target = Manifest.read(exported).targets["openvino-cpu-fp32"]
    assert (target.status, target.file) == ("verified", "model.onnx")


def test_companions_are_a_plain_bert(exported, demo):
    config = json.loads((exported / "config.json").read_text())
    own = json.loads((demo / "config.json").read_text())
    assert config["model_type"] == "bert"
    assert config["architectures"] == ["BertForSequenceClassification"]
    assert config["adtp"]["prune_sites"] == own["prune_sites"]
    assert "prune_sites" not in config
    assert config["id2label"] == own["id2label"]
    stored, written = (json.loads((folder / "tokenizer.json").read_text()) for folder in (demo, exported))
    assert {**stored, "truncation": written["truncation"]} == written


@pytest.mark.usefixtures("has_rtx")
def test_engine_covers_the_three_gpus(exported):
    manifest = json.loads((exported / "manifest.json").read_text())
    for attention, plugin_layers in (("decomposed", 0), ("plugin", 4)):
        name = f"rtx-sm_86+sm_89+sm_120-fp32-{attention}"
        target = manifest["targets"][name]
        assert target["file"] == f"engines/{name}.engine"
        assert target["attention"] == attention
        assert target["plugin_layers"] == plugin_layers
        assert manifest["files"][target["file"]]["bytes"] > 600_000
        assert target["gpus"] == ["sm_86", "sm_89", "sm_120"]
        assert target["profile"] == {"batch": "1:8:32", "seq": "1:128:128"}
        allowed = {
            "decomposed": "built-not-run",
            "plugin": "emulated" if target.get("kernels_emulated") else "built-not-run",
        }
        assert target["status"] in (allowed[attention], "verified")
    assert (exported / "plugins").exists() == any("plugins/" in name for name in manifest["files"])


@pytest.fixture(scope="module")
def unverified(small, tmp_path_factory):
    """The small student exported without verification, with a file for CUDA; and what the command said."""
    out = tmp_path_factory.mktemp("unverified") / "out"
    with taking_known_graphs():
        result = run_cli("adtp-export", small, "--out", out, "--json", "--skip-parity-check", "--ort-cuda")
    assert result.returncode == 0, result.stderr
    return out, result.stdout


def test_json_is_the_manifest(unverified):
    out, said = unverified
    manifest = json.loads(said)
    ort_cuda = manifest["targets"]["onnxruntime-cuda-fp32"]
    assert ort_cuda["attention"] == "ort-packed"
    assert (out / ort_cuda["file"]).name == "model.ort-cuda.fp32.onnx"
    assert manifest == json.loads((out / "manifest.json").read_text())
    assert manifest["targets"]["onnxruntime-cpu-fp32"]["status"] == "unverified"
    assert manifest["retention"] == {}


@pytest.mark.usefixtures("known_graphs")
def test_ort_cpu(tmp_path, small, unverified):
    """A file for ONNX Runtime on CPUs beside the portable one: verified, timed, and adtp-run takes the faster one."""
    out = shutil.copytree(unverified[0], tmp_path / "out")
    result = run_cli(
        "adtp-export",
        small,
        "--out",
        out,
        "--update",
        "--precompute-embedding-projections",
        "--attention",
        "decomposed",
        "--json",
    )
    assert result.returncode == 0, result.stderr
    manifest = json.loads(result.stdout)
    targets = [manifest["targets"][f"onnxruntime-cpu-{name}"] for name in ("fp32", "fp32-precomputed")]
    assert [target["file"] for target in targets] == ["model.onnx", "model.precomputed.fp32.onnx"]
    assert [target["status"] for target in targets] == ["verified", "verified"]
    assert all(target["p50_ms"] > 0 for target in targets)
    assert not any(name.startswith("openvino") and "precomputed" in name for name in manifest["targets"])
    sizes = [manifest["files"][target["file"]]["bytes"] for target in targets]
    assert targets[1]["tables_bytes"] == sizes[1] - sizes[0] > 0
    assert any("larger than model.onnx" in note["text"] for note in manifest["notes"])
    result = run_cli("adtp-run", out, "--text", "a fine film")
    fastest = min(targets, key=lambda target: target["p50_ms"])
    assert (
        f": fastest of 2 verified fp32 targets measured on this kind of machine: {fastest['p50_ms']:.1f} ms"
        in result.stderr
    )


@pytest.mark.slow
@pytest.mark.usefixtures("has_openvino", "has_rtx")
def test_precisions(tmp_path, small):
    """Variants beside the fp32 file, each verified; `--update` adds one to a directory that has others."""
    out = tmp_path / "out"
    result = run_cli("adtp-export", small, "--out", out, "--precision", "fp16", "--json")
    assert result.returncode == 0, result.stderr
    targets = json.loads(result.stdout)["targets"]
    assert targets["onnxruntime-cpu-fp16"]["status"] == "verified"
    times = {p: targets[f"onnxruntime-cpu-{p}"]["p50_ms"] for p in ("fp32", "fp16")}
    said = any("fp16 is not faster than fp32" in note["text"] for note in json.loads(result.stdout)["notes"])
    assert said == (times["fp16"] >= times["fp32"] > 0)
    engine = ("--trt", "--gpu", "sm_86")
    result = run_cli("adtp-export", small, "--out", out, "--precision", "bf16", "--update", "--json", *engine)
    assert result.returncode == 0, result.stderr
    manifest = json.loads(result.stdout)
    bf16 = manifest["targets"]["openvino-cpu-bf16"]
    assert bf16["status"] == "verified"
    assert {"model.onnx", "model.fp16.onnx", "model.bf16.onnx"} <= set(manifest["files"])
    assert manifest["files"]["model.fp16.onnx"]["bytes"] < 0.6 * manifest["files"]["model.onnx"]["bytes"]
    fp32, fp16 = (manifest["targets"][f"onnxruntime-cpu-{p}"] for p in ("fp32", "fp16"))
    assert fp32["tolerance"] < fp16["tolerance"] / 50
    assert manifest["targets"]["rtx-sm_86-bf16-plugin"]["plugin_layers"] == 2
    assert "rtx-sm_86-fp32-plugin" not in manifest["targets"]


def test_default_out_is_named_after_the_model(tmp_path, small):
    """Brackets in that name are no markup. Nothing is left in the temporary folder, where torch makes one for compiled code."""
    student = shutil.copytree(small, tmp_path / "x[" / "y]")
    (tmp_path / "scratch").mkdir()
    fresh = f"import os, tempfile; tempfile.tempdir = {str(tmp_path / 'scratch')!r}; os.environ.pop('TORCHINDUCTOR_CACHE_DIR', 0)"
    result = run_cli("adtp-export", student, "--skip-parity-check", cwd=tmp_path, prelude=fresh)
    assert result.returncode == 0, result.stderr
    assert list((tmp_path / "scratch").iterdir()) == []
    assert (tmp_path / "y]-export" / "model.onnx").exists()
    assert "y]-export" in result.stdout + result.stderr


@pytest.mark.usefixtures("known_graphs")
def test_verify_data_and_debug_outputs(tmp_path, small):
    data = tmp_path / "reviews.tsv"
    lines = [f"{i}\tthe film was {'very ' * (i % 7)}good\twhatever" for i in range(60)]
    data.write_text("\n".join(["id\treview\tother", *lines]))
    out = tmp_path / "out"
    arguments = ("--verify-data", data, "--text-column", "review", "--debug-outputs", "--json")
    result = run_cli("adtp-export", small, "--out", out, *arguments)
    assert result.returncode == 0, result.stderr
    manifest = json.loads(result.stdout)
    assert manifest["verification"].pop("explanation").keys() == {BY_CHANCE, HELD, POSSIBLE, ORDER, FLOWED}
    assert manifest["verification"] == {
        "text": "reviews.tsv",
        "sha256": manifest["verification"]["sha256"],
        "rows": 60,
        "batches": manifest["verification"]["batches"],
        "accuracy": None,
        "quality": {},
    }
    target = manifest["targets"]["onnxruntime-cpu-fp32"]
    assert target["rows"] == target["rows_compared"] == 60
    assert target["verification"] == {name: v for name, v in manifest["verification"].items() if name != "batches"}
    assert len(target["verification"]["sha256"]) == 64
    session = onnxruntime.InferenceSession(out / "model.onnx", one_thread(), providers=["CPUExecutionProvider"])
    assert [o.name for o in session.get_outputs()] == ["logits", "kept_site"]


@pytest.mark.usefixtures("has_rtx", "known_graphs")
def test_update_adds_an_engine_and_force_replaces(tmp_path, demo, small, exported):
    out = Path(shutil.copytree(exported, tmp_path / "out"))
    arguments = (
        "--update",
        "--trt",
        "--gpu",
        "sm_89,sm_86",
        "--per-gpu",
        "--batch",
        "1:1:4",
        "--skip-parity-check",
        "--json",
    )
    result = run_cli("adtp-export", demo, "--out", out, *arguments, "--attention", "decomposed")
    assert result.returncode == 0, result.stderr
    manifest = json.loads(result.stdout)
    for name in ("rtx-sm_86-fp32-decomposed", "rtx-sm_89-fp32-decomposed", "rtx-sm_86+sm_89+sm_120-fp32-decomposed"):
        assert (out / manifest["targets"][name]["file"]).exists()
    assert manifest["targets"]["rtx-sm_86-fp32-decomposed"]["profile"]["batch"] == "1:1:4"
    assert manifest["targets"]["onnxruntime-cpu-fp32"]["status"] == "verified"  # known from before, same file
    for name, entry in manifest["files"].items():
        assert entry == {"sha256": sha256(out / name), "bytes": (out / name).stat().st_size}
    assert manifest["profile"]["batch"] == "1:8:32"

    result = run_cli("adtp-export", small, "--out", out, "--force", "--skip-parity-check")
    assert result.returncode == 0, result.stderr
    assert not (out / "engines").exists()


@pytest.mark.usefixtures("has_openvino")
def test_openvino_takes_the_inlined_copy(tmp_path, exported):
    """What a user without this project does: inline the function, hand the file over."""
    import openvino as ov

    inlined = onnx.inliner.inline_local_functions(onnx.load(exported / "model.onnx"))
    onnx.save(inlined, tmp_path / "inlined.onnx")
    compiled = ov.compile_model(tmp_path / "inlined.onnx", "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    ids = np.array([[2, 9, 14, 3, 0], [2, 30, 31, 32, 3]])
    batch = {"input_ids": ids, "attention_mask": (ids > 0).astype(np.int64), "token_type_ids": ids * 0}
    session = onnxruntime.InferenceSession(exported / "model.onnx", one_thread(), providers=["CPUExecutionProvider"])
    assert np.allclose(compiled(batch)["logits"], session.run(None, batch)[0], atol=1e-5)


@pytest.mark.slow
def test_other_stored_dtypes(tmp_path, small):
    student = shutil.copytree(small, tmp_path / "student")
    path = student / "model.safetensors"
    weights = load_file(path)
    save_file({n: t.to(torch.bfloat16) for n, t in weights.items()}, path, metadata={"format": "pt"})
    result = run_cli("adtp-export", student, "--out", tmp_path / "out", "--json")
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["checkpoint"]["stored_dtype"] == "bfloat16"
