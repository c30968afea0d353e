"""`adtp-run` by head: JSON lines, vectors in a file, rankings."""

import json

import numpy as np
import pytest
from plain_models import TEXTS
from testbed import run_cli

import adtp_export


def lines(result):
    assert result.returncode == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


def texts_file(folder):
    path = folder / "texts.txt"
    path.write_text("\n".join(TEXTS))
    return path


def test_entities(tagger, tmp_path):
    found = lines(run_cli("adtp-run", tagger[1], "--file", texts_file(tmp_path), "--aggregation", "first"))
    expected = adtp_export.load(tagger[1])(TEXTS, aggregation="first")
    for line, text, answer in zip(found, TEXTS, expected, strict=True):
        assert list(line) == ["text", "entities", "truncated"]
        assert line["text"] == text
        for entity, own in zip(line["entities"], answer.entities, strict=True):
            assert entity == {**vars(own), "score": pytest.approx(own.score, abs=1e-5)}


@pytest.mark.parametrize("typed", ["question", "text"])
def test_questions(answerer, typed):
    pair = ("--question", "--context") if typed == "question" else ("--text", "--text-pair")
    (line,) = lines(run_cli("adtp-run", answerer[1], pair[0], "who ?", pair[1], TEXTS[2], "--top-k", 3, "--kept"))
    (expected,) = adtp_export.load(answerer[1])([("who ?", TEXTS[2])], top_k=3)
    assert (line["question"], line["context"]) == ("who ?", TEXTS[2])
    assert (line["answer"], line["start"], line["end"]) == (expected.answer, expected.start, expected.end)
    assert [part["text"] for part in line["answers"]] == [part.text for part in expected.answers]
    assert line["tokens"][0] == "[CLS]"
    assert all(line["kept"])


def test_questions_of_a_file(answerer, tmp_path):
    path = tmp_path / "questions.jsonl"
    path.write_text("".join(json.dumps({"question": "who ?", "context": text, "id": 1}) + "\n" for text in TEXTS))
    found = lines(run_cli("adtp-run", answerer[1], "--file", path, "--may-be-none"))
    assert [line["context"] for line in found] == TEXTS
    assert all(line["context"][line["start"] : line["end"]] == line["answer"] for line in found)


def test_questions_of_squads_file_in_other_windows(answerer, tmp_path):
    path = tmp_path / "dev.json"
    context = " ".join(TEXTS) * 6
    paragraph = {
        "context": context,
        "qas": [{"question": "who ?", "answers": []}, {"question": "where ?", "answers": []}],
    }
    path.write_text(json.dumps({"data": [{"paragraphs": [paragraph]}]}))
    windows = {"max_tokens": 24, "stride": 3, "max_answer_tokens": 2}
    typed = [word for name, n in windows.items() for word in (f"--{name.replace('_', '-')}", n)]
    found = lines(run_cli("adtp-run", answerer[1], "--file", path, *typed))
    asked = [("who ?", context), ("where ?", context)]
    expected = adtp_export.load(answerer[1])(asked, windows=windows)
    assert [(line["question"], line["answer"], line["start"]) for line in found] == [
        (question, prediction.answer, prediction.start)
        for (question, _), prediction in zip(asked, expected, strict=True)
    ]


def test_vectors(embedder, tmp_path):
    file, texts = tmp_path / "vectors.npy", texts_file(tmp_path)
    result = run_cli("adtp-run", embedder[1], "--file", texts, "--out", file)
    assert result.stdout == f"{file}\n", result.stderr
    assert result.stderr.splitlines()[-1] == "adtp-run: 4 rows of 6 numbers, fp32"
    vectors, expected = np.load(file), adtp_export.load(embedder[1]).encode(TEXTS)
    assert vectors.dtype == np.float32
    np.testing.assert_allclose(vectors, expected, atol=1e-5)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["texts.txt", "vectors.npy"]
    found = lines(run_cli("adtp-run", embedder[1], "--file", texts, "--kept"))
    np.testing.assert_allclose([line["vector"] for line in found], expected, atol=1e-5)
    assert all(len(line["tokens"]) == len(line["kept"]) for line in found)


def test_rankings(reranker, tmp_path):
    found = lines(
        run_cli("adtp-run", reranker[1], "--query", "which film", "--file", texts_file(tmp_path), "--top-k", 3)
    )
    expected = adtp_export.load(reranker[1]).rank("which film", TEXTS, top_k=3)
    assert [line["index"] for line in found] == [ranked.index for ranked in expected]
    assert [line["score"] for line in found] == pytest.approx([ranked.score for ranked in expected], abs=1e-5)
    assert [line["text"] for line in found] == [TEXTS[line["index"]] for line in found]


@pytest.mark.parametrize(
    ("head", "arguments", "message"),
    [
        ("tagger", ["--text", "a", "--top-k", "2"], "--top-k is for models with the head spans or sequence"),
        ("tagger", ["--text", "a", "--out", "x.npy"], "--out is for models with the head embedding"),
        ("tagger", ["--text", "a", "--aggregation", "mean"], "aggregation: got 'mean'; accepted are none, simple"),
        ("answerer", ["--question", "a"], "--question: got no --context"),
        ("embedder", ["--text", "a", "--text-pair", "b"], "--text-pair is for models with the head sequence or spans"),
        (
            "answerer",
            ["--question", "a", "--context", "b", "--query", "c"],
            "--query is for models with the head sequence",
        ),
        ("answerer", ["--question", "a", "--context", "b", "--max-tokens", "65"], "reads at most 64 tokens"),
        ("tagger", ["--text", "a", "--stride", "9"], "--stride is for models with the head spans"),
        ("embedder", ["--text", "a", "--out", "vectors.txt"], "accepted is a file that ends in .npy"),
        ("embedder", ["--text", "a", "--out", "nowhere/v.npy"], "there is no directory nowhere"),
        ("embedder", ["--text", "a", "--out", "v.npy", "--kept"], "--kept prints tokens, and --out has no place"),
        ("embedder", ["--text", "a", "--prompt-name", "query"], "this model has no prompts"),
        ("embedder", ["--text", "a", "--stride", "0"], "--stride is for models with the head spans"),
        ("tagger", ["--text", "a", "--truncate-dim", "0"], "--truncate-dim is for models with the head embedding"),
        ("reranker", ["--text", "a", "--top-k", "2"], "or goes with --query Q"),
        ("reranker", ["--text", "a", "--text-pair", "b", "--query", "c"], "accepted are single texts"),
        (
            "reranker",
            ["--text", "a", "--query", "c", "--top-k", "0"],
            "error: --top-k: got 0; accepted is an integer of at least 1",
        ),
    ],
)
def test_bad_input(request, tmp_path, head, arguments, message):
    result = run_cli("adtp-run", request.getfixturevalue(head)[1], *arguments, cwd=tmp_path)
    assert result.returncode == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert list(tmp_path.iterdir()) == []
