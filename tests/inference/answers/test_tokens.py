import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adtp_export.inference.answers import tokens

TAGS = st.lists(st.sampled_from(["O", "B-A", "I-A", "B-B", "I-B"]), max_size=8)


@pytest.mark.parametrize(
    ("tags", "found"),
    [
        ("O O", []),
        ("B-A I-A O B-A", [("A", 0, 2), ("A", 3, 4)]),
        ("B-A B-A", [("A", 0, 1), ("A", 1, 2)]),
        ("I-A I-A I-B", [("A", 0, 2), ("B", 2, 3)]),
        ("B-A I-B", [("A", 0, 1), ("B", 1, 2)]),
    ],
)
def test_entities_as_conll_reads_them(tags, found):
    assert list(tokens.entities(tags.split())) == found


def test_quality_of_entities():
    true = [["B-A", "I-A", "O", "B-B"], ["O"]]
    answered = [["B-A", "O", "O", "B-B"], ["B-A"]]
    assert tokens.quality(answered, true, ["O", "B-A", "I-A", "B-B"]) == pytest.approx(
        {"accuracy": 3 / 5, "precision": 1 / 3, "recall": 1 / 2, "f1": 2 / 5}
    )


def test_quality_of_tags():
    assert tokens.quality([["N", "V"], ["N"]], [["N", "N"], ["N"]], ["N", "V"]) == pytest.approx(
        {"accuracy": 2 / 3, "f1_macro": 0.4}
    )


@pytest.mark.parametrize("tags", [["B-A"], ["O"]])
def test_measures_are_those_of_the_models_tags(tags):
    """Whatever tags a few texts happen to hold: a record of one run has the names of another's."""
    assert set(tokens.quality([tags], [tags], ["O", "B-A"])) == {"accuracy", "precision", "recall", "f1"}
    assert set(tokens.quality([tags], [tags], ["O", "B-A", "X"])) == {"accuracy", "f1_macro"}


@given(TAGS)
def test_entities_cover_what_is_tagged(tags):
    covered = [i for e in tokens.entities(tags) for i in range(e.start, e.end)]
    assert covered == [i for i, tag in enumerate(tags) if tag != "O"]


def test_agreement_is_the_share_of_the_same_tags():
    logits = np.array([[0, 1.0], [2, 1], [0, 3]])
    assert tokens.agreement(logits, logits * [1, -1]).tolist() == [False, True, False]
