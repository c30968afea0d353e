"""What is asked and refused on the way to a checkpoint of Length-Adaptive Transformer, and which lists of lengths are read."""

import pytest
import torch
from originals import Original
from testbed import shared_or_skip

from adtp_export.errors import InputError
from adtp_export.imports import ReadOptions, open_checkpoint

LENGTHS = "40,30,24,16,11,6"
READ = ReadOptions(allow_pickle=True, length_config=LENGTHS)


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    return Original.open("lat", tmp_path_factory, READ)


@pytest.fixture
def copied(tmp_path, original):
    return original.copy(tmp_path / "lat")


def test_it_asks_for_the_lengths(copied):
    with pytest.raises(InputError, match="type: --length-config .*lat/length_config.txt, or the lengths") as raised:
        open_checkpoint(copied, ReadOptions(allow_pickle=True))
    assert "\n" not in str(raised.value)


def test_what_it_says_to_type_works(copied):
    checkpoint = open_checkpoint(copied, ReadOptions(allow_pickle=True, length_config=copied / "length_config.txt"))
    assert checkpoint.student.config.settings.lengths == [40, 30, 24, 16, 11, 6]
    assert "Length-Adaptive Transformer on bert" in checkpoint.notes[0]
    (copied / "length_config.txt").unlink()
    assert open_checkpoint(copied, READ).student.site_names == checkpoint.student.site_names
    assert open_checkpoint(copied, ReadOptions(allow_pickle=True)).student.site_names == ()  # a plain encoder


def test_it_asks_before_it_unpickles(copied):
    with pytest.raises(InputError, match="--allow-pickle"):
        open_checkpoint(copied, ReadOptions(length_config=LENGTHS))


def test_a_layer_that_can_drop_nothing_has_no_site(original, copied):
    """128 is the longest text, and 9 the length before: the answers are those with sites in all layers."""
    checkpoint = open_checkpoint(copied, ReadOptions(allow_pickle=True, length_config=[200, 128, 9, 9, 5, 5]))
    assert checkpoint.student.site_names == ("2.ffn", "4.ffn")
    assert "; 4 of them drop nothing" in checkpoint.notes[0]
    all_sites = {**checkpoint.student.config.pruning, "lengths": [200, 128, 9, 9, 5, 5]}
    all_sites["sites"] = [f"{i}.ffn" for i in range(6)]
    whole = type(checkpoint.student)(type(checkpoint.student.config)(
        backbone=checkpoint.student.config.backbone, pruning=all_sites, num_labels=3
    )).eval()  # fmt: skip
    whole.load_state_dict(checkpoint.student.state_dict())
    with torch.no_grad():
        assert torch.equal(whole(**original.batch).logits, checkpoint.student(**original.batch).logits)


def test_lengths_that_drop_nothing_leave_a_plain_model(copied):
    checkpoint = open_checkpoint(copied, ReadOptions(allow_pickle=True, length_config=[128] * 6))
    assert checkpoint.student.site_names == ()
    assert "; 6 of them drop nothing" in checkpoint.notes[0]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("40,30,24,16,11", "got 5 lengths, and the model has 6 layers; accepted is one number per layer"),
        ([40, 30, 24, 16, 11, 6, 4], "got 7 lengths, and the model has 6 layers"),
        ("40,30,24,25,11,6", "got 25 after 24; accepted are lengths that never grow"),
        ("40,30,24,16,11,0", "got the length 0; accepted is at least 1"),
        ((40, 30, 24, 16, 11, -6), "got the length -6; accepted is at least 1"),
        ("40,30,24,16,11,6.5", "got '40,30,24,16,11,6.5', which is no list and no file"),
        ([40, 30, 24, 16, 11, 6.5], "got \\[40, 30, 24, 16, 11, 6.5\\]; accepted is one number per layer"),
        ([40, 30, 24, 16, 11, True], "got \\[40, 30, 24, 16, 11, True\\]"),
        (40, "got 40 \\(int\\); accepted is text or a path or a list"),
        ("[40, 30", "got '\\[40, 30', which is no list and no file"),
        ("9" * 5000, "which is no list and no file|cannot be read"),
        ("missing.txt", "got 'missing.txt', which is no list and no file"),
        ("", "it is a directory|which is no list and no file"),
        ("a\0b", "cannot be read"),
    ],
)
def test_bad_lengths(copied, given, message):
    with pytest.raises(InputError, match=f"--length-config: .*(?:{message})") as raised:
        open_checkpoint(copied, ReadOptions(allow_pickle=True, length_config=given))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nothing here", "holds no lists of whole numbers; accepted is one, in brackets"),
        ("(40, 30, 24, 16, 11, 6)\n(40, 30, 24, 16, 11, 5)\n", "holds 2 lists of whole numbers"),
        ("(0.5, 0.25)", "holds no lists of whole numbers"),
        ("(40, 30, 24, 16, 11, __import__('os'))", "holds no lists of whole numbers"),
    ],
)
def test_bad_files_of_lengths(copied, text, message):
    (copied / "length_config.txt").write_text(text)
    with pytest.raises(InputError, match=message):
        open_checkpoint(copied, ReadOptions(allow_pickle=True, length_config=copied / "length_config.txt"))


@pytest.mark.parametrize(
    "text",
    [
        "[40,30,24,16,11,6]",
        "40, 30, 24, 16, 11, 6\n",
        "(40, 30, 24, 16, 11, 6)\t1000000\t0.9\t0\tNone\n",
        "a\n lengths:[40,30,24,16,11,6] b(c)",
    ],
)
def test_files_of_lengths(copied, text):
    (copied / "any").write_text(text)
    checkpoint = open_checkpoint(copied, ReadOptions(allow_pickle=True, length_config=str(copied / "any")))
    assert checkpoint.student.config.settings.lengths == [40, 30, 24, 16, 11, 6]


def test_the_option_is_for_such_checkpoints_alone(demo):
    with pytest.raises(InputError, match="--length-config is for checkpoints of Length-Adaptive Transformer, which"):
        open_checkpoint(demo, ReadOptions(length_config=LENGTHS))
    ltp = shared_or_skip("originals/ltp") / "checkpoint"
    with pytest.raises(InputError, match="--length-config is for checkpoints of Length-Adaptive Transformer, which"):
        open_checkpoint(ltp, ReadOptions(padded_length=64, allow_pickle=True, length_config=LENGTHS))
