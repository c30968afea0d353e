import gzip
import math
import os

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from adtp_export.data.labelled import read_questions
from adtp_export.data.readers import is_label, read_rows, read_texts
from adtp_export.data.tokenize import check_batch, encode, readable
from adtp_export.errors import InputError, ellipsize


def write(path, text):
    opened = gzip.open(path, "wt", encoding="utf-8") if path.suffix == ".gz" else path.open("w", encoding="utf-8")
    with opened as stream:
        stream.write(text)
    return path


@pytest.mark.parametrize(
    ("name", "content", "column", "expected"),
    [
        ("a.txt", "one\n\ntwo ü\n", None, ["one", "two ü"]),
        ("a.txt.gz", "one\r\ntwo\r\n", None, ["one", "two"]),
        ("a.tsv", 'label\tsentence\n1\tsay "hi\n0\tbye\n', None, ['say "hi', "bye"]),
        ("a.tsv.gz", "x\ty\nA\tB\n", "y", ["B"]),
        ("a.csv", 'text,n\n"one, two",1\n', None, ["one, two"]),
        ("a.jsonl", '{"text": "one"}\n\n{"text": "two"}\n', None, ["one", "two"]),
        ("a.csv", "\ufefftext,n\none,1\n", None, ["one"]),
        ("a.tsv", "sentence\tquestion\ta\nb\ta\tx\n", None, [("a", "b")]),
        ("a.tsv", "sentence1\tsentence2\na\tb\n", None, [("a", "b")]),
        ("a.jsonl", '{"p": "a", "q": "b"}\n', "p, q", [("a", "b")]),
        ("a.csv", "label, sentence\n1,one\n", " sentence", ["one"]),
        ("a.csv", 'label,"first, second"\n1,one\n', "first, second", ["one"]),
        ("a.csv", "p, q\na,b\n", "p, q", [("a", "b")]),
    ],
)
def test_reads(tmp_path, name, content, column, expected):
    assert list(read_texts(write(tmp_path / name, content), column)) == expected


@pytest.mark.parametrize(
    ("name", "content", "column", "message"),
    [
        ("a.pdf", "x", None, "accepted are .txt"),
        ("a", "x", None, "a: got a name without an ending; accepted are .txt"),
        ("a.jsonl", '{"text": "x"}\n{"text": "\\ud800 y"}\n', None, "row 2: got .*, which is not valid Unicode"),
        ("a.txt", "\n\n", None, "holds no text"),
        ("a.tsv", "label\tsentence\n", None, "holds no text"),
        ("a.tsv", "a\tb\n1\t2\n", None, "which column.*a, b.*--text-column"),
        ("a.tsv", "label\tsentence\n1\tx\n", "sentense", "did you mean 'sentence'"),
        ("a.csv", "label, sentence\n1,x\n", None, "which column holds the text. It has label, ' sentence'; say"),
        ("a.tsv", "a\tb\tc\n1\t2\t3\n", "a,b,c", "one name, or two"),
        ("a.tsv", "label\tsentence\n1\n", None, "row 1 has no text"),
        ("a.jsonl", '{"text": 3}\n', None, "row 1 has no text"),
        ("a.jsonl", '{"text": "x"}\n{oops\n', None, "line 2 is not JSON"),
        ("a.jsonl", "[1]\n", None, "not a JSON object"),
        ("a.jsonl", f'{{"text": {"9" * 5000}}}\n', None, "line 1 is not JSON"),
        ("a.jsonl", f'{{"text": {"[" * 5000}\n', None, "line 1 is not JSON"),
        ("a.tsv", "\t".join(f"column{i}" for i in range(9999)) + "\nx\n", None, "column1, .*\\.\\.\\.; say"),
    ],
)
def test_bad_files_are_named(tmp_path, name, content, column, message):
    with pytest.raises(InputError, match=message) as raised:
        list(read_texts(write(tmp_path / name, content), column))
    assert len(str(raised.value)) < 600


@pytest.mark.parametrize(
    ("name", "lines", "headless"),
    [
        ("a.tsv", ["1\ta fine film", "0\ta bad film", "1\tgood"], True),
        ("a.csv", ["a fine film,positive", "a bad one,negative", "good,positive"], True),
        ("a.tsv", ["17\ta film of great beauty", "18\tbad", "19\tgood"], True),
        ("a.tsv", ["rating\treview text", "1\ta fine film", "0\ta bad film"], False),
        ("a.csv", ["0,1", "a fine film,0", "bad,1", "good,1"], False),
        ("a.csv", [",How did you like the film?", "0,much", "1,little"], False),
        ("a.tsv", ["country name\t1960\t1961", "Chad\t1\t2", "Mali\t3\t4"], False),
        ("a.tsv", ["n\tbody", "1\ta", "n\tbody", "2\tb"], False),
        ("a.tsv", ["A fine film, indeed", "I like it, really"], False),
        ("a.csv", ["Good;bad", "a fine film"], False),
        ("a.csv", ['"sentence, raw"', '"a fine film, 1"'], False),
    ],
)
def test_tables_without_a_header(tmp_path, name, lines, headless):
    """Headers of any names are offered."""
    path = write(tmp_path / name, "\n".join(lines) + "\n")
    message = "seems to have no header line.*Put a line of names" if headless else "which column holds the text"
    with pytest.raises(InputError, match=message):
        list(read_texts(path))


