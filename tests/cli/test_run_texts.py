"""Where `adtp-run` takes texts from: typed ones, files, stdin."""

import io
import json
import subprocess
import sys
import threading

import pytest

from adtp_export.cli import run_texts
from adtp_export.cli.run import make_parser
from adtp_export.cli.run_texts import CHUNK
from adtp_export.errors import InputError


def texts(*typed):
    options = make_parser().parse_args(["OUT", *map(str, typed)])
    run_texts.settle(options)
    return list(run_texts.read(options))


@pytest.fixture
def stdin(monkeypatch):
    """Return a function that puts bytes there."""
    return lambda content: monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))


@pytest.mark.parametrize(
    ("typed", "found"),
    [
        (["a film"], ["a film"]),
        (["a film", "--kept", "a soup", "--top-k", "2", "3"], ["a film", "a soup", "3"]),
        (["--kept", "a film"], ["a film"]),
        (["--", "-5"], ["-5"]),
        (["-1 degree"], ["-1 degree"]),
        (["--text", "-", "--text", "b"], ["-", "b"]),
        (["a", "b", "--text-pair", "c", "--text-pair", "d"], [("a", "c"), ("b", "d")]),
        (["who?", "--context", "Ada."], [("who?", "Ada.")]),
        (["x" * 5000], ["x" * 5000]),
        ([""], [""]),
    ],
    ids=lambda value: " ".join(map(str, value))[:20],
)
def test_typed(typed, found):
    """A text may stand before, between and after options."""
    assert texts(*typed) == found


def test_a_column_of_typed_texts_is_refused():
    with pytest.raises(InputError, match="--text-column names a column of --file or stdin; leave it out"):
        texts("a film", "--text-column", "sentence")


def test_answers_do_not_wait_for_another_text(exported):
    """As many texts as are answered together, and no end: another program may wait for these answers."""
    run = "from adtp_export.cli.run import main; main()"
    with subprocess.Popen(
        [sys.executable, "-c", run, exported, "-"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        too_late = threading.Timer(120, process.kill)
        too_late.start()
        process.stdin.write(b"a film\n" * CHUNK)
        process.stdin.flush()
        answers = [json.loads(process.stdout.readline()) for _ in range(CHUNK)]
        process.stdin.close()
        assert process.wait() == 0
        too_late.cancel()
    assert {answer["text"] for answer in answers} == {"a film"}


SQUAD = {"data": [{"paragraphs": [{"context": "Ada.", "qas": [{"question": "who?"}]}]}]}


@pytest.mark.parametrize(
    ("content", "options", "found"),
    [
        (b"a film\n\n  a soup \r\nlast", [], ["a film", "  a soup ", "last"]),
        ("\ufeffcaf\u00e9 \u732b\n".encode(), ["--format", "txt"], ["caf\u00e9 \u732b"]),
        (b"sentence\tn\nx\t1\n", ["--format", "tsv"], ["x"]),
        (b"a,b\nx,y\n", ["--format", "csv", "--text-column", "a,b"], [("x", "y")]),
        (b'{"question": "x", "context": "y"}\n', ["--format", "jsonl"], [("x", "y")]),
        (json.dumps(SQUAD).encode(), ["--format", "json"], [("who?", "Ada.")]),
    ],
    ids=["lines", "utf-8", "tsv", "csv", "jsonl", "squad"],
)
@pytest.mark.parametrize("dash", [["-"], ["--file", "-"]], ids=" ".join)
def test_stdin(stdin, content, options, found, dash):
    stdin(content)
    assert texts(*dash, *options) == found


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        (b"", [], "<stdin>.txt: holds no text"),
        (b"caf\xe9\n", [], "<stdin>.txt: cannot be read as UTF-8 text"),
        (b"a film\n", ["--format", "jsonl"], "<stdin>.jsonl: line 1 is not JSON"),
        (b"{}", ["--format", "json"], "<stdin>.json: is not of SQuAD's form"),
    ],
)
def test_stdin_that_cannot_be_read(stdin, content, options, message):
    stdin(content)
    with pytest.raises(InputError, match=message):
        texts("-", *options)


def test_closed_stdin(monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(InputError, match="-: stdin is closed"):
        texts("-")


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ([], 'give TEXT, --text TEXT, --file FILE, or - to read stdin, as in: adtp-run OUT "a wonderful film"'),
        (["a", "--text", "b"], "got texts by TEXT and by --text; give them in one of these ways"),
        (["a", "-"], "got - among 2 texts; type - alone to read stdin, or --text - for that text"),
        (["-", "--file", "x.txt"], "got texts by TEXT and by --file"),
        (["a", "--format", "csv"], "--format says what stdin holds, and files say it by their ending"),
        (["-", "--text-pair", "b"], "for a file or stdin say --text-column FIRST,SECOND"),
        (["--file", "x.parquet"], "--file x.parquet: Parquet files go with --ray; add --ray --out DIR"),
        (["-", "--ray", "--out", "x"], "stdin does not go with --ray"),
        (
            ["-", "--text-column", "a"],
            "--text-column: stdin is read as lines of text; leave it out, or add --format jsonl",
        ),
        (
            ["--file", "x.txt", "--text-column", "a"],
            "--text-column: x.txt has lines of text; leave it out, or name a .tsv, .csv or .jsonl",
        ),
        ([__file__], "is a file here; type --file for the texts in it, or --text for the name itself"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input(typed, message):
    with pytest.raises(InputError) as error:
        texts(*typed)
    assert message in str(error.value)


def test_an_error_says_among_which_rows_of_a_long_input_it_counts():
    told = "texts: got no [MASK] at index 951"
    for before, expected in ((0, told), (2048, f"rows 2049 to 3072: {told}")):
        with pytest.raises(InputError) as raised, run_texts.naming_rows(before, 1024):
            raise InputError(told)
        assert str(raised.value) == expected
    with pytest.raises(InputError, match="^prompt: "), run_texts.naming_rows(2048, 1024):
        raise InputError("prompt: got 1; accepted is a string")


@pytest.mark.parametrize(("typed", "head", "found"), [([], "", 128), ([], "images", 8), (["128"], "images", 128)])
def test_as_many_run_at_once_as_are_asked_for(typed, head, found):
    options = make_parser().parse_args(["OUT", *[word for number in typed for word in ("--batch-size", number)]])
    assert run_texts.batch_size(options.batch_size, head) == found
