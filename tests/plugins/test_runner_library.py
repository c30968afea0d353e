"""`adtp-plugin build --cuda`: a library that needs nothing of CUDA, and says what is missing where there is no driver."""

import json
import os
import shutil
import subprocess
import sys

import kept_builds
import pytest

from adtp_export.cli import plugin
from adtp_export.errors import MissingDependencyError
from adtp_export.plugins import runner


@pytest.fixture(scope="module")
def built():
    return kept_builds.library(runner)


def test_missing_tools_are_named(tmp_path):
    with pytest.raises(MissingDependencyError, match="needs CMake; type: pip install cmake"):
        runner.build(tmp_path, {"PATH": str(tmp_path)})


def test_a_build_of_other_sources_is_not_taken(built, monkeypatch):
    monkeypatch.setattr(runner, "BUILT", built.parent)
    assert runner.built() == built
    monkeypatch.setattr(runner, "sources_sha256", lambda: "of a later version")
    assert runner.built() is None


def test_the_command_builds_it(built, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(runner, "build", lambda directory: shutil.copy(built, directory / runner.FILE))
    tmp_path.mkdir(exist_ok=True)
    options = plugin.make_parser().parse_args(["build", "--cuda", "--json", "--out", str(tmp_path)])
    plugin.command(options)
    assert json.loads(capsys.readouterr().out)["library"] == str(tmp_path / runner.FILE)


@pytest.mark.skipif(sys.platform != "linux", reason="looks at an ELF file")
def test_it_needs_no_cuda_and_shows_its_interface_alone(built):
    needed = subprocess.run(["ldd", built], capture_output=True, text=True, check=True).stdout
    assert not any(name in needed for name in ("cuda", "onnxruntime", "not found"))
    listed = subprocess.run(["nm", "-D", "--defined-only", built], capture_output=True, text=True, check=True).stdout
    names = {line.split()[-1] for line in listed.splitlines()}
    wanted = {"create", "create_for_host", "destroy", "enqueue", "run", "limits", "warning", "error", "obstacle"}
    assert {name for name in names if name[0] != "_"} == {
        "RegisterCustomOps",
        *(f"adtp_runner_{name}" for name in wanted),
    }


def test_without_a_driver_it_says_what_is_missing(built, no_gpu):
    code = f"""
from pathlib import Path
from adtp_export.errors import CudaError
from adtp_export.plugins.plan import Bucket, Launch, Plan
from adtp_export.plugins.runner import Runner
launch = Launch(variant="fp16-d32-16x16", programs=1, arguments=())
bucket = Bucket(tokens=1, texts=1, workspace=0, inputs=(), outputs=(), launches=(launch,))
try:
    Runner(Plan((), (bucket,)), [], library=Path({str(built)!r}))
except CudaError as error:
    print(error)
"""
    environment = {name: value for name, value in os.environ.items() if name != "LD_LIBRARY_PATH"}
    said = subprocess.check_output([sys.executable, "-c", code], text=True, env=environment)
    assert said == "runner: the CUDA driver (R525 or newer) is missing or lacks cuGetErrorString\n"
