"""Every mistake in a checkpoint is named, before any work starts."""

import json
import os

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import edit_weights

from adtp_export.errors import InputError
from adtp_export.model.checkpoint import load_checkpoint
from adtp_export.pipeline.companions import write_companions


def test_demo_loads_in_fp32(demo):
    checkpoint = load_checkpoint(demo)
    stored = load_file(demo / "model.safetensors")
    state = checkpoint.student.state_dict()
    assert all(torch.equal(state[name], tensor.float()) for name, tensor in stored.items())
    assert checkpoint.stored_dtype == "float16"
    assert not checkpoint.student.training


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "bert"}, "'prune_sites' is a field of 'adtp_bert'"),
        (
            {"model_type": "bart"},
            "accepted are 'adtp_bert', 'pruned_encoder', 'bert', 'roberta', .* 'ltp'; did you mean 'bert'",
        ),
        ({"model_type": None}, "model_type is None"),
        ({"pruning": {"method": "adtp"}}, "'prune_sites' is a field of format 1 and 'pruning' one of format 2"),
        ({"prune_sites": None}, "'prune_sites' is missing"),
        ({"prune_sites": ["0.attention"]}, "same for every input"),
        ({"prune_sites": ["1.mlp"]}, "got '1.mlp'"),
        ({"prune_sites": ["99.ffn"]}, "layers"),
        ({"prune_sites": ["2.ffn", "1.attention"]}, "order of execution"),
        ({"prune_sites": ["1.ffn", "1.ffn"]}, "each site once"),
        ({"prune_sites": "1.ffn"}, "must be a list"),
        ({"retention_ratios": [0.5, 0.2, 1.0]}, "ascending"),
        ({"retention_ratios": [0.0, 1.0]}, "ascending multiples"),
        ({"retention_ratios": [0.5, 1.5]}, "ascending multiples"),
        ({"retention_ratios": [0.2, 0.5]}, "end with 1.0"),
        ({"retention_ratios": [0.12345, 1.0]}, "multiples of 0.001"),
        ({"retention_ratios": []}, "ascending multiples"),
        ({"retention_ratios": ["a", 1.0]}, "ascending multiples"),
        ({"min_tokens": 0}, "min_tokens"),
        ({"saliency_hidden_size": 0.5}, "saliency_hidden_size"),
        ({"num_attention_heads": 7}, "num_attention_heads"),
        ({"hidden_act": "gelo"}, "did you mean 'gelu'"),
        ({"hidden_size": "big"}, "hidden_size"),
        ({"position_embedding_type": "relative_key"}, "accepted is 'absolute'"),
        ({"num_hidden_layers": 5}, "missing"),
        ({"intermediate_size": 128}, "is \\(256, 64\\), not \\(128, 64\\)"),
        ({"vocab_size": 100}, "tokenizer gives ids up to"),
        ({"pad_token_id": 10**6}, "pad_token_id"),
        ({"pad_token_id": -1}, "pad_token_id"),
        ({"hidden_size": -64}, "hidden_size: got -64; accepted is an integer of at least 1"),
        ({"num_attention_heads": -2}, "num_attention_heads"),
        ({"min_tokens": 10**30}, "min_tokens"),
        ({"max_position_embeddings": 2}, "max_position_embeddings"),
        ({"hidden_dropout_prob": 5.0}, "does not describe a model|hidden_dropout_prob"),
        ({"problem_type": "foo"}, "problem_type"),
        ({"num_hidden_layers": 10**6}, "num_hidden_layers is 1000000, and the weights of layer 4 are missing"),
        ({"vocab_size": 2**31 - 1}, "is \\(1238, 64\\), not \\(2147483647, 64\\)"),
        ({"hidden_size": 2**30, "max_position_embeddings": 2**30}, "does not describe a model|is \\(1238, 64\\)"),
        ({"saliency_hidden_size": 2**31 - 1}, "not \\(2147483647, 64\\)"),
        ({"id2label": None, "label2id": None, "num_labels": 10**9}, "num_labels is 1000000000; accepted are at most"),
        ({"id2label": {"0": "same", "1": "same"}}, "gives labels 0 and 1 the name 'same'"),
        ({"id2label": {"0": "a", "2": "b"}}, "numbered from 0 on"),
        ({"id2label": {"0": "a", "1": 5}}, "id2label names label 1 5"),
        ({"id2label": "x" * 10**6}, "id2label is 'x"),
        ({"label2id": 3}, "label2id is 3"),
        ({"to_dict": 1}, "got the field 'to_dict'"),
        ({"retention_ratios": [10**400, 1.0]}, "retention_ratios must be"),
        ({"hidden_size": 10**400}, "hidden_size"),
        ({"layer_norm_eps": "x"}, "layer_norm_eps"),
        ({"layer_norm_eps": -1.0}, "layer_norm_eps must not be negative, got -1.0"),
        ({"hidden_act": ["gelu"]}, "hidden_act"),
    ],
)
def test_bad_config(edit_config, changes, message):
    with pytest.raises(InputError, match=message) as raised:
        load_checkpoint(edit_config(**changes))
    assert len(str(raised.value)) < 600
    assert "\n" not in str(raised.value)


