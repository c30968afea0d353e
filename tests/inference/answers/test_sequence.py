"""Answers of the sequence head, against transformers' conventions and scipy."""

import numpy as np
import pytest
import scipy.special
import scipy.stats
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from adtp_export.errors import InputError
from adtp_export.inference import answers
from adtp_export.inference.answers import sequence

LOGITS = np.array([[1.0, 3.0, -2.0], [0.5, 0.5, 0.5], [900.0, -900.0, 0.0]], np.float32)


def test_heads_are_a_table():
    assert answers.for_head("sequence") is sequence
    with pytest.raises(
        InputError,
        match="got 'sequenze'; accepted are sequence, tokens, spans, embedding, masked, sparse, vectors, hybrid; did you mean 'sequence'",
    ):
        answers.for_head("sequenze")


@pytest.mark.filterwarnings("error")
def test_scores_are_scipys():
    exact = LOGITS.astype(np.float64)
    single = sequence.scores(LOGITS, "single_label_classification")
    assert single.dtype == np.float64
    np.testing.assert_allclose(single, scipy.special.softmax(exact, axis=1), rtol=1e-12)
    several = sequence.scores(LOGITS, "multi_label_classification")
    np.testing.assert_allclose(several, scipy.special.expit(exact), rtol=1e-12)
    np.testing.assert_array_equal(sequence.scores(LOGITS, "regression"), exact)


def test_answers_name_the_best_label():
    first, tied, _ = sequence.answers(LOGITS, ["a", "b", "c"], "single_label_classification")
    assert (first.label, first.score) == ("b", first.scores["b"])
    assert sum(first.scores.values()) == pytest.approx(1)
    assert (tied.label, tied.score) == ("a", pytest.approx(1 / 3))
    (several,) = sequence.answers(LOGITS[:1], ["a", "b", "c"], "multi_label_classification")
    assert several.label == "b"
    assert several.scores["a"] == pytest.approx(1 / (1 + np.exp(-1)))
    (value,) = sequence.answers(np.array([[2.5]], np.float32), ["stars"], "regression")
    assert (value.label, value.score, value.scores) == (None, 2.5, {"stars": 2.5})


def test_agreement_by_kind_of_problem():
    other = np.array([[-1.0, 2.0, -2.0], [0.5, 0.6, 0.5], [1.0, 0.0, 0.0]], np.float32)
    assert sequence.agreement(LOGITS, other, "single_label_classification").tolist() == [True, False, True]
    assert sequence.agreement(LOGITS, other, None).tolist() == [True, False, True]
    assert sequence.agreement(LOGITS, other, "multi_label_classification").tolist() == [False, True, True]
    values, shifted = np.array([[1.0], [2.0]]), np.array([[1.009], [2.011]])
    assert sequence.agreement(values, shifted, None).tolist() == [True, False]
    assert sequence.agreement(values, shifted, "regression").tolist() == [True, False]


def test_points_lost():
    assert sequence.points_lost(0.9, 0.85, 0.99) == pytest.approx(5)
    assert sequence.points_lost(None, 0.85, 0.99) == pytest.approx(1)
    assert sequence.points_lost(0.9, None, 0.99) == pytest.approx(1)


def test_quality_of_classes():
    two = np.array([[0.0, 1.0], [0.0, 1.0], [1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])  # answers 1, 1, 0, 0, 1
    assert sequence.quality(two, np.array([1, 0, 0, 0, 1])) == {
        "accuracy": pytest.approx(4 / 5),
        "f1": pytest.approx(2 * (2 / 3) / (2 / 3 + 1)),  # precision 2 of 3, recall 2 of 2
        "matthews": pytest.approx((2 * 2 - 1 * 0) / (3 * 2 * 3 * 2) ** 0.5),
    }
    found = sequence.quality(LOGITS, np.array([1, 0, 2]))  # answers 1, 0, 0
    assert list(found) == ["accuracy", "f1_macro", "matthews"]
    assert found["accuracy"] == pytest.approx(2 / 3)
    assert found["f1_macro"] == pytest.approx((2 / 3 + 1 + 0) / 3)


def one_class_at_a_time(answered, true, number):
    """F1 as the harmonic mean of precision and recall, 0 where nothing is right."""
    both = sum(a == t == number for a, t in zip(answered, true))
    if not both:
        return 0.0
    return scipy.stats.hmean([both / answered.count(number), both / true.count(number)])


@given(st.data(), st.sampled_from([2, 3, 5]), st.integers(1, 40))
def test_quality_of_classes_is_that_of_the_definitions(data, classes, rows):
    """Matthews' correlation is Pearson's of one-hot rows; scipy's, where there are two classes."""
    drawn = st.lists(st.integers(0, classes - 1), min_size=rows, max_size=rows)
    answered, true = data.draw(drawn), data.draw(drawn)
    found = sequence.quality(np.eye(classes)[answered], np.array(true))
    one_hot = [np.eye(classes)[side] - np.eye(classes)[side].mean(0) for side in (answered, true)]
    a, b = (side.ravel() for side in one_hot)
    clear = len(set(answered)) > 1 and len(set(true)) > 1
    assert found["matthews"] == pytest.approx(a @ b / np.sqrt((a @ a) * (b @ b)) if clear else 0.0, abs=1e-9)
    if classes == 2 and clear:
        assert found["matthews"] == pytest.approx(scipy.stats.pearsonr(answered, true).statistic, abs=1e-9)
    scores = [one_class_at_a_time(answered, true, number) for number in range(classes)]
    met = sorted({*answered, *true})
    assert (found["f1"] if classes == 2 else found["f1_macro"]) == pytest.approx(
        scores[1] if classes == 2 else np.mean([scores[number] for number in met])
    )
    assert found["accuracy"] == pytest.approx(np.mean(np.equal(answered, true)))


# Few distinct values: nearly all examples have ties.
levels = hnp.arrays(np.float64, st.shared(st.integers(3, 40), key="rows"), elements=st.integers(-4, 4).map(float))


@given(levels, levels, st.sampled_from([1.0, 1e-9, 1e200]))
def test_quality_of_values_is_scipys(values, labels, scale):
    assume(np.ptp(values) and np.ptp(labels))
    found = sequence.quality(values[:, None] * scale, labels)
    assert found["spearman"] == pytest.approx(scipy.stats.spearmanr(values, labels).statistic, abs=1e-9)
    assert found["pearson"] == pytest.approx(scipy.stats.pearsonr(values, labels).statistic, abs=1e-9)


@given(levels)
def test_ranks_of_ties_are_scipys(values):
    np.testing.assert_array_equal(sequence._ranks(values), scipy.stats.rankdata(values))


def test_quality_where_all_are_the_same():
    same, rising = np.ones((4, 1), np.float32), np.arange(4.0)
    assert sequence.quality(same, rising) == {"spearman": 0.0, "pearson": 0.0}
    assert sequence.quality(rising[:, None], same[:, 0]) == {"spearman": 0.0, "pearson": 0.0}
