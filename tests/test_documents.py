"""Documents say what is so: commands parse, code runs, links lead somewhere, figures come from records. They read easily."""

import importlib.util
import re
import shlex
import shutil
import sys
import tomllib
from xml.etree import ElementTree

import pytest
from testbed import ROOT, command_module

from adtp_export.artifacts.records import Manifest
from adtp_export.model import registry
from benchmarks.harness.records import read_document
from benchmarks.render import __main__ as render
from benchmarks.render import options

README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = sorted(path.name for path in (ROOT / "docs").glob("*.md"))
DOCUMENTS = {
    name: (ROOT / name).read_text(encoding="utf-8")
    for name in ("README.md", "CONTRIBUTING.md", "examples/README.md", *(f"docs/{page}" for page in PAGES))
}
MAX_WORDS, MAX_LINE, README_LINES = 40, 120, 120


def test_figures_are_those_of_the_records():
    for name in render.DOCUMENTS:
        text = (ROOT / name).read_text(encoding="utf-8")
        assert len(re.findall("<!-- figures:", text)) == text.count("<!-- end of figures -->") > 0
        assert render.fill(text) == text
    plots = render.plots()
    drawn_by_hand = {"docs/idea.svg"}
    assert set(plots) == {f"docs/{path.name}" for path in (ROOT / "docs").glob("*.svg")} - drawn_by_hand
    assert plots
    for name, svg in plots.items():
        assert (ROOT / name).read_text(encoding="utf-8") == svg
        ElementTree.fromstring(svg)


def test_tables_of_options_are_those_of_the_commands():
    listed = {name for name, text in DOCUMENTS.items() if "<!-- options:" in text}
    assert listed == set(options.DOCUMENTS)
    for name in listed:
        assert "<!-- end of options -->" in DOCUMENTS[name]
        assert options.fill(DOCUMENTS[name]) == DOCUMENTS[name]
    for command in ("adtp-export", "adtp-run", "adtp-bench", "adtp-train", "adtp-tune", "adtp-import"):
        for flag in command_module(command).make_parser()._option_string_actions:
            assert flag in ("-h", "--help", "--version") or f"`{flag}" in DOCUMENTS["docs/options.md"]


def test_the_commands_of_records_are_those_that_made_them():
    listed = re.findall(r"^    (adtp-bench .*) > (benchmarks/records/.*)$", DOCUMENTS["docs/latency.md"], re.MULTILINE)
    assert len(listed) == 4
    for command, record in listed:
        assert read_document(ROOT / record)["command"] == command


def code(language):
    """Blocks of a language, with the document each is in."""
    return [
        (name, block)
        for name, text in DOCUMENTS.items()
        for block in re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)
    ]


def commands():
    """Commands of this package, from blocks of code and of tables."""
    lines = [line.split("#")[0].strip() for _, block in code("bash") for line in block.splitlines()]
    lines += [line for text in DOCUMENTS.values() for line in re.findall(r"\| `(adtp-[^`]+)` \|", text)]
    return sorted({line for line in lines if line.startswith("adtp-")})


def test_there_are_commands_of_every_kind():
    assert {command.split()[0] for command in commands()} == {
        "adtp-export",
        "adtp-run",
        "adtp-bench",
        "adtp-import",
        "adtp-train",
        "adtp-tune",
        "adtp-plugin",
    }


@pytest.mark.parametrize("command", commands())
def test_commands_of_the_documents_parse(command):
    name, *arguments = shlex.split(command)
    command_module(name).make_parser().parse_args(arguments)


def python_of_the_documents():
    own_tests = ("docs/extending.md", "docs/plugin.md", "docs/rag.md", "docs/serving.md")
    return [(name, block) for name, block in code("python") if name not in own_tests and "optimum" not in block]


