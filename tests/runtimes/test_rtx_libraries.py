"""The links to TensorRT-RTX's libraries: plugins parse, and no temporary folder is left."""

import os
import subprocess
import sys

import pytest
from known_graphs import known_graph
from testbed import make_student

from adtp_export.graph import program
from adtp_export.runtimes import rtx_libraries

BUILD = """
import os, sys
from pathlib import Path
from adtp_export.runtimes import tensorrt
from adtp_export.artifacts.records import ShapeRange
profile = {"batch": ShapeRange(1, 2, 4), "seq": ShapeRange(1, 8, 32)}
_, details = tensorrt.build(tensorrt.RTX, Path(sys.argv[1]), profile, ["sm_86"], "plugin")
print(details["plugin_layers"], flush=True)
os._exit(0)  # as commands end
"""


@pytest.fixture(scope="module")
def model(has_rtx, tmp_path_factory):
    path = tmp_path_factory.mktemp("rtx") / "model.onnx"
    student = make_student([], num_hidden_layers=1, hidden_size=64, num_attention_heads=2)
    program.save(known_graph(student, {"version": "test"}), path)
    return path


def build(model, scratch, cache):
    environment = {**os.environ, "TMPDIR": str(scratch), "XDG_CACHE_HOME": str(cache)}
    return subprocess.check_output([sys.executable, "-c", BUILD, str(model)], text=True, env=environment).strip()


def test_a_build_with_the_plugin_leaves_no_temporary_folder(model, tmp_path):
    scratch, cache = tmp_path / "scratch", tmp_path / "cache"
    scratch.mkdir()
    for _ in range(2):  # the second uses what the first has made
        assert build(model, scratch, cache) == "1"
        assert list(scratch.iterdir()) == []
        (directory,) = (cache / "adtp-export").iterdir()
        assert (directory / "libtensorrt_rtx.so").resolve().is_file()


def test_a_build_where_no_cache_can_be(model, tmp_path):
    (tmp_path / "scratch").mkdir()
    (tmp_path / "file").write_text("")
    assert build(model, tmp_path / "scratch", tmp_path / "file") == "1"


def test_links_are_made_once_and_mended(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    libraries = [tmp_path / "liba.so.1", tmp_path / "libb.so.1"]
    for library in libraries:
        library.write_text(library.name)
    directory = rtx_libraries._directory_of_links(libraries)
    assert sorted(path.name for path in directory.iterdir()) == ["liba.so", "liba.so.1", "libb.so", "libb.so.1"]
    assert directory.stat().st_mode & 0o777 == 0o700
    (directory / "liba.so").unlink()
    (directory / "libb.so").unlink()
    (directory / "libb.so").symlink_to(libraries[0])
    (directory / "libb.so.1").unlink()
    (directory / "libb.so.1").write_text("not a link")
    assert rtx_libraries._directory_of_links(libraries) == directory
    assert {path.name: path.read_text() for path in directory.iterdir()} == {
        "liba.so": "liba.so.1",
        "liba.so.1": "liba.so.1",
        "libb.so": "libb.so.1",
        "libb.so.1": "libb.so.1",
    }
    assert rtx_libraries._directory_of_links(libraries[:1]) != directory


def test_a_relative_cache_is_ignored(tmp_path, monkeypatch):
    """As the XDG base directory specification says."""
    monkeypatch.setenv("XDG_CACHE_HOME", "here")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert rtx_libraries._cache() == tmp_path / ".cache" / "adtp-export"
