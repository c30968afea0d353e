"""LTP's own checkpoint and its own answers, and what is asked and refused on the way to them."""

import numpy as np
import pytest
import torch
from originals import AgainstReference, Original, edit

from adtp_export.errors import InputError
from adtp_export.imports import ReadOptions, open_checkpoint

PADDED = 64
READ = ReadOptions(allow_pickle=True, padded_length=PADDED)


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    return Original.open("ltp", tmp_path_factory, READ)


def test_thresholds_are_those_of_the_original(original):
    """Learned part plus the base of the configuration; one is negative, and is 1e-5 then."""
    found = [pruner.threshold.item() for pruner in original.checkpoint.student.pruners.values()]
    assert found == pytest.approx([max(1e-5, value) for value in original.told["thresholds"]], rel=1e-6)


class TestAgainstReference(AgainstReference):
    pass


def test_the_reference_has_all_sites(original):
    assert len(original.golden["ref_kept"]) == 6


def test_the_original_answers_alike(original):
    """Its [CLS] stays in all rows, so true removal is its own masking: `golden.json` says 7.4e-07 between the two."""
    answer = original.checkpoint.student(**original.batch)
    assert np.array_equal(original.kept(), original.golden["orig_kept"])
    assert np.abs(answer.logits.numpy() - original.golden["orig_logits"]).max() <= original.tolerance + 7.4e-7


def test_a_planted_mistake_is_noticed(original):
    """Scores over another padded length keep other tokens."""
    pruners = original.checkpoint.student.pruners.values()
    for pruner in pruners:
        pruner.queries *= 2
    try:
        kept = original.kept()
    finally:
        for pruner in pruners:
            pruner.queries //= 2
    assert not np.array_equal(kept, original.golden["ref_kept"])


@pytest.fixture
def copied(tmp_path, original):
    return original.copy(tmp_path / "ltp")


def test_it_asks_for_the_padded_length(copied):
    with pytest.raises(InputError, match="type: --padded-length 128"):
        open_checkpoint(copied, ReadOptions(allow_pickle=True))


def test_it_asks_before_it_unpickles(copied):
    with pytest.raises(InputError, match="--allow-pickle"):
        open_checkpoint(copied, ReadOptions(padded_length=PADDED))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prune_mode": "rising_threshold"}, "accepted are 'absolute_threshold', 'threshold', 'topk'"),
        ({"architectures": ["LTPForTokenClassification"]}, "accepted of LTP is LTPForSequenceClassification"),
        ({"architectures": [7]}, "got 7; accepted of LTP is LTPForSequenceClassification"),
        ({"quant_mode": True}, "quant_mode is on"),
        ({"final_token_threshold": None}, "final_token_threshold is None"),
        ({"num_hidden_layers": 7}, "accepted are all 7 layers"),
        ({"num_hidden_layers": 2**31 - 1}, "accepted are all 2147483647 layers"),
        ({"final_token_threshold": 10**400}, "final_token_threshold is 1000.*accepted is a number"),
        ({"max_position_embeddings": 5}, "no room for a text"),
        ({"hidden_size": 48}, "do not match config.json"),
    ],
)
def test_bad_checkpoints_are_named(copied, changes, message):
    with pytest.raises(InputError, match=message):
        open_checkpoint(edit(copied, **changes), READ)


def test_a_threshold_of_zero_switches_a_layer_off(copied):
    weights = torch.load(copied / "pytorch_model.bin", weights_only=True)
    for layer in (1, 4):
        name = f"ibert.encoder.layer.{layer}.attention.self.pruner.keep_threshold"
        weights[name] = -(torch.tensor(0.01 * layer / 6))
    torch.save(weights, copied / "pytorch_model.bin")
    checkpoint = open_checkpoint(copied, READ)
    assert checkpoint.student.site_names == ("0.ffn", "2.ffn", "3.ffn", "5.ffn")
    assert any("2 of its layers drop nothing" in note for note in checkpoint.notes)


def test_the_option_is_for_ltp_alone(demo):
    with pytest.raises(InputError, match="--padded-length is for checkpoints of LTP"):
        open_checkpoint(demo, ReadOptions(padded_length=128))
