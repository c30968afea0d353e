"""`adtp-export` as a user meets it: what it writes, how it fails, and what it leaves behind."""

import json
import os
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from conftest import Command, run_cli
from safetensors.torch import load_file, save_file

from adtp_export.engines import openvino, tensorrt
from adtp_export.records import Manifest, sha256


def listing(directory: Path):
    return {p.relative_to(directory).as_posix(): p.read_bytes() for p in directory.rglob("*") if p.is_file()}


def test_output_directory(exported, demo):
    manifest = json.loads((exported / "manifest.json").read_text())
    assert manifest["schema"] == 1
    assert {"model.onnx", "config.json", "tokenizer.json", "manifest.json", "report.md"} <= set(listing(exported))
    assert set(manifest["files"]) == set(listing(exported)) - {"manifest.json"}
    for name, entry in manifest["files"].items():
        path = exported / name
        assert entry == {"sha256": sha256(path), "bytes": path.stat().st_size}
    target = manifest["targets"]["onnxruntime-cpu-fp32"]
    assert target["file"] == "model.onnx"
    assert target["status"] == "verified"
    assert target["attention"] == "portable"
    assert target["prediction_agreement"] == target["kept_token_agreement"] == 1
    assert 0 < target["max_abs_logit_diff"] < target["tolerance"] < 1e-3
    assert list(manifest["retention"]) == json.loads((demo / "config.json").read_text())["prune_sites"]
    for figures in manifest["retention"].values():
        assert 0 < figures["mean_ratio"] < 1 < figures["mean_kept_tokens"]
    if openvino.installed():
        assert manifest["targets"]["openvino-cpu-fp32"]["status"] == "verified"
    assert json.loads(json.dumps(Manifest.read(exported).to_json())) == manifest


def test_companions_are_a_plain_bert(exported, demo):
    config = json.loads((exported / "config.json").read_text())
    own = json.loads((demo / "config.json").read_text())
    assert config["model_type"] == "bert"
    assert config["architectures"] == ["BertForSequenceClassification"]
    assert config["adtp"]["prune_sites"] == own["prune_sites"]
    assert "prune_sites" not in config
    assert config["id2label"] == own["id2label"]
    assert (exported / "tokenizer.json").read_bytes() == (demo / "tokenizer.json").read_bytes()


def test_engine_covers_the_three_gpus(exported):
    if not tensorrt.RTX.installed():
        pytest.skip("TensorRT-RTX is not installed")
    manifest = json.loads((exported / "manifest.json").read_text())
    for attention, plugin_layers in (("portable", 0), ("plugin", 4)):
        name = f"rtx-sm_86+sm_89+sm_120-fp32-{attention}"
        target = manifest["targets"][name]
        assert target["file"] == f"engines/{name}.engine"
        assert target["attention"] == attention
        assert target["plugin_layers"] == plugin_layers
        assert manifest["files"][target["file"]]["bytes"] > 600_000
        assert target["gpus"] == ["sm_86", "sm_89", "sm_120"]
        assert target["profile"] == {"batch": "1:8:32", "seq": "1:128:128"}
        assert target["status"] in ("built-not-run", "verified")
    assert (exported / "plugins").exists() == any("plugins/" in name for name in manifest["files"])


def test_json_is_the_manifest(tmp_path, small):
    result = run_cli("adtp-export", small, "--out", tmp_path / "out", "--json", "--no-verify", "--ort-cuda")
    assert result.returncode == 0, result.stderr
    manifest = json.loads(result.stdout)
    ort_cuda = manifest["targets"]["onnxruntime-cuda-fp32"]
    assert ort_cuda["attention"] == "ort-packed"
    assert (tmp_path / "out" / ort_cuda["file"]).name == "model.ort-cuda.fp32.onnx"
    assert manifest == json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["targets"]["onnxruntime-cpu-fp32"]["status"] == "unverified"
    assert manifest["retention"] == {}


