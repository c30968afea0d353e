"""Single texts in reports, head by head: what the model answered stands where it belongs."""

import dataclasses
import re

import numpy as np
import pytest
from test_html import read
from testbed import HEAD_FIELDS, as_numpy, make_batch, make_encoder
from tokenizers import Tokenizer

from adtp_export.artifacts.records import Manifest, OutputParity, Parity, ShapeRange, Target
from adtp_export.contract import HEAD_TEXT
from adtp_export.inference.answers.spans import best_spans
from adtp_export.report import explained, html, markdown
from adtp_export.report.names import NAMES
from adtp_export.report.targets import SIZE, groups
from adtp_export.verify.oracle import run_oracle
from adtp_export.verify.views import Labels, make_views

TAGS = ["O", "B-PER", "I-PER", "B-LOC", "I-LOC"]


def manifest(head, sites):
    """A manifest of one target, as an export of that head writes it."""
    answers = {"smallest_cosine": 0.9875, "similarity_kept": 0.99} if NAMES[head].figure else {}
    parity = Parity(
        rows=3,
        rows_compared=2,
        max_abs_logit_diff=1e-6,
        mean_abs_logit_diff=1e-7,
        prediction_agreement=0.5,
        kept_token_agreement=1.0,
        tolerance=1e-5,
        outputs={"x": OutputParity(1e-6, 1e-7, 1e-5)},
        answers=answers,
    )
    rows = {"text": "x.tsv", "sha256": "0", "rows": 3}
    target = Target(file="model.onnx", status="verified", attention="decomposed", parity=parity, verification=rows)
    return Manifest(
        versions={"adtp-export": "1"},
        checkpoint={"name": "m", "sha256": "0" * 64, "stored_dtype": "float32", "prune_sites": sites, "head": head},
        profile={"batch": ShapeRange(1, 2, 3), "seq": ShapeRange(1, 2, 3)},
        retention={site: {"mean_ratio": 0.5, "mean_kept_tokens": 3.0} for site in sites},
        targets={"onnxruntime-cpu-fp32": target},
        durations_s={},
        verification=rows,
        files={"model.onnx": {"sha256": "0", "bytes": 1}},
    )


@pytest.fixture(scope="module")
def shown(demo):
    """By head: the oracle, views and the report of a model that drops tokens."""
    tokenizer = Tokenizer.from_file(str(demo / "tokenizer.json"))

    def make(head):
        student = make_encoder("bert", "adtp", head=head, **HEAD_FIELDS[head])
        oracle = run_oracle(student, [as_numpy(make_batch([9, 14, 4], 15)), as_numpy(make_batch([2, 6], 6, seed=1))])
        views = make_views(oracle, tokenizer, Labels(dict(enumerate(TAGS))))
        return oracle, views, html.render(manifest(head, list(oracle.sites)), views)

    made = {}
    return lambda head: made.setdefault(head, make(head))


@pytest.mark.parametrize("head", HEAD_FIELDS)
def test_reports_of_each_head_are_whole(shown, head):
    oracle, views, document = shown(head)
    reader = read(document)
    assert [len(view.tokens) for view in views.texts] == [9, 14, 4, 6]  # two tokens are too few to look at
    assert NAMES[head].views in reader.text
    assert ("50.00%same" in reader.text) == (not NAMES[head].figure)
    assert "2 of 3" in reader.text
    assert reader.classes.count("t d0") > 0
    told = markdown.render(manifest(head, list(oracle.sites)))
    for text in (told, reader.text):
        assert f"max {NAMES[head].value} diff" in text
        assert NAMES[head].answers in text
        assert ("0.9875" in text, "50.00%" in text) == (bool(NAMES[head].figure), not NAMES[head].figure)
    widths = {
        line.count("|") for line in told.split("## Targets")[1].split("##")[0].splitlines() if line.startswith("|")
    }
    assert len(widths) == 1


def test_tags_stand_below_their_tokens(shown):
    oracle, views, document = shown("tokens")
    best = oracle.answers[0]["logits"].argmax(1)
    special = [token.strip() in ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]") for token in views.texts[0].tokens]
    assert any(special)
    assert views.texts[0].tags == tuple("" if out or TAGS[i] == "O" else TAGS[i] for i, out in zip(best, special))
    first = document.split("<figure>")[1]
    assert re.findall(r"<small>(.*?)</small>", first) == [tag for tag in views.texts[0].tags if tag]
    assert "(PER)" in views.texts[0].answer or "(LOC)" in views.texts[0].answer


def test_an_answer_is_framed(shown):
    oracle, views, document = shown("spans")
    row = oracle.answers[0]
    best = best_spans(row["start_logits"], row["end_logits"], np.ones(9, bool), 15)[0]
    assert views.texts[0].span == (best.start, best.end)
    classes = [c for c in read(document.split("<figure>")[1].split("</figure>")[0]).classes if c.startswith("t ")]
    assert [" answer" in c for c in classes] == [best.start <= i <= best.end for i in range(9)]
    assert "answer: " in document


def test_the_nearest_texts_are_listed_with_their_cosines(shown):
    oracle, views, document = shown("embedding")
    vectors = np.stack([row["sentence_embedding"] for row in oracle.answers]).astype(np.float64)
    cosines = vectors @ vectors.T
    for number, view in zip((0, 1, 2, 4), views.texts):
        others = sorted((c for i, c in enumerate(cosines[number]) if i != number), reverse=True)
        assert [cosine for _, cosine in view.near] == pytest.approx(others[:3], abs=1e-6)
    assert document.count("<li>") == 3 * len(views.texts)
    assert f"<b>{views.texts[0].near[0][1]:.3f}</b>" in document


@pytest.mark.parametrize(
    ("token", "seen"), [(" film", "film"), ("s", "s"), (" ", "␣"), ("\n", "\\n"), ("\n\t", "\\n\\t"), ("", "")]
)
def test_no_token_is_invisible(token, seen):
    assert explained.shown(token) == seen


def test_a_target_is_as_large_as_all_that_it_reads():
    """The weights of large models lie beside the file, and models that generate text have several."""
    whole = manifest("sequence", [])
    target = dataclasses.replace(whole.targets["onnxruntime-cpu-fp32"], details={"step": "step.onnx"})
    sizes = {"model.onnx": 1e6, "model.onnx.data": 2e9, "step.onnx": 3e6, "step.onnx.data": 4e6, "other.onnx": 5e6}
    given = {
        "files": {name: {"sha256": "0", "bytes": int(size)} for name, size in sizes.items()},
        "targets": {"t": target},
    }
    for head, megabytes in (("sequence", "2001.0"), (HEAD_TEXT, "2008.0")):
        found = dataclasses.replace(whole, **given, checkpoint={**whole.checkpoint, "head": head})
        assert [group.columns(found)[0][SIZE] for group in groups(found)] == [megabytes]
