"""Labels of the caller's own: the scores of transformers' pipeline, texts that are cut and sentences that are not."""

import json

import numpy as np
import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_models import DEMO as DEMO_STUDENT
from plain_models import TEXTS, edit_json, export_unverified, write_plain
from tokenizers import Tokenizer

import adtp_export
from adtp_export.cli.run import command, make_parser
from adtp_export.data.tokenize import encode_whole_second
from adtp_export.errors import InputError
from adtp_export.inference.answers import zero_shot

LABELS = ["film", "food, and drink", "Jane's book"]
HARD = [*TEXTS, " ", "\u00dcn\u00ef \u1e9e \u6f22\u5b57", "word " * 60, "very " * 500]
NAMES = {"CONTRADICTION": 0, "neutral": 1, "Entailment": 2}


@pytest.fixture(scope="module")
def judge(tmp_path_factory):
    """A model of natural language inference, and its export."""
    folder = tmp_path_factory.mktemp("judge")
    names = {"id2label": {i: name for name, i in NAMES.items()}, "label2id": NAMES}
    model = write_plain(folder / "model", "sequence", **names)
    edit_json(model / "tokenizer_config.json", model_max_length=64)
    return model, export_unverified(model, folder / "out")


@pytest.mark.parametrize(
    ("labels", "asked"),
    [
        (LABELS, {}),
        (LABELS, {"multi_label": True}),
        (LABELS[:1], {}),
        ("film, food,, drink", {"hypothesis_template": "It is about {} !"}),
    ],
    ids=["one of all", "each alone", "one label", "a string"],
)
def test_scores_are_those_of_transformers(judge, labels, asked):
    model, out = judge
    peer = transformers.pipeline("zero-shot-classification", model=str(model), device="cpu")
    for found, text in zip(adtp_export.load(out).zero_shot(HARD, labels, **asked), HARD, strict=True):
        expected = peer(text, candidate_labels=labels, **asked)
        assert found.labels == expected["labels"]
        np.testing.assert_allclose(found.scores, expected["scores"], atol=1e-5)
        assert found.truncated == (len(text) > 250)


DEMO = Tokenizer.from_file(str(DEMO_STUDENT / "tokenizer.json"))
WORDS = st.text(st.sampled_from("a film\u00fc\u6f22 "), max_size=60)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(WORDS, WORDS), min_size=1, max_size=4), st.integers(8, 40))
def test_the_first_text_alone_is_cut_where_tokenizers_cuts_it(pairs, longest):
    peer = Tokenizer.from_str(DEMO.to_str())
    peer.no_padding()
    peer.enable_truncation(longest, strategy="only_first")
    lengths = [[len(DEMO.encode(side, add_special_tokens=False)) for side in pair] for pair in pairs]
    if any(first + second + 3 > longest and second + 3 >= longest for first, second in lengths):
        with pytest.raises(InputError, match="leaves no room for the first"):
            encode_whole_second(DEMO, pairs, longest)
        return
    found = encode_whole_second(DEMO, pairs, longest)
    for row, expected, (first, second) in zip(found, peer.encode_batch(pairs), lengths, strict=True):
        assert (row.input_ids, row.token_type_ids) == (expected.ids, expected.type_ids)
        assert row.truncated == (first + second + 3 > longest)


def test_the_first_class_may_be_entailment():
    """Then the last one is contradiction."""
    logits = np.array([[[2.0, 0.0, 1.0], [0.0, 5.0, 1.0]]])
    ((order, scores),) = zero_shot.answers(logits, 0, multi_label=True)
    assert order == [0, 1]
    np.testing.assert_allclose(scores, [1 / (1 + np.exp(-1)), 1 / (1 + np.exp(1))], atol=1e-12)
    assert [zero_shot.entailment(names) for names in (["entails", "x"], ["x", "ENTAILMENT"], ["x", "y"])] == [
        0,
        1,
        None,
    ]


def test_empty_texts_and_no_texts(judge):
    """transformers refuses these. An empty text has the tokens of a space: none."""
    load = adtp_export.load(judge[1])
    assert load.zero_shot([], LABELS) == []
    assert load.zero_shot("", LABELS) == load.zero_shot(" ", LABELS)


