"""A machine that only answers has `adtp-export[cpu]`: here with all else hidden, and in an environment of its own (slow)."""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from testbed import DEMO, ROOT

import adtp_export
from adtp_export.artifacts.records import Manifest
from adtp_export.environment import machine
from adtp_export.errors import _EXTRAS
from adtp_export.plugins import operators
from adtp_export.targets import measured

pytestmark = pytest.mark.timeout(900)  # the slow half downloads

TEXTS = ["a wonderful film", "the soup was cold , the waiter was rude and nobody cared"]
MAX_BYTES = 60_000_000
"""Installed, besides ONNX Runtime and what it needs itself (numpy is the largest part of that)."""

HIDE = """
import importlib, sys

class Hiding:
    def __init__(self, finder):
        self.finder = finder
    def __getattr__(self, name):
        return getattr(self.finder, name)
    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in hidden else self.finder.find_spec(name, path, target)

hidden = set(sys.argv.pop(1).split(","))
sys.meta_path[:] = map(Hiding, sys.meta_path)
"""
COMMAND = """
sys.argv = sys.argv[1:]
importlib.import_module(sys.argv[0].replace("adtp-", "adtp_export.cli.")).main()
"""


class Edge:
    """An interpreter without the extras, and how to start a command in it."""

    def __init__(self, python, hidden=()):
        self.python, self.hidden = str(python), ",".join(hidden)

    def run(self, code, *arguments):
        return self._finish(self.python, "-c", HIDE + code, self.hidden, *arguments)

    def command(self, name, *arguments):
        if self.hidden:
            return self.run(COMMAND, name, *arguments)
        return self._finish(os.path.join(os.path.dirname(self.python), name), *arguments)

    def _finish(self, *words):
        left_out = {"PYTHONPATH"} if self.hidden else {"PYTHONPATH", operators.SWITCH}
        environment = {name: value for name, value in os.environ.items() if name not in left_out}
        elsewhere = os.path.dirname(
            self.python
        )  # Python would find the source in this folder, and not what is installed
        if not self.hidden:
            environment["PATH"] = elsewhere  # no compiler there
        return subprocess.run(
            [*map(str, words)], capture_output=True, text=True, check=False, env=environment, cwd=elsewhere
        )


