"""`load` answers in the form of each head, as transformers' and sentence-transformers' own code does."""

import numpy as np
import pytest
import torch
from plain_models import TEXTS
from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer, pipeline

import adtp_export
from adtp_export.errors import InputError
from adtp_export.inference.answers.tokens import AGGREGATIONS


@pytest.fixture(scope="module")
def tag(tagger):
    return adtp_export.load(tagger[1])


@pytest.fixture(scope="module")
def answer(answerer):
    return adtp_export.load(answerer[1])


@pytest.fixture(scope="module")
def embed(embedder):
    return adtp_export.load(embedder[1])


@pytest.fixture(scope="module")
def rerank(reranker):
    return adtp_export.load(reranker[1])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_entities_are_those_of_transformers(tag, tagger, aggregation):
    own = pipeline("token-classification", str(tagger[0]), aggregation_strategy=aggregation, device="cpu")
    found = tag(TEXTS, aggregation=aggregation)
    assert sum(len(text.entities) for text in found) > 5
    for text, expected in zip(found, own(TEXTS), strict=True):
        label = "entity" if aggregation == "none" else "entity_group"
        assert [(e.label, e.start, e.end) for e in text.entities] == [
            (e[label], e["start"], e["end"]) for e in expected
        ]
        assert [e.score for e in text.entities] == pytest.approx([float(e["score"]) for e in expected], abs=1e-5)


def test_one_output_without_a_kind_is_what_transformers_makes_of_it(rerank, reranker):
    own = pipeline("text-classification", str(reranker[0]), device="cpu")
    pairs = [("which film", text) for text in TEXTS]
    expected = [own({"text": query, "text_pair": text}) for query, text in pairs]
    found = rerank(pairs)
    assert [answer.label for answer in found] == [each["label"] for each in expected]
    assert [answer.score for answer in found] == pytest.approx([each["score"] for each in expected], abs=1e-5)
    ranked = {each.index: each.score for each in rerank.rank("which film", TEXTS)}
    assert [ranked[i] for i in range(len(TEXTS))] == pytest.approx([answer.score for answer in found], abs=1e-5)


def test_entities_point_into_their_text(tag):
    (text,) = tag(TEXTS[2])
    assert text.entities == tag(TEXTS, aggregation="simple")[2].entities  # labels are B-X and I-X
    assert all(TEXTS[2][e.start : e.end] == e.text for e in text.entities)
    assert not text.truncated
    (long,) = tag("good film " * 50)
    assert long.truncated
    assert max(e.end for e in long.entities) <= 62 * 5


def test_vectors_are_those_of_transformers(embed, embedder):
    """The definition of sentence-transformers, written down: at most 20 tokens, their mean, dense, tanh, length 1."""
    model, _ = embedder
    encoder, tokenizer = AutoModel.from_pretrained(model).eval(), AutoTokenizer.from_pretrained(model)
    texts = [*TEXTS, "", "good film " * 30]
    torch.manual_seed(1)
    weight, bias = torch.randn(6, 32), torch.randn(6)
    expected = []
    for text in texts:
        with torch.no_grad():
            states = encoder(**tokenizer(text, return_tensors="pt", truncation=True, max_length=20))[0][0]
        vector = torch.tanh(weight @ states.mean(0) + bias)
        expected.append((vector / vector.norm()).numpy())
    found = embed.encode(texts)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, atol=1e-5)
    np.testing.assert_allclose(embed.encode(texts, batch_size=1), found, atol=1e-6)
    np.testing.assert_allclose(embed.encode(iter(texts)), found, atol=1e-6)
    assert embed.encode([]).shape == (0, 6)
    assert embed.encode("one").shape == (1, 6)


def test_only_the_vector_is_fetched(embed):
    """The states of all tokens are another output, which nobody reads here."""
    batch = {name: np.ones((2, 5), np.int64) for name in embed.inputs}
    assert list(embed._engine.run(batch, ["sentence_embedding"])) == ["sentence_embedding"]
    assert list(embed._engine.run(batch)) == ["sentence_embedding", "last_hidden_state"]
    np.testing.assert_allclose(embed.run(batch), embed._engine.run(batch)["sentence_embedding"], atol=1e-6)


def test_rankings_are_those_of_a_cross_encoder(rerank, reranker):
    model, tokenizer = (
        kind.from_pretrained(reranker[0]) for kind in (AutoModelForSequenceClassification, AutoTokenizer)
    )
    with torch.no_grad():
        pairs = tokenizer(["which film"] * 4, TEXTS, padding=True, truncation=True, max_length=64, return_tensors="pt")
        expected = torch.sigmoid(model.eval()(**pairs).logits[:, 0])
    found = rerank.rank("which film", TEXTS)
    assert [r.index for r in found] == expected.argsort(descending=True).tolist()
    assert [r.score for r in found] == pytest.approx(expected.sort(descending=True).values.tolist(), abs=1e-5)
    assert [r.text for r in found] == [TEXTS[r.index] for r in found]
    assert rerank.rank("which film", TEXTS, top_k=2) == found[:2]
    assert rerank.rank("which film", []) == []


