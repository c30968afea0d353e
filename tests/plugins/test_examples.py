"""The applications of `plugins/examples`, as far as this machine can take them."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import onnx
import pytest
from testbed import ROOT

from adtp_export.errors import MissingDependencyError
from adtp_export.plugins import library
from adtp_export.runtimes import cuda

EXAMPLES = ROOT / "plugins" / "examples"


def run(*command, **environment):
    environment = {**os.environ, **environment}
    return subprocess.run([*map(str, command)], capture_output=True, text=True, check=False, env=environment)


@pytest.fixture(scope="module")
def out(exported, tmp_path_factory):
    """An output directory that has the plugin library, where it can be built."""
    copy = Path(shutil.copytree(exported, tmp_path_factory.mktemp("examples") / "out"))
    try:
        built = library.build(tmp_path_factory.mktemp("library"))
    except MissingDependencyError as error:
        pytest.skip(str(error))
    (copy / "plugins").mkdir(exist_ok=True)
    shutil.copy(built, copy / "plugins")
    return copy


@pytest.mark.usefixtures("has_rtx")
def test_tensorrt_python(out):
    result = run(sys.executable, EXAMPLES / "tensorrt_python.py", out, "--module", "tensorrt_rtx")
    assert result.returncode == 0, result.stderr
    assert "4 plugin layers, 0 softmax layers" in result.stdout
    assert ("no GPU here" in result.stdout) == (cuda.local_gpu() is None)


def test_examples_say_what_is_missing(tmp_path):
    for command in ((sys.executable, EXAMPLES / "onnxruntime_tensorrt.py"), ("sh", EXAMPLES / "trtexec.sh")):
        result = run(*command, tmp_path)
        assert result.returncode != 0
        assert "libadtp_plugins.so is missing; type: adtp-plugin build" in result.stderr


def test_onnxruntime_tensorrt(exported, monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    import onnxruntime_tensorrt as example

    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "plugins" / "cpp").glob("*plugin.cpp")]
    assert set(example.PLUGINS) == set(re.findall(r'"(AdtpRagged\w+)"', "".join(sources)))
    model = onnx.load_from_string(example.for_tensorrt_provider(exported / "model.onnx"))
    assert [node.domain for node in model.graph.node if node.op_type == "AdtpRaggedAttention"] == ["trt.plugins"] * 4
    assert not model.functions


def test_trtexec(tmp_path):
    (tmp_path / "plugins").mkdir()
    (tmp_path / "plugins" / "libadtp_plugins.so").touch()
    said = run("sh", EXAMPLES / "trtexec.sh", tmp_path, TRTEXEC="echo").stdout
    assert f"--dynamicPlugins={tmp_path}/plugins/libadtp_plugins.so" in said
    assert "--minShapes=input_ids:1x1,attention_mask:1x1,token_type_ids:1x1 " in said
    two = run("sh", EXAMPLES / "trtexec.sh", tmp_path, TRTEXEC="echo", NO_TOKEN_TYPES="1").stdout
    assert "--minShapes=input_ids:1x1,attention_mask:1x1 " in two


@pytest.fixture
def toolkit():
    found = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "include")
    if not (found / "cuda_runtime_api.h").exists():
        pytest.skip("the CUDA toolkit's headers are missing")
    return found


@pytest.fixture
def include():
    try:
        return library.find_headers()
    except MissingDependencyError as error:
        pytest.skip(str(error))


def test_run_engine_compiles(toolkit, include):
    flags = ("-std=c++17", "-Wall", "-Wextra", "-Werror", "-fsyntax-only", "-isystem", include, "-isystem", toolkit)
    assert run("g++", *flags, EXAMPLES / "run_engine.cpp").stderr == ""
