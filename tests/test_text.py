import gzip

import numpy as np
import pytest
from tokenizers import Tokenizer

from adtp_export.errors import InputError
from adtp_export.text import check_batch, encode, read_texts


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
    ],
)
def test_reads(tmp_path, name, content, column, expected):
    assert list(read_texts(write(tmp_path / name, content), column)) == expected


@pytest.mark.parametrize(
    ("name", "content", "column", "message"),
    [
        ("a.pdf", "x", None, "accepted are .txt"),
        ("a", "x", None, "accepted are .txt"),
        ("a.txt", "\n\n", None, "holds no text"),
        ("a.tsv", "label\tsentence\n", None, "holds no text"),
        ("a.tsv", "a\tb\n1\t2\n", None, "which column.*a, b.*--text-column"),
        ("a.tsv", "label\tsentence\n1\tx\n", "sentense", "did you mean 'sentence'"),
        ("a.tsv", "a\tb\tc\n1\t2\t3\n", "a,b,c", "one name, or two"),
        ("a.tsv", "label\tsentence\n1\n", None, "row 1 has no text"),
        ("a.jsonl", '{"text": 3}\n', None, "row 1 has no text"),
        ("a.jsonl", '{"text": "x"}\n{oops\n', None, "line 2 is not JSON"),
        ("a.jsonl", "[1]\n", None, "not a JSON object"),
    ],
)
def test_bad_files_are_named(tmp_path, name, content, column, message):
    with pytest.raises(InputError, match=message):
        list(read_texts(write(tmp_path / name, content), column))


def test_unreadable_files(tmp_path):
    with pytest.raises(InputError, match="no such file"):
        list(read_texts(tmp_path / "missing.txt"))
    (tmp_path / "folder.txt").mkdir()
    with pytest.raises(InputError, match="cannot be read"):
        list(read_texts(tmp_path / "folder.txt"))
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
