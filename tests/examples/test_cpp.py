"""The example in C++: texts in, with the answers of Python.

Where ONNXRUNTIME_ROOT names an unpacked release of ONNX Runtime, its headers are used. Elsewhere those in `onnxruntime_headers` stand
in for them, because no Python package has them; the library is that of the wheel.
"""

import os
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest
from testbed import ROOT
from tokenizers import Tokenizer

import adtp_export
from adtp_export.graph import strings
from adtp_export.verify.samples import HARD

SOURCE = ROOT / "examples" / "cpp" / "classify.cpp"
TOLERANCE = 1e-6
"""Of probabilities, which the program prints with nine digits: batches of other shapes round otherwise."""


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    if shutil.which("g++") is None:
        pytest.skip("CMake or a C++ compiler is missing")
    folder = tmp_path_factory.mktemp("cpp")
    import onnxruntime

    (library,) = (Path(onnxruntime.__file__).parent / "capi").glob("libonnxruntime.so.*")
    for name in ("libonnxruntime.so", "libonnxruntime.so.1"):  # what the linker and the program look for
        (folder / name).symlink_to(library)
    root = os.environ.get("ONNXRUNTIME_ROOT")
    headers = Path(root, "include") if root else Path(__file__).parent / "onnxruntime_headers"
    options = [
        "-std=c++17",
        "-O1",
        "-Wall",
        "-Wextra",
        "-Werror",
        f"-isystem{headers}",
        f"-L{folder}",
        f"-Wl,-rpath,{folder}",
    ]
    command = ["g++", str(SOURCE), *options, "-lonnxruntime", "-o", str(folder / "classify")]
    compiled = subprocess.run(command, capture_output=True, text=True, check=False)
    assert compiled.returncode == 0, compiled.stderr
    return folder / "classify"


@pytest.fixture(scope="module")
def extensions():
    """The library of onnxruntime-extensions, and what makes it load outside Python: it looks for Python's functions."""
    package = pytest.importorskip("onnxruntime_extensions", reason="onnxruntime-extensions is not installed")
    python = Path(sysconfig.get_config_var("LIBDIR"), str(sysconfig.get_config_var("INSTSONAME")))
    if ".so" not in python.name or not python.exists():
        pytest.skip("Python's shared library is missing")
    return package.get_library_path(), {**os.environ, "LD_PRELOAD": str(python)}


def run(program, extensions, model, *texts):
    library, environment = extensions
    command = [program, model, library, *texts]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


@pytest.mark.parametrize("compiled", [False, True], ids=["in the graph", "with the operators"])
def test_it_answers_as_python(program, extensions, exported, tmp_path, operators_library, compiled):
    classify = adtp_export.load(exported, target="onnxruntime-cpu-fp32")
    tokenizer = Tokenizer.from_file(str(exported / "tokenizer.json"))
    before = strings.tokenizing(tokenizer, classify.max_tokens, classify.inputs)
    strings.join(before, exported / "model.onnx", tmp_path / "model.strings.onnx")
    texts = [text for text in HARD if "\n" not in text]  # the program prints a text on a line
    path, environment = extensions
    environment = {**environment, "LD_DEBUG": "files", "LD_DEBUG_OUTPUT": str(tmp_path / "loaded")}
    environment |= {"ADTP_LIBRARY": str(operators_library)} if compiled else {}
    said = run(program, (path, environment), tmp_path / "model.strings.onnx", *texts)
    assert said.returncode == 0, said.stderr
    assert compiled == any(str(operators_library) in log.read_text() for log in tmp_path.glob("loaded.*"))
    lines = said.stdout.removesuffix("\n").split("\n")
    for line, text, answer in zip(lines, texts, classify(texts), strict=True):
        *probabilities, printed = line.split(" ", len(classify.labels))
        assert printed == text
        assert [float(p) for p in probabilities] == pytest.approx(list(answer.scores.values()), abs=TOLERANCE)


def test_what_it_cannot_open_is_told(program, extensions, tmp_path):
    said = run(program, extensions, tmp_path / "none.onnx", "a text")
    assert said.returncode == 1
    assert said.stderr.startswith("classify: ")
    assert "none.onnx" in said.stderr