LOADING = {
    "_attn_implementation": "somebody/kernels",
    "attn_implementation": "somebody/kernels",
    "auto_map": {"AutoConfig": "somebody--code.Config"},
    "quantization_config": {"quant_method": "bitsandbytes"},
    "trust_remote_code": True,
    "dtype": [],
}


def test_what_tells_transformers_how_to_load_is_left_out(edit_config, plain_bert, tmp_path):
    """A name such as somebody/kernels would be fetched from the network, and run."""
    for name in ("config.json", "tokenizer_config.json"):
        path = plain_bert / name
        path.write_text(json.dumps({**json.loads(path.read_text()), **LOADING}))
    write_companions(load_checkpoint(plain_bert), tmp_path)
    assert not {*LOADING} & {*json.loads((tmp_path / "config.json").read_text())}
    assert "auto_map" not in json.loads((tmp_path / "tokenizer_config.json").read_text())
    for directory in (edit_config(**LOADING), plain_bert):
        checkpoint = load_checkpoint(directory)
        assert not {*LOADING} & {*checkpoint.raw_config, *getattr(checkpoint.student.config, "backbone", {})}
        assert checkpoint.student.dense.config._attn_implementation in ("sdpa", "eager")


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "vocab.txt", "model.safetensors"])
def test_pipes_are_not_waited_for(checkpoint_dir, name):
    (checkpoint_dir / "tokenizer.json").unlink()
    (checkpoint_dir / name).unlink()
    os.mkfifo(checkpoint_dir / name)
    with pytest.raises(InputError, match="is a pipe|has no"):
        load_checkpoint(checkpoint_dir)


@pytest.mark.parametrize(
    "value", ["9" * 5000, "[" * 5000 + "]" * 5000, "[" * 500 + "]" * 500, '{"a":' * 900 + "1" + "}" * 900]
)
def test_bombs_in_json(checkpoint_dir, value):
    path = checkpoint_dir / "config.json"
    path.write_text(path.read_text().replace('"vocab_size"', f'"extra": {value}, "vocab_size"'))
    with pytest.raises(InputError, match="is not readable JSON|nested deeper than 64"):
        load_checkpoint(checkpoint_dir)


def test_not_a_directory(tmp_path, demo):
    with pytest.raises(InputError, match="does not exist"):
        load_checkpoint(tmp_path / "nowhere")
    with pytest.raises(InputError, match="not a directory"):
        load_checkpoint(demo / "config.json")
    with pytest.raises(InputError, match="no config.json"):
        load_checkpoint(tmp_path)


