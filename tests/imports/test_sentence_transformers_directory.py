"""Directories of sentence-transformers: what is read, how texts are read, and what is refused."""

import contextlib
import json
import shutil

import pytest
import torch
from plain_models import add_tokenizer, edit_json, write_json, write_plain, write_sentence_transformer
from tokenizers import Tokenizer

from adtp_export.errors import InputError
from adtp_export.imports import ReadOptions, open_checkpoint
from adtp_export.model.config import EmbeddingSettings
from adtp_export.pipeline.companions import write_companions


@pytest.fixture
def directory(tmp_path):
    return write_sentence_transformer(tmp_path / "model")


def settings_of(checkpoint):
    return EmbeddingSettings.read(checkpoint.student.config.embedding)


@pytest.mark.parametrize("folder", ["", "0_Transformer"])
@pytest.mark.parametrize(
    ("pooling", "expected"),
    [
        ({}, "mean"),
        ({"pooling_mode_mean_tokens": False, "pooling_mode_cls_token": True}, "first"),
        ({"pooling_mode_mean_tokens": False, "pooling_mode_max_tokens": True}, "max"),
        ({"pooling_mode_mean_tokens": None, "pooling_mode": "cls"}, "first"),
    ],
)
def test_modules_become_a_head(tmp_path, folder, pooling, expected):
    directory = write_sentence_transformer(tmp_path / "model", folder, **pooling)
    checkpoint = open_checkpoint(directory)
    assert settings_of(checkpoint) == EmbeddingSettings(expected, True, ((32, 6, True, "tanh"),))
    torch.manual_seed(1)
    assert torch.equal(checkpoint.student.projections[0].linear.weight, torch.randn(6, 32))
    assert checkpoint.max_tokens == 20
    assert checkpoint.directory == directory
    (told,) = [note for note in checkpoint.notes if "was taken for a model of sentence-transformers" in note]
    assert told.endswith(", 1 dense after it, vectors of length 1")
    (tmp_path / "out").mkdir()
    write_companions(checkpoint, tmp_path / "out")
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["adtp"]["max_tokens"] == 20
    assert written["adtp"]["dimension"] == 6
    tokenizers = (
        json.loads((place / "tokenizer.json").read_text()) for place in (tmp_path / "out", directory / folder)
    )
    assert next(tokenizers)["model"] == next(tokenizers)["model"]


def test_modules_count_more_than_the_class_that_was_saved(directory):
    """Encoders often come from pretraining, and say so."""
    edit_json(directory / "config.json", architectures=["BertForMaskedLM"])
    assert open_checkpoint(directory).student.config.head == "embedding"


def test_without_a_projection(tmp_path):
    checkpoint = open_checkpoint(write_sentence_transformer(tmp_path / "model", dense=False))
    assert settings_of(checkpoint) == EmbeddingSettings("mean", True, ())


def test_normalize_may_stand_anywhere_after_pooling(directory, tmp_path):
    reorder(0, 1, 3, 2)(directory)
    checkpoint = open_checkpoint(directory)
    assert settings_of(checkpoint) == EmbeddingSettings("mean", False, ("normalize", (32, 6, True, "tanh")))
    (tmp_path / "out").mkdir()
    write_companions(checkpoint, tmp_path / "out")
    again = json.loads((tmp_path / "out" / "modules.json").read_text())
    assert [module["path"] for module in again] == ["", "1_Pooling", "2_Normalize", "3_Dense"]


def test_the_first_numbers_of_vectors(directory):
    edit_json(directory / "config_sentence_transformers.json", truncate_dim=4)
    checkpoint = open_checkpoint(directory)
    assert checkpoint.settings["truncate_dim"] == 4
    assert any("of which the first 4 numbers are taken" in note for note in checkpoint.notes)


def test_the_hash_is_of_all_that_decides(directory):
    before = open_checkpoint(directory).sha256
    edit_json(directory / "2_Dense" / "config.json", activation_function="torch.nn.modules.linear.Identity")
    after = open_checkpoint(directory)
    assert settings_of(after).projections == ((32, 6, True, "none"),)
    assert after.sha256 != before


