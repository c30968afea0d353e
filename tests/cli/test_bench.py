"""`adtp-bench` as a user meets it, and `adtp_export.bench`, which it calls."""

import dataclasses
import inspect
import json
import shlex
import shutil

import pytest
from testbed import run_cli

import adtp_export
from adtp_export.artifacts.records import Manifest, file_entry
from adtp_export.benchmarking import contenders
from adtp_export.cli import bench as command
from adtp_export.cli.console import Console
from adtp_export.errors import InputError
from adtp_export.pipeline.bench.options import BenchOptions


def test_an_exported_student(tmp_path, packed_export):
    """Of two layers, beside dense networks of 3 for 12: their exports would be most of the time."""
    exported = shutil.copytree(packed_export / "out", tmp_path / "exported")
    data = tmp_path / "texts.txt"
    data.write_text("\n".join(f"the film was {'so ' * (i % 9)}good" for i in range(64)))
    asked = f"--data {data} --workload 1x32,8x128,1x384 --seconds 0.01 --json --peers sorted"
    asked += " --precompute-embedding-projections"
    shallow = "from adtp_export.benchmarking import contenders; contenders.FULL_DEPTH = 3"
    result = run_cli("adtp-bench", exported, *asked.split(), prelude=shallow)
    assert result.returncode == 0, result.stderr
    assert "left out 1x384" in result.stderr
    document = json.loads(result.stdout)
    assert set(document) >= {"device", "versions", "results"}
    rows = {(row["workload"], row["contender"]): row for row in document["results"]}
    names = {"student", "student-packed", "student-precomputed", "packed-dense-2", "padded-dense-2"}
    names |= {"packed-dense-3", "padded-dense-3"}
    split = {"student-sorted", "student-one-by-one", "sorted-packed-dense-2", "one-by-one-packed-dense-2"}
    split |= {"sorted-dense-2"}
    names.add("sorted-dense-3")
    assert set(rows) == {(w, c) for w in ("1x32", "8x128", "data-1", "data-32") for c in names} | {
        ("data-32", c) for c in split
    }
    assert rows["data-32", "student-sorted"]["flops"] == rows["data-32", "student"]["flops"]
    assert rows["data-32", "sorted-dense-2"]["flops"] < rows["data-32", "padded-dense-2"]["flops"]
    for row in rows.values():
        assert 0 < row["p50_ms"] <= row["p90_ms"] <= row["p99_ms"]
        assert row["flops"] > 0
        assert len(row["rounds_ms"]) == row["rounds"]
    student = rows["8x128", "student"]
    assert set(student["vs"]) == {"padded-dense-3", "padded-dense-2", "packed-dense-2", "sorted-dense-3"}
    assert rows["8x128", "student-precomputed"]["flops"] < student["flops"]
    versus = student["vs"]["packed-dense-2"]
    assert versus["flops_ratio"] > 1
    assert versus["realized_fraction"] == pytest.approx(versus["speedup"] / versus["flops_ratio"], abs=0.01)
    assert rows["1x32", "padded-dense-2"]["flops"] > rows["1x32", "packed-dense-2"]["flops"]  # its last layer is whole
    assert rows["8x128", "padded-dense-2"]["flops"] > rows["8x128", "packed-dense-2"]["flops"]
    assert [profile["workload"] for profile in document["profiles"]] == ["1x32", "8x128", "data-1", "data-32"]
    report = (exported / "report.html").read_text()
    assert report.count("<h3>8x128</h3>") == 1
    assert f"{student['p50_ms']:.1f} ms" in report
    assert file_entry(exported / "report.html") == Manifest.read(exported).files["report.html"]


def test_a_table_without_a_baseline_that_there_was_time_for(capsys):
    row = {
        "workload": "8x128",
        "contender": "student",
        "vs": {},
        "flops": 1e9,
        "p50_ms": 2.0,
        "p90_ms": 2.5,
        "p99_ms": 3.0,
    }
    left_out = [{"workload": "8x128", "contender": "packed-dense-2", "seconds": 90.0}]
    document = {
        "subject": "student", "retention": "0.5", "results": [row], "left_out": left_out, "profiles": [], "sweeps": [],
        "versions": {"onnxruntime": "1.0"}, "device": {"model": "a CPU", "cores": 2, "threads": 2},
        "peaks": {"gflops": 100.0, "gigabytes_per_s": 10.0, "runtime": "onnxruntime"},
    }  # fmt: skip
    command.show(document)
    said = " ".join(capsys.readouterr().out.split())
    assert "no time for packed-dense-2 (takes 90.0 s)" in said
    assert "2.50" in said
    assert "are against" not in said


@pytest.mark.slow
def test_a_plain_encoder_is_compared_with_padded_forms(tmp_path, plain_bert, monkeypatch, capsys):
    """It is the packed form of its depth itself, and has no retention to vary."""
    monkeypatch.setattr(contenders, "FULL_DEPTH", 4)
    out = tmp_path / "out"
    adtp_export.export(plain_bert, out, skip_parity_check=True, packed_inputs=True)
    asked = {"workloads": ["8x128"], "seconds": 0, "sweep_retention": True, "precompute_embedding_projections": True}
    document = adtp_export.bench(out, **asked, steps=Console())
    assert "no prune site, so it has no retention to vary" in capsys.readouterr().err
    student, padded, packed, precomputed = document["results"]
    names = ["student", "padded-dense-4", "student-packed", "student-precomputed"]
    assert [row["contender"] for row in document["results"]] == names
    assert packed["flops"] == student["flops"]
    assert set(student["vs"]) == {"padded-dense-4"}
    assert precomputed["flops"] < student["flops"] < padded["flops"]
    assert document["sweeps"] == []
    assert "padded-dense-4" in (out / "report.html").read_text()
    command.show(document)
    said = capsys.readouterr().out
    assert "are against padded-dense-4" in said
    assert "retention 1, for it has no prune site" in said


