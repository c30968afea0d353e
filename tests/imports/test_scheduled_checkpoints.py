"""The checkpoints of Length-Adaptive Transformer and PoWER-BERT, and what their own code answered."""

import numpy as np
import pytest
from originals import AgainstReference, Original

from adtp_export.imports import ReadOptions

LENGTHS = {"lat": [40, 30, 24, 16, 11, 6], "power": [40, 30, 20, 8]}


@pytest.fixture(scope="module", params=LENGTHS)
def original(request, tmp_path_factory):
    if request.param == "power":
        pytest.importorskip("h5py", reason="h5py is not installed")
    options = ReadOptions(allow_pickle=True, length_config=LENGTHS[request.param])
    return Original.open(request.param, tmp_path_factory, options)


class TestAgainstReference(AgainstReference):
    pass


def test_the_original_answers_alike_where_padding_did_not_decide(original):
    """There padding gives attention, too. So it keeps others in as many rows as `golden.json` tells, and answers otherwise."""
    told, stored = original.told, original.golden
    alike = (original.kept() == stored["orig_kept"] & stored["attention_mask"].astype(bool)).all((0, 2))
    assert alike.sum() == told["rows_with_equal_kept"] > 0
    far = np.abs(original.checkpoint.student(**original.batch).logits.numpy() - stored["orig_logits"]).max(1)
    assert far[alike].max() <= original.tolerance + told["max_logit_difference_where_kept_is_equal"]
    assert far[~alike].max() > 100 * original.tolerance


@pytest.mark.parametrize("mistake", ["from_others", "length"])
def test_planted_mistakes_are_noticed(original, mistake):
    """What a token gives itself is left out, or not, against the system's rule; a length is one too large."""
    pruners, expected = list(original.checkpoint.student.pruners.values()), original.golden["ref_kept"]
    right = [getattr(pruner, mistake) for pruner in pruners]
    try:
        for pruner, value in zip(pruners, right):
            setattr(pruner, mistake, not value if mistake == "from_others" else value + 1)
        assert (original.kept() != expected).any()
    finally:
        for pruner, value in zip(pruners, right):
            setattr(pruner, mistake, value)
    assert np.array_equal(original.kept(), expected)
