"""Attention flow in models that generate text: that of the graph of transformers' own attention."""

import numpy as np
import pytest
import torch
from language_models import save_causal, save_grid
from test_flow import networkx_flow
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from adtp_export.errors import InputError
from adtp_export.explain.flow import capacities, flows, unit
from adtp_export.explain.merged_layers import merge
from adtp_export.explain.prompt import attended, prompt_flow
from adtp_export.model.decoder import load_decoder

IDS = [5, 9, 30, 7, 41, 9, 12]


@pytest.mark.parametrize("kind", ["qwen3", "qwen2", "llama", "mistral", "qwen2_vl", "qwen2_5_vl"])
def test_flow_is_that_of_transformers_attention(kind, tmp_path):
    has_pictures = kind.endswith("_vl")  # texts alone have the same positions along all axes
    (save_grid if has_pictures else save_causal)(tmp_path, kind)
    auto = AutoModelForImageTextToText if has_pictures else AutoModelForCausalLM
    whole = auto.from_pretrained(tmp_path, attn_implementation="eager", dtype=torch.float64).eval()
    with torch.no_grad():
        attentions = whole(torch.tensor([IDS]), output_attentions=True).attentions
    layers = [capacities(weights[0].numpy()) for weights in attentions]
    decoder = load_decoder(tmp_path).copy(torch.float64)
    for token in (-1, 3):
        found, end = prompt_flow(decoder, IDS, token), token % len(IDS)
        depths = np.full(len(IDS), len(layers))
        expected = [networkx_flow(layers, depths, source, [end]) for source in range(len(IDS))]
        rounding = (
            len(layers) * len(IDS) ** 2 * unit(1)
        )  # a cut has at most all edges, and fp64 is off by less than half a unit
        np.testing.assert_allclose(found, expected, atol=rounding, rtol=0)
        assert not found[end + 1 :].any()
        assert found[end] >= 0.5  # the residual connections alone


def test_merged_layers(tmp_path):
    """The model has four layers: four are all of them, and three are another graph."""
    save_causal(tmp_path, "llama", num_hidden_layers=4)
    decoder = load_decoder(tmp_path)
    exact, same, less = (prompt_flow(decoder, IDS, merge_layers=left) for left in (None, 4, 3))
    assert np.array_equal(exact, same)
    depths, merged = np.full(len(IDS), 3), merge(attended(decoder.backbone, IDS), 3)
    assert np.array_equal(less, flows(merged, depths, range(len(IDS)), [len(IDS) - 1]))
    assert not np.array_equal(exact, less)
    with pytest.raises(InputError, match="merge_layers: got 2; accepted is an integer of at least 3"):
        prompt_flow(decoder, IDS, merge_layers=2)


def test_bad_input_is_refused(tmp_path):
    save_causal(tmp_path, "llama")
    decoder = load_decoder(tmp_path)
    for ids, token, told in (
        ([], -1, "got 0 tokens; the model reads 1 to"),
        ([5] * (decoder.max_tokens + 1), -1, "so give a shorter text"),
        ([5, -1], -1, "ids: got -1; accepted are 0 to"),
        (IDS, len(IDS), "token: got 7; the text has 7 tokens, so accepted are -7 to 6"),
    ):
        with pytest.raises(InputError, match=told):
            prompt_flow(decoder, ids, token)