@pytest.mark.parametrize(("lowers", "edited"), [(True, False), (False, True)])
def test_lower_case_is_honoured(directory, tmp_path, lowers, edited):
    """A tokenizer that does so already stays as it is; another one is changed, in OUT as well."""
    fields = json.loads((directory / "tokenizer.json").read_text())
    fields["normalizer"]["lowercase"] = lowers
    write_json(directory / "tokenizer.json", fields)
    edit_json(directory / "sentence_bert_config.json", do_lower_case=True)
    checkpoint = open_checkpoint(directory)
    assert checkpoint.tokenizer_edited == edited
    (tmp_path / "out").mkdir()
    write_companions(checkpoint, tmp_path / "out")
    written = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    for tokenizer in (checkpoint.tokenizer, written):
        assert tokenizer.encode("A GOOD Film").ids == tokenizer.encode("a good film").ids


def test_a_length_that_is_not_said_is_the_tokenizers(directory):
    edit_json(directory / "sentence_bert_config.json", max_seq_length=None)
    edit_json(directory / "tokenizer_config.json", model_max_length=30)
    assert open_checkpoint(directory).max_tokens == 30
    edit_json(directory / "tokenizer_config.json", model_max_length=10**30)
    assert open_checkpoint(directory).max_tokens == 64


def test_prompts_are_kept_and_told(directory, tmp_path):
    prompts = {"prompts": {"query": "query: ", "document": ""}, "default_prompt_name": "query"}
    write_json(directory / "config_sentence_transformers.json", prompts)
    checkpoint = open_checkpoint(directory)
    assert any("has the prompts query" in note and "'query' is put before texts" in note for note in checkpoint.notes)
    (tmp_path / "out").mkdir()
    write_companions(checkpoint, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config_sentence_transformers.json").read_text()) == prompts
    adtp = json.loads((tmp_path / "out" / "config.json").read_text())["adtp"]
    assert (adtp["prompts"], adtp["prompt"]) == ({"query": "query: ", "document": ""}, "query")


def test_a_reranker_has_a_transformer_alone(tmp_path):
    directory = write_plain(tmp_path / "model", "sequence", num_labels=1)
    module = {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.base.modules.transformer.Transformer"}
    write_json(directory / "modules.json", [module])
    write_json(directory / "config_sentence_transformers.json", {"activation_fn": "torch.nn.modules.linear.Identity"})
    checkpoint = open_checkpoint(directory)
    assert checkpoint.student.config.head == "sequence"
    assert checkpoint.settings["activation"] == "torch.nn.modules.linear.Identity"


def change_module(i, **fields):
    def change(directory):
        modules = json.loads((directory / "modules.json").read_text())
        modules[i] |= fields
        write_json(directory / "modules.json", modules)

    return change


def reorder(*order):
    def change(directory):
        modules = json.loads((directory / "modules.json").read_text())
        write_json(directory / "modules.json", [modules[i] for i in order])

    return change


def edit(name, **fields):
    return lambda directory: edit_json(directory / name, **fields)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            change_module(2, type="sentence_transformers.models.LSTM"),
            "got the module 'sentence_transformers.models.LSTM'; accepted",
        ),
        (change_module(2, type="somebody.code.Dense"), "got the module 'somebody.code.Dense'"),
        (change_module(1, path="../elsewhere"), "Pooling lies in '../elsewhere'"),
        (change_module(1, path=".."), "Pooling lies in '..'"),
        (
            reorder(0, 3, 1, 2),
            "got Transformer, Normalize, Pooling, Dense; accepted are Transformer and Pooling, then any number",
        ),
        (reorder(0, 2, 3), "Pooling is missing"),
        (reorder(), "got no module"),
        (reorder(0), "got Transformer alone; a model of vectors needs Pooling"),
        (
            edit("1_Pooling/config.json", pooling_mode="weightedmean"),
            "pooling is \\['weightedmean'\\]; accepted is one of mean, cls, lasttoken, max",
        ),
        (edit("1_Pooling/config.json", pooling_mode_lasttoken=True), "pooling is \\['mean', 'lasttoken'\\]"),
        (edit("1_Pooling/config.json", include_prompt=False), "include_prompt is false"),
        (edit("2_Dense/config.json", activation_function="torch.nn.ELU"), "accepted are torch's Tanh, Identity"),
        (edit("2_Dense/config.json", activation_function="somebody.Tanh"), "activation_function is 'somebody.Tanh'"),
        (edit("2_Dense/config.json", use_residual=True), "use_residual is true"),
        (edit("2_Dense/config.json", module_input_name="token_embeddings"), "work on 'sentence_embedding'"),
        (edit("2_Dense/config.json", out_features=7), "is \\(6, 32\\), not \\(7, 32\\)"),
        (edit("2_Dense/config.json", in_features="x"), "embedding.projections: got .*; accepted is an integer"),
        (
            edit("sentence_bert_config.json", max_seq_length=0.5),
            "max_seq_length: got .*; accepted is an integer of at least 4",
        ),
        (edit("config_sentence_transformers.json", prompts=["query"]), "prompts are \\['query'\\]"),
        (edit("config_sentence_transformers.json", default_prompt_name="query"), "the default 'query'"),
        (
            edit("config_sentence_transformers.json", truncate_dim=0),
            "truncate_dim: got .*; accepted is an integer of at least 1",
        ),
        (edit("config.json", model_type="t5"), "model_type is 't5'; accepted are"),
        (edit("config.json", model_type="pruned_encoder"), "beside modules.json it has to be a plain encoder"),
        (lambda directory: (directory / "modules.json").write_text("{}"), "is no list of modules"),
        (lambda directory: (directory / "2_Dense" / "model.safetensors").unlink(), "has no weights"),
        (lambda directory: (directory / "config.json").unlink(), "has no config.json"),
    ],
)
def test_bad_directories(directory, change, message):
    change(directory)
    with pytest.raises(InputError, match=message) as raised:
        open_checkpoint(directory)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("name", "value", "refused"),
    [
        ("config_args", {"is_causal": False}, True),
        ("tokenizer_args", {"model_max_length": 8}, True),
        ("tokenizer_name_or_path", "another", True),
        ("model_kwargs", {"torch_dtype": "float16", "attn_implementation": "eager"}, False),
        ("config_kwargs", {}, False),
    ],
)
def test_arguments_that_change_the_model_are_not_passed_over(directory, name, value, refused):
    edit_json(directory / "sentence_bert_config.json", **{name: value})
    message = f"its settings for sentence-transformers have {name}: .* Write it into config.json"
    with pytest.raises(InputError, match=message) if refused else contextlib.nullcontext():
        open_checkpoint(directory)


