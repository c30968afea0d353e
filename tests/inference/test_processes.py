"""What `load` returns goes to other processes: as what it was opened from."""

import copy
import multiprocessing
import operator
import os
import pickle
import subprocess
import sys

import pytest

import adtp_export
from adtp_export.errors import InputError
from adtp_export.inference import session as room

TARGET = "onnxruntime-cpu-fp32"
TEXTS = ["a wonderful film", "the soup was terrible", ""]


@pytest.fixture(scope="module")
def deployment(exported):
    """Opened by a path that means something in one working directory alone."""
    here = os.getcwd()
    os.chdir(exported.parent)
    try:
        return adtp_export.load(exported.name, TARGET, threads=1)
    finally:
        os.chdir(here)


def test_a_spawned_process_answers_alike(deployment):
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(operator.methodcaller("__call__", TEXTS), (deployment,)) == deployment(TEXTS)


def test_a_copy_is_opened_with_the_same_arguments(deployment, exported):
    for again in (pickle.loads(pickle.dumps(deployment)), copy.deepcopy(deployment)):
        assert again is not deployment
        assert again._asked == deployment._asked == (exported, TARGET, 1, "precision", True)
        assert again(TEXTS) == deployment(TEXTS)
    assert len(pickle.dumps(deployment)) < 1000  # no weights


def test_what_is_opened_by_a_relative_path_reads_on_wherever_the_process_goes(deployment):
    assert deployment.kept(TEXTS[:1])[0].kept  # it opens the debug form


def test_a_repository_of_the_hub_stays_one(exported, monkeypatch):
    """It is somewhere else in another machine's cache. `test_hub.py` has one that answers."""
    monkeypatch.setattr(room, "located", lambda directory: exported)
    assert adtp_export.load("user/repo", TARGET)._asked[0] == "user/repo"


def test_a_directory_that_is_gone_is_named(deployment, exported, tmp_path):
    moved = pickle.dumps(deployment).replace(b"demo-export", b"demo-gone!!")
    with pytest.raises(InputError, match="demo-gone!! is not an exported directory"):
        pickle.loads(moved)


def test_the_public_names_are_listed():
    listed = dir(adtp_export)
    assert set(adtp_export.__all__) | {"__version__"} == set(listed)
    assert listed == sorted(listed)
    assert all(hasattr(adtp_export, name) for name in listed)


@pytest.mark.usefixtures("has_openvino")
def test_openvino_is_loaded_without_a_fork(exported):
    """Its telemetry would fork the process at every import; a fork takes along locks that other threads hold."""
    script = (
        "import os, sys; os.register_at_fork(before=lambda: print('forked', flush=True)); os.environ.pop('CI', None)\n"
        "import adtp_export; print(adtp_export.load(sys.argv[1], 'openvino-cpu-fp32').target)"
    )
    said = subprocess.run([sys.executable, "-c", script, exported], capture_output=True, text=True)
    assert said.stdout.split() == ["openvino-cpu-fp32"], said.stderr


@pytest.mark.parametrize("asked", [None, "true"])
def test_onnx_runtime_reports_nothing_unless_it_is_asked_to(exported, tmp_path, asked):
    """It would send what it runs to Microsoft, and keep a database of it in the user's home."""
    script = (
        "import os, sys, adtp_export; adtp_export.load(sys.argv[1], 'onnxruntime-cpu-fp32')('a film')\n"
        "print(os.environ['ORT_DISABLE_TELEMETRY'])"
    )
    hints = ("ORT_DISABLE_TELEMETRY", "CI", "GITHUB_ACTIONS", "XDG_CACHE_HOME")  # nor does it report from CI
    environment = {name: value for name, value in os.environ.items() if name not in hints} | {"HOME": str(tmp_path)}
    if asked is not None:
        environment["ORT_DISABLE_TELEMETRY"] = asked
    said = subprocess.run(
        [sys.executable, "-c", script, exported], env=environment, capture_output=True, text=True, timeout=100
    )
    assert said.stdout.split() == [asked or "1"], said.stderr
    assert not list(tmp_path.rglob("*"))
