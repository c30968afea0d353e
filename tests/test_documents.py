"""Documents say what is so: commands parse, code runs, figures come from records."""

import importlib
import re
import runpy
import shlex
from xml.etree import ElementTree

import pytest
from conftest import ROOT

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


def test_python_of_the_readme_runs(exported, demo):
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        exec(block.replace("MODEL-export", str(exported)).replace("MODEL_DIR", str(demo)), {})


def test_make_targets_of_the_readme_exist():
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"`make (\w+)`", README):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)


def test_constraints_pin_what_the_package_asks_for():
    tomllib = pytest.importorskip("tomllib")  # Python 3.11

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pinned = set(re.findall(r"^([\w-]+)==", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    asked = project["dependencies"] + [
        p for e in ("cpu", "openvino", "rtx", "train", "dev") for p in project["optional-dependencies"][e]
    ]
    assert {re.match(r"[\w-]+", requirement)[0] for requirement in asked} <= pinned