def test_ort_cpu(tmp_path, small):
    """A file for ONNX Runtime on CPUs beside the portable one: verified, timed, and adtp-run takes the faster one."""
    out = tmp_path / "out"
    assert run_cli("adtp-export", small, "--out", out, "--no-verify").returncode == 0
    result = run_cli("adtp-export", small, "--out", out, "--update", "--ort-cpu", "--json")
    assert result.returncode == 0, result.stderr
    manifest = json.loads(result.stdout)
    targets = [manifest["targets"][f"onnxruntime-cpu-{name}"] for name in ("fp32", "fp32-lookup")]
    assert [target["file"] for target in targets] == ["model.onnx", "model.ort-cpu.fp32.onnx"]
    assert [target["status"] for target in targets] == ["verified", "verified"]
    assert all(target["p50_ms"] > 0 for target in targets)
    assert not any(name.startswith("openvino") and "lookup" in name for name in manifest["targets"])
    sizes = [manifest["files"][target["file"]]["bytes"] for target in targets]
    assert targets[1]["tables_bytes"] == sizes[1] - sizes[0] > 0
    assert any("larger than model.onnx" in note for note in manifest["notes"])
    result = run_cli("adtp-run", out, "--text", "a fine film")
    fastest = min(targets, key=lambda target: target["p50_ms"])
    assert (
        f": fastest of 2 verified fp32 targets measured on this kind of machine: {fastest['p50_ms']:.1f} ms"
        in result.stderr
    )


def test_precisions(tmp_path, small):
    """Variants beside the fp32 file, each verified; `--update` adds one to a directory that has others."""
    out = tmp_path / "out"
    result = run_cli("adtp-export", small, "--out", out, "--precision", "fp16", "--json")
    assert result.returncode == 0, result.stderr
    targets = json.loads(result.stdout)["targets"]
    assert targets["onnxruntime-cpu-fp16"]["status"] == "verified"
    times = {p: targets[f"onnxruntime-cpu-{p}"]["p50_ms"] for p in ("fp32", "fp16")}
    said = any("fp16 is not faster than fp32" in note for note in json.loads(result.stdout)["notes"])
    assert said == (times["fp16"] >= times["fp32"] > 0)
    extra = ["--trt", "--gpu", "sm_86"] if tensorrt.RTX.installed() else []
    result = run_cli("adtp-export", small, "--out", out, "--precision", "bf16", "--update", "--json", *extra)
    assert result.returncode == 0, result.stderr
    manifest = json.loads(result.stdout)
    bf16 = manifest["targets"]["openvino-cpu-bf16"]
    assert bf16["status"] == ("verified" if openvino.installed() else "unverified")
    assert {"model.onnx", "model.fp16.onnx", "model.bf16.onnx"} <= set(manifest["files"])
    assert manifest["files"]["model.fp16.onnx"]["bytes"] < 0.6 * manifest["files"]["model.onnx"]["bytes"]
    fp32, fp16 = (manifest["targets"][f"onnxruntime-cpu-{p}"] for p in ("fp32", "fp16"))
    assert fp32["tolerance"] < fp16["tolerance"] / 50
    if extra:
        assert manifest["targets"]["rtx-sm_86-bf16-plugin"]["plugin_layers"] == 2
        assert "rtx-sm_86-fp32-plugin" not in manifest["targets"]


def test_default_out_is_named_after_the_model(tmp_path, small):
    result = run_cli("adtp-export", small, "--no-verify", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "student-export" / "model.onnx").exists()


def test_verify_data_and_debug_outputs(tmp_path, small):
    data = tmp_path / "reviews.tsv"
    lines = [f"{i}\tthe film was {'very ' * (i % 7)}good\twhatever" for i in range(60)]
    data.write_text("\n".join(["id\treview\tother", *lines]))
    out = tmp_path / "out"
    arguments = ("--verify-data", data, "--text-column", "review", "--debug-outputs", "--json")
    result = run_cli("adtp-export", small, "--out", out, *arguments)
    assert result.returncode == 0, result.stderr
    manifest = json.loads(result.stdout)
    assert manifest["verification"] == {
        "text": "reviews.tsv",
        "rows": 60,
        "batches": manifest["verification"]["batches"],
        "accuracy": None,
    }
    assert manifest["targets"]["onnxruntime-cpu-fp32"]["rows"] == 60
    session = onnxruntime.InferenceSession(out / "model.onnx", providers=["CPUExecutionProvider"])
    assert [o.name for o in session.get_outputs()] == ["logits", "kept_site"]


