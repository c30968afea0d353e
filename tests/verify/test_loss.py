"""What a precision costs is judged by what the texts show: one flip among few shows nothing."""

import dataclasses
import functools
import json

import numpy as np
import pytest

from adtp_export.data.tokenize import TokenizedText
from adtp_export.data.windows import TextWithOffsets
from adtp_export.verify import metrics
from adtp_export.verify.loss import lost


def answers(flipped):
    """Two classes; the first one everywhere, but for rows ``flipped (rows,) bool``."""
    return [{"logits": np.array([not other, other], np.float32)} for other in flipped]


def loss_of(flipped, labels=None):
    metric = metrics.SequenceMetric(None, labels)
    return lost(metric, answers(np.zeros(len(flipped), bool)), answers(flipped))


@pytest.mark.parametrize(
    ("flips", "texts", "exceeds", "holds"),
    [
        (1, 18, False, False),  # 5.56 points
        (5, 18, True, False),
        (0, 299, False, False),
        (0, 300, False, True),
        (9, 872, False, False),
        (1, 1024, False, True),
        (40, 1024, True, False),
        (0, 1, False, False),
        (1, 1, False, False),
    ],
)
def test_a_limit_of_one_point(flips, texts, exceeds, holds):
    loss = loss_of(np.arange(texts) < flips)
    assert loss.points == pytest.approx(100 * flips / texts)
    assert (loss.exceeds(1), loss.holds(1)) == (exceeds, holds)
    assert loss.texts_for(0) is None
    if loss.points >= 1:
        assert loss.texts_for(1) is None
    else:
        assert loss.texts_for(1) >= 300
        assert (loss.texts_for(1) <= texts) == holds


@pytest.mark.parametrize("texts", [31, 36, 100, 299])
def test_where_nothing_is_lost_300_texts_show_one_point(texts):
    assert loss_of(np.zeros(texts, bool)).texts_for(1) == 300


def test_vectors_of_tokens_are_judged_on_all_texts():
    """Those that are wrong come last."""
    rng = np.random.default_rng(0)
    before = [
        {"token_embeddings": rows / np.linalg.norm(rows, axis=1, keepdims=True)}
        for rows in rng.standard_normal((200, 3, 8))
    ]
    after = [*before[:70], *before[:69:-1]]
    metric = metrics.VectorsMetric()
    assert lost(metric, before, before).points == pytest.approx(0)
    assert lost(metric, before, after).exceeds(1)


def test_margins_are_those_of_the_binomial():
    """At a true loss of 1 point, some 5 of 100 samples say that it is more; at 5 points nearly all do."""
    rng = np.random.default_rng(0)
    exceeds = functools.cache(
        lambda flips: loss_of(np.arange(500) < flips).exceeds(1)
    )  # how many flip is all that counts
    said = {p: np.mean([exceeds((rng.random(500) < p).sum()) for _ in range(200)]) for p in (0.01, 0.05)}
    assert said[0.01] <= 0.05 + 3 * (0.05 * 0.95 / 200) ** 0.5
    assert said[0.05] > 0.95


def test_with_labels_flips_to_the_right_answer_count_against_flips_to_the_wrong_one():
    flipped = np.arange(100) % 5 == 0
    labels = np.where(np.arange(100) % 10 == 0, 1, 0)
    loss = loss_of(flipped, labels)
    assert loss.points == 0
    assert loss.margin > loss_of(flipped * 0 > 0, labels).margin == 3  # 20 flips are less sure than none


def spans_metric():
    """Three questions, of two, one and two windows."""
    windows = [TextWithOffsets(TokenizedText([1] * 3, [0] * 3, False), [(0, 0), (i, i + 1), (0, 0)], [None, 0, None], [None, 1, None])
               for i in range(5)]  # fmt: skip
    asked = [metrics.AskedRow("abcde", [letter]) for letter in "bce"]
    return metrics.SpansMetric(15, windows, [0, 0, 1, 2, 2], asked)


def test_questions_leave_with_all_their_windows():
    part = spans_metric().part(np.array([False, True, True]))
    assert [window.offsets[1][0] for window in part.windows] == [2, 3, 4]
    assert list(part.owners) == [0, 1, 1]
    assert [asked.answers for asked in part.labels] == [["c"], ["e"]]


def test_pairs_leave_together_and_tags_with_their_text():
    pairs = metrics.EmbeddingMetric(np.array([5.0, 0, 3]))
    assert pairs.owners_of(6).tolist() == [0, 0, 1, 1, 2, 2]
    stays = np.array([True, False, True])
    assert pairs.part(stays).scores.tolist() == [5, 3]
    tags = metrics.TokensMetric(["O", "B-X"], [metrics.TaggedRow([1], [tag]) for tag in ("O", "B-X", "O")])
    assert [row.tags for row in tags.part(stays).labels] == [["O"], ["O"]]


@pytest.mark.parametrize("head", ["spans", "pairs", "vectors"])
def test_other_measures_have_a_margin_too(head):
    rng = np.random.default_rng(0)
    if head == "spans":
        metric = spans_metric()
        before = [{name: rng.standard_normal(3) for name in metric.reads} for _ in range(5)]
    else:
        metric = metrics.EmbeddingMetric(np.arange(6.0) if head == "pairs" else None)
        before = [{"sentence_embedding": rng.standard_normal(4).astype(np.float32)} for _ in range(12)]
    assert lost(metric, before, before).points == 0
    moved = [{name: value + rng.standard_normal(value.shape) for name, value in row.items()} for row in before]
    assert 0 < lost(metric, before, moved).margin < np.inf


@pytest.mark.parametrize("labels", [None, np.arange(12.0)])
def test_numbers_lose_what_their_order_loses(labels):
    """However large they are; a reranker's scores may lie anywhere."""
    metric = dataclasses.replace(metrics.default("sequence", None, {0: "LABEL_0"}), labels=labels)
    numbers = [{"logits": np.float32([10 * number])} for number in range(12)]
    moved = [{"logits": row["logits"] * 2 + 0.5} for row in numbers]
    swapped = [moved[i] for i in (1, 0, *range(2, 12))]
    assert lost(metric, numbers, moved).points == pytest.approx(0)
    assert lost(metric, numbers, swapped).points == pytest.approx(100 * 12 / (12 * 143))  # 6 times 2, by n (n^2 - 1)
    assert lost(metric, numbers[:1] * 12, moved[:1] * 12).points == pytest.approx(0)
    worst = metric.agreement_with(swapped, numbers)
    assert worst["agreement"] == 0
    assert worst["similarity_kept"] < 1


def test_a_loss_can_be_stored():
    """JSON has no infinity, also where there is one text."""
    assert json.loads(json.dumps(dataclasses.asdict(loss_of(np.array([True]))), allow_nan=False))["texts"] == 1
