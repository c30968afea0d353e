"""The verdict on every head: what is right passes, and planted mistakes are named. A new line in the table of heads is tested by it."""

import dataclasses
import functools
import re

import numpy as np
import pytest
import torch
from testbed import HEAD_FIELDS, as_numpy, make_batch, make_encoder

from adtp_export.contract import OUTPUTS
from adtp_export.data.tokenize import TokenizedText
from adtp_export.data.windows import TextWithOffsets
from adtp_export.model.packed import PackedStudent
from adtp_export.verify import metrics
from adtp_export.verify.oracle import for_precision, run_oracle, typed
from adtp_export.verify.parity import compare

CASES = [(head, pruning) for head in HEAD_FIELDS for pruning in ("none", "adtp")]
PER_TOKEN = [(head, name) for head, outputs in OUTPUTS.items() for name, axes in outputs.items() if "sequence" in axes]


@functools.cache
def known(head, pruning):
    """A random model of a head, and its oracle."""
    student = make_encoder("bert", pruning, head=head, **HEAD_FIELDS[head])
    batches = [as_numpy(make_batch([9, 20, 4], 21)), as_numpy(make_batch([30, 2], 32, seed=1))]
    return student, run_oracle(student, batches)


class PackedEngine:
    """The packed student as an engine, with a spoiler."""

    def __init__(self, student, spoil=lambda outputs: None):
        self.student, self.packed, self.spoil = student, PackedStudent(student), spoil
        self.inputs, self.outputs = student.input_names, (*OUTPUTS[student.config.head], "kept_site")

    def run(self, batch):
        tensors = {name: torch.from_numpy(array) for name, array in batch.items()}
        with torch.inference_mode():
            values = [output.numpy().copy() for output in self.packed(**tensors)[0]]
            kept = self.student(**tensors).kept_site.numpy()
        outputs = dict(zip(self.outputs, values))
        self.spoil(outputs)
        return {**outputs, "kept_site": kept}


def verdict(head, pruning, spoil=lambda outputs: None):
    student, oracle = known(head, pruning)
    return compare(oracle, PackedEngine(student, spoil))


@pytest.mark.parametrize(("head", "pruning"), CASES)
def test_what_is_right_passes(head, pruning):
    parity = verdict(head, pruning)
    assert parity.failure is None
    assert parity.prediction_agreement == parity.kept_token_agreement == 1
    assert 0 < parity.max_abs_logit_diff <= parity.tolerance < 1e-3
    assert list(parity.outputs) == (list(OUTPUTS[head]) if len(OUTPUTS[head]) > 1 else [])
    for found in parity.outputs.values():
        assert 0 < found.mean_abs_diff <= found.max_abs_diff <= found.tolerance < 1e-3
    if head == "embedding":
        assert parity.answers["smallest_cosine"] == pytest.approx(1, abs=1e-9)
        assert parity.answers["similarity_kept"] == pytest.approx(1)


def test_each_output_has_a_tolerance_of_its_own():
    """States are of size 1, and a vector of length 1 has smaller numbers."""
    _, oracle = known("embedding", "adtp")
    assert oracle.tolerances["sentence_embedding"] < oracle.tolerances["last_hidden_state"] / 2


@pytest.mark.parametrize(("head", "pruning"), CASES)
def test_rows_in_another_order_fail(head, pruning):
    def spoil(outputs):
        for name in outputs:
            outputs[name] = outputs[name][::-1].copy()

    failure = verdict(head, pruning, spoil).failure
    assert failure.startswith(next(iter(OUTPUTS[head])))  # of tokens, the padding is found first


@pytest.mark.parametrize(("head", "name"), PER_TOKEN)
def test_tokens_in_another_order_fail(head, name):
    def spoil(outputs):
        outputs[name][:, 1:4] = outputs[name][:, 3:0:-1].copy()

    assert f"{name}: off by" in verdict(head, "adtp", spoil).failure


@pytest.mark.parametrize(("head", "name"), PER_TOKEN)
@pytest.mark.parametrize("value", [1e-30, np.nan])
def test_padding_that_is_not_zero_fails(head, name, value):
    def spoil(outputs):
        if outputs[name].shape[1] == 21:
            outputs[name][2, 4] = value

    said = f"{name}: not " + ("all values are finite" if np.isnan(value) else "0 in the padding of row 2$")
    assert re.fullmatch(said, verdict(head, "adtp", spoil).failure.partition(" (")[0])


@pytest.mark.parametrize(("head", "name"), PER_TOKEN)
@pytest.mark.parametrize("pruning", ["none", "adtp"])
def test_one_token_beyond_the_tolerance_is_named(head, name, pruning):
    _, oracle = known(head, pruning)

    def spoil(outputs):
        if outputs[name].shape[1] == 21:
            outputs[name][1, 19] += 2 * np.float32(oracle.tolerances[name])

    assert f"in row 1, token 19, allowed are {oracle.tolerances[name]:.3g}" in verdict(head, pruning, spoil).failure


def test_one_flipped_tag_is_counted():
    def spoil(outputs):
        logits = outputs["logits"]
        if logits.shape[1] == 21:
            logits[0, 8, logits[0, 8].argmin()] += 100

    parity = verdict("tokens", "adtp", spoil)
    assert "logits: off by" in parity.failure
    assert parity.prediction_agreement == pytest.approx(1 - 1 / (9 + 20 + 4 + 30 + 2))