@pytest.mark.slow
def test_a_shape_with_all_peers(monkeypatch, capsys):
    """In this process, with two layers for twelve: their exports are most of the time."""
    monkeypatch.setattr(contenders, "FULL_DEPTH", 2)
    words = "--shape bert-mini --layers 1 --retention 0.29 --workload 1x32 --seconds 0.1 --peers all --sweep-retention"
    assert command.command(*command.read(command.make_parser(), words.split())) == 0
    said = capsys.readouterr().out
    assert "forced to 0.29, random weights" in said
    assert "packed-dense-1" in said
    assert "padded-dense-2" in said
    for peer in ("optimum-fused-dense-2", "sorted-dense-2", "torch-compile-dense-2", "ltp-1"):
        assert peer in said
    assert "1x32, speedup over packed-dense-1 by retention: 0.1: " in said


@pytest.mark.slow
def test_ltp_beside_a_student_of_the_same_retention(monkeypatch):
    """It keeps 40% on average over layers, the student from its first cut on; the command says how to do it again."""
    monkeypatch.setattr(contenders, "FULL_DEPTH", 2)
    document = adtp_export.bench(
        shape="bert-mini", layers=2, retention=0.4, peers=["ltp"], workloads="1x32", seconds=0, prune_sites=["0.ffn"]
    )
    rows = {row["contender"]: row for row in document["results"]}
    assert list(rows) == ["student", "packed-dense-2", "padded-dense-2", "ltp-2"]
    assert set(rows["student"]["vs"]) == {"padded-dense-2", "packed-dense-2", "ltp-2"}
    assert rows["student"]["flops"] <= rows["ltp-2"]["flops"] < rows["packed-dense-2"]["flops"]
    assert rows["ltp-2"]["engine"] == "onnxruntime"
    as_json, keywords = command.read(command.make_parser(), shlex.split(document["command"])[1:])
    assert as_json
    assert BenchOptions(**keywords).command == document["command"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "either OUT or --shape"),
        (["--shape", "bert-bas"], "did you mean 'bert-base'"),
        (["--shape", "bert-mini", "--retention", "1.5"], "--retention: got 1.5; accepted are multiples of 0.001"),
        (["--shape", "bert-mini", "--retention", "nan"], "--retention: got nan"),
        (["--shape", "bert-mini", "--prune-sites", "4.ffn"], "--prune-sites: got '4.ffn' in a model of 4 layers"),
        (
            ["--shape", "bert-mini", "--workload", "2x2"],
            "accepted are mixed-32, one-long-32, and texts x tokens such as 8x128",
        ),
        (["--shape", "bert-mini", "--data", "x.txt"], "--data goes with OUT"),
        (["--shape", "bert-mini", "--text-column", "x"], "--text-column names a column of --data FILE"),
        (["--shape", "bert-mini", "--seconds", "nan"], "accepted is 0 or more"),
        (["nowhere"], "not an exported directory"),
        (["--shape", "bert-mini", "--peers", "openvin"], "did you mean 'openvino'"),
        (["nowhere", "--layers", "3"], "--layers: only with --shape; a checkpoint has its own"),
    ],
)
def test_bad_input(arguments, message):
    result = run_cli("adtp-bench", *arguments)
    assert result.returncode == 2, result.stderr
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_bad_input_from_python(tmp_path):
    with pytest.raises(InputError, match="unknown option 'layer'; did you mean 'layers'"):
        adtp_export.bench(shape="bert-mini", layer=2)
    for nothing in ([], "", " "):
        with pytest.raises(InputError, match="--prune-sites: got an empty list"):
            adtp_export.bench(shape="bert-mini", prune_sites=nothing)
    (tmp_path / "manifest.json").write_text("{}")
    with pytest.raises(InputError, match=str(tmp_path)):
        adtp_export.bench(str(tmp_path))


def test_the_signature_names_every_option():
    parameters = inspect.signature(adtp_export.bench).parameters
    fields = {field.name: field for field in dataclasses.fields(BenchOptions)}
    assert list(parameters) == list(fields)
    assert all(parameters[name].default == field.default for name, field in fields.items())
    assert all(f"\n    {name}: " in adtp_export.bench.__doc__ for name in fields if name != "steps")


def test_the_command_has_every_option():
    taken = {action.dest for action in command.make_parser()._actions} - {"help", "version", "json"}
    assert taken == {field.name for field in dataclasses.fields(BenchOptions)} - {"steps"}


def test_onnx_runtime_may_come_from_a_package_of_another_name():
    assert command._onnxruntime({"adtp-export": "1", "onnxruntime-gpu": "1.31"}) == "1.31"
    assert command._onnxruntime({"adtp-export": "1"}) == "of unknown version"
