"""`adtp-run` and `adtp-bench` as a user meets them; help is quick in every command."""

import json
import subprocess
import sys

import pytest
from conftest import run_cli

from adtp_export.cli import bench
from adtp_export.latency import contenders
from adtp_export.records import Manifest, file_entry


@pytest.mark.parametrize("command", ["export", "run", "bench", "plugin"])
def test_help_does_not_load_frameworks(command):
    """It takes 0.1 s; torch alone would take seconds."""
    code = f"""
import atexit, sys
sys.argv = ["adtp-{command}", "--help"]
atexit.register(lambda: print(sorted({{"torch", "transformers", "onnx", "numpy"}} & set(sys.modules))))
from adtp_export.cli.{command} import main
main()"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "usage: adtp-" in result.stdout
    assert result.stdout.splitlines()[-1] == "[]"


def test_run_texts(exported):
    result = run_cli("adtp-run", exported, "--text", "a wonderful film", "--text", "terrible food", "--kept")
    assert result.returncode == 0, result.stderr
    first, second = map(json.loads, result.stdout.splitlines())
    assert (first["text"], first["label"], second["label"]) == ("a wonderful film", "positive", "negative")
    assert len(first["tokens"]) == len(first["kept"]) == len(first["dropped_at"])
    assert sum(first["scores"].values()) == pytest.approx(1)


def test_run_pairs_and_files(tmp_path, exported):
    result = run_cli("adtp-run", exported, "--text", "a", "--text-pair", "b")
    assert json.loads(result.stdout)["text"] == ["a", "b"]
    path = tmp_path / "many.jsonl"
    path.write_text("".join(json.dumps({"n": i, "text": f"number {i} is good"}) + "\n" for i in range(1500)))
    result = run_cli("adtp-run", exported, "--file", path)
    texts = [json.loads(line)["text"] for line in result.stdout.splitlines()]
    assert texts == [f"number {i} is good" for i in range(1500)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--text", "a", "--text-pair", "b", "--text-pair", "c"], "one for each"),
        (["--file", "x.txt", "--text-pair", "b"], "--text-column FIRST,SECOND"),
        (["--file", "missing.txt"], "there is no such file"),
        (["--text", "a", "--target", "gpu"], "'gpu'"),
        (["--text", "a", "--batch-size", "0"], "at least 1"),
        ([], "required"),
    ],
)
def test_run_bad_input(exported, arguments, message):
    result = run_cli("adtp-run", exported, *arguments)
    assert result.returncode == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_bench_of_an_exported_student(tmp_path, exported):
    data = tmp_path / "texts.txt"
    data.write_text("\n".join(f"the film was {'so ' * (i % 9)}good" for i in range(64)))
    arguments = (
        "--data",
        data,
        "--workload",
        "1x32,8x128,1x384",
        "--seconds",
        "0.2",
        "--json",
        "--sweep-retention",
        "--ort-cpu",
    )
    result = run_cli("adtp-bench", exported, *arguments)
    assert result.returncode == 0, result.stderr
    assert "left out 1x384" in result.stderr
    document = json.loads(result.stdout)
    assert set(document) >= {"device", "versions", "results"}
    rows = {(row["workload"], row["contender"]): row for row in document["results"]}
    contenders = {"student", "student-lookup", "packed-dense-4", "padded-dense-4", "packed-dense-12", "padded-dense-12"}
    assert set(rows) == {(w, c) for w in ("1x32", "8x128", "data-1", "data-32") for c in contenders}
    for row in rows.values():
        assert 0 < row["p50_ms"] <= row["p90_ms"] <= row["p99_ms"]
        assert row["flops"] > 0
    student = rows["8x128", "student"]
    assert set(student["vs"]) == {"padded-dense-12", "padded-dense-4", "packed-dense-4"}
    assert rows["8x128", "student-lookup"]["flops"] < student["flops"]
    versus = student["vs"]["packed-dense-4"]
    assert versus["flops_ratio"] > 1
    assert versus["realized_fraction"] == pytest.approx(versus["speedup"] / versus["flops_ratio"], abs=0.01)
    assert rows["1x32", "padded-dense-4"]["flops"] > rows["1x32", "packed-dense-4"]["flops"]  # its last layer is whole
    assert rows["8x128", "padded-dense-4"]["flops"] > rows["8x128", "packed-dense-4"]["flops"]
    assert [profile["workload"] for profile in document["profiles"]] == ["1x32", "8x128", "data-1", "data-32"]
    (_, swept) = document["sweeps"]
    ratios = json.loads((exported / "config.json").read_text())["adtp"]["retention_ratios"]
    assert (swept["workload"], swept["retention"]) == ("8x128", ratios)
    flops = [point["flops"] for point in swept["points"]]
    assert flops == sorted(flops)
    assert flops[-1] == rows["8x128", "packed-dense-4"]["flops"]
    report = (exported / "report.html").read_text()
    assert report.count("<h3>8x128</h3>") == 1
    assert f"{student['p50_ms']:.1f} ms" in report
    assert file_entry(exported / "report.html") == Manifest.read(exported).files["report.html"]


@pytest.mark.slow
def test_bench_of_a_shape(monkeypatch, capsys):
    """In this process, with two layers for twelve: their exports are most of the time."""
    monkeypatch.setattr(contenders, "FULL_DEPTH", 2)
    arguments = (
        "--shape bert-mini --layers 1 --retention 0.29 --workload 1x32 --seconds 0.1 --peers all --sweep-retention"
    )
    assert bench.command(bench.make_parser().parse_args(arguments.split())) == 0
    said = capsys.readouterr().out
    assert "forced to 0.29, random weights" in said
    assert "packed-dense-1" in said
    assert "padded-dense-2" in said
    for peer in ("optimum-fused-dense-2", "sorted-dense-2", "torch-compile-dense-2", "ltp-1"):
        assert peer in said
    assert "1x32, speedup over packed-dense-1 by retention: 0.1: " in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "either OUT or --shape"),
        (["--shape", "bert-bas"], "did you mean 'bert-base'"),
        (["--shape", "bert-mini", "--retention", "1.5"], "retention_ratios"),
        (["--shape", "bert-mini", "--prune-sites", "0.attention"], "same for every input"),
        (["--shape", "bert-mini", "--workload", "2x2"], "accepted are 1x32"),
        (["--shape", "bert-mini", "--data", "x.txt"], "--data goes with OUT"),
        (["--shape", "bert-mini", "--seconds", "nan"], "accepted is 0 or more"),
        (["nowhere"], "not an exported directory"),
        (["--shape", "bert-mini", "--peers", "openvin"], "did you mean 'openvino'"),
        (["nowhere", "--layers", "3"], "go with --shape"),
    ],
)
def test_bench_bad_input(arguments, message):
    result = run_cli("adtp-bench", *arguments)
    assert result.returncode == 2, result.stderr
    assert message in result.stderr
    assert "Traceback" not in result.stderr
