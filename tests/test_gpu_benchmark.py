"""`benchmarks/gpu/run.sh` without a GPU: what it says, and how it records steps that fail, hang or lack something."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
from testbed import DEMO, ROOT

from benchmarks.gpu import emulated, grouped_attention, schemas, suite


@pytest.fixture(scope="module")
def gpu():
    return dict(vars(suite))


def run(path, *arguments):
    environment = {**os.environ, "PYTHON": sys.executable, "PATH": f"{path}:{os.environ['PATH']}"}
    command = [ROOT / "benchmarks" / "gpu" / "run.sh", *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def fake_nvidia_smi(folder, script):
    (folder / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "nvidia-smi").chmod(0o755)


def test_without_a_gpu_it_says_what_it_needs_and_writes_nothing(tmp_path):
    fake_nvidia_smi(tmp_path, "echo 'NVIDIA-SMI has failed: no driver.'; exit 9")
    result = run(tmp_path, DEMO, "--records", tmp_path / "records")
    assert result.returncode == 2
    assert "no NVIDIA GPU found: nvidia-smi says: NVIDIA-SMI has failed: no driver. This needs" in result.stderr
    assert "type: benchmarks/gpu/run.sh [MODEL_DIR]" in result.stderr
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "records").exists()


def test_what_is_no_checkpoint_is_named(tmp_path, gpu):
    fake_nvidia_smi(tmp_path, f"echo '{', '.join('x' for _ in gpu['QUERY'])}'")
    result = run(tmp_path, tmp_path, "--records", tmp_path / "records")
    assert result.returncode == 2
    assert f"{tmp_path} is no checkpoint" in result.stderr
    assert not (tmp_path / "records").exists()


def python(code, **settings):
    return {"command": [sys.executable, "-c", code], **settings}


@pytest.mark.parametrize(
    ("settings", "status", "reason"),
    [
        (python("print('3 passed')", proof=" passed"), "ok", None),
        (python("print('it broke'); raise SystemExit(4)"), "failed", "exit code 4: it broke"),
        (python("print('X is not installed'); raise SystemExit(3)"), "skipped", "X is not installed"),
        (python("print('5 skipped')", proof=" passed"), "skipped", "nothing ran on the GPU: 5 skipped"),
        ({"needs": ("json", "no_such.module")}, "skipped", "not installed: no_such.module"),
        ({"obstacle": "no CUDA provider"}, "skipped", "no CUDA provider"),
        ({"ends_by_s": 11}, "skipped", "no time left: it has to end within 11 s of the start, 10 s are over"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_each_end_of_a_step_is_told_apart(tmp_path, gpu, settings, status, reason):
    line = gpu["run_step"](gpu["Step"]("step", **settings), 10.0, tmp_path, os.environ)
    assert (line["status"], line["reason"]) == (status, reason)
    assert line["limit_s"] <= gpu["BUDGET_S"] - 10


def test_paths_are_said_as_they_are_from_the_repository(tmp_path, gpu):
    file = ROOT / "tests" / "data" / "test_text.py"
    said = f"{file} {os.path.relpath(file, tmp_path)} {tmp_path}/export/model.onnx"
    assert gpu["short"](said, tmp_path) == "tests/data/test_text.py tests/data/test_text.py export/model.onnx"


def test_committed_records_prove_what_ran():
    """Each is of a commit, says no path of the machine, and has no step, check or verdict that failed."""
    found = sorted((ROOT / "benchmarks" / "records").glob("gpu-*")) + sorted(
        (ROOT / "benchmarks" / "records").glob("ragged-attention-*")
    )
    assert found
    for path in found:
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"[\" ](/(tmp|home|root|opt|work)/|\.\./)", text), path.name
        parts = [json.loads(text)] if path.suffix == ".json" else [json.loads(line) for line in text.splitlines()]
        for part in parts:
            assert re.fullmatch("[0-9a-f]{40}", part.get("commit", "0" * 40)), path.name
            assert part.get("status") != "failed"
            assert all(row["holds"] for row in part.get("checks", ()))
            assert all(target["status"] == "verified" for target in part.get("parity", {}).values())
            assert not part.get("failures")
            assert part.get("checks_failed", 0) == 0


RECORDS = ROOT / "benchmarks" / "records"
KINDS = {
    path.name: schemas.kind_of(path)
    for path in sorted(RECORDS.iterdir())
    if schemas.kind_of(path) not in (None, schemas.StepLine)
}


def test_committed_records_are_of_their_kinds():
    assert len(set(KINDS.values())) == 4
    for name in [*KINDS, "gpu-nvidia-h100-80gb-hbm3-steps.jsonl"]:
        assert schemas.read(RECORDS / name)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("mistake", ["left out", "mistyped", "of another type"])
def test_a_mistake_in_a_record_is_named(tmp_path, name, mistake):
    document = json.loads((RECORDS / name).read_text())
    value = document.pop("versions")
    if mistake != "left out":
        document["verions" if mistake == "mistyped" else "versions"] = (
            [value] if mistake == "of another type" else value
        )
    (tmp_path / name).write_text(json.dumps(document))
    with pytest.raises(msgspec.ValidationError, match="ver"):
        schemas.read(tmp_path / name)


@pytest.mark.parametrize("script", ["suite", "attention_kernel"])
def test_a_dry_run_does_not_write_beside_real_records(script):
    option = {"suite": ["--records", RECORDS], "attention_kernel": []}[script]
    command = [sys.executable, "-m", f"benchmarks.gpu.{script}", "--dry-run", *option]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert "its times mean nothing" in result.stderr


@pytest.mark.parametrize("reach", [(-1, 0), (3, 8)], ids=["causal", "window"])
def test_the_check_of_grouped_attention_holds_for_the_reference(reach, monkeypatch):
    monkeypatch.setattr(grouped_attention, "DEVICE", "cpu")
    monkeypatch.setattr(grouped_attention, "CHECKS", ([1], [5, 0, 9]))
    row = grouped_attention.check((4, 2, 8, reach), "fp32")
    assert row["holds"]
    assert row["share_of_allowed_error"] > 0


@pytest.fixture
def emulated_gpu_here():
    try:
        emulated.environment()
    except emulated.MissingError as error:
        pytest.skip(str(error))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("emulated_gpu_here")
def test_a_dry_run_tries_out_what_needs_no_engine(tmp_path):
    command = [ROOT / "benchmarks" / "gpu" / "run.sh", "--dry-run", "--records", tmp_path]
    result = subprocess.run(command, env={**os.environ, "PYTHON": sys.executable}, capture_output=True, check=False)
    assert result.returncode == 0, result.stdout
    (path,) = tmp_path.glob("gpu-*-steps.jsonl")
    lines = {line.step: line for line in schemas.read(path)}
    ran = {"device", "ragged-attention", "dense-baselines", "export-ort-cpu-fp32", "time-ort-cpu-fp32", "records"}
    assert {name for name, line in lines.items() if line.status == "ok"} - {"plugin-host"} == ran
    assert [line.reason for line in lines.values() if line.status == "skipped"].count(
        "a dry run builds no engines"
    ) == 3
    (record,) = tmp_path.glob("ragged-attention-*.json")
    (attention,) = schemas.read(record)
    assert attention.device.gpu == "emulated, no GPU"
    assert all(check.holds for check in attention.checks)


def test_a_step_that_fails_is_recorded_and_the_next_goes_on(tmp_path, gpu, monkeypatch):
    fake_nvidia_smi(tmp_path, f"echo 'Test GPU{', x' * (len(gpu['QUERY']) - 1)}'")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    broken = gpu["Step"]("broken", **python("print('first'); 1 / 0"))
    fine = gpu["Step"]("fine", **python("import adtp_export.plugins"))
    monkeypatch.setitem(gpu["run"].__globals__, "steps", lambda *arguments: iter([broken, fine]))
    assert gpu["run"](DEMO, tmp_path / "records") == 1
    lines = (tmp_path / "records" / "gpu-test-gpu-steps.jsonl").read_text().splitlines()
    first, second = map(json.loads, lines)
    assert (first["step"], first["status"]) == ("broken", "failed")
    assert first["reason"] == "exit code 1: ZeroDivisionError: division by zero"
    assert first["output_tail"][0] == "first"
    assert (second["step"], second["status"]) == ("fine", "ok")


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_step_that_hangs_is_killed_with_its_children_and_keeps_what_it_said(tmp_path, gpu):
    hang = "sleep 600 & echo child $!; wait"
    line = gpu["run_step"](gpu["Step"]("hangs", ["sh", "-c", hang], limit_s=1), 0.0, tmp_path, os.environ)
    assert (line["status"], line["reason"]) == ("failed", "timed out after 1 s")
    assert 1 <= line["seconds"] < 60
    child, deadline = line["output_tail"][0].removeprefix("child "), time.monotonic() + 30
    while alive(child) and time.monotonic() < deadline:  # killed, and on its way out
        time.sleep(0.05)
    assert not alive(child)
