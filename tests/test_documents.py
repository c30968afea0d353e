"""Documents say what is so: commands parse, code runs, figures come from records."""

import importlib
import importlib.util
import re
import runpy
import shlex
import shutil
import sys
import tomllib
from xml.etree import ElementTree

import pytest
from conftest import ROOT

from adtp_export.model import registry
from adtp_export.records import Manifest

README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_figures_are_those_of_the_records():
    render = runpy.run_path(str(ROOT / "benchmarks" / "render.py"))
    for name in render["DOCUMENTS"]:
        text = (ROOT / name).read_text(encoding="utf-8")
        assert "<!-- figures:" in text
        assert render["fill"](text) == text
    for name, svg in render["plots"]().items():
        assert (ROOT / name).read_text(encoding="utf-8") == svg
        ElementTree.fromstring(svg)


def commands():
    for block in re.findall(r"```bash\n(.*?)```", README, re.DOTALL):
        yield from (line.split("#")[0].strip() for line in block.splitlines() if line.startswith("adtp-"))


@pytest.mark.parametrize("command", commands())
def test_commands_of_the_readme_parse(command):
    name, *arguments = shlex.split(command)
    module = importlib.import_module(f"adtp_export.cli.{name.removeprefix('adtp-')}")
    module.make_parser().parse_args(arguments)


def test_python_of_the_readme_runs(exported, demo, tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(blocks) == 3
    for block in blocks:
        out = str(tmp_path / "out") if "adtp_export.export(" in block else str(exported)
        exec(block.replace("MODEL-export", out).replace("MODEL_DIR", str(demo)), {})


def test_the_pruner_of_the_guide_works(tmp_path, demo, monkeypatch, capsys):
    """Its file, its line in the table, its checkpoint: as docs/extending.md writes them."""
    text = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
    source, use = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(source.splitlines()) <= 40
    (line,) = re.findall(r'^    "(\w+)": \("([\w.]+)", "(\w+)"\),$', text, re.MULTILINE)
    spec = importlib.util.spec_from_loader(f"adtp_export.model.{line[1]}", loader=None)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)  # where dataclasses look their module up
    exec(source, vars(module))
    monkeypatch.setitem(registry.PRUNERS, line[0], line[1:])
    directory = tmp_path / "model"
    shutil.copytree(demo, directory, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    exec(use.replace("MODEL_DIR", str(directory)).replace("OUT", str(tmp_path / "out")), {})
    assert capsys.readouterr().out.strip().endswith("verified")
    assert Manifest.read(tmp_path / "out").checkpoint["method"] == "norm"


def test_make_targets_of_the_readme_exist():
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"`make (\w+)`", README):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)


def test_constraints_pin_what_the_package_asks_for():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pinned = set(re.findall(r"^([\w-]+)==", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    asked = project["dependencies"] + [
        p for e in ("export", "cpu", "openvino", "rtx", "train", "dev") for p in project["optional-dependencies"][e]
    ]
    assert {re.match(r"[\w-]+", requirement)[0] for requirement in asked} - {project["name"]} <= pinned
