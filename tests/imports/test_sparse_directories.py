"""Directories of sentence-transformers' `SparseEncoder`: what is read, and what is refused."""

import json

import pytest
import torch
from plain_models import edit_json, write_json, write_sparse_encoder

from adtp_export.errors import InputError
from adtp_export.imports import ReadOptions, open_checkpoint
from adtp_export.pipeline.companions import write_companions
from adtp_export.pipeline.convert import import_checkpoint


@pytest.fixture
def directory(tmp_path):
    return write_sparse_encoder(tmp_path / "model")


@pytest.mark.parametrize(("old", "width"), [(False, "embedding_dimension"), (True, "word_embedding_dimension")])
@pytest.mark.parametrize("pooling", ["max", "sum"])
def test_modules_become_a_head(tmp_path, old, width, pooling):
    fields = {"pooling_strategy": pooling, "activation_function": "log1p_relu"}
    checkpoint = open_checkpoint(write_sparse_encoder(tmp_path / "model", old, width, **fields))
    assert checkpoint.student.config.head == "sparse"
    assert checkpoint.student.settings == (pooling, "log1p_relu")
    assert checkpoint.max_tokens == 20
    assert checkpoint.settings == {
        "prompts": {"query": "query : ", "document": ""},
        "max_active_dims": 200,
        "max_tokens": 20,
    }
    told = " ".join(checkpoint.notes)
    assert "was taken for a model of sparse vectors" in told
    assert "encode_sparse(texts, prompt_name=NAME)" in told
    (tmp_path / "out").mkdir()
    write_companions(checkpoint, tmp_path / "out")
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["architectures"] == ["BertForMaskedLM"]
    assert written["adtp"]["dimension"] == written["vocab_size"] == 1238
    assert not (tmp_path / "out" / "modules.json").exists()  # its pooling wants logits, which the graph does not give


def test_an_import_is_the_same_model(directory, tmp_path):
    before = open_checkpoint(directory)
    told = import_checkpoint(directory, tmp_path / "student")
    assert (told["head"], told["method"]) == ("sparse", None)
    after = open_checkpoint(tmp_path / "student")
    assert after.settings == before.settings
    assert after.student.settings == before.student.settings
    own, again = before.student.state_dict(), after.student.state_dict()
    assert own.keys() == again.keys()
    assert all(torch.equal(tensor, again[name]) for name, tensor in own.items())


def test_pooling_has_defaults(directory):
    write_json(directory / "1_SpladePooling" / "config.json", {})
    assert open_checkpoint(directory).student.settings == ("max", "relu")


def test_a_directory_without_modules_pools_as_sentence_transformers_does(directory):
    (directory / "modules.json").unlink()
    checkpoint = open_checkpoint(directory, ReadOptions(head="sparse"))
    assert checkpoint.student.settings == ("max", "relu")
    assert "its vectors are SPLADE's, by the maximum, as sentence-transformers" in " ".join(checkpoint.notes)


def module(number, name):
    def change(directory):
        modules = json.loads((directory / "modules.json").read_text())
        modules[number]["type"] = f"sentence_transformers.sparse_encoder.models.{name}"
        write_json(directory / "modules.json", modules)

    return change


def pooling(**fields):
    return lambda directory: edit_json(directory / "1_SpladePooling" / "config.json", **fields)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            module(0, "Router"),
            "got the module Router: texts go different ways .* accepted is one way, .*save_pretrained",
        ),
        (module(0, "SparseStaticEmbedding"), "SparseStaticEmbedding: a look-up of each token's weight"),
        (module(1, "SparseAutoEncoder"), "SparseAutoEncoder: vectors of a dense model, made sparse; accepted are"),
        (module(1, "Nothing"), "got the module .*Nothing'; accepted are Transformer, .*SpladePooling"),
        (pooling(pooling_strategy="mean"), "pooling_strategy is 'mean'; accepted are max, sum"),
        (pooling(activation_function="gelu"), "activation_function is 'gelu'; accepted are relu, log1p_relu"),
        (pooling(embedding_dimension=30522), "vectors have 30522 numbers, and the vocabulary of .* 1238 tokens"),
        (lambda d: (d / "1_SpladePooling" / "config.json").unlink(), "is missing, which says how vectors are pooled"),
        (
            lambda d: edit_json(d / "config_sentence_transformers.json", max_active_dims=0),
            "max_active_dims: got .*; accepted is an integer of at least 1",
        ),
        (
            lambda d: edit_json(d / "sentence_bert_config.json", modality_config={"text": {"method": "forward"}}),
            "accepted are models that read texts, of whose forward logits is taken",
        ),
    ],
    ids=range(10),
)
def test_what_is_refused(directory, change, message):
    change(directory)
    with pytest.raises(InputError, match=message):
        open_checkpoint(directory)


def test_another_head_is_refused(directory):
    with pytest.raises(InputError, match="got embedding, and .* the model gives sparse vectors; leave --head out"):
        open_checkpoint(directory, ReadOptions(head="embedding"))
