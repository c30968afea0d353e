import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adtp_export.data.tokenize import TokenizedText
from adtp_export.data.windows import TextWithOffsets
from adtp_export.inference.answers import spans


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


def test_true_answers_without_words_do_not_count_beside_others():
    assert spans.exact_and_f1("", ["the", "cat"]) == (0, 0)
    assert spans.exact_and_f1("", ["the"]) == (1, 1)


def test_the_best_span_is_in_the_context_and_not_too_long():
    start, end = np.array([9, 0, 2, 0.0]), np.array([9, 0, 0, 2.0])
    context = np.array([False, True, True, True])
    assert spans.told(start, end, context, 2) == (2, 3)
    assert spans.told(start, end, context, 1) == (2, 2)  # the first of two that are as good
    assert spans.told(start, end, ~context | True, 2) == (0, 0)
    assert spans.told(start, end, np.zeros(4, bool), 2) is None


def window(words, first, sure):
    """A window over some words of a context of three letters each, from word `first` on, that is `sure` of word `sure`."""
    tokens = range(first, first + words)
    offsets = [(0, 0), *((4 * i, 4 * i + 3) for i in tokens), (0, 0)]
    sides = [None, *[1] * words, None]
    logits = np.zeros((words + 2, 2))
    logits[1 + sure - first] = 20.0
    return logits, TextWithOffsets(
        TokenizedText([0] * len(sides), [0] * len(sides), False), offsets, [None, *tokens, None], sides
    )


def test_an_answer_that_many_windows_give_has_a_probability():
    """They are as sure together as the surest of them; transformers' sum would be 3."""
    context = " ".join(["ada", "bob", "cat", "ada", "bob", "cat", "Ada", "bob", "cat"])
    windows = [window(3, 0, 0), window(3, 3, 3), window(3, 6, 6)]
    windows[1][0][2] = 5.0  # the second is less sure
    found = spans.answers(context, windows, 2, top=50, may_be_none=True)
    best = found.parts[0]
    assert (best.text.lower(), best.start) == ("ada", 0)
    alone = [spans.answers(context, [one], 2).parts[0].score for one in windows]
    assert best.score == max(alone) > 0.99
    assert alone[1] < alone[0]
    assert all(0 <= part.score <= 1 for part in found.parts)


@given(st.integers(1, 5), st.integers(0, 2**32 - 1), st.sampled_from([1, 30, 1e4]))
def test_scores_of_one_window_are_those_of_disjoint_spans(words, seed, size):
    """Equal texts are added, so the sum over all answers and none is at most 1."""
    random = np.random.default_rng(seed)
    context = " ".join(random.choice(["ada", "Bob"], words))
    logits, placed = window(words, 0, 0)
    logits = random.normal(size=logits.shape) * size
    found = spans.answers(context, [(logits, placed)], words, top=100, may_be_none=True)
    assert sum(part.score for part in found.parts) <= 1 + 1e-12 * len(found.parts)
    assert all(0 <= part.score <= 1 for part in found.parts)