@pytest.mark.parametrize(("name", "mark"), [("a.csv", ";"), ("a.csv", "\t"), ("a.tsv", ",")])
@pytest.mark.parametrize("column", [None, "text"])
def test_other_delimiters_are_named(tmp_path, name, mark, column):
    path = write(tmp_path / name, f"text{mark}label\na fine film{mark}1\n")
    with pytest.raises(InputError, match=f"its columns seem to be separated by '{'.t' if mark == chr(9) else mark}'"):
        list(read_texts(path, column))


@pytest.mark.parametrize("rows", ['1;"a fine film"\n', '1;a fine film\n2;"a bad one"\n'], ids=["first", "second"])
def test_other_delimiters_are_named_where_fields_have_quotes(tmp_path, rows):
    """Which end in the midst of what commas divide."""
    path = write(tmp_path / "a.csv", f"label;sentence\n{rows}")
    with pytest.raises(InputError, match="its columns seem to be separated by ';'"):
        list(read_texts(path))


@pytest.mark.parametrize(("texts", "labels"), [("text", "text"), ("text,text", "label")])
def test_a_column_serves_once(tmp_path, texts, labels):
    path = write(tmp_path / "a.tsv", "text\tlabel\na fine film\t1\n")
    with pytest.raises(InputError, match="holds the texts, so it cannot|two different ones with a comma"):
        list(read_rows(path, texts, labels))


def test_labels_are_finite_numbers():
    assert [is_label(value) for value in ("a", " ", 1, 0.5, math.inf, math.nan, 10**400, -(10**400), None)] == [
        True, False, True, True, False, False, False, False, False,
    ]  # fmt: skip


def test_unreadable_files(tmp_path):
    with pytest.raises(InputError, match="no such file"):
        list(read_texts(tmp_path / "missing.txt"))
    for missing, what in (("missing", "no such file"), ("x" * 300, "no such file"), ("", "it is a directory")):
        with pytest.raises(InputError, match=what):
            list(read_texts(tmp_path / missing))
    (tmp_path / "folder.txt").mkdir()
    with pytest.raises(InputError, match="cannot be read"):
        list(read_texts(tmp_path / "folder.txt"))
    os.mkfifo(tmp_path / "pipe.txt.gz")
    with pytest.raises(InputError, match="it is a pipe; accepted is a file"):
        list(read_texts(tmp_path / "pipe.txt.gz"))
    (tmp_path / "endless.txt").symlink_to("/dev/zero")
    with pytest.raises(InputError, match="it is a device"):
        list(read_texts(tmp_path / "endless.txt"))
    (tmp_path / "latin.txt").write_bytes("naïve\n".encode("latin-1"))
    with pytest.raises(InputError, match="UTF-8"):
        list(read_texts(tmp_path / "latin.txt"))
    (tmp_path / "cut.txt.gz").write_bytes(gzip.compress(b"text\n" * 1000)[:-12])
    with pytest.raises(InputError, match="cannot be read"):
        list(read_texts(tmp_path / "cut.txt.gz"))


def test_corrupt_gzip_and_broken_unicode(tmp_path, demo):
    body = bytearray(gzip.compress(b"text\n" * 1000))
    body[20:40] = b"x" * 20
    (tmp_path / "bad.txt.gz").write_bytes(bytes(body))
    with pytest.raises(InputError, match="cannot be read"):
        list(read_texts(tmp_path / "bad.txt.gz"))
    tokenizer = Tokenizer.from_file(str(demo / "tokenizer.json"))
    with pytest.raises(InputError, match="not valid Unicode"):
        encode(tokenizer, ["fine", "\ud800 hi"], 16)


def good():
    ids = np.array([[5, 6, 7], [8, 0, 0]])
    return {"input_ids": ids, "attention_mask": (ids > 0).astype(np.int64), "token_type_ids": np.zeros_like(ids)}


