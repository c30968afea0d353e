"""Transkimmer's own checkpoint and its own answers, RoBERTa and other heads, and what is refused."""

import json
import pickle
from collections import OrderedDict

import numpy as np
import pytest
import torch
from originals import AgainstReference, Original, edit
from safetensors.torch import save_file
from testbed import make_batch, make_encoder

from adtp_export.errors import InputError
from adtp_export.imports import ReadOptions, open_checkpoint

READ = ReadOptions(allow_pickle=True)


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    return Original.open("transkimmer", tmp_path_factory)


def test_every_layer_has_a_site(original):
    assert list(original.checkpoint.student.site_names) == original.told["sites"]
    assert any("Gumbel noise" in note for note in original.checkpoint.notes)


class TestAgainstReference(AgainstReference):
    pass


def test_the_original_answers_alike(original):
    """Without noise its first layer decides alike. With skipped keys hidden, its own modules give the same answers."""
    kept, golden, live = original.kept(), original.golden, original.batch["attention_mask"].bool().numpy()
    assert np.array_equal(kept[0], golden["orig_kept"][0] & live)
    assert np.array_equal(kept, golden["masked_kept"] & live)
    logits = original.checkpoint.student(**original.batch).logits.numpy()
    difference = original.told["masked_max_logit_difference"]
    assert np.abs(logits - golden["masked_logits"]).max() <= original.tolerance + difference


def test_dropped_tokens_keep_the_state_of_the_reference(original):
    original.check_states()


@pytest.mark.parametrize("mistake", ["eps", "activation", "scores"])
def test_planted_mistakes_are_noticed(original, mistake):
    """Of the encoder's eps, of another GELU, and scores the other way round: the reference's scores are to 1e-12."""
    broken = Original(folder=original.folder, options=READ, work=original.work)
    for pruner in broken.checkpoint.student.pruners.values():
        if mistake == "eps":
            pruner.predictor[2].eps = 1e-12
        elif mistake == "activation":
            pruner.predictor[3] = torch.nn.GELU("tanh")
        else:
            pruner.predictor[4].weight.copy_(pruner.predictor[4].weight.flip(0))
    object.__setattr__(broken, "read", lambda: broken.checkpoint)
    with pytest.raises(AssertionError):
        broken.check_reference()


@pytest.fixture
def copied(tmp_path, original):
    return original.copy(tmp_path / "transkimmer")


def stored(directory):
    return torch.load(directory / "pytorch_model.bin", weights_only=True)


def test_it_is_known_without_unpickling_and_asks_first(copied):
    """By the names in the pickle, which are read and not run; `skim_coefficient` says nothing."""
    with pytest.raises(InputError, match="--allow-pickle"):
        open_checkpoint(edit(copied, skim_coefficient=None))
    torch.save(stored(copied), copied / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    assert open_checkpoint(copied, READ).student.config.method == "transkimmer"


@pytest.mark.parametrize("shards", [False, True])
def test_safetensors(copied, original, shards):
    weights = stored(copied)
    (copied / "pytorch_model.bin").unlink()
    if shards:
        names = sorted(weights)
        parts = {"one.safetensors": names[::2], "two.safetensors": names[1::2]}
        for file, own in parts.items():
            save_file({name: weights[name] for name in own}, copied / file)
        index = {"weight_map": {name: file for file, own in parts.items() for name in own}}
        (copied / "model.safetensors.index.json").write_text(json.dumps(index))
    else:
        save_file(weights, copied / "model.safetensors")
    student = open_checkpoint(copied).student
    expected = original.checkpoint.student.state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in student.state_dict().items())


@pytest.mark.parametrize(
    ("backbone", "head", "architecture"),
    [
        ("roberta", "sequence", "RobertaForSequenceClassification"),
        ("bert", "spans", "BertForQuestionAnswering"),
        ("bert", "tokens", "BertForTokenClassification"),
        ("bert", "embedding", "BertModel"),
    ],
)
def test_other_backbones_and_heads(tmp_path, backbone, head, architecture):
    """Written as its code would: predictors beside the layers, under names that end alike."""
    model = make_encoder(backbone, "transkimmer", head=head)
    weights = {}
    for name, tensor in model.state_dict().items():
        if name.startswith("pruners."):
            _, site, rest = name.split(".", 2)
            name = f"{backbone}.encoder.skim_predictors.{site.partition('_')[0]}.{rest}"
        weights[name] = tensor.clone()
    config = {**model.dense.config.to_dict(), "architectures": [architecture], "skim_coefficient": 0.3}
    (tmp_path / "config.json").write_text(json.dumps(config))
    first = ["[PAD]", "[UNK]"] if backbone == "bert" else ["[UNK]", "[PAD]"]  # by the backbone's `pad_token_id`
    (tmp_path / "vocab.txt").write_text("\n".join([*first, "[CLS]", "[SEP]", *(f"w{i}" for i in range(90))]))
    save_file(weights, tmp_path / "model.safetensors")
    student = open_checkpoint(tmp_path).student
    assert type(student) is type(model)
    types = model.dense.config.type_vocab_size
    batch = make_batch([9, 1, 14, 6], 15, types=types)
    batch["input_ids"][batch["input_ids"] == 1] = 5  # RoBERTa takes that for padding
    found, expected = student(**batch), model(**batch)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found.kept_site, expected.kept_site)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda w: [w.pop(n) for n in list(w) if "skim_predictors.3." in n],
            r"layers \[0, 1, 2, 4, 5\]; accepted are all 6",
        ),
        (
            lambda w: w.pop("bert.encoder.skim_predictors.3.predictor.4.bias"),
            "1 missing .pruners.3_attention.predictor.4.bias",
        ),
        (lambda w: w["bert.encoder.skim_predictors.0.predictor.1.bias"].fill_(torch.nan), "NaN or infinite weights"),
    ],
)
def test_bad_weights_are_named(copied, change, message):
    weights = OrderedDict(stored(copied))
    change(weights)
    torch.save(weights, copied / "pytorch_model.bin")
    with pytest.raises(InputError, match=message):
        open_checkpoint(copied, READ)


def test_more_predictors_than_layers(copied):
    with pytest.raises(InputError, match="accepted are all 5 layers"):
        open_checkpoint(edit(copied, num_hidden_layers=5), READ)


def test_a_checkpoint_of_two_systems(copied):
    torch.save({"token_z": torch.ones(1, 2), "pruner_z": torch.ones(1)}, copied / "zs.pt")
    with pytest.raises(InputError, match="could be a checkpoint of ToP .token_z in zs.pt. and Transkimmer"):
        open_checkpoint(copied, READ)


def test_what_is_no_checkpoint_is_looked_into_without_harm(copied, tmp_path):
    """A pickle that would run code is refused; looking for names does not load it."""

    class Harmful:
        def __reduce__(self):
            return (tmp_path / "ran").touch, ()

    (copied / "pytorch_model.bin").write_bytes(pickle.dumps({"skim_predictors.0.x": Harmful()}))
    with pytest.raises(InputError, match="pickled weights only"):
        open_checkpoint(copied)
    with pytest.raises(InputError, match="cannot be read"):
        open_checkpoint(copied, READ)
    assert not (tmp_path / "ran").exists()
