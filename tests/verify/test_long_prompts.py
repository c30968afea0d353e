"""Prompts are long enough for what only long ones show, and rows that no choice leaves are known."""

import dataclasses
import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from language_models import STAGES as OF_METHODS
from language_models import networks, save_causal, save_llava, with_rows

import adtp_export
from adtp_export.errors import VerificationError
from adtp_export.model.decoder import load_decoder
from adtp_export.model.image_pruners import BtpStage, FastVStage
from adtp_export.model.vision import language_model
from adtp_export.verify import prompts
from adtp_export.verify.plain_choice import Settled, choose, settled
from adtp_export.verify.prefill import Prompt, compare, expect, for_precision, keeps_settled, may_follow
from adtp_export.verify.prompts import draw_prompts


def lengths(decoder):
    return [len(prompt.states) for prompt in draw_prompts(decoder, 1)]


@pytest.mark.parametrize("window", [100, 300])
def test_a_window_that_is_not_there_shows(window, tmp_path):
    model = save_causal(tmp_path, "mistral", sliding_window=window, max_position_embeddings=512)
    decoder = load_decoder(tmp_path)
    assert lengths(decoder) == [1, 17, 40, 64, 130 + window - 1]  # a token sees itself, and those before it
    expected = expect(decoder, draw_prompts(decoder, 1), 1)
    assert compare(decoder, expected, *networks(decoder)).failure is None
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "sliding_window": None}))
    assert compare(decoder, expected, *networks(load_decoder(tmp_path))).failure.startswith("logits differ")
    assert model.config.sliding_window == window


def test_the_longest_prompt_has_bounds(tmp_path, monkeypatch):
    save_causal(tmp_path / "a", "llama", max_position_embeddings=512)
    decoder = load_decoder(tmp_path / "a")
    assert lengths(decoder)[-1] == 130
    flops_of_token = 2 * sum(np.prod(weight.shape) for weight in decoder.model.parameters())
    for most, expected in ((130, 130), (129, 64)):
        monkeypatch.setattr(prompts, "LONGEST_FLOPS", float(most * flops_of_token))
        assert lengths(decoder)[-1] == expected
    save_causal(tmp_path / "b", "llama", max_position_embeddings=50)
    assert lengths(load_decoder(tmp_path / "b"))[-1] == 40


@pytest.mark.parametrize(
    ("found", "may"),
    [
        ([0, 1, 3, 4, 7], True),
        ([0, 1, 3, 3, 7], True),
        ([0, 1, 4, 5, 7], False),
        ([0, 3, 3, 3, 7], False),
        ([0, 1, 3, 7], False),
    ],
)
def test_image_tokens_that_may_follow(found, may):
    """Tokens 0 and 7 are text, and 5 and 6 left before."""
    prompt = Prompt(torch.zeros(8, 4), (torch.arange(8) > 0) & (torch.arange(8) < 7))
    own = [np.array([0, 1, 2, 3, 4, 7]), np.array([0, 1, 2, 3, 7])]
    assert may_follow(prompt, own, np.array(found)) == may


@pytest.mark.parametrize(
    ("found", "may"),
    [
        ([0, 1, 2, 4, 7], True),
        ([0, 1, 1, 2, 7], True),
        ([0, 2, 2, 4, 7], False),
        ([0, 1, 3, 4, 7], False),
    ],
)
def test_image_tokens_that_rounding_may_leave(found, may):
    """Tokens 0 and 7 are text, 5 and 6 left before; 1 follows whatever the rounding, and 3 never does."""
    prompt = Prompt(torch.zeros(8, 4), (torch.arange(8) > 0) & (torch.arange(8) < 7))
    choice = Settled(np.array([1, 0, 0, 0], bool), np.array([1, 1, 0, 1], bool), 2)
    assert keeps_settled(prompt, np.array([0, 1, 2, 3, 4, 7]), np.array(found), choice) == may