def test_another_span_is_counted():
    def spoil(outputs):
        outputs["start_logits"][0, 1], outputs["end_logits"][0, 1] = 100, 100

    parity = verdict("spans", "none", spoil)
    assert "start_logits: off by" in parity.failure
    assert "more findings" in parity.failure  # the ends do, too
    assert parity.prediction_agreement < 1


def test_a_vector_that_is_not_normalized_fails():
    def spoil(outputs):
        outputs["sentence_embedding"] *= np.float32(1.001)

    parity = verdict("embedding", "adtp", spoil)
    assert "sentence_embedding: off by" in parity.failure
    assert parity.prediction_agreement == 1  # it points where it should


def test_states_that_are_wrong_fail_though_the_vector_is_right():
    def spoil(outputs):
        outputs["last_hidden_state"][0, 0, 0] += 0.01

    assert "last_hidden_state: off by" in verdict("embedding", "adtp", spoil).failure


@pytest.mark.parametrize("head", HEAD_FIELDS)
def test_states_of_padding_in_transformers_mean_nothing(head):
    """Without sites its own forward is the definition; what it computes for padding is not asked of anyone."""
    _, oracle = known(head, "none")
    for name, axes in OUTPUTS[head].items():
        for batch in oracle.batches:
            padding = batch.kept_site < 0
            assert padding.any()
            assert "sequence" not in axes or not batch.outputs[name][padding].any()
            assert batch.references[name].dtype == np.float64


@pytest.mark.parametrize("head", HEAD_FIELDS)
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_lower_precisions_have_wider_bounds(head, precision):
    student, oracle = known(head, "adtp")
    judged = for_precision(oracle, typed(student, precision), precision)
    assert judged.output_errors.keys() == oracle.output_errors.keys()
    for name, error in judged.output_errors.items():
        assert error > 30 * oracle.output_errors[name]
    assert judged.loss.points >= 0


def test_labels_of_tags_are_judged_at_the_first_token_of_words():
    metric = metrics.TokensMetric(
        ["O", "B-X"], [metrics.TaggedRow([1, 3], ["B-X", "O"]), metrics.TaggedRow([1], ["O"])]
    )
    logits = np.array([[0, 9], [0, 1], [0, 9], [0, 1], [9, 9]], np.float32)
    rows = [{"logits": logits}, {"logits": logits[:3]}]
    assert metric.main == "f1"
    assert metric.quality(rows) == pytest.approx({"accuracy": 1 / 3, "precision": 1 / 3, "recall": 1, "f1": 0.5})
    assert metric.points_lost(metric.quality(rows), {"f1": 0.25}, {"agreement": 1.0}) == pytest.approx(25)
    assert metric.points_lost({}, {}, {"agreement": 0.9}) == pytest.approx(10)


def test_answers_are_taken_from_the_context():
    """Questions that have no answer are judged by the first token; where all have one, it is not asked."""
    places, sides = [(0, 0), (0, 3), (0, 3), (4, 9), (0, 0)], [None, 0, 1, 1, None]
    placed = TextWithOffsets(TokenizedText([1] * 5, [0] * 5, False), places, [None, 0, 0, 1, None], sides)
    asked = metrics.AskedRow("the tenor", ["tenor"])
    row = {"start_logits": np.array([5, 9, 0, 1, 9.0]), "end_logits": np.array([5, 9, 0, 1, 9.0])}
    right = metrics.SpansMetric(15, [placed], [0], [asked]).quality([row])
    assert right == {"exact": 1.0, "f1": 1.0}
    unanswerable = metrics.AskedRow("the tenor", [])
    both = metrics.SpansMetric(15, [placed] * 2, [0, 1], [asked, unanswerable]).quality([row, row])
    assert both["exact"] == 0.5
    assert both["no_answer_accuracy"] == 1
    assert metrics.SpansMetric(15, [placed]).span(0, row) == (3, 3)
    assert metrics.SpansMetric().span(0, row) == (1, 1)  # the first of those that are as good


def test_all_windows_of_a_context_answer_together():
    """The second window is surer of its word than the first one is of its own."""
    sides = [None, 1, None]
    windows = [
        TextWithOffsets(TokenizedText([1] * 3, [0] * 3, False), [(0, 0), place, (0, 0)], [None, 0, None], sides)
        for place in ((0, 3), (4, 9))
    ]
    rows = [{"start_logits": np.array([0, sure, 0.0]), "end_logits": np.array([0, sure, 0.0])} for sure in (1, 2)]
    metric = metrics.SpansMetric(15, windows, [0, 0], [metrics.AskedRow("the tenor", ["tenor"])])
    assert metric.quality(rows) == {"exact": 1.0, "f1": 1.0}
    assert metric.quality(rows[::-1]) == {"exact": 0.0, "f1": 0.0}


def test_vectors_are_judged_in_pairs():
    rows = [{"sentence_embedding": np.array(v, np.float32)} for v in ([1, 0], [1, 0], [1, 0], [0, 1], [1, 0], [1, 1])]
    metric = metrics.EmbeddingMetric(np.array([5.0, 0, 3]))
    assert metric.quality(rows)["spearman"] == pytest.approx(1)
    assert dataclasses.replace(metric, scores=np.array([0.0, 5])).quality(rows)["spearman"] == pytest.approx(-1)
    assert metrics.EmbeddingMetric().quality(rows) == {}
    lost = metric.points_lost({}, {}, {"agreement": 1.0, "similarity_kept": 0.98})
    assert lost == pytest.approx(2)
