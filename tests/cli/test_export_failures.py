"""`adtp-export` when it cannot: one message, an exit code, and OUT as it was, however it ends."""

import json
import os
import shutil
import signal
import time
from pathlib import Path

import pytest
from known_graphs import taking_known_graphs
from testbed import Command, listing, run_cli

from adtp_export.runtimes import tensorrt


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
        bad("--trt-flavor", "rtx"),
        bad("--per-gpu"),
        bad("--verify-data", "missing.txt"),
        bad("--update", "--force"),
        bad("--precision", "int3"),
        bad("--precision", "fp32,,fp16"),
        bad("--seq", "1:1:1"),
        bad("--trt", "--batch", "1:8:2147483648"),
        bad("--text-column", "x"),
        bad("--skip-parity-check", "--verify-data", "x.txt"),
        bad("--trt", "--attention", "flash"),
        bad("--trt", "--attention", "plugin", "--gpu", "sm_75,sm_86"),
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
    result = run_cli("adtp-export", small, "--out", tmp_path / "out", "--skip-parity-check", prelude=limit)
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
        with taking_known_graphs():
            assert run_cli("adtp-export", small, "--out", out, "--force", "--skip-parity-check").returncode == 0
        assert [p.name for p in tmp_path.iterdir()] == ["out"]


@pytest.mark.usefixtures("has_rtx", "known_graphs")
def test_a_signal_during_the_engine_build_counts(tmp_path, small):
    """The build calls back into Python; what is raised there would be lost inside the library."""
    kill_inside = """
import contextlib, os, signal
from adtp_export.runtimes import tensorrt
held = tensorrt._signals_held
@contextlib.contextmanager
def kill_inside():
    with held():
        os.kill(os.getpid(), signal.SIGTERM)
        yield
tensorrt._signals_held = kill_inside
"""
    result = run_cli(
        "adtp-export", small, "--out", tmp_path / "out", "--trt", "--skip-parity-check", prelude=kill_inside
    )
    assert result.returncode == 128 + signal.SIGTERM, result.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_machine_that_takes_no_temporary_files_is_told():
    nowhere = "import tempfile; tempfile.tempdir = None; tempfile._candidate_tempdir_list = lambda: ['/nowhere']\n"
    result = run_cli("adtp-bench", "--shape", "bert-mini", "--layers", 1, "--workload", "1x8", prelude=nowhere)
    assert result.returncode == 2
    assert result.stderr.endswith("error: no directory takes temporary files; type TMPDIR=DIR before the command\n")


def test_what_appears_meanwhile_is_not_replaced(tmp_path, small):
    command = Command("adtp-export", small, "--out", tmp_path / "out", "--skip-parity-check")
    command.wait_for(lambda: list(tmp_path.glob(".out.adtp-work-*")))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    result = command.finish()
    assert result.returncode == 2, result.stderr
    assert (tmp_path / "out" / "notes.txt").read_text() == "mine"
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


@pytest.mark.usefixtures("known_graphs")
def test_out_behind_a_symlink(tmp_path, small):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    result = run_cli("adtp-export", small, "--out", tmp_path / "link", "--skip-parity-check")
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real" / "model.onnx").exists()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["link", "real"]


def test_a_result_moved_aside_comes_back(tmp_path, small, exported):
    """Killed between the two renames of a replacement: the next run restores the old result, and does not replace it unasked."""
    shutil.copytree(exported, tmp_path / ".out.adtp-old-x")
    result = run_cli("adtp-export", small, "--out", tmp_path / "out", "--skip-parity-check")
    assert (result.returncode, "add --force" in result.stderr) == (2, True)
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    assert listing(tmp_path / "out") == listing(exported)


def test_bad_checkpoint_is_one_message(tmp_path, edit_config):
    result = run_cli("adtp-export", edit_config(prune_sites=["0.attention"]), "--out", tmp_path / "out")
    assert result.returncode == 2
    assert "same for every input" in result.stderr
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "out").exists()


def test_failed_verification_is_exit_code_1(tmp_path, small):
    """An exporter that drops the wrong token is caught, and the site is named."""
    wrong = (
        "from adtp_export.model.selection import KeepBest; right = KeepBest.packed\n"
        "KeepBest.packed = lambda rule, *rest: right(KeepBest(-rule.order, rule.count), *rest)"
    )
    result = run_cli("adtp-export", small, "--out", tmp_path / "out", prelude=wrong)
    assert result.returncode == 1, result.stderr
    (site,) = json.loads((small / "config.json").read_text())["prune_sites"]
    assert f"first at site {site}" in result.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("flavor", "extra"), [("rtx", "rtx"), ("tensorrt", "trt")])
def test_missing_dependency_is_exit_code_3(tmp_path, small, flavor, extra):
    hidden = (
        "import importlib.util as u; find = u.find_spec\n"
        "u.find_spec = lambda name, *a: None if name in ('tensorrt', 'tensorrt_rtx') else find(name, *a)"
    )
    arguments = ("--out", tmp_path / "out", "--trt", "--trt-flavor", flavor)
    result = run_cli("adtp-export", small, *arguments, prelude=hidden)
    assert result.returncode == 3, result.stderr
    assert f"pip install 'adtp-export[{extra}]'" in result.stderr


@pytest.mark.usefixtures("has_rtx", "known_graphs")
def test_refused_by_the_builder_is_exit_code_4(tmp_path, small):
    """TensorRT-RTX 1.7 has no fp32 matrix products for Turing, and says so itself."""
    result = run_cli("adtp-export", small, "--out", tmp_path / "out", "--trt", "--gpu", "sm_75", "--skip-parity-check")
    assert result.returncode == 4, result.stderr
    assert "cannot build model.onnx for sm_75" in result.stderr
    assert "leave it out of --gpu" in result.stderr
    assert "Traceback" not in result.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def has_classic_tensorrt():
    if tensorrt.TENSORRT.installed() is None:
        pytest.skip("classic TensorRT is not installed")


@pytest.mark.usefixtures("has_classic_tensorrt", "no_gpu")
def test_classic_tensorrt_without_a_gpu(tmp_path, small):
    result = run_cli("adtp-export", small, "--out", tmp_path / "out", "--trt", "--trt-flavor", "tensorrt")
    assert result.returncode == 2
    assert "tensorrt" in result.stderr.lower()


def test_a_bug_keeps_its_traceback(tmp_path, small):
    bug = "import adtp_export.model.checkpoint as c; c.assemble = None"
    result = run_cli("adtp-export", small, "--out", tmp_path / "out", prelude=bug)
    assert result.returncode == 70
    assert "Traceback" in result.stderr