@pytest.mark.usefixtures("known_graphs")
@pytest.mark.parametrize("number", range(len(python_of_the_documents())))
def test_python_of_the_documents_runs(number, exported, small, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _, block = python_of_the_documents()[number]
    out = tmp_path / "out"
    if "adtp_export.export(" not in block:
        shutil.copytree(exported, out)
    for name, path in (("MODEL-export", out), ("student-export", out), ("MODEL_DIR", small)):
        block = block.replace(name, str(path))
    exec(block, {})


@pytest.mark.usefixtures("has_openvino")
def test_openvino_is_loaded_in_full_precision(exported, tmp_path, monkeypatch):
    """Where the processor has bf16, OpenVINO takes it unless it is told not to."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(exported, "MODEL-export")
    (block,) = [block for name, block in python_of_the_documents() if "openvino.compile_model" in block]
    made = {}
    exec(block, made)
    assert made["compiled"].get_property("INFERENCE_PRECISION_HINT").to_string() == "f32"
    assert '"INFERENCE_PRECISION_HINT": "f32"' in block


def test_the_documents_have_python():
    having = {name for name, _ in python_of_the_documents()}
    assert having == {"README.md", "docs/deployment.md", "docs/export.md", "docs/systems.md"}


def test_the_output_that_the_readme_shows_is_that_of_the_export(exported):
    rows = [line for line in README.splitlines() if line.startswith("│")]
    names = []
    for row in rows:
        name, status, _, predictions, kept, compared, file = (cell.strip() for cell in row.strip("│").split("│"))
        names.append(name)
        target = Manifest.read(exported).targets[name.removesuffix("-plugin")]  # most tests leave the operators out
        assert (status, file) == (target.status, target.file)
        assert predictions == f"{target.parity.prediction_agreement:.2%}"
        assert kept == f"{target.parity.kept_token_agreement:.2%}"
        assert compared == f"{target.parity.rows_compared} of {target.parity.rows}"
    assert names == ["onnxruntime-cpu-fp32", "onnxruntime-cpu-fp32-plugin"]


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
    use = use.replace("demo/student", str(demo)).replace("MODEL_DIR", str(tmp_path / "model"))
    exec(use.replace("OUT", str(tmp_path / "out")), {})
    assert capsys.readouterr().out.strip().endswith("verified")
    assert Manifest.read(tmp_path / "out").checkpoint["method"] == "norm"


def test_make_targets_of_the_documents_exist():
    makefile = (ROOT / "Makefile").read_text()
    named = {target for text in DOCUMENTS.values() for target in re.findall(r"`make ([\w-]+)`", text)}
    assert {"demo", "test"} <= named
    assert [target for target in named if not re.search(rf"^{target}:", makefile, re.MULTILINE)] == []


def anchors(name):
    """Headings of a document, as GitHub names them in addresses."""
    headings = re.findall(r"^#+ (.+)$", DOCUMENTS[name], re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_lead_somewhere(name):
    links = re.findall(r"\]\(([^)\s]+)\)", DOCUMENTS[name]) + re.findall(r'(?:src|srcset)="([^"]+)"', DOCUMENTS[name])
    for link in links:
        path, _, anchor = link.partition("#")
        if path.startswith("https://"):
            continue
        target = ((ROOT / name).parent / path).resolve() if path else ROOT / name
        assert target.exists(), link
        assert not anchor or anchor in anchors(str(target.relative_to(ROOT))), link


def test_the_index_has_every_page():
    rows = re.findall(r"^\| \[[^\]]+\]\(([\w.]+)\) \| .+ \|$", DOCUMENTS["docs/README.md"], re.MULTILINE)
    assert sorted(rows) == [page for page in PAGES if page != "README.md"]


def prose(text):
    """Lines that are prose: no blocks of code, tables, figures of records, headings or pictures."""
    text = re.sub(r"```.*?```|<!-- figures:.*?<!-- end of figures -->", "", text, flags=re.DOTALL)
    return ["" if re.match(r"\||#|<|!\[|    \S|\s*alt=", line) else line for line in text.splitlines()]


def sentences(text):
    """Sentences of a document's prose. An item of a list begins a new one; code and links count as one word."""
    lines = (re.sub(r"^\s*(- |\d+\. )", "\n\n", line) for line in prose(text))
    for paragraph in re.split(r"\n\s*\n", "\n".join(lines)):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", re.sub(r"`[^`]*`", "Code", paragraph))
        yield from re.split(r"(?<=[.!?])\**\s+(?=[\"*\[A-Z0-9])", " ".join(plain.split()))


def test_a_long_sentence_is_seen():
    text = "One `piece of code` here.\n\n- Two [words or more](x.md)\n  in an item.\n- Three.\n\n| a | b |\n```\ncode\n```\n"
    found = [sentence for sentence in sentences(text) if sentence]
    assert found == ["One Code here.", "Two words or more in an item.", "Three."]


@pytest.mark.parametrize("name", DOCUMENTS)
def test_prose_is_short(name):
    long = [line for line in prose(DOCUMENTS[name]) if len(line) > MAX_LINE]
    assert long == []
    assert [sentence for sentence in sentences(DOCUMENTS[name]) if len(sentence.split()) > MAX_WORDS] == []


def test_the_readme_is_read_in_three_minutes():
    assert len(README.splitlines()) <= README_LINES


def test_constraints_pin_what_the_package_asks_for():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pinned = set(re.findall(r"^([\w-]+)==", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    asked = project["dependencies"] + [
        p for e in ("export", "cpu", "openvino", "rtx", "train", "dev") for p in project["optional-dependencies"][e]
    ]
    assert {re.match(r"[\w-]+", requirement)[0] for requirement in asked} - {project["name"]} <= pinned
