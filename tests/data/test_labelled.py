"""Rows whose labels lie inside the text: what is read, and what is said of rows that are wrong."""

import gzip
import json

import pytest
from tokenizers import Tokenizer

from adtp_export.data.labelled import Question, encode_words, read_questions, read_tagged
from adtp_export.data.tokenize import strings
from adtp_export.errors import InputError

TAGGED = {"tokens": ["Ada", "sleeps"], "tags": ["B-PER", "O"]}
ASKED = {"question": "Who?", "context": "Ada, Bob.", "answers": {"text": ["Ada", "Bob"], "answer_start": [0, 5]}}


def write(path, *rows):
    opened = gzip.open(path, "wt", encoding="utf-8") if path.suffix == ".gz" else path.open("w", encoding="utf-8")
    with opened as stream:
        stream.write("\n".join(json.dumps(row) for row in rows))
    return path


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_tagged_rows_are_read(tmp_path, name):
    path = write(tmp_path / name, TAGGED, {"tokens": ["x"], "tags": [3], "id": 1})
    assert list(read_tagged(path)) == [(["Ada", "sleeps"], ["B-PER", "O"]), (["x"], ["3"])]


def test_other_columns_are_read(tmp_path):
    path = write(tmp_path / "a.jsonl", {"words": ["x"], "pos": ["X"]})
    assert list(read_tagged(path, "words", "pos")) == [(["x"], ["X"])]


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_questions_are_read(tmp_path, name):
    path = write(tmp_path / name, ASKED, {**ASKED, "answers": {"text": [], "answer_start": []}})
    first, second = read_questions(path)
    assert first == Question("Who?", "Ada, Bob.", ("Ada", "Bob"), (0, 5))
    assert second.answers == second.starts == ()


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"tokens": ["a"]}, "row 2 has no 'tags'; it has tokens"),
        ({"tokens": ["a"], "tag": ["X"]}, "did you mean 'tag'"),
        ({**TAGGED, "tokens": "Ada sleeps"}, "row 2: 'tokens' is 'Ada sleeps'; accepted is a list of words"),
        ({**TAGGED, "tags": ["O", 1.5]}, "accepted is a list of tags"),
        ({**TAGGED, "tags": ["O", True]}, "accepted is a list of tags"),
        ({**TAGGED, "tags": ["O"]}, "row 2 has 2 words and 1 tags"),
        ({"tokens": [], "tags": []}, "row 2 has no words"),
    ],
)
def test_a_bad_tagged_row_is_named(tmp_path, row, message):
    with pytest.raises(InputError, match=message):
        list(read_tagged(write(tmp_path / "a.jsonl", TAGGED, row)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"context": 3}, "row 1 has no text in 'context'"),
        ({"answers": ["Ada"]}, "row 1: 'answers' is .*accepted is"),
        ({"answers": {"text": ["Ada"]}}, "accepted is"),
        ({"answers": {"text": "Ada", "answer_start": [0]}}, "'text' of 'answers' is 'Ada'"),
        ({"answers": {"text": ["Ada"], "answer_start": ["0"]}}, "accepted is a list of numbers"),
        ({"answers": {"text": ["Ada"], "answer_start": []}}, "row 1 has 1 answers and 0 starts"),
        ({"answers": {"text": ["Ada"], "answer_start": [5]}}, "'Ada' should begin at character 5 .* where 'Bob' is"),
        ({"answers": {"text": ["Bob"], "answer_start": [-4]}}, "'Bob' should begin at character -4"),
        (
            {"answers": {"text": [""], "answer_start": [-1]}},
            "got the answer ''; accepted are texts, and empty lists where",
        ),
        ({"answers": {"text": [" "], "answer_start": [3]}}, "got the answer ' '; accepted are texts"),
    ],
)
def test_a_bad_question_is_named(tmp_path, change, message):
    with pytest.raises(InputError, match=message):
        list(read_questions(write(tmp_path / "a.jsonl", {**ASKED, **change})))


ANSWER = {"text": "Ada", "answer_start": 0}


def squad(**fields):
    qa = {"question": "Who?", "answers": [ANSWER], **fields}
    return {"version": "v2.0", "data": [{"title": "t", "paragraphs": [{"context": "Ada, Bob.", "qas": [qa]}]}]}


