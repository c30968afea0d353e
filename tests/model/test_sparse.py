"""Sparse vectors: every family's masked-language head, as transformers computes its logits; blocks and pieces of any size."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_models import SHAPE, write_plain
from safetensors.torch import load_file, save_file
from testbed import make_batch
from tiny_models import GATED_BACKBONES, TINY_BACKBONES, TINY_BERT, make_encoder
from transformers import AutoModelForMaskedLM

from adtp_export.errors import InputError
from adtp_export.imports import ReadOptions, open_checkpoint
from adtp_export.model import PrunedEncoderConfig, predictions, sequences, tied
from adtp_export.model.heads import head_class
from adtp_export.model.packed import PackedStudent
from adtp_export.model.registry import BACKBONES, fields
from adtp_export.model.sequences import Packed

EUROBERT = {
    **TINY_BERT,
    "model_type": "eurobert",
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "mask_token_id": 3,
}
FAMILIES = {**TINY_BACKBONES, **GATED_BACKBONES, "eurobert": EUROBERT}
FORMS = [(pooling, activation) for pooling in predictions.POOLINGS for activation in predictions.ACTIVATIONS]
LENGTHS = [40, 1, 9, 33]


def make(backbone, seed=0, **sparse):
    """A random model, with norms and biases that are not those of a new one; it gets its weights as those of a file are loaded."""
    torch.manual_seed(seed)
    config = PrunedEncoderConfig(backbone=backbone, head="sparse", sparse=sparse)
    model, noise = head_class("sparse")(config).eval(), torch.Generator().manual_seed(seed)
    ties = tied.shared(model)
    stored = dict(model.named_parameters())
    moved = {name: x.detach() + torch.empty_like(x).normal_(0, 0.1, generator=noise) for name, x in stored.items()}
    tied.complete(moved, ties)
    tied.load(model, {**model.state_dict(), **moved}, ties)
    return model.requires_grad_(False)


def batch_for(model):
    batch = make_batch(LENGTHS, 42, types=fields(model.dense.config)["type_vocab_size"])
    batch["input_ids"][batch["attention_mask"].bool()] = batch["input_ids"][batch["attention_mask"].bool()].clamp(min=5)
    return {name: batch[name] for name in model.input_names}


def by_definition(logits, mask, pooling, activation):
    """The definition of sentence-transformers, text by text."""
    rows = []
    for row, live in zip(logits, mask.bool()):
        weights = torch.log1p(torch.relu(row[live]))
        weights = torch.log1p(weights) if activation == "log1p_relu" else weights
        rows.append(weights.max(0).values if pooling == "max" else weights.sum(0))
    return torch.stack(rows)


def test_the_families_of_these_tests_are_all_that_have_such_a_head():
    known = {fields["model_type"] for fields in FAMILIES.values()}
    for name in set(BACKBONES) - known:
        with pytest.raises(InputError, match=f"head: got 'sparse', for which transformers has no {name} model"):
            make({**EUROBERT, "model_type": name})


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_made_of_transformers_own_logits(monkeypatch, family):
    """In blocks that do not divide the vocabulary. transformers rounds a root mean square to fp32, whatever the states are."""
    monkeypatch.setattr(predictions, "BLOCK", 40)
    tolerance = 1e-5 if family == "eurobert" else 1e-11
    for pooling, activation in FORMS if family == "bert" else FORMS[:1]:
        model = make(FAMILIES[family], pooling=pooling, activation=activation).double()
        batch = batch_for(model)
        expected = by_definition(model.dense(**batch).logits, batch["attention_mask"], pooling, activation)
        assert (expected > 0).any(1).all()
        assert (expected == 0).any()
        found, (packed,) = model(**batch).sparse_embedding, PackedStudent(model)(**batch)[0]
        torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)
        torch.testing.assert_close(packed, found, rtol=0, atol=1e-11)


@given(st.lists(st.integers(1, 70), min_size=1, max_size=6), st.integers(1, 40))
@settings(max_examples=60, deadline=None)
def test_the_largest_and_the_sum_of_each_text(lengths, piece):
    """One long text does not widen the others: rows that are looked at are those of texts, and less than a piece more for each."""
    values = torch.randn(sum(lengths), 3, generator=torch.Generator().manual_seed(sum(lengths)))
    bounds = torch.tensor([0, *np.cumsum(lengths)])
    tokens = Packed(values, bounds, torch.zeros(len(values)), torch.zeros(len(values)))
    looked_at = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sequences, "PIECE", piece)
        own = torch.nn.functional.embedding
        patch.setattr(torch.nn.functional, "embedding", lambda rows, x: looked_at.append(rows.numel()) or own(rows, x))
        found = tokens.maxima()(values)
    parts = values.split(lengths)
    assert torch.equal(found, torch.stack([part.amax(0) for part in parts]))
    pieces = [-(-length // piece) for length in lengths]
    assert looked_at[0] < sum(lengths) + piece * len(lengths)
    assert looked_at[1] < sum(pieces) + piece * len(lengths)
    assert looked_at[2] == len(lengths) * -(-max(pieces) // piece)
    torch.testing.assert_close(tokens.sum(values), torch.stack([part.sum(0) for part in parts]))


def test_a_dropped_token_counts_with_the_state_that_reached_its_cut():
    model = make_encoder("bert", "adtp", head="sparse").double()
    batch = make_batch([20] * 4, 20)
    states, kept_site, _ = model.encode(**batch)
    assert (kept_site == 0).any()
    logits = model.dense.cls(states)
    torch.testing.assert_close(model(**batch).sparse_embedding, logits.amax(1).relu().log1p(), rtol=0, atol=1e-11)


TABLE, DECODER = "bert.embeddings.word_embeddings.weight", "cls.predictions.decoder.weight"


def change(directory, edit):
    path = directory / "model.safetensors"
    weights = load_file(path)
    edit(weights)
    save_file(weights, path, metadata={"format": "pt"})


def test_the_decoder_may_be_the_table_under_either_name(tmp_path):
    directory = write_plain(tmp_path, "open")
    read = lambda: open_checkpoint(directory, ReadOptions(head="sparse")).student  # noqa: E731
    first = read()
    assert first.get_parameter(TABLE) is first.get_parameter(DECODER)
    change(directory, lambda weights: weights.update({DECODER: weights.pop(TABLE)}))
    assert all(torch.equal(tensor, first.state_dict()[name]) for name, tensor in read().state_dict().items())
    change(directory, lambda weights: weights.update({TABLE: weights[DECODER] + 1}))
    student = read()  # two that differ are two, as in transformers
    own = AutoModelForMaskedLM.from_pretrained(directory)
    for name in (TABLE, DECODER):
        assert torch.equal(student.get_parameter(name), own.get_parameter(name))
    assert not torch.equal(student.get_parameter(TABLE), student.get_parameter(DECODER))


@pytest.mark.parametrize(
    ("sparse", "message"),
    [
        ({"pooling": "mean"}, "sparse.pooling: got 'mean'; accepted are max, sum"),
        ({"activation": "gelu"}, "sparse.activation: got 'gelu'; accepted are relu, log1p_relu"),
        ({"pool": "max"}, "sparse: got the field 'pool'; accepted are pooling, activation"),
        ([], "sparse: got .*; accepted is an object"),
    ],
    ids=str,
)
def test_wrong_settings_are_named(sparse, message):
    with pytest.raises(InputError, match=message):
        PrunedEncoderConfig(backbone={"model_type": "bert", **SHAPE}, head="sparse", sparse=sparse)


def test_settings_are_of_that_head_alone():
    with pytest.raises(InputError, match="sparse: is for the head 'sparse', and this is 'sequence'; leave it out"):
        PrunedEncoderConfig(backbone={"model_type": "bert", **SHAPE}, sparse={"pooling": "max"})


@pytest.mark.parametrize(
    ("head", "message"),
    [
        ("embedding", "--head: got sparse, and .* the head 'embedding'; leave --head out"),
        ("sequence", "--head: got sparse, and .* the head 'sequence'"),
    ],
)
def test_a_model_without_such_a_head_is_refused(tmp_path, head, message):
    with pytest.raises(InputError, match=message):
        open_checkpoint(write_plain(tmp_path, head), ReadOptions(head="sparse"))


def test_weights_of_such_a_head_have_to_be_there(tmp_path):
    directory = write_plain(tmp_path, "embedding")
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "architectures": ["BertForMaskedLM"]}))
    with pytest.raises(InputError, match="the weights do not match config.json: .* missing .*cls.predictions"):
        open_checkpoint(directory, ReadOptions(head="sparse"))
