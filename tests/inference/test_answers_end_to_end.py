"""From a checkpoint to an answer, for each kind of problem, and within the limits of an engine's profile."""

import json
import math
import re
import shutil

import numpy as np
import pytest
import torch
from testbed import make_student
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import adtp_export
from adtp_export.artifacts.records import ShapeRange, file_entry
from adtp_export.errors import InputError

TEXTS = [
    "a wonderful film",
    "the soup was terrible",
    "",
    "not bad at all , but the ending is dull and the sound is awful",
]
PLAIN = "onnxruntime-cpu-fp32"


def save(directory, demo, **fields):
    """A checkpoint of one layer with the tokenizer of the demo."""
    tokenizer = AutoTokenizer.from_pretrained(demo)
    student = make_student(["0.ffn"], vocab_size=len(tokenizer), num_hidden_layers=1, **fields)
    student.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def exported_and_own(directory):
    """The export of a checkpoint, opened, and transformers' logits for `TEXTS` in fp64, one by one."""
    out = directory.with_name("out")
    adtp_export.export(directory, out, skip_parity_check=True)
    model = AutoModelForSequenceClassification.from_pretrained(directory, dtype=torch.float64).eval()
    tokenizer = AutoTokenizer.from_pretrained(directory)
    with torch.inference_mode():
        logits = [model(**tokenizer(text, return_tensors="pt")).logits[0].numpy() for text in TEXTS]
    return adtp_export.load(out), np.stack(logits)


@pytest.fixture(scope="module")
def several_labels(tmp_path_factory, demo):
    names = {0: "food", 1: "film", 2: "sound"}
    directory = tmp_path_factory.mktemp("several") / "model"
    return exported_and_own(save(directory, demo, problem_type="multi_label_classification", id2label=names))


def test_each_of_several_labels_has_a_score_of_its_own(several_labels):
    deployment, logits = several_labels
    answers = deployment(TEXTS)
    scores = 1 / (1 + np.exp(-logits))
    for answer, expected in zip(answers, scores, strict=True):
        assert list(answer.scores) == ["food", "film", "sound"]
        assert list(answer.scores.values()) == pytest.approx(expected, abs=1e-4)
        assert answer.label == ("food", "film", "sound")[expected.argmax()]
        assert answer.score == answer.scores[answer.label]
    assert abs(scores.sum(1) - 1).min() > 0.01  # softmax would be something else
    assert json.loads(json.dumps(answers[0].to_json()))["scores"] == answers[0].scores


@pytest.fixture(scope="module")
def a_value(tmp_path_factory, demo):
    directory = tmp_path_factory.mktemp("value") / "model"
    return exported_and_own(save(directory, demo, problem_type="regression", id2label={0: "stars"}))


def test_regression_answers_with_a_value_and_no_label(a_value):
    deployment, logits = a_value
    answers = deployment(TEXTS)
    assert [answer.score for answer in answers] == pytest.approx(logits[:, 0].tolist(), rel=1e-3, abs=1e-3)
    assert np.ptp(logits) > 0.1
    for answer in answers:
        assert answer.label is None
        assert answer.scores == {"stars": answer.score}
        assert "label" not in answer.to_json()


def test_one_label_without_a_kind_of_problem_is_a_probability(a_value, tmp_path):
    """As in transformers' pipeline."""
    deployment, _ = a_value
    out = shutil.copytree(deployment.directory, tmp_path / "out")
    config = json.loads((out / "config.json").read_text())
    config.pop("problem_type")
    (out / "config.json").write_text(json.dumps(config))
    document = json.loads((out / "manifest.json").read_text())
    document["files"]["config.json"] = file_entry(out / "config.json")
    (out / "manifest.json").write_text(json.dumps(document))
    found, values = adtp_export.load(out)(TEXTS), deployment(TEXTS)
    assert [answer.score for answer in found] == pytest.approx([1 / (1 + math.exp(-each.score)) for each in values])
    assert {(answer.label, each.label) for answer, each in zip(found, values)} == {(deployment.labels[0], None)}


