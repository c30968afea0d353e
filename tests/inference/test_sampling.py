"""Which token comes next: as transformers chooses it."""

import numpy as np
import pytest
import torch
import transformers
from language_models import save_causal

import adtp_export
from adtp_export.errors import InputError
from adtp_export.inference.asked import as_token_ids
from adtp_export.inference.generation import Generator, Sampling
from adtp_export.inference.sampling import penalized
from adtp_export.model.decoder import load_decoder
from adtp_export.pipeline.export import decoder


@pytest.mark.parametrize("penalty", [0.5, 1.0, 1.3])
def test_tokens_that_are_there_are_penalized_as_in_transformers(penalty):
    ids = torch.tensor([[3, 5, 5, 0], [1, 1, 2, 7]])
    logits = torch.randn(2, 9, generator=torch.Generator().manual_seed(0))
    there = np.zeros((2, 9), dtype=bool)
    for row, known in zip(there, ids):
        row[known] = True
    expected = transformers.RepetitionPenaltyLogitsProcessor(penalty)(ids, logits)
    np.testing.assert_allclose(penalized(logits.numpy(), there, penalty), expected.numpy(), rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("penalty", [None, 1.5])
def test_text_alone(tmp_path, penalty):
    """Qwen2 with windows; the files go on as transformers does."""
    fields = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
    model = save_causal(tmp_path / "model", "qwen2", **fields)
    model.generation_config.repetition_penalty = penalty
    model.generation_config.no_repeat_ngram_size = 3 if penalty else None
    model.generation_config.save_pretrained(tmp_path / "model")
    model.generation_config.no_repeat_ngram_size = None
    manifest = adtp_export.export(tmp_path / "model", tmp_path / "out")
    assert [note.text for note in manifest.notes if "ignored" in note.text] == [
        "generation_config.json: ignored, and followed by transformers: no_repeat_ngram_size"
    ] * bool(penalty)
    assert {target.status for target in manifest.targets.values()} == {"verified"}
    prompts = [(5, 17, 20, 31, 7, 40, 9), [3], [60, 2]]
    tokens = list(Generator(tmp_path / "out").tokens(prompts, None, Sampling(max_new_tokens=32)))
    given = Sampling(max_new_tokens=32, repetition_penalty=1 if penalty else 1.5)
    assert list(Generator(tmp_path / "out").tokens(prompts, None, given)) != tokens
    for prompt, found in zip(prompts, zip(*tokens, strict=True)):
        wanted = model.generate(torch.tensor([list(prompt)]), max_new_tokens=32, do_sample=False)[0, len(prompt) :]
        assert list(found) == wanted.tolist()


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"num_beams": 1, "guidance_scale": 1.0, "encoder_repetition_penalty": 1.0, "min_length": 0}, None),
        ({"guidance_scale": 1.5, "suppress_tokens": [3]}, "suppress_tokens, guidance_scale"),
        ({"encoder_repetition_penalty": 2.0}, "encoder_repetition_penalty"),
        ({"forced_eos_token_id": 0}, "forced_eos_token_id"),
        ({"stop_strings": ["\n"]}, "stop_strings"),
    ],
    ids=str,
)
def test_settings_that_are_ignored_are_named(tmp_path, fields, named):
    model = save_causal(tmp_path, "llama")
    for name, value in fields.items():
        setattr(model.generation_config, name, value)
    model.generation_config.save_pretrained(tmp_path)
    notes = [note.text for note in decoder._notes(load_decoder(tmp_path))]
    told = f"generation_config.json: ignored, and followed by transformers: {named}"
    assert notes == ([told] if named else [])


@pytest.mark.parametrize("penalty", [0, -1, 101, "1", True])
def test_penalties_out_of_range_are_refused(penalty):
    with pytest.raises(InputError, match="repetition_penalty: got .*; accepted are numbers above 0, to 100"):
        Sampling(repetition_penalty=penalty)


@pytest.mark.parametrize(
    ("prompts", "told"),
    [
        ([], "got no prompts"),
        (5, "prompts: got int; accepted is a list"),
        ("5", "prompts: got str; accepted is a list"),
        ([[]], "prompt 0 has no tokens"),
        ([[1, 97]], "prompt 0 has the token 97; the model knows 0 to 96"),
        ([[-1]], "has the token -1"),
        ([np.array([2**64 - 1], np.uint64)], "has the token 18446744073709551615"),
        ([["x"]], r"prompt 0 is \['x'\]; accepted are token ids, 0 to 96"),
        ([[1], [5.7, 6.2]], r"prompt 1 is \[5.7, 6.2\]; accepted are token ids"),
        ([["5"]], "accepted are token ids"),
        ([[True, False]], "accepted are token ids"),
        ([[5, True]], "accepted are token ids"),
        ([[[1, 2]]], "accepted are token ids"),
        ([[1, [2, 3]]], "accepted are token ids"),
        ([[2**70]], "accepted are token ids"),
        ([7], "prompt 0 is 7; accepted are token ids"),
    ],
)  # fmt: skip
def test_token_ids_that_are_none_are_refused(prompts, told):
    with pytest.raises(InputError, match=told):
        as_token_ids(prompts, 97)


def test_token_ids_of_any_type():
    for prompts in ([[1, 96]], ((1, 96),), iter([(1, 96)]), np.array([[1, 96]], np.uint8)):
        (found,) = as_token_ids(prompts, 97)
        assert (found.dtype, found.tolist()) == (np.int64, [1, 96])