def test_config_that_is_not_json(checkpoint_dir):
    (checkpoint_dir / "config.json").write_text("{")
    with pytest.raises(InputError, match="not readable JSON"):
        load_checkpoint(checkpoint_dir)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.pop("classifier.weight"), "1 missing \\(classifier.weight"),
        (lambda w: w.update({"bert.extra": torch.zeros(1)}), "not part of the model \\(bert.extra"),
        (
            lambda w: w.update({"classifier.weight": torch.zeros(2, 3)}),
            "classifier.weight is \\(2, 3\\), not \\(2, 64\\)",
        ),
        (
            lambda w: w["pooler" if "pooler" in w else "classifier.bias"].fill_(torch.nan),
            "NaN or infinite weights in classifier.bias",
        ),
        (lambda w: w["classifier.bias"].fill_(torch.inf), "NaN or infinite"),
        (
            lambda w: w.update({"classifier.bias": torch.zeros(2, dtype=torch.int64)}),
            "accepted are fp32, fp16 and bf16",
        ),
    ],
)
def test_bad_weights(checkpoint_dir, change, message):
    edit_weights(checkpoint_dir, change)
    with pytest.raises(InputError, match=message):
        load_checkpoint(checkpoint_dir)


def test_benign_extra_is_ignored(checkpoint_dir):
    extra = {
        "bert.embeddings.position_ids": torch.arange(128),
        "layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4),  # as old versions of transformers wrote them
    }
    edit_weights(checkpoint_dir, lambda w: w.update(extra))
    load_checkpoint(checkpoint_dir)


def test_truncated_weights(checkpoint_dir):
    path = checkpoint_dir / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(InputError, match="truncated or corrupt"):
        load_checkpoint(checkpoint_dir)
    path.write_bytes(b"not safetensors at all")
    with pytest.raises(InputError, match="truncated or corrupt"):
        load_checkpoint(checkpoint_dir)


@pytest.mark.parametrize(("ending", "save"), [("safetensors", save_file), ("bin", torch.save)])
def test_sharded_weights(checkpoint_dir, demo, ending, save):
    path, pickled = checkpoint_dir / "model.safetensors", ending == "bin"
    weights = load_file(path)
    names = sorted(weights)
    shards = {f"a.{ending}": names[::2], f"b.{ending}": names[1::2]}
    for shard, members in shards.items():
        save({n: weights[n] for n in members}, checkpoint_dir / shard)
    path.unlink()
    index = checkpoint_dir / ("pytorch_model.bin.index.json" if pickled else "model.safetensors.index.json")
    index.write_text(json.dumps({"weight_map": {n: shard for shard, members in shards.items() for n in members}}))
    expected = load_checkpoint(demo).student.state_dict()
    loaded = load_checkpoint(checkpoint_dir, allow_pickle=pickled).student.state_dict()
    assert all(torch.equal(expected[n], loaded[n]) for n in expected)
    if pickled:
        with pytest.raises(InputError, match="pickled weights only .*index.json.*--allow-pickle"):
            load_checkpoint(checkpoint_dir)

    (checkpoint_dir / f"b.{ending}").unlink()
    with pytest.raises(InputError, match=rf"b\.{ending}, which is missing"):
        load_checkpoint(checkpoint_dir, allow_pickle=pickled)
    index.write_text(json.dumps({"weight_map": {"x": f"../x.{ending}"}}))
    with pytest.raises(InputError, match="of the same directory"):
        load_checkpoint(checkpoint_dir, allow_pickle=pickled)
    index.write_text(json.dumps({"weight_map": {}}))
    with pytest.raises(InputError, match=rf"names no file; accepted are \.{ending} files"):
        load_checkpoint(checkpoint_dir, allow_pickle=pickled)


def test_pickle_needs_a_word(checkpoint_dir, demo):
    path = checkpoint_dir / "model.safetensors"
    torch.save(load_file(path), checkpoint_dir / "pytorch_model.bin")
    path.unlink()
    with pytest.raises(InputError, match="--allow-pickle"):
        load_checkpoint(checkpoint_dir)
    expected = load_checkpoint(demo).student.state_dict()
    loaded = load_checkpoint(checkpoint_dir, allow_pickle=True).student.state_dict()
    assert all(torch.equal(expected[n], loaded[n]) for n in expected)
    (checkpoint_dir / "pytorch_model.bin").write_bytes(b"junk")
    with pytest.raises(InputError, match="cannot be read"):
        load_checkpoint(checkpoint_dir, allow_pickle=True)