def test_update_adds_an_engine_and_force_replaces(tmp_path, demo, exported):
    if not tensorrt.RTX.installed():
        pytest.skip("TensorRT-RTX is not installed")
    out = Path(shutil.copytree(exported, tmp_path / "out"))
    arguments = ("--update", "--trt", "--gpu", "sm_89,sm_86", "--per-gpu", "--batch", "1:1:4", "--no-verify", "--json")
    result = run_cli("adtp-export", demo, "--out", out, *arguments)
    assert result.returncode == 0, result.stderr
    manifest = json.loads(result.stdout)
    for name in ("rtx-sm_86-fp32-portable", "rtx-sm_89-fp32-portable", "rtx-sm_86+sm_89+sm_120-fp32-portable"):
        assert (out / manifest["targets"][name]["file"]).exists()
    assert manifest["targets"]["rtx-sm_86-fp32-portable"]["profile"]["batch"] == "1:1:4"
    assert manifest["targets"]["onnxruntime-cpu-fp32"]["status"] == "verified"  # known from before, same file
    for name, entry in manifest["files"].items():
        assert entry == {"sha256": sha256(out / name), "bytes": (out / name).stat().st_size}
    assert manifest["profile"]["batch"] == "1:8:32"

    result = run_cli("adtp-export", demo, "--out", out, "--force", "--no-verify")
    assert result.returncode == 0, result.stderr
    assert not (out / "engines").exists()


def bad(*arguments):
    return pytest.param(arguments, id=" ".join(arguments))


@pytest.mark.parametrize(
    "arguments",
    [
        bad("--seq", "1:64:129"),
        bad("--seq", "64:32:128"),
        bad("--seq", "128"),
        bad("--batch", "8:4:2"),
        bad("--batch", "0:1:2"),
        bad("--batch", "a:b:c"),
        bad("--trt", "--gpu", "sm_86,sm_999"),
        bad("--gpu", "sm_86"),
        bad("--per-gpu"),
        bad("--verify-data", "missing.txt"),
        bad("--update", "--force"),
        bad("--precision", "int3"),
        bad("--precision", "fp32,,fp16"),
        bad("--seq", "1:1:1"),
        bad("--trt", "--batch", "1:8:2147483648"),
        bad("--text-column", "x"),
        bad("--no-verify", "--verify-data", "x.txt"),
        bad("--trt", "--attention", "flash"),
        bad("--trt", "--attention", "plugin", "--gpu", "sm_75,sm_86"),
        bad("--attention", "plugin"),
        bad("--nonsense"),
    ],
)
def test_bad_options_leave_out_untouched(tmp_path, demo, exported, arguments):
    out = Path(shutil.copytree(exported, tmp_path / "out"))
    before = listing(out)
    result = run_cli("adtp-export", demo, "--out", out, *(() if "--update" in arguments else ("--force",)), *arguments)
    assert result.returncode == 2, result.stderr
    assert "Traceback" not in result.stderr
    assert "error: " in result.stderr.splitlines()[-1]
    assert listing(out) == before
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_out_exists(tmp_path, demo, exported):
    out = Path(shutil.copytree(exported, tmp_path / "out"))
    before = listing(out)
    result = run_cli("adtp-export", demo, "--out", out)
    assert (result.returncode, listing(out)) == (2, before)
    assert "--force" in result.stderr


def test_force_never_deletes_what_is_not_ours(tmp_path, checkpoint_dir):
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.txt").write_text("years of work")
    (precious / "manifest.json").write_text('{"name": "a browser extension", "manifest_version": 3}')
    for out, message in (
        (precious, "not made by adtp-export"),
        (checkpoint_dir, "model directory"),
        (tmp_path, "model directory"),
    ):
        result = run_cli("adtp-export", checkpoint_dir, "--out", out, "--force")
        assert result.returncode == 2
        assert message in result.stderr
    assert (precious / "thesis.txt").exists()
    assert (checkpoint_dir / "model.safetensors").exists()


