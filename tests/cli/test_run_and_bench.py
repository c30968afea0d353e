"""`adtp-run` as a user meets it; help is quick in every command."""

import json
import subprocess
import sys

import pytest
from testbed import run_cli

from adtp_export.artifacts.records import Manifest


@pytest.mark.parametrize("command", ["export", "run", "bench", "train", "import_", "plugin"])
def test_help_does_not_load_frameworks(command):
    """It takes 0.1 s; torch alone would take seconds."""
    code = f"""
import os, sys
sys.argv = ["adtp-{command}", "--help"]
def ended(code):
    print(sorted({{"torch", "transformers", "onnx", "numpy"}} & set(sys.modules)), flush=True)
    really(code)
really, os._exit = os._exit, ended
from adtp_export.cli.{command} import main
main()"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "usage: adtp-" in result.stdout
    assert result.stdout.splitlines()[-1] == "[]"


def test_run_texts(exported):
    result = run_cli("adtp-run", exported, "--text", "a wonderful film", "--text", "terrible food", "--kept")
    assert result.returncode == 0, result.stderr
    first, second = map(json.loads, result.stdout.splitlines())
    assert (first["text"], first["label"], second["label"]) == ("a wonderful film", "positive", "negative")
    assert len(first["tokens"]) == len(first["kept"]) == len(first["dropped_at"])
    assert sum(first["scores"].values()) == pytest.approx(1)
    (said,) = result.stderr.splitlines()
    command, target, reason = said.split(": ", 2)
    assert (command, target in Manifest.read(exported).targets) == ("adtp-run", True)
    assert "fp32" in reason


def test_run_a_wish(exported):
    result = run_cli("adtp-run", exported, "--text", "a wonderful film", "--target", "onnxruntime-cpu-fp32")
    assert result.stderr == "adtp-run: onnxruntime-cpu-fp32: asked for\n"
    result = run_cli("adtp-run", exported, "--text", "a wonderful film", "--prefer", "speed")
    assert json.loads(result.stdout)["label"] == "positive"


def test_run_pairs_and_files(tmp_path, exported):
    result = run_cli("adtp-run", exported, "--text", "a", "--text-pair", "b")
    assert json.loads(result.stdout)["text"] == ["a", "b"]
    path = tmp_path / "many.jsonl"
    path.write_text("".join(json.dumps({"n": i, "text": f"number {i} is good"}) + "\n" for i in range(1500)))
    result = run_cli("adtp-run", exported, "--file", path)
    texts = [json.loads(line)["text"] for line in result.stdout.splitlines()]
    assert texts == [f"number {i} is good" for i in range(1500)]


def test_run_stdin(exported):
    """One text a line, and what adtp-run prints is JSON lines that it reads."""
    stdin = (
        "import os; r, w = os.pipe(); os.write(w, {!r}); os.close(w); os.dup2(r, 0); import sys; sys.stdin = open(0)"
    )
    lines = run_cli("adtp-run", exported, "-", prelude=stdin.format(b"a wonderful film\n\n bad soup"))
    assert lines.returncode == 0, lines.stderr
    assert [json.loads(line)["text"] for line in lines.stdout.splitlines()] == ["a wonderful film", " bad soup"]
    again = run_cli(
        "adtp-run", exported, "--file", "-", "--format", "jsonl", prelude=stdin.format(lines.stdout.encode())
    )
    assert again.stdout == lines.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--text", "a", "--text-pair", "b", "--text-pair", "c"], "one for each"),
        (["--file", "x.txt", "--text-pair", "b"], "--text-column FIRST,SECOND"),
        (["--file", "missing.txt"], "there is no such file"),
        (["--text", "a", "--target", "gpu"], "'gpu'"),
        (["--text", "a", "--batch-size", "0"], "error: --batch-size: got 0; accepted is an integer of at least 1"),
        (["--text", "a", "--threads", "-1"], "error: --threads: got -1; accepted is an integer from 0"),
        (["-abc"], "a text that begins with - goes behind --"),
        (["--text", "-abc"], "as in --text=-abc"),
        (["--text", "a", "--prefer", "accuracy"], "error: --prefer: got 'accuracy'; accepted are precision and speed"),
        ([], "there is nothing to answer; give TEXT, --text TEXT, --file FILE, or - to read stdin"),
    ],
)
def test_run_bad_input(exported, arguments, message):
    result = run_cli("adtp-run", exported, *arguments)
    assert result.returncode == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr
