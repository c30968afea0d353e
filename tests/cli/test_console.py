"""What the commands write: where it cannot be written, and what a terminal must not obey."""

import dataclasses
import importlib.util
import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from testbed import run_cli

from adtp_export.artifacts.directory import OutputDirectory
from adtp_export.artifacts.manifest import read_manifest
from adtp_export.artifacts.records import Manifest, Note
from adtp_export.cli.console import counting_rows, make_table, print_json, table_console
from adtp_export.cli.parsing import Parser
from adtp_export.errors import MAX_SHOWN, InputError, printable, quoted, typed
from adtp_export.model.weights import weight_files
from adtp_export.pipeline.tune.directory import claimed
from adtp_export.pipeline.tune.options import TuneOptions
from adtp_export.report import markdown
from adtp_export.training.models import load_config

ESCAPES = "\x1b[31m\x9b1m\u202e\udcff\x07"
FULL = "import os; os.dup2(os.open('/dev/full', os.O_WRONLY), {})"
NO_READER = "import os; r, w = os.pipe(); os.close(r); os.dup2(w, 1)"


@pytest.mark.parametrize(
    ("prelude", "code", "said"),
    [
        (FULL.format(1), 2, "adtp-run: error: stdout cannot be written (No space left on device)"),
        (NO_READER, 141, None),
        ("import sys; sys.stdout = None", 2, "adtp-run: error: stdout is closed"),
        (
            "import tempfile; tempfile.tempdir = '/nowhere'",
            2,
            "/nowhere: a temporary copy of the model cannot be written",
        ),
        (
            "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (9999, 9999))",
            2,
            "TMPDIR=DIR before the command",
        ),
    ],
)
def test_what_cannot_be_written(exported, prelude, code, said):
    words = ["--kept", "--target", "onnxruntime-cpu-fp32", "--text", "good"]
    result = run_cli("adtp-run", exported, *words, prelude=prelude)
    assert result.returncode == code
    assert "Traceback" not in result.stderr
    more = [line for line in result.stderr.splitlines() if not line.endswith(": asked for")]  # the target and why
    assert len(more) == (said is not None)
    assert all(said in line for line in more)


@pytest.mark.parametrize("encoding", ["latin-1", "ascii", "utf-8", "cp1252"])
def test_answers_in_any_encoding_of_stdout(tmp_path, encoding):
    """JSON is spelled in characters that the encoding has; other text is written out where it lacks some."""
    code = """
from adtp_export.cli.console import print_json, run_command
def command():
    print_json({"text": "\\u6771\\u4eac Z\\xfcrich \\U0001f600"}, indent=None)
    print("\\u6771 Z\\xfcrich", "\\u6771\\udce9")
    return 0
run_command("adtp-run", command)
"""
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert json.loads(first.decode(encoding)) == {"text": "\u6771\u4eac Z\xfcrich \U0001f600"}
    plain = {"utf-8": "\u6771 Z\xfcrich".encode(), "ascii": rb"\u6771 Z\xfcrich"}.get(encoding, b"\\u6771 Z\xfcrich")
    kanji = "\u6771".encode() if encoding == "utf-8" else rb"\u6771"
    assert second == plain + b" " + kanji + b"\xe9"  # the byte of a file's name


@pytest.mark.parametrize("place", ["torchinductor_me", "torchinductor_me/in-use", "../mine"])
def test_the_cache_that_torch_makes_is_left_where_it_is_used_or_asked_for(tmp_path, place):
    (tmp_path / "tmp" / place).mkdir(parents=True)
    used = tmp_path / "mine" if place == "../mine" else tmp_path / "tmp" / "torchinductor_me"
    fresh = f"import tempfile; tempfile.tempdir = {str(tmp_path / 'tmp')!r}"
    result = run_cli(
        "adtp-run", tmp_path / "none", "--text", "a", prelude=fresh, env={"TORCHINDUCTOR_CACHE_DIR": str(used)}
    )
    assert result.returncode == 2
    assert used.exists() == (place != "torchinductor_me")


@pytest.mark.parametrize("unbuffered", [False, True])
def test_answers_that_were_given_stay_given(tmp_path, unbuffered):
    """An error ends the run after what was printed; and with PYTHONUNBUFFERED even a kill does."""
    end = "import os; os.kill(os.getpid(), 9)" if unbuffered else "raise InputError('row 501')"
    code = f"""
from adtp_export.cli.console import print_json, run_command
from adtp_export.errors import InputError
def command():
    for i in range(500):
        print_json({{"n": i}}, indent=None)
    {end}
run_command("adtp-run", command)
"""
    out = tmp_path / "answers"
    environment = {**os.environ, "PYTHONUNBUFFERED": "1" if unbuffered else ""}
    with out.open("w") as stream:
        subprocess.run(
            [sys.executable, "-c", code], stdout=stream, stderr=subprocess.DEVNULL, env=environment, check=False
        )
    assert [json.loads(line)["n"] for line in out.read_text().splitlines()] == list(range(500))


def test_nobody_reads_stderr(exported):
    result = run_cli("adtp-run", exported, "--text", "good", prelude=FULL.format(2))
    assert result.returncode == 0
    assert json.loads(result.stdout)["text"] == "good"


def test_a_closed_stdout():
    code = "import sys; sys.argv = ['adtp-run', 'x', '--text', 'a']; from adtp_export.cli.run import main; main()"
    command = f'{sys.executable} -c "{code}" >&-'
    result = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (
        2,
        "adtp-run: error: stdout is closed; send it to a file, or to /dev/null\n",
    )


def test_terminals_are_not_steered(exported, tmp_path, capsys):
    assert printable(f"a\tü\n{ESCAPES}") == "a\tü\n\\x1b[31m\\x9b1m\\u202e\\udcff\\x07"
    print_json({"text": ESCAPES})
    said = capsys.readouterr().out
    assert json.loads(said) == {"text": ESCAPES}
    assert said.isprintable() or said.replace("\n", "").isprintable()
    with pytest.raises(SystemExit):
        Parser(prog="x").parse_args([f"--{ESCAPES}"])
    assert "\x1b" not in capsys.readouterr().err
    table = tmp_path / "a.tsv"
    table.write_text("\x1b[31mred\tb\n1\t2\n")
    result = run_cli("adtp-run", exported, "--file", table)
    assert "It has \\x1b[31mred, b" in result.stderr


def test_the_report_steers_no_terminal(exported):
    manifest = Manifest.read(exported)
    notes = (Note(f"labels of column {ESCAPES}"),)
    report = markdown.render(
        dataclasses.replace(manifest, notes=notes, checkpoint={**manifest.checkpoint, "name": ESCAPES})
    )
    assert report.count(printable(ESCAPES)) == 2
    assert report.replace("\n", "").isprintable()


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_rows_are_counted_on_a_terminal(monkeypatch):
    for stderr, stdout, expected in (
        (Terminal, io.StringIO, True),
        (io.StringIO, io.StringIO, False),
        (Terminal, Terminal, False),
    ):
        monkeypatch.setattr(sys, "stderr", stderr())
        monkeypatch.setattr(sys, "stdout", stdout())
        with counting_rows() as count:
            count(1024)
            count(476)
            print("an answer")
        assert ("1,500 rows" in sys.stderr.getvalue()) == ("rows/s" in sys.stderr.getvalue()) == expected
        assert sys.stdout.getvalue() == "an answer\n"


@pytest.mark.parametrize(
    "opened",
    [
        read_manifest,
        OutputDirectory,
        lambda place: claimed(TuneOptions(model="m", train="t", out=place)).__enter__(),
        lambda place: weight_files(place, allow_pickle=False),
        lambda place: load_config(str(place)),
    ],
    ids=["manifest", "output", "tune", "weights", "teacher"],
)
def test_directories_whose_names_are_no_text_are_named(tmp_path, opened):
    """Libraries in Rust open no such path, and their words sound like damage."""
    (place := tmp_path / os.fsdecode(b"\xff") / "below").mkdir(parents=True)
    with pytest.raises(InputError, match=r"the name '.udcff' in this path is not UTF-8.*; rename it$"):
        opened(place)
    assert not list(place.iterdir())


def test_a_name_that_no_locale_has_is_no_text():
    with pytest.raises(InputError, match="is not UTF-8"):
        read_manifest(Path("\ud800x"))


@pytest.mark.parametrize("opened", [read_manifest, lambda place: load_config(str(place))], ids=["manifest", "teacher"])
def test_a_locale_in_which_a_name_has_other_letters_is_told(tmp_path, opened):
    """Python reads the bytes of a name by the locale: in that of C, letters beyond ASCII have no character."""
    place = tmp_path / "".join(chr(0xDC00 + byte) for byte in "\u00f6".encode())
    with pytest.raises(InputError, match="is UTF-8, and this locale is not; type PYTHONUTF8=1 before the command$"):
        opened(place)


@pytest.mark.parametrize("columns", ["20", "60", "80", "200"])
def test_tables_are_whole_however_narrow_a_terminal_is(monkeypatch, columns):
    monkeypatch.setattr(sys, "stdout", Terminal())
    monkeypatch.setenv("COLUMNS", columns)
    cells = [
        "onnxruntime-cpu-int8-linear-plugin",
        "verified",
        "1.4e-06",
        "100.00%",
        "36 of 36",
        "model.linear.int8.onnx",
    ]
    table = make_table("target", "status", "max logit diff", "predictions", "rows compared", "file", right=["file"])
    table.add_row(*cells)
    table_console().print(table)
    lines = [line.strip("│").split("│") for line in sys.stdout.getvalue().splitlines() if line.startswith("│")]
    assert ["".join(cell.replace(" ", "") for cell in column) for column in zip(*lines)] == [
        cell.replace(" ", "") for cell in cells
    ]