@pytest.mark.parametrize(
    "fields",
    [
        {"problem_type": "multi_label_classification", "id2label": {0: "food", 1: "film", 2: "sound"}},
        {"problem_type": "regression", "id2label": {0: "stars"}},
        {"id2label": {0: "relevant"}},
        {"problem_type": "regression", "id2label": {0: "taste", 1: "price"}},
    ],
    ids=["several", "value", "one", "values"],
)
def test_the_report_shows_the_scores_that_load_gives(tmp_path, demo, fields):
    verified = tmp_path / "texts.txt"
    verified.write_text(f"{TEXTS[0]}\n")
    out = tmp_path / "out"
    adtp_export.export(save(tmp_path / "model", demo, **fields), out, verify_data=verified)
    (shown,) = re.findall("<figcaption>(.*?) &middot; ", (out / "report.html").read_text())
    (answer,) = adtp_export.load(out)([TEXTS[0]])
    if len(answer.scores) == 1:
        assert float(shown) == pytest.approx(answer.score, rel=0.01)
    elif answer.label is None:
        told = {label: float(value) for label, value in (each.split() for each in shown.split(", "))}
        assert told == pytest.approx(answer.scores, rel=0.01)
    else:
        told = {label: float(share) / 100 for label, share in re.findall(r"(\w+) ([\d.]+)%", shown)}
        right = {label: score for label, score in answer.scores.items() if score > 0.5}
        assert told == pytest.approx(right or {answer.label: answer.score}, abs=1e-3)


class Watched:
    """An engine that notes the shapes it is run on."""

    def __init__(self, engine):
        self.engine, self.shapes = engine, []
        self.inputs, self.outputs = engine.inputs, engine.outputs

    def run(self, batch, wanted=None):
        self.shapes.append(batch["input_ids"].shape)
        return self.engine.run(batch, wanted)


PROFILE = {"batch": "1:2:3", "seq": "1:4:8"}


@pytest.fixture
def limited(a_value, tmp_path, monkeypatch):
    """A target with an engine's profile in its record. ONNX Runtime runs it: the limits are kept before a runtime is asked."""
    out = shutil.copytree(a_value[0].directory, tmp_path / "out")
    document = json.loads((out / "manifest.json").read_text())
    document["targets"][PLAIN]["profile"] = PROFILE
    (out / "manifest.json").write_text(json.dumps(document))
    deployment = adtp_export.load(out, target=PLAIN)
    monkeypatch.setattr(deployment, "_engine", Watched(deployment._engine))
    return deployment


def test_a_profile_limits_batches_and_lengths(limited, a_value):
    texts = [*TEXTS, "fine", "good film", "bad", "a b c d e f g h i j"]
    answers = limited(texts, batch_size=100)
    shapes = limited._engine.shapes
    assert [rows for rows, _ in shapes] == [3, 3, 2]
    assert max(columns for _, columns in shapes) == limited.max_tokens == 8
    free = a_value[0](texts)
    assert [answer.truncated for answer in answers] == [text.count(" ") + 3 > 8 for text in texts]
    assert not any(answer.truncated for answer in free)
    for answer, other in zip(answers, free, strict=True):
        assert answer.truncated or answer.score == pytest.approx(other.score, abs=1e-4)
    limited._engine.shapes.clear()
    limited(texts, batch_size=2)
    assert [rows for rows, _ in limited._engine.shapes] == [2] * 4


def test_a_row_longer_than_the_profile_is_refused(limited):
    def batch(columns):
        ids = np.full((1, columns), 5)
        return {"input_ids": ids, "attention_mask": ids * 0 + 1, "token_type_ids": ids * 0}

    assert limited.run(batch(8)).shape == (1, 1)
    with pytest.raises(InputError, match="9"):
        limited.run(batch(9))
    assert limited._engine.shapes == [(1, 8)]


def test_the_debug_form_is_made_for_the_same_profile(limited, monkeypatch):
    from adtp_export.inference import session as room

    asked = []
    runtime = room.RUNTIMES["onnxruntime"]

    class Spy:
        def open_model(self, model, spec, profile=None, threads=0):
            asked.append(profile)
            return runtime.open_model(model, spec, profile, threads)

    monkeypatch.setitem(room.RUNTIMES, "onnxruntime", Spy())
    (answer,) = limited("a b c d e f g h i j", return_kept=True)
    assert len(answer.kept) == 8
    assert asked == [{axis: ShapeRange.parse(text, axis) for axis, text in PROFILE.items()}]
