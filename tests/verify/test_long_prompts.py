"""Prompts are long enough for what only long ones show, and rows that no choice leaves are known."""

import json

import numpy as np
import pytest
import torch
from language_models import networks, save_causal

from adtp_export.model.decoder import load_decoder
from adtp_export.verify import prompts
from adtp_export.verify.prefill import Prompt, compare, expect, may_follow
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