def test_rows_are_counted_without_rich_by_nobody(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with counting_rows() as count:
        count(1)
    assert sys.stderr.getvalue() == ""


def test_values_are_cut():
    assert quoted("x" * 10**6) == "'" + "x" * (MAX_SHOWN - 1) + "..."
    assert len(quoted([["y" * 10**5]])) == MAX_SHOWN + 3
    assert quoted(10**5000) == "int too large to show"


def ended(body):
    """Run a command whose body is given; return its exit code, and what it wrote to stdout and to stderr."""
    code = f"from adtp_export.cli.console import run_command\n{body}\nrun_command('adtp-run', command)"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    return process.returncode, process.stdout, process.stderr


@pytest.mark.parametrize(("name", "said"), [("SIGINT", "adtp-run: interrupted\n"), ("SIGTERM", ""), ("SIGHUP", "")])
def test_a_signal_ends_a_command_also_where_a_library_makes_another_error_of_it(name, said):
    body = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it\n"
        "signal.signal(signal.SIGHUP, signal.SIG_DFL)  # and what nohup starts, that\n"
        "def command():\n"
        f"    try: signal.raise_signal(signal.{name})\n"
        "    except BaseException: raise InputError('could not determine the shape') from None\n"
    )
    told = ended(f"from adtp_export.errors import InputError\n{body}")
    assert told == (128 + getattr(signal, name), "", said)


@pytest.mark.parametrize(
    ("raised", "said"),
    [
        ("MemoryError()", "there is not enough memory; end other programs, or take smaller batches"),
        ("ImportError('Exception caught: std::bad_alloc')", "there is not enough memory"),
        ("PermissionError(13, 'Permission denied', 'model/x')", "model/x may not be used (Permission denied)"),
        (
            "RuntimeError('No space left on device (os error 28)')",
            "a disk is full (No space left on device (os error 28))",
        ),
    ],
)
def test_what_a_machine_does_not_have_is_no_bug(raised, said):
    code, _, error = ended(f"def command():\n    raise {raised}")
    assert code == 2
    assert error.startswith(f"adtp-run: error: {said}")
    assert "bug" not in error


def test_a_refusal_of_no_file_is_a_bug():
    code, _, error = ended("def command():\n    raise PermissionError(1, 'Operation not permitted')")
    assert code == 70
    assert "Operation not permitted" in error


def test_a_directory_that_was_removed_is_named(tmp_path):
    code, _, error = ended(
        f"import os\nfrom pathlib import Path\nos.chdir({str(tmp_path)!r}); os.rmdir({str(tmp_path)!r})\n"
        "def command():\n    Path('x').absolute()"
    )
    assert code == 2
    assert "the current directory has been removed" in error


@pytest.mark.parametrize(("found", "code"), [("SIG_DFL", 128 + signal.SIGHUP), ("SIG_IGN", 0)], ids=["alone", "nohup"])
def test_a_terminal_that_is_closed_ends_a_command_as_signals_do(tmp_path, found, code):
    body = (
        f"import os, signal, tempfile\nsignal.signal(signal.SIGHUP, signal.{found})\ndef command():\n"
        f"    with tempfile.TemporaryDirectory(dir={str(tmp_path)!r}):\n        os.kill(os.getpid(), signal.SIGHUP)\n    return 0"
    )
    assert ended(body)[0] == code
    assert not list(tmp_path.iterdir())


def test_what_a_parser_says_goes_where_the_rest_goes():
    body = "import sys\n{}\nfrom adtp_export.cli.run import make_parser\ndef command():\n    make_parser().parse_args([{!r}])"
    code, out, error = ended(body.format("", "--version"))
    assert (code, error) == (0, "")
    assert out.startswith("adtp-run ")
    code, _, error = ended(body.format(FULL.format(1), "--version"))
    assert code == 2
    assert "stdout cannot be written" in error
    assert ended(body.format("sys.stderr = None", "--nosuch"))[:2] == (2, "")


@pytest.mark.parametrize("path", ["two words/\u00e9", "-x", "plain"])
def test_paths_are_shown_as_they_are_typed(path):
    echoed = subprocess.check_output(["sh", "-c", f"printf %s {typed(path)}"], text=True)
    assert echoed == (f"./{path}" if path.startswith("-") else path)


@pytest.mark.parametrize(
    ("command", "policy"), [("adtp-export", "PASSIVE"), ("adtp-train", "PASSIVE"), ("adtp-bench", "")]
)
def test_pytorchs_threads_wait_asleep_but_where_pytorch_is_timed(command, policy):
    """Spinning threads take 40 times as long where other processes want the cores."""
    code = (
        "import os, sys; from adtp_export.cli.console import run_command; early = 'torch' in sys.modules\n"
        f"run_command({command!r}, lambda: print(early, os.environ.get('OMP_WAIT_POLICY', '')) or 0)"
    )
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    said = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    ).stdout
    assert said == f"False {policy}\n"
