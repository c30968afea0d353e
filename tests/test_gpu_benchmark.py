"""`benchmarks/gpu.sh` without a GPU: what it says, and how it records steps that fail, hang or lack something."""

import json
import os
import re
import runpy
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import DEMO, ROOT


@pytest.fixture(scope="module")
def gpu():
    return runpy.run_path(str(ROOT / "benchmarks" / "gpu.py"))


def run(path, *arguments):
    environment = {**os.environ, "PYTHON": sys.executable, "PATH": f"{path}:{os.environ['PATH']}"}
    command = [ROOT / "benchmarks" / "gpu.sh", *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def fake_nvidia_smi(folder, script):
    (folder / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "nvidia-smi").chmod(0o755)


def test_without_a_gpu_it_says_what_it_needs_and_writes_nothing(tmp_path):
    fake_nvidia_smi(tmp_path, "echo 'NVIDIA-SMI has failed: no driver.'; exit 9")
    result = run(tmp_path, DEMO, "--records", tmp_path / "records")
    assert result.returncode == 2
    assert "no NVIDIA GPU found: nvidia-smi says: NVIDIA-SMI has failed: no driver. This needs" in result.stderr
    assert "type: benchmarks/gpu.sh [MODEL_DIR]" in result.stderr
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
    file = ROOT / "tests" / "test_text.py"
    said = f"{file} {os.path.relpath(file, tmp_path)} {tmp_path}/export/model.onnx"
    assert gpu["short"](said, tmp_path) == "tests/test_text.py tests/test_text.py export/model.onnx"


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