@pytest.mark.parametrize("kind", ["file", "read-only"])
def test_out_that_cannot_be_written(tmp_path, small, kind):
    if kind == "file":
        out = tmp_path / "file"
        out.write_text("x")
    elif os.geteuid() == 0:
        out = Path("/proc/adtp-export-test")  # root may write anywhere else
    else:
        (tmp_path / "locked").mkdir(mode=0o500)
        out = tmp_path / "locked" / "out"
    result = run_cli("adtp-export", small, "--out", out)
    assert result.returncode == 2, result.stderr
    assert "Traceback" not in result.stderr


def test_full_disk(tmp_path, small):
    """A limit on file size stands in for a full disk: the write fails half-way in the same place."""
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))"
    result = run_cli("adtp-export", small, "--out", tmp_path / "out", "--no-verify", prelude=limit)
    assert result.returncode == 2, result.stderr
    assert "disk is full" in result.stderr
    assert "Traceback" not in result.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_killed_at_any_moment(tmp_path, small, exported, how):
    """Half-way through the export: the previous result stays whole, and the next run clears what a SIGKILL left."""
    out = Path(shutil.copytree(exported, tmp_path / "out"))
    before = listing(out)
    command = Command("adtp-export", small, "--out", out, "--force")
    command.wait_for(lambda: list(tmp_path.glob(".out.adtp-work-*")))
    time.sleep(0.5)
    assert command.finish(how).returncode != 0
    assert listing(out) == before
    left = [p.name for p in tmp_path.iterdir() if p.name != "out"]
    assert bool(left) == (how == signal.SIGKILL)
    if left:
        assert run_cli("adtp-export", small, "--out", out, "--force", "--no-verify").returncode == 0
        assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_a_signal_during_the_engine_build_counts(tmp_path, small):
    """The build calls back into Python; what is raised there would be lost inside the library."""
    if not tensorrt.RTX.installed():
        pytest.skip("TensorRT-RTX is not installed")
    kill_inside = """
import contextlib, os, signal
from adtp_export.engines import tensorrt
held = tensorrt._signals_held
@contextlib.contextmanager
def kill_inside():
    with held() as numbers:
        os.kill(os.getpid(), signal.SIGTERM)
        yield numbers
tensorrt._signals_held = kill_inside
"""
    result = run_cli("adtp-export", small, "--out", tmp_path / "out", "--trt", "--no-verify", prelude=kill_inside)
    assert result.returncode == 128 + signal.SIGTERM, result.stderr
    assert list(tmp_path.iterdir()) == []


def test_what_appears_meanwhile_is_not_replaced(tmp_path, small):
    command = Command("adtp-export", small, "--out", tmp_path / "out", "--no-verify")
    command.wait_for(lambda: list(tmp_path.glob(".out.adtp-work-*")))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    result = command.finish()
    assert result.returncode == 2, result.stderr
    assert (tmp_path / "out" / "notes.txt").read_text() == "mine"
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_out_behind_a_symlink(tmp_path, small):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    result = run_cli("adtp-export", small, "--out", tmp_path / "link", "--no-verify")
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real" / "model.onnx").exists()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["link", "real"]


def test_brackets_in_names_are_no_markup(tmp_path, small):
    result = run_cli("adtp-export", small, "--out", tmp_path / "x[" / "y]", "--no-verify")
    assert result.returncode == 0, result.stderr


def test_a_result_moved_aside_comes_back(tmp_path, small, exported):
    """Killed between the two renames of a replacement: the next run restores the old result, and does not replace it unasked."""
    shutil.copytree(exported, tmp_path / ".out.adtp-old-x")
    result = run_cli("adtp-export", small, "--out", tmp_path / "out", "--no-verify")
    assert (result.returncode, "add --force" in result.stderr) == (2, True)
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    assert listing(tmp_path / "out") == listing(exported)