@pytest.mark.parametrize(
    ("file", "fields", "message"),
    [
        ("1_Pooling/config.json", {"pooling_mode": [["x"]]}, "pooling is .*; accepted is one of"),
        (
            "config_sentence_transformers.json",
            {"prompts": {"a": "b"}, "default_prompt_name": []},
            "prompts are .*the default",
        ),
    ],
)
def test_values_of_other_types_are_one_message(directory, file, fields, message):
    if not (directory / file).exists():
        write_json(directory / file, {})
    edit_json(directory / file, **fields)
    with pytest.raises(InputError, match=message):
        open_checkpoint(directory)


def test_options_of_others_are_refused(directory):
    with pytest.raises(InputError, match="--head: got sequence, and .*modules.json says that the model gives vectors"):
        open_checkpoint(directory, ReadOptions(head="sequence"))
    with pytest.raises(InputError, match="--padded-length is for checkpoints of LTP"):
        open_checkpoint(directory, ReadOptions(padded_length=128))


def test_another_tokenizer_is_refused(directory):
    shutil.rmtree(directory)
    write_sentence_transformer(directory)
    edit_json(directory / "config.json", vocab_size=100)
    with pytest.raises(InputError, match="the tokenizer gives ids up to 1237, the model knows 100"):
        open_checkpoint(directory)
    assert add_tokenizer(directory) == directory