def newest_python():
    """The newest Python of this machine, and the version of it; pyenv keeps several beside each other."""
    kept = (Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions").glob("*/bin/python3")
    on_path = (shutil.which(f"python3.{minor}") for minor in range(sys.version_info.minor + 1, 20))
    tell = "import sys; print(*sys.version_info[:2])"
    found = []
    for python in (*filter(None, on_path), *kept):
        told = subprocess.run([python, "-c", tell], capture_output=True, text=True, check=False)
        if not told.returncode:
            found.append((tuple(map(int, told.stdout.split())), str(python)))
    version, python = max(found, default=(sys.version_info[:2], sys.executable))
    if version <= sys.version_info[:2]:
        pytest.skip("this machine has no newer Python")
    return python


def own_environment(python, folder, wheel):
    """A fresh environment with the wheel, made of the source distribution, and the extra for ONNX Runtime."""
    subprocess.run([python, "-m", "venv", folder], check=True)
    python = folder / "bin" / "python"
    install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-c", ROOT / "constraints.txt"]
    result = subprocess.run(
        [*install, f"adtp-export[cpu] @ {wheel.as_uri()}"], capture_output=True, text=True, check=False
    )
    if result.returncode and "No matching distribution" in result.stderr:
        pytest.skip(f"the environment could not be made: {result.stderr.strip()[-300:]}")
    assert result.returncode == 0, result.stderr
    return Edge(python)


INSTALLED = [pytest.param(name, marks=pytest.mark.slow) for name in ("installed", "installed on the newest Python")]


@pytest.fixture(scope="module", params=["hidden", *INSTALLED])
def edge(request, tmp_path_factory):
    if request.param == "hidden":
        return Edge(sys.executable, {module for modules in _EXTRAS.values() for module in modules})
    python = sys.executable if request.param == "installed" else newest_python()
    wheel = request.getfixturevalue("distributions")[1]
    return own_environment(python, tmp_path_factory.mktemp("edge") / "venv", wheel)


def test_the_extras_are_those_of_the_package():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    modules = {"pyyaml": "yaml", "pillow": "PIL"}
    for extra, known in _EXTRAS.items():
        names = [re.match(r"[\w-]+", requirement)[0] for requirement in extras[extra]]
        assert {modules.get(name, name).replace("-", "_") for name in names} - {"adtp_export"} == set(known)


def test_answers_are_the_same(edge, exported):
    result = edge.command("adtp-run", exported, *(word for text in TEXTS for word in ("--text", text)))
    assert result.returncode == 0, result.stderr
    expected = adtp_export.load(exported, target="onnxruntime-cpu-fp32")(TEXTS)
    for line, answer in zip(result.stdout.splitlines(), expected, strict=True):
        found = json.loads(line)
        assert (found["label"], found["score"]) == (answer.label, pytest.approx(answer.score, abs=1e-5))


@pytest.mark.parametrize("edge", INSTALLED, indirect=True)
def test_the_operators_of_the_wheel_answer(edge, demo, tmp_path, monkeypatch):
    """In an environment that has no compiler and has built nothing, which takes what this one takes."""
    monkeypatch.delenv(operators.SWITCH)
    adtp_export.export(demo, tmp_path / "out")
    code = """
import adtp_export
from adtp_export.plugins import operators
print(adtp_export.load(sys.argv[1]).target)
for target in ("onnxruntime-cpu-fp32-plugin", "onnxruntime-cpu-fp32"):
    print(*(answer.label for answer in adtp_export.load(sys.argv[1], target=target)(sys.argv[2:])))
print(operators.library())
"""
    result = edge.run(code, tmp_path / "out", *TEXTS)
    assert result.returncode == 0, result.stderr
    target, *answers, library = result.stdout.splitlines()
    assert target == adtp_export.load(tmp_path / "out").target
    assert answers == ["positive negative"] * 2
    assert os.path.dirname(os.path.dirname(edge.python)) in library


def blocks_after(install):
    """Python blocks of pages on deployment that stand below this installation, and above another one."""
    found = []
    for page in (ROOT / "README.md", ROOT / "docs" / "deployment.md"):
        said = None
        text = page.read_text(encoding="utf-8")
        for language, block in re.findall(r"^```(bash|python)\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
            if language == "python" and said == install:
                found.append(block)
            said = ([said] + re.findall(r"pip install '?([^' #\n]+)", block))[-1] if language == "bash" else said
    return found


def test_examples_run_in_what_their_page_installs(edge, exported):
    blocks = blocks_after("adtp-export[cpu]")
    assert len(blocks) == 2
    for block in blocks:
        for name in ("MODEL-export", "student-export"):
            block = block.replace(name, str(exported))
        result = edge.run(block)
        assert result.returncode == 0, result.stderr
        assert [line.split()[0] for line in result.stdout.splitlines()] == ["positive", "negative"]


def test_targets_are_timed_for_the_machine_that_answers(edge, exported, tmp_path):
    out = shutil.copytree(exported, tmp_path / "out")
    result = edge.command("adtp-bench", out, "--write", "--workload", "1x32", "--seconds", "0")
    assert result.returncode == 0, result.stderr
    assert "onnxruntime-cpu-fp32: median ms: 1x32 " in result.stdout
    assert [each.place.machine for each in measured.read(out, Manifest.read(out))] == [machine()]


def test_python_says_what_is_missing(edge, exported):
    """`load` answers; all else names the extra, as an error of ours that is an ImportError as well."""
    code = """
import adtp_export
import adtp_export.integrations.ray
from adtp_export.errors import MissingDependencyError
classify = adtp_export.load(sys.argv[1])
assert classify("a good film")[0].label == "positive"
for lacking in (
    lambda: classify("a good film", return_kept=True),
    lambda: adtp_export.export(sys.argv[1], "OUT"),
    lambda: adtp_export.bench(sys.argv[1]),
    lambda: adtp_export.train("OUT", base="BERT_DIR", train="train.tsv"),
    lambda: adtp_export.AdtpBertForSequenceClassification,
    lambda: adtp_export.integrations.ray.score("x.parquet", sys.argv[1], "answers"),
):
    try:
        lacking()
    except MissingDependencyError as error:
        print(error)
import adtp_export.errors as errors
modules = {module for modules in errors._EXTRAS.values() for module in modules}
assert not modules & set(sys.modules), modules & set(sys.modules)
"""
    result = edge.run(code, exported)
    assert result.returncode == 0, result.stderr
    said = result.stdout.splitlines()
    assert [line.split(" needs the package ")[0] for line in said] == [
        "telling which tokens stay (--kept)",
        "export",
        "bench",
        "train",
        "adtp_export.AdtpBertForSequenceClassification",
        "adtp_export.integrations.ray.score",
    ]
    assert [re.search(r"type: pip install 'adtp-export\[(\w+)\]'$", line)[1] for line in said] == [
        *["export"] * 3,
        "train",
        "export",
        "ray",
    ]


@pytest.mark.parametrize(
    ("extra", "command"),
    [
        ("export", ["adtp-export", DEMO, "--out", "{tmp}/out"]),
        ("export", ["adtp-bench", "{exported}"]),
        ("train", ["adtp-train", "--base", "b", "--train", "x.tsv", "--out", "{tmp}/out"]),
        ("export", ["adtp-plugin", "build", "--out", "{tmp}/out"]),
        ("export", ["adtp-run", "{exported}", "--text", "a good film", "--kept"]),
        ("ray", ["adtp-run", "{exported}", "--ray", "--file", "x.parquet", "--out", "{tmp}/out"]),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else value,
)
def test_commands_say_what_is_missing(edge, exported, tmp_path, extra, command):
    words = [str(word).format(tmp=tmp_path, exported=exported) for word in command]
    result = edge.command(*words)
    assert result.returncode == 3, result.stderr
    assert result.stdout == ""
    assert result.stderr.splitlines()[-1].startswith(f"{words[0]}: error: ")
    assert result.stderr.endswith(f"type: pip install 'adtp-export[{extra}]'\n")
    assert "Traceback" not in result.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("edge", ["installed"], indirect=True)
@pytest.mark.slow
def test_it_is_small(edge):
    code = """
import importlib.metadata as metadata, json, os, re
def named(text):
    return re.match(r"[\\w.-]+", text)[0].lower().replace("_", "-")
installed = {named(d.name): d for d in metadata.distributions()}
def closure(name):
    needs = [named(r) for r in installed[name].requires or () if "extra ==" not in r]
    return {name}.union(*(closure(need) for need in needs if need in installed))
ours = set(installed) - closure("onnxruntime") - {"pip", "setuptools"}
print(json.dumps({n: sum(f.locate().stat().st_size for f in installed[n].files if f.locate().exists()) for n in ours}))
"""
    result = edge.run(code)
    assert result.returncode == 0, result.stderr
    sizes = json.loads(result.stdout)
    assert {"adtp-export", "tokenizers"} <= set(sizes)
    assert not {name.replace("_", "-") for name in _EXTRAS["export"]} & set(sizes)
    print("installed besides the runtime, MB:", round(sum(sizes.values()) / 1e6, 1), sizes)
    assert sum(sizes.values()) < MAX_BYTES, sizes
