import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adtp_export.answers import spans


@given(st.integers(1, 9), st.integers(1, 9), st.integers(0, 2**32 - 1), st.integers(1, 5))
def test_best_spans_are_those_of_all_pairs(size, longest, seed, top):
    random = np.random.default_rng(seed)
    start, end, allowed = random.normal(size=size), random.normal(size=size), random.random(size) < 0.7
    pairs = sorted(
        (
            (start[i] + end[j], i, j)
            for i in range(size)
            for j in range(i, min(size, i + longest))
            if allowed[i] and allowed[j]
        ),
        reverse=True,
    )
    found = spans.best_spans(start, end, allowed, longest, top)
    assert [(s.start, s.end) for s in found] == [(i, j) for _, i, j in pairs[:top]]
    assert [s.score for s in found] == pytest.approx([score for score, _, _ in pairs[:top]])


def test_quality_as_squad_has_it():
    answered = ["The cat!", "a dog", "", "something"]
    true = [["cat"], ["big dog", "dog and cat"], [], [""]]
    assert spans.quality(answered, true) == pytest.approx(
        {"exact": 2 / 4, "f1": (1 + 2 / 3 + 1 + 0) / 4, "has_answer_f1": (1 + 2 / 3) / 2, "no_answer_accuracy": 1 / 2}
    )


def test_the_best_span_is_in_the_context_and_not_too_long():
    start, end = np.array([9, 0, 2, 0.0]), np.array([9, 0, 0, 2.0])
    context = np.array([False, True, True, True])
    assert spans.told(start, end, context, 2) == (2, 3)
    assert spans.told(start, end, context, 1) == (2, 2)  # the first of two that are as good
    assert spans.told(start, end, ~context | True, 2) == (0, 0)
    assert spans.told(start, end, np.zeros(4, bool), 2) is None