QUESTIONS = [
    ("who wrote it ?", TEXTS[2]),
    ("where ?", TEXTS[0]),
    ("what was terrible ?", TEXTS[1] + " " + " ".join(TEXTS) * 6),
]


@pytest.mark.parametrize("top_k", [1, 4])
def test_answers_point_into_their_context(answer, top_k):
    found = answer(QUESTIONS, top_k=top_k)
    for (_, context), prediction in zip(QUESTIONS, found, strict=True):
        assert context[prediction.start : prediction.end] == prediction.answer == prediction.answers[0].text
        assert prediction.score == prediction.answers[0].score == max(part.score for part in prediction.answers)
        assert all(context[part.start : part.end] == part.text for part in prediction.answers)
        assert len(prediction.answers) == top_k
        assert 0 <= prediction.no_answer <= 1
    singly = [answer(question, top_k=top_k, batch_size=1)[0] for question in QUESTIONS]
    assert [p.answer for p in singly] == [p.answer for p in found]


def test_no_answer_is_one_where_it_may_be(answer):
    for given, asked in zip(answer(QUESTIONS, may_be_none=True, top_k=500), answer(QUESTIONS, top_k=500)):
        (none,) = [part for part in given.answers if part.text == ""]
        assert none.score == given.no_answer == asked.no_answer
        assert all(part.text for part in asked.answers)
    (empty,) = answer([("who ?", "")])
    assert (empty.answer, empty.start, empty.end) == ("", 0, 0)


def test_windows_are_the_models_own_unless_others_are_asked_for(answer):
    """Each window gives an answer of its own where answers are one token long; 64 tokens are all that the model reads."""
    assert vars(answer.windows) == {"max_tokens": 64, "stride": 32, "max_answer_tokens": 15}
    question = QUESTIONS[2]

    def parts(**changes):
        return answer(question, top_k=1000, windows=changes)[0].answers

    assert parts() == answer(question, top_k=1000)[0].answers
    assert all(len(part.text.split()) == 1 for part in parts(max_answer_tokens=1))
    assert max(len(part.text.split()) for part in parts()) > 1
    cut = answer(question, windows={"max_tokens": 32, "stride": 0}, return_kept=True)[0]
    assert len(cut.tokens) <= 32


def test_a_long_question_is_cut(answer):
    (long,) = answer([("who " * 100, TEXTS[2])])
    assert long.truncated
    assert TEXTS[2][long.start : long.end] == long.answer


@pytest.mark.parametrize(
    ("head", "call", "message"),
    [
        ("embedder", lambda d: d("a text"), r"has embedding; type: load\(OUT\).encode"),
        ("embedder", lambda d: d.encode("a", prompt_name="query"), "accepted are none: this model has no prompts"),
        ("embedder", lambda d: d.rank("a", ["b"]), "rank is for models with the head sequence"),
        (
            "tagger",
            lambda d: d.encode("a text"),
            r"encode is for models with the head embedding.* type: load\(OUT\)\(",
        ),
        ("tagger", lambda d: d("a", top_k=2), "top_k and may_be_none are for models with the head spans"),
        ("tagger", lambda d: d("a", aggregation="frist"), "accepted are none, simple, .* did you mean 'first'"),
        ("tagger", lambda d: d([("a", "b")]), "got a pair; accepted for the head tokens are single texts"),
        ("answerer", lambda d: d("a text"), "accepted are questions with their contexts"),
        ("answerer", lambda d: d([("a", "b")], top_k=0), "top_k: got 0; accepted is an integer of at least 1"),
        ("answerer", lambda d: d([("a", "b")], windows={"max_tokens": 65}), "got 65; .* reads at most 64 tokens"),
        ("answerer", lambda d: d([("a", "b")], windows={"doc_stride": 1}), "windows: got 'doc_stride'; accepted are"),
        ("tagger", lambda d: d("a", windows={"stride": 1}), "windows are for models with the head spans"),
        ("answerer", lambda d: d([("a", "b")], aggregation="max"), "aggregation is for models with the head tokens"),
        ("reranker", lambda d: d.rank(("a", "b"), ["c"]), "query: got tuple; accepted is a string"),
        ("reranker", lambda d: d.rank("a", [("b", "c")]), "documents: got a pair"),
        ("exported", lambda d: d.rank("a", ["b"]), "answers with 2 labels; accepted are models with one output"),
    ],
)
def test_a_wrong_method_names_the_right_one(request, head, call, message):
    out = request.getfixturevalue(head)
    deployment = adtp_export.load(out[1] if isinstance(out, tuple) else out)
    with pytest.raises(InputError, match=message):
        call(deployment)


def test_what_was_kept_is_told_for_every_head(pruned_tagger):
    tag = adtp_export.load(pruned_tagger[1])
    found = tag(TEXTS, return_kept=True)
    for text, reading in zip(found, tag.kept(TEXTS)):
        assert (text.tokens, text.kept, text.dropped_at) == (reading.tokens, reading.kept, reading.dropped_at)
        assert text.tokens[0] == "[CLS]"
        assert text.kept[0]
    assert not all(kept for text in found for kept in text.kept)
    assert {site for text in found for site in text.dropped_at} <= {None, "0.ffn", "1.ffn"}
    assert any(found[0].entities != other.entities for other in found[1:])