STAGES = [
    FastVStage(layer=1, keep=0.3),
    BtpStage(layer=1, divisor=2, attended=1.0),
    BtpStage(layer=1, divisor=2, attended=1.0, surplus=1.5),
    BtpStage(layer=1, divisor=2, attended=0.6, surplus=1.5, diverse=0.2, spatial=4),
    BtpStage(layer=1, divisor=2, attended=0.6, surplus=1.5, diverse=0.3, twice=True),
    BtpStage(layer=1, divisor=3, attended=0.5, surplus=1.2, all_candidates=True),
    BtpStage(layer=1, divisor=0),
]


@pytest.mark.parametrize("stage", STAGES, ids=str)
@given(n=st.integers(1, 40), levels=st.integers(1, 20), seed=st.integers(0, 2**32 - 1))
def test_what_is_settled_holds_however_scores_are_rounded(stage, n, levels, seed):
    """Scores of a grid are often tied, or as far apart as may be rounded."""
    rng = np.random.default_rng(seed)
    scores, states = rng.integers(0, levels, n).astype(float), torch.tensor(rng.standard_normal((n, 6)))
    off, spread = 0.5 * rng.integers(0, 3), torch.arange(4)
    choice = settled(stage, scores, n, off)
    for _ in range(4):
        rounded = scores + off * rng.choice([-1.0, 0.0, 1.0], n)
        copies = choose(stage, torch.tensor(rounded), states, n, spread).copies
        assert (copies[choice.sure] > 0).all()
        assert (copies <= choice.copies * choice.possible).all()
    exact = settled(stage, scores + np.arange(n) / 100, n, 0.0)
    copies = choose(stage, torch.tensor(scores + np.arange(n) / 100), states, n, spread).copies
    if not exact.possible.all():
        assert ((copies > 0) == exact.sure).all()


def test_a_near_tie_excuses_no_other_image_tokens(tmp_path):
    """The closest choice says nothing of tokens that are far behind."""
    save_llava(tmp_path)
    decoder = load_decoder(tmp_path, {"method": "fastv", "stages": [{"layer": 2, "keep": 0.5}]})
    expected = expect(decoder, prompts := draw_prompts(decoder, 1), 1)
    tied = [
        dataclasses.replace(reading, choices=[dataclasses.replace(reading.choices[0], margin=0.0)])
        for reading in expected.exact
    ]

    def worst(number, rows):
        choice, image = tied[number].choices[0], np.flatnonzero(prompts[number].may_leave.numpy())
        text = rows[~prompts[number].may_leave.numpy()[rows]]
        return np.sort([*text, *image[np.argsort(choice.scores, kind="stable")[: len(rows) - len(text)]]])

    close = dataclasses.replace(expected, exact=tied)
    assert "image tokens that no rounding explains" in compare(decoder, close, *with_rows(decoder, 2, worst)).failure
    loose = dataclasses.replace(close, choice_errors=np.full(1, 1e9))
    found = compare(decoder, loose, *with_rows(decoder, 2, worst))
    assert found.failure == "of no prompt the same tokens were kept, so no answer could be compared"


@torch.no_grad()
def test_answers_that_overflow_are_told(tmp_path):
    """The norm behind an infinity makes it a NaN."""
    save_llava(tmp_path)
    decoder = load_decoder(tmp_path)
    prompts = draw_prompts(decoder, 2)
    assert for_precision(expect(decoder, prompts, 1), decoder, "fp16").error < 1
    language_model(decoder.model).layers[1].mlp.down_proj.weight *= 6e6
    expected = expect(decoder, prompts, 1)
    with pytest.raises(VerificationError, match="PyTorch overflows in fp16"):
        for_precision(expected, decoder, "fp16")
    assert np.isfinite(for_precision(expected, decoder, "bf16").error)


@pytest.mark.slow
def test_windows_see_each_of_two_tokens_at_one_position(tmp_path):
    (tmp_path / "model").mkdir()
    save_llava(tmp_path / "model", model_type="mistral", sliding_window=9)
    (tmp_path / "btp.json").write_text(json.dumps({"method": "btp", "stages": OF_METHODS["btp"]}))
    manifest = adtp_export.export(tmp_path / "model", tmp_path / "out", pruning=tmp_path / "btp.json")
    assert {target.status for target in manifest.targets.values()} == {"verified"}