def test_good_batch_passes():
    check_batch(good(), 10, 2, 64)
    for kind in (np.uint8, np.uint64, np.int8):  # differences of unsigned numbers wrap
        check_batch({**good(), "attention_mask": good()["attention_mask"].astype(kind)}, 10, 2, 64)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda b: b["attention_mask"].__setitem__(0, [0, 1, 1]), "row 0 has padding before"),
        (lambda b: b["attention_mask"].__setitem__(0, [1, 0, 1]), "row 0 has padding before or between"),
        (lambda b: b["attention_mask"].__setitem__(1, 0), "row 1 has no live token"),
        (lambda b: b["attention_mask"].__setitem__((0, 0), 2), "other than 0 and 1"),
        (lambda b: b["input_ids"].__setitem__((0, 0), 10), "input_ids: got 10; accepted are ids from 0 to 9"),
        (lambda b: b["input_ids"].__setitem__((0, 0), -1), "got -1"),
        (lambda b: b["token_type_ids"].__setitem__((0, 0), 2), "token_type_ids: got 2"),
        (lambda b: b.update(attention_mask=np.ones((2, 4), np.int64)), "all inputs of one shape"),
        (lambda b: b.update(input_ids=b["input_ids"].astype(float)), "accepted are integers"),
        (lambda b: b.update(input_ids=b["input_ids"][0]), "all inputs of one shape|integers"),
        (lambda b: [b.update({n: np.ones((1, 65), np.int64)}) for n in list(b)], "at most 64"),
        (lambda b: [b.update({n: np.ones((0, 4), np.int64)}) for n in list(b)], "empty batch"),
    ],
)
def test_bad_batches_are_refused(change, message):
    batch = good()
    change(batch)
    with pytest.raises(InputError, match=message):
        check_batch(batch, 10, 2, 64)


def test_what_a_message_cites_moves_no_cursor():
    assert ellipsize("a\x1b[2J\n  b\u202e") == "a\\x1b[2J b\\u202e"


def test_a_long_field_is_read(tmp_path):
    path = tmp_path / "long.tsv"
    path.write_text("text\tlabel\n" + "word " * 40_000 + "\t1\n")
    assert [len(text) for text in read_texts(path)] == [200_000]


@pytest.mark.parametrize("name", ["a.txt.gz", "a.tsv", "a.csv.gz", "a.jsonl.gz", "questions.json.gz"])
def test_rows_without_end_are_refused(tmp_path, monkeypatch, name):
    """A few kB of gzip are a line of gigabytes, and a row of a .csv may be of any number of lines."""
    monkeypatch.setattr("adtp_export.io.MAX_ROW", 1000)
    monkeypatch.setattr("adtp_export.data.labelled.MAX_ROW", 1000)
    begin, middle = {
        "txt": ("", "a"),
        "tsv": ("text\n", "a"),
        "csv": ("text\n", '"\n",'),
        "jsonl": ('{"text": "', "a"),
        "json": ("[", "["),
    }[name.split(".")[1]]
    path = write(tmp_path / name, begin + middle * 2000)
    with pytest.raises(InputError, match="more than 1,000 characters"):
        list(read_questions(path) if name.startswith("questions") else read_texts(path))
    rows = write(tmp_path / "many.csv.gz", "text\n" + '"a\nb"\n' * 1000)
    assert len(list(read_texts(rows))) == 1000


LETTERS = trainers.BpeTrainer(initial_alphabet=pre_tokenizers.ByteLevel.alphabet())


@pytest.mark.parametrize(
    ("model", "trainer", "split", "decoder", "expected"),
    [
        pytest.param(
            models.BPE(),
            LETTERS,
            pre_tokenizers.ByteLevel(add_prefix_space=False),
            decoders.ByteLevel(),
            ["the", " café", ",", " 你", " ", "t", "é", "Ø"],
            id="byte-level",
        ),
        pytest.param(
            models.BPE(),
            trainers.BpeTrainer(),
            pre_tokenizers.Metaspace(),
            decoders.Metaspace(),
            [" the", " café,", " 你", " ", "t", "é"],
            id="metaspace",
        ),
        pytest.param(
            models.WordPiece(),
            trainers.WordPieceTrainer(),
            pre_tokenizers.BertPreTokenizer(),
            decoders.WordPiece(),
            [" the", " café", ",", " 你", " t", "é"],
            id="wordpiece",
        ),
        pytest.param(
            models.WordLevel(),
            trainers.WordLevelTrainer(),
            pre_tokenizers.Whitespace(),
            None,
            [" the", " café", " ,", " 你"],
            id="words",
        ),
    ],
)
def test_tokens_are_readable(model, trainer, split, decoder, expected):
    """Whatever a vocabulary writes for the space before a word, for the rest of one, and for bytes that are no letters."""
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = split
    if decoder is not None:
        tokenizer.decoder = decoder
    tokenizer.train_from_iterator(["the café, 你"] * 9, trainer)
    text = "the café, 你" + (" té" if "t" in tokenizer.get_vocab() else "")
    ids = tokenizer.encode(text).ids
    if trainer is LETTERS:
        ids.append(tokenizer.token_to_id("Ø"))  # a byte that begins a letter of two
    assert readable(tokenizer, ids) == expected
