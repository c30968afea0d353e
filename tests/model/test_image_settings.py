"""Settings of what leaves: presets, and stages and shares that are refused, each with what is accepted."""

import pytest
import torch
from language_models import SIDE

from adtp_export.errors import InputError
from adtp_export.model.image_choice import read_kept
from adtp_export.model.image_pruners import SeenImage, read_stages


@pytest.mark.parametrize(
    ("pruning", "told"),
    [
        ({"method": "btq"}, "did you mean 'btp'"),
        ({"method": ["btp"]}, "got \\['btp'\\]; accepted for image tokens are btp"),
        ({"method": "fastv", "ratio": 1}, "accepted are method and stages"),
        ({"method": "fastv", "stages": []}, "accepted is a list of objects"),
        ({"method": "fastv", "stages": [{"layer": 2}]}, "accepted are the fields layer, keep"),
        ({"method": "fastv", "stages": [{"layer": 2, "keeps": 1}]}, "did you mean 'keep'"),
        ({"method": "fastv", "stages": [{"layer": 2, "keep": 1.5}]}, "accepted are numbers from 0 to 1"),
        ({"method": "fastv", "stages": [{"layer": 2, "keep": 0.01}]}, "of 16 image tokens none stays before layer 2"),
        ({"method": "fastv", "stages": [{"layer": 0, "keep": 0.5}]}, "accepted is an integer of at least 1"),
        ({"method": "btp"}, "got layer 6 in a model of 4 layers; accepted are 1 to 3"),
        (
            {"method": "btp", "stages": [{"layer": 2, "divisor": 0}, {"layer": 1, "divisor": 2}]},
            "layer 1 after layer 2",
        ),
        ({"method": "btp", "stages": [{"layer": 1, "divisor": 0}, {"layer": 2, "divisor": 2}]}, "leave that stage out"),
        (
            {"method": "btp", "stages": [{"layer": 1, "divisor": 2, "attended": 0.7, "diverse": 0.6}]},
            "a sum of at most 1",
        ),
        ({"method": "btp", "stages": [{"layer": 1, "divisor": 2, "surplus": 0.5}]}, "numbers from 1 on"),
        ({"method": "btp", "stages": [{"layer": 1, "divisor": 2, "attended": 0.1}]}, "none of 8 image tokens"),
        (
            {"method": "btp", "stages": [{"layer": 1, "divisor": 2}, {"layer": 2, "divisor": 2, "spatial": 2}]},
            "spatial in the first stage alone",
        ),
        ({"method": "btp", "stages": [{"layer": 1, "divisor": 2, "twice": 1}]}, "accepted are true and false"),
        (
            {
                "method": "btp-qwen",
                "stages": [{"layer": 1, "divisor": 2, "attended": 0.9, "surplus": 1.2, "all_candidates": True}],
            },
            "with all_candidates, and diverse 0.0; accepted is a sum of at most 1",
        ),
    ],
)
def test_stages_that_are_refused(pruning, told):
    with pytest.raises(InputError, match=told):
        read_stages(pruning, 4, SIDE**2)


def test_the_published_settings_of_qwen():
    """A half, a quarter, an eighth; seeds are counted as the authors' code counts them, and the last tokens stay."""
    stages = read_stages({"method": "btp-qwen"}, 28, 1000)
    assert [stage.layer for stage in stages] == [3, 6, 15]
    assert all(stage.softmax for stage in stages)
    count, kept = torch.tensor([1000]), []
    for stage in stages:
        n = int(count)
        generator = torch.Generator().manual_seed(0)
        asked, states = torch.rand(1, n, generator=generator), torch.randn(1, n, 4, generator=generator)
        seen = SeenImage(
            asked, states, torch.ones(1, n, dtype=torch.bool), count, torch.tensor([1000]), torch.arange(n)
        )
        copies = stage.copies(seen)[0]
        kept.append(int(copies.sum()))
        if stage.layer < 15:
            seeds = int(int(0.1 * (n // 2)) * 1.2) if stage.layer == 3 else int(0.4 * (n // 2))
            assert copies[asked[0].argsort(descending=True)[:seeds]].all()
        count = copies.sum()[None]
    assert kept == [500, 250, 125]


def test_places_are_those_of_a_square():
    stage = {"layer": 1, "divisor": 2, "spatial": 4}
    with pytest.raises(InputError, match="of a square"):
        read_stages({"method": "btp", "stages": [stage]}, 4, SIDE**2 + 1)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"keeps": 1}, "did you mean 'keep'"),
        ({"keep": "half"}, "accepted are numbers from 0 to 1"),
        ({"keep": 1.5}, "accepted are numbers from 0 to 1"),
        ({"keep": None}, "got None; accepted are numbers"),
        ({"keep": 0}, "none of 16 image tokens. Accepted are shares from 0.063 on"),
    ],
)
def test_shares_that_are_refused(fields, told):
    with pytest.raises(InputError, match=told):
        read_kept({"method": "divprune", **fields}, SIDE**2)


def test_shares_are_rounded():
    """To the nearest number of tokens, as the authors' code does; the share that the message names keeps one."""
    assert [read_kept({"method": "divprune", **fields}, 576) for fields in ({}, {"keep": 0.1}, {"keep": 1})] == [
        56,
        58,
        576,
    ]
    for tokens in range(1, 1500):
        with pytest.raises(InputError) as refused:
            read_kept({"method": "divprune", "keep": 0}, tokens)
        least = float(str(refused.value).split()[-2])
        assert read_kept({"method": "divprune", "keep": least}, tokens) >= 1
