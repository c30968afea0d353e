"""`adtp-export --precision int8,fp8` as a user meets it."""

import hashlib
import json
import re

import pytest
from known_graphs import taking_known_graphs
from testbed import run_cli

from adtp_export.runtimes import tensorrt
from adtp_export.verify.samples import BUILT_IN


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "mine.tsv"
    rows = [f"{sentence}\t{'positive' if i % 2 else 'negative'}" for i, sentence in enumerate(BUILT_IN * 2)]
    path.write_text("sentence\tlabel\n" + "\n".join(rows) + "\n")
    return path


@pytest.fixture(scope="module")
def quantized(small, text, tmp_path_factory):
    out = tmp_path_factory.mktemp("quantized") / "out"
    engines = ["--trt", "--attention", "decomposed"] if tensorrt.RTX.installed() else []
    precisions = "int8,fp8" if engines else "int8"
    more = ("--precision", precisions, "--calibration-data", text, "--max-accuracy-drop", "20", *engines)
    with taking_known_graphs():
        result = run_cli("adtp-export", small, "--out", out, *more)
    assert result.returncode == 0, result.stderr
    return out, result.stderr


def test_manifest_names_recipe_sample_and_ranges(quantized, text):
    out, _ = quantized
    manifest = json.loads((out / "manifest.json").read_text())
    rows = text.read_text().splitlines()[1:]
    target = manifest["targets"]["onnxruntime-cpu-int8"]
    calibration = target["calibration"]
    assert "calibration" not in manifest["targets"]["onnxruntime-cpu-fp32"]
    assert (calibration["text"], calibration["rows"], calibration["of_rows"]) == ("mine.tsv", len(rows), len(rows))
    sentences = "\n".join(row.split("\t")[0] for row in rows)
    assert calibration["sha256"] == hashlib.sha256(sentences.encode()).hexdigest()
    assert target["status"] == "verified"
    assert target["file"] == "model.ort-cpu.int8.onnx"
    assert target["recipe"] == "ort-cpu.int8"
    assert target["left_in_base"] == []
    assert len(target["ranges"]) == len(target["sensitivity"]) == 8
    assert all(end > 0 for end in target["ranges"].values())
    assert target["p50_ms"] > 0
    costs = [cost["mean_abs_logit_diff"] for cost in target["sensitivity"]]
    assert costs == sorted(costs, reverse=True)
    assert "matrix products" in (out / "report.md").read_text()


@pytest.mark.usefixtures("has_rtx")
def test_engines_of_quantized_files(quantized):
    out, said = quantized
    targets = json.loads((out / "manifest.json").read_text())["targets"]
    int8, fp8 = targets["rtx-sm_86+sm_89+sm_120-int8-decomposed"], targets["rtx-sm_89+sm_120-fp8-decomposed"]
    assert (int8["model"], fp8["model"]) == ("model.rtx.int8.onnx", "model.rtx.fp8.onnx")
    assert "no fp8 engine for sm_86" in said
    for name in ("trt.int8", "rtx.int8", "trt.fp8", "rtx.fp8"):
        assert targets[f"onnxruntime-cpu-{name}"]["status"] == "verified"


def test_a_quantized_target_answers(quantized):
    out, _ = quantized
    result = run_cli("adtp-run", out, "--target", "onnxruntime-cpu-int8", "--text", "a waste of an evening")
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["label"]


@pytest.mark.usefixtures("known_graphs")
def test_products_stay_behind_until_accuracy_holds(small, text, tmp_path):
    """A recipe that clips four fifths of all activations loses far more than a point."""
    recipe = tmp_path / "rough.toml"
    recipe.write_text(
        'target = "ort-cpu"\nformat = "int8"\nbase = "fp32"\nobserver = "percentile:20"\nbias = "int32"\n'
    )
    options = ("--precision", "int8", "--calibration-data", text, "--recipe", recipe, "--json")
    result = run_cli("adtp-export", small, "--out", tmp_path / "out", *options)
    assert result.returncode == 0, result.stderr
    manifest = json.loads(result.stdout)
    target = manifest["targets"]["onnxruntime-cpu-int8"]
    assert target["recipe"] == "rough"
    assert 0 < len(target["left_in_base"]) <= 8
    assert target["left_in_base"] == [c["product"] for c in target["sensitivity"][: len(target["left_in_base"])]]
    assert target["points_lost"]["points"] - target["points_lost"]["margin"] <= 1
    assert target["points_lost"]["texts"] == target["verification"]["rows"] == 34  # those of the calibration
    assert any("matrix products stay in fp32, to lose at most 1 points" in note["text"] for note in manifest["notes"])


INT8 = ("--precision", "int8")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((*INT8, "--trt"), r"--precision int8 takes its ranges from text like yours; type: --calibration-data FILE"),
        (("--calibration-data", "TEXT"), "--calibration-data is about quantized models; add --precision int8"),
        (("--max-accuracy-drop", "1"), "--max-accuracy-drop is about quantized models"),
        (("--precision", "fp8", "--calibration-data", "TEXT"), "--precision fp8 is for TensorRT engines; add --trt"),
        (
            (*INT8, "--calibration-data", "TEXT", "--max-accuracy-drop", "101"),
            "--max-accuracy-drop: got 101.0; accepted",
        ),
        ((*INT8, "--calibration-data", "nowhere.txt"), "nowhere.txt: there is no such file"),
        ((*INT8, "--calibration-data", "EMPTY"), "empty.txt"),
        ((*INT8, "--calibration-data", "TEXT", "--text-column", "sentense"), "sentense.*did you mean 'sentence'"),
        (
            (*INT8, "--calibration-data", "TEXT", "--recipe", "FP8"),
            "it is fp8 for trt, and this run makes int8 for ort-cpu",
        ),
        (
            (*INT8, "--calibration-data", "TEXT", "--max-accuracy-drop", "1"),
            "--max-accuracy-drop is held by verification, and --skip-parity-check",
        ),
        (("--verify-rows", "5"), "--verify-rows counts rows of --verify-data FILE, which is missing"),
    ],
)
def test_wrong_options(small, text, tmp_path, options, message):
    (tmp_path / "empty.txt").write_text("\n")
    (tmp_path / "mine.toml").write_text('target = "trt"\nformat = "fp8"\nbase = "fp16"\n')
    places = {"TEXT": text, "EMPTY": tmp_path / "empty.txt", "FP8": tmp_path / "mine.toml"}
    given = [places.get(option, option) for option in options]
    result = run_cli("adtp-export", small, "--out", tmp_path / "out", "--skip-parity-check", *given, cwd=tmp_path)
    assert result.returncode == 2
    assert not (tmp_path / "out").exists()
    assert re.search(message, result.stderr), result.stderr


@pytest.mark.usefixtures("has_rtx")
def test_fp8_for_a_gpu_that_has_none(small, text, tmp_path):
    options = ("--precision", "fp8", "--calibration-data", text, "--trt", "--gpu", "sm_86,sm_89")
    result = run_cli("adtp-export", small, "--out", tmp_path / "out", *options)
    assert result.returncode == 2
    assert (
        "--precision fp8: sm_86 has no e4m3 products; they come with sm_89. Type: --gpu sm_89,sm_120,sm_121"
        in result.stderr
    )