@pytest.mark.parametrize("name", ["dev.json", "dev.json.gz"])
def test_files_of_squad_are_read(tmp_path, name):
    path = write(tmp_path / name, squad())
    assert list(read_questions(path)) == [Question("Who?", "Ada, Bob.", ("Ada",), (0,))]
    write(path, squad(is_impossible=True, answers=[], plausible_answers=[ANSWER]))
    assert [asked.answers for asked in read_questions(path)] == [()]


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ("{", "is not readable JSON"),
        (json.dumps({"data": [{"paragraph": []}]}), "is not of SQuAD's form"),
        (json.dumps([squad()]), "is a JSON list; .* Write it as .jsonl"),
        (json.dumps({"data": []}), "holds no question"),
        (json.dumps(squad(question=1)), "question 1 has no text in 'question'"),
        (json.dumps(squad(answers=[{"text": "Bob", "answer_start": 0}])), "question 1: the answer 'Bob' should begin"),
        (json.dumps(squad(answers=[{"text": "B", "answer_start": -4}])), "should begin at character -4"),
    ],
)
def test_other_documents_are_no_squad(tmp_path, document, message):
    (tmp_path / "a.json").write_text(document)
    with pytest.raises(InputError, match=message):
        list(read_questions(tmp_path / "a.json"))


@pytest.mark.parametrize("read", [read_tagged, read_questions])
@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.tsv", "tokens\ttags\n", "ending in '.tsv'; accepted is .jsonl"),
        ("a.jsonl", "\n", "holds no rows"),
        ("a.jsonl", "[1]\n", "line 1 is not a JSON object"),
        ("a.jsonl", "\xff{", "line 1 is not JSON"),
    ],
)
def test_other_files_are_refused(tmp_path, read, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(InputError, match=message):
        list(read(tmp_path / name))
    with pytest.raises(InputError, match="no such file"):
        list(read(tmp_path / "missing.jsonl"))


@pytest.fixture(scope="module")
def tokenizer(demo):
    return Tokenizer.from_file(str(demo / "tokenizer.json"))


def test_tokens_of_words_know_their_word(tokenizer):
    words = ["a", "wonderful", "film", "\u200b", "indeed"]
    ((encoded, places),) = encode_words(tokenizer, [words], 64)
    assert encoded.input_ids == tokenizer.encode("a wonderful film indeed").ids
    for number in (0, 1, 2, 4):
        pieces = [
            t.removeprefix("##") for t, place in zip(strings(tokenizer, encoded.input_ids), places) if place == number
        ]
        assert "".join(pieces) == words[number]
    assert places[0] is places[-1] is None
    assert 3 not in places  # nothing is left of a space without width
    assert not encoded.truncated


def test_words_are_cut_at_the_limit(tokenizer):
    ((encoded, places),) = encode_words(tokenizer, [["good", "film"] * 20], 8)
    whole = tokenizer.encode("good film " * 20)
    assert encoded.input_ids == [*whole.ids[:7], whole.ids[-1]]
    assert encoded.truncated
    assert places[-1] is None


@pytest.mark.parametrize("words", [["good", "film" * 50, "x" * 300, "good"] * 3, ["good"] * 200, ["film" * 400]])
def test_long_words_and_rows_are_read_to_the_cut(tokenizer, words, monkeypatch):
    """The beginning of what a file holds, however long that is, gives the tokens that the whole would."""
    monkeypatch.setattr("adtp_export.data.truncate._CHARACTERS", 1)
    ((encoded, places),) = encode_words(tokenizer, [words], 24)
    whole = tokenizer.encode([f" {word}" if i else word for i, word in enumerate(words)], is_pretokenized=True)
    stay = [*range(min(23, len(whole) - 1)), len(whole) - 1]
    assert encoded.input_ids == [whole.ids[i] for i in stay]
    assert places == [whole.word_ids[i] for i in stay]
    monkeypatch.setattr("adtp_export.data.labelled.MAX_CHARACTERS", 40)
    monkeypatch.setattr("adtp_export.data.truncate.MAX_CHARACTERS", 40)
    ((least, _),) = encode_words(tokenizer, [["good"] * 200], 100)
    assert least.input_ids.count(tokenizer.token_to_id("good")) == 9  # four letters, and a space before all but one
    assert least.truncated


def test_words_of_byte_level_tokenizers_begin_with_a_space():
    from tokenizers import ByteLevelBPETokenizer

    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator(["good film, good cast"] * 9, vocab_size=300, min_frequency=2)
    tokenizer = Tokenizer.from_str(trained.to_str())
    ((encoded, places),) = encode_words(tokenizer, [["good", "film"]], 16)
    assert encoded.input_ids == tokenizer.encode("good film").ids
    assert places[0] == 0
    assert places[-1] == 1