@pytest.mark.parametrize(
    ("labels", "asked", "message"),
    [
        ([], {}, r"labels: got \[\]; accepted are strings, at least one"),
        (" , ", {}, "labels: got"),
        ({"a", "b"}, {}, "accepted is a list of strings, or one string with commas"),
        (["a", 1], {}, "labels: got"),
        (3, {}, "labels: got 3"),
        (
            LABELS,
            {"hypothesis_template": "It is so."},
            "hypothesis_template: got 'It is so.'; accepted is a sentence with {}",
        ),
        (LABELS, {"hypothesis_template": "{x} {"}, "hypothesis_template: got"),
        (LABELS, {"hypothesis_template": "{0[a]}"}, "hypothesis_template: got"),
        (["", *LABELS], {"hypothesis_template": "{0[0]}"}, "hypothesis_template: got"),
        (LABELS, {"hypothesis_template": "so {{}}"}, "hypothesis_template: got"),
        (LABELS, {"hypothesis_template": None}, "hypothesis_template: got None"),
        (["word " * 80], {}, "leaves no room for the first in 64 tokens; give a shorter one"),
    ],
)
def test_bad_labels(judge, labels, asked, message):
    with pytest.raises(InputError, match=message):
        adtp_export.load(judge[1]).zero_shot("ok", labels, **asked)


def test_other_models_are_refused(reranker, embedder):
    with pytest.raises(
        InputError, match=r"the model has the labels \['LABEL_0'\]; accepted are models of natural language"
    ):
        adtp_export.load(reranker[1]).zero_shot("ok", LABELS)
    with pytest.raises(InputError, match="zero_shot is for models with the head sequence"):
        adtp_export.load(embedder[1]).zero_shot("ok", LABELS)


def test_the_command(judge, capsys):
    def answered(*typed):
        assert command(make_parser().parse_args([str(judge[1]), "--text", TEXTS[0], *typed])) == 0
        return json.loads(capsys.readouterr().out)

    (expected,) = adtp_export.load(judge[1]).zero_shot(TEXTS[0], "a,b", "It is {} .", multi_label=True)
    found = answered("--labels", "a, b", "--hypothesis-template", "It is {} .", "--multi-label")
    assert found == {"text": TEXTS[0], **expected.to_json()}
    for typed, message in (
        (["--multi-label"], "--multi-label goes with --labels LIST"),
        (["--hypothesis-template", ""], "--hypothesis-template goes with --labels LIST"),
        (["--labels", "a", "--kept"], "--kept prints tokens, and --labels has no place for them"),
        (["--labels", "a", "--query", "q"], "--labels: classifies texts, and --query ranks them"),
        (["--prompt", ""], "--prompt and --prompt-name go with --query"),
    ):
        with pytest.raises(InputError, match=message):
            answered(*typed)


@pytest.mark.usefixtures("has_ray")
def test_tables(judge, embedder):
    import pyarrow

    from adtp_export.integrations.ray import answering
    from adtp_export.integrations.ray.config import ScoringConfig

    asked = ScoringConfig(labels=LABELS, hypothesis_template="It is {} .", keep=["text"])
    model = answering.Answering(adtp_export.load(judge[1]), asked, 32, pairs=False)
    found = model.table(pyarrow.table({"text": TEXTS}), ["text"], "x.parquet").to_pylist()
    expected = adtp_export.load(judge[1]).zero_shot(TEXTS, LABELS, "It is {} .")
    for row, text, answer in zip(found, TEXTS, expected, strict=True):
        assert {**row, "scores": pytest.approx(row["scores"], abs=1e-5)} == {"text": text, **answer.to_json()}
    with pytest.raises(InputError, match="labels are missing"):
        ScoringConfig(multi_label=True)
    assert asked.to_json()["labels"] == LABELS
    for changed, message in (
        ({"labels": 3}, "labels: got 3"),
        ({"top_k": 2}, "got both"),
        ({"prompt": "a"}, "got both"),
    ):
        with pytest.raises(InputError, match=message):
            ScoringConfig(**{"labels": LABELS, **changed})
    with pytest.raises(InputError, match="zero_shot is for models with the head sequence"):
        answering.Answering(adtp_export.load(embedder[1]), asked, 32, pairs=False)