def test_bad_checkpoint_is_one_message(tmp_path, edit_config):
    result = run_cli("adtp-export", edit_config(prune_sites=["0.attention"]), "--out", tmp_path / "out")
    assert result.returncode == 2
    assert "same for every input" in result.stderr
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "out").exists()


def test_failed_verification_is_exit_code_1(tmp_path, demo):
    """An exporter that drops the wrong token is caught, and the site is named."""
    wrong = (
        "from adtp_export.model.selection import KeepBest; right = KeepBest.packed\n"
        "KeepBest.packed = lambda rule, *rest: right(KeepBest(-rule.order, rule.count), *rest)"
    )
    result = run_cli("adtp-export", demo, "--out", tmp_path / "out", prelude=wrong)
    assert result.returncode == 1, result.stderr
    site = json.loads((demo / "config.json").read_text())["prune_sites"][0]
    assert f"first at site {site}" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_missing_dependency_is_exit_code_3(tmp_path, small):
    hidden = (
        "import importlib.util as u; find = u.find_spec\n"
        "u.find_spec = lambda name, *a: None if name == 'tensorrt_rtx' else find(name, *a)"
    )
    arguments = ("--out", tmp_path / "out", "--trt", "--trt-flavor", "rtx")
    result = run_cli("adtp-export", small, *arguments, prelude=hidden)
    assert result.returncode == 3, result.stderr
    assert "pip install 'adtp-export[rtx]'" in result.stderr


def test_refused_by_the_builder_is_exit_code_4(tmp_path, small):
    """TensorRT-RTX 1.7 has no fp32 matrix products for Turing, and says so itself."""
    if not tensorrt.RTX.installed():
        pytest.skip("TensorRT-RTX is not installed")
    result = run_cli("adtp-export", small, "--out", tmp_path / "out", "--trt", "--gpu", "sm_75", "--no-verify")
    assert result.returncode == 4, result.stderr
    assert "cannot build model.onnx for sm_75" in result.stderr
    assert "leave it out of --gpu" in result.stderr
    assert "Traceback" not in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_classic_tensorrt_without_a_gpu(tmp_path, small):
    from adtp_export.engines.cuda import local_gpu

    if local_gpu():
        pytest.skip("this machine has a GPU")
    result = run_cli("adtp-export", small, "--out", tmp_path / "out", "--trt", "--trt-flavor", "tensorrt")
    assert result.returncode == (2 if tensorrt.TENSORRT.installed() else 3)
    assert "tensorrt" in result.stderr.lower()


def test_a_bug_keeps_its_traceback(tmp_path, small):
    bug = "import adtp_export.model.checkpoint as c; c.load_checkpoint = None"
    result = run_cli("adtp-export", small, "--out", tmp_path / "out", prelude=bug)
    assert result.returncode == 70
    assert "Traceback" in result.stderr


def test_openvino_takes_the_inlined_copy(tmp_path, exported, demo):
    """What a user without this project does: inline the function, hand the file over."""
    ov = pytest.importorskip("openvino")
    import onnx.inliner

    inlined = onnx.inliner.inline_local_functions(onnx.load(exported / "model.onnx"))
    onnx.save(inlined, tmp_path / "inlined.onnx")
    compiled = ov.compile_model(tmp_path / "inlined.onnx", "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    ids = np.array([[2, 9, 14, 3, 0], [2, 30, 31, 32, 3]])
    batch = {"input_ids": ids, "attention_mask": (ids > 0).astype(np.int64), "token_type_ids": ids * 0}
    session = onnxruntime.InferenceSession(exported / "model.onnx", providers=["CPUExecutionProvider"])
    assert np.allclose(compiled(batch)["logits"], session.run(None, batch)[0], atol=1e-5)


def test_other_stored_dtypes(tmp_path, checkpoint_dir):
    path = checkpoint_dir / "model.safetensors"
    weights = load_file(path)
    save_file({n: t.to(torch.bfloat16) for n, t in weights.items()}, path, metadata={"format": "pt"})
    result = run_cli("adtp-export", checkpoint_dir, "--out", tmp_path / "out", "--json")
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["checkpoint"]["stored_dtype"] == "bfloat16"