def test_no_weights(checkpoint_dir):
    (checkpoint_dir / "model.safetensors").unlink()
    with pytest.raises(InputError, match="has no weights"):
        load_checkpoint(checkpoint_dir)


def test_tokenizer(checkpoint_dir, demo):
    (checkpoint_dir / "tokenizer.json").unlink()
    text = "a wonderful film"
    ids = load_checkpoint(checkpoint_dir).tokenizer.encode(text).ids  # from vocab.txt
    assert len(ids) >= 5
    assert ids == load_checkpoint(demo).tokenizer.encode(text).ids
    (checkpoint_dir / "tokenizer_config.json").unlink()
    assert ids == load_checkpoint(checkpoint_dir).tokenizer.encode(text).ids
    (checkpoint_dir / "vocab.txt").unlink()
    with pytest.raises(InputError, match="no tokenizer"):
        load_checkpoint(checkpoint_dir)
    (checkpoint_dir / "tokenizer.json").write_text("{}")
    with pytest.raises(InputError, match="tokenizer cannot be loaded"):
        load_checkpoint(checkpoint_dir)


def test_code_in_the_directory_is_never_run(checkpoint_dir):
    (checkpoint_dir / "tokenizer.json").unlink()
    marker = checkpoint_dir / "ran"
    (checkpoint_dir / "evil.py").write_text(f"open({str(marker)!r}, 'w')\nclass T: pass\n")
    settings = {"tokenizer_class": "NoSuch", "auto_map": {"AutoTokenizer": ["evil.T", None]}}
    (checkpoint_dir / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(InputError, match="it has code of its own, which is not run; save it as tokenizer.json"):
        load_checkpoint(checkpoint_dir)
    (checkpoint_dir / "tokenizer_config.json").write_text("{}")
    load_checkpoint(checkpoint_dir)
    assert not marker.exists()


def test_index_of_nonsense(checkpoint_dir):
    (checkpoint_dir / "model.safetensors").unlink()
    for content in (
        '{"weight_map": {"a": 1}}',
        '{"weight_map": {"a": "' + "x" * 300 + '.safetensors"}}',
        "[" * 100_000,
    ):
        (checkpoint_dir / "model.safetensors.index.json").write_text(content)
        with pytest.raises(InputError, match="index"):
            load_checkpoint(checkpoint_dir)


def a_tokenizer(**changes):
    """Change parts of tokenizer.json: dotted names reach into objects, None removes."""

    def change(stored):
        for name, value in changes.items():
            *outer, last = name.split("__")
            place = stored
            for key in outer:
                place = place[key]
            place[last] = value

    return change


def without_unknown(stored):
    del stored["model"]["vocab"]["[UNK]"]
    stored["added_tokens"] = [token for token in stored["added_tokens"] if token["content"] != "[UNK]"]


TEMPLATE = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "[CLS]", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 7}}],
    "special_tokens": {"[CLS]": {"id": "[CLS]", "ids": [2], "tokens": ["[CLS]"]}},
}
FAR = {**TEMPLATE, "special_tokens": {"[CLS]": {"id": "[CLS]", "ids": [10**6], "tokens": ["[CLS]"]}}}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without_unknown, "cannot read a text: .*Missing .UNK. token"),
        (a_tokenizer(pre_tokenizer={"type": "FixedLength", "length": 0}), "cannot read a text: chunk size"),
        (a_tokenizer(post_processor=None), "gives no token for ''"),
        (a_tokenizer(post_processor=TEMPLATE), "gives the token types 7, the model knows 2"),
        (a_tokenizer(post_processor=FAR), "gives the ids 1000000, the model knows"),
        (
            a_tokenizer(model={"type": "BPE", "vocab": {}, "merges": []}, normalizer=None),
            "gives no token for 'a film",
        ),
    ],
)
def test_a_tokenizer_that_does_not_fit_is_found_at_once(checkpoint_dir, change, message):
    path = checkpoint_dir / "tokenizer.json"
    stored = json.loads(path.read_text())
    change(stored)
    path.write_text(json.dumps(stored))
    with pytest.raises(InputError, match=message) as raised:
        load_checkpoint(checkpoint_dir)
    assert "\n" not in str(raised.value)
