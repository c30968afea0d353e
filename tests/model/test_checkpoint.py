"""Every mistake in a checkpoint is named, before any work starts."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from adtp_export.errors import InputError
from adtp_export.model.checkpoint import load_checkpoint


def edit_weights(directory, change):
    path = directory / "model.safetensors"
    weights = load_file(path)
    change(weights)
    save_file(weights, path, metadata={"format": "pt"})


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
        ({"model_type": "bert"}, "accepted is 'adtp_bert'"),
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
        ({"hidden_size": -64}, "hidden_size must be an integer of at least 1"),
        ({"num_attention_heads": -2}, "num_attention_heads"),
        ({"min_tokens": 10**30}, "min_tokens"),
        ({"max_position_embeddings": 2}, "max_position_embeddings"),
        ({"hidden_dropout_prob": 5.0}, "does not describe a model|hidden_dropout_prob"),
        ({"problem_type": "foo"}, "problem_type"),
    ],
)
def test_bad_config(edit_config, changes, message):
    with pytest.raises(InputError, match=message):
        load_checkpoint(edit_config(**changes))


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
    edit_weights(checkpoint_dir, lambda w: w.update({"bert.embeddings.position_ids": torch.arange(128)}))
    load_checkpoint(checkpoint_dir)


def test_truncated_weights(checkpoint_dir):
    path = checkpoint_dir / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(InputError, match="truncated or corrupt"):
        load_checkpoint(checkpoint_dir)
    path.write_bytes(b"not safetensors at all")
    with pytest.raises(InputError, match="truncated or corrupt"):
        load_checkpoint(checkpoint_dir)


def test_sharded_weights(checkpoint_dir, demo):
    path = checkpoint_dir / "model.safetensors"
    weights = load_file(path)
    names = sorted(weights)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for shard, members in shards.items():
        save_file({n: weights[n] for n in members}, checkpoint_dir / shard)
    path.unlink()
    index = {"weight_map": {n: shard for shard, members in shards.items() for n in members}}
    (checkpoint_dir / "model.safetensors.index.json").write_text(json.dumps(index))
    expected = load_checkpoint(demo).student.state_dict()
    loaded = load_checkpoint(checkpoint_dir).student.state_dict()
    assert all(torch.equal(expected[n], loaded[n]) for n in expected)

    (checkpoint_dir / "b.safetensors").unlink()
    with pytest.raises(InputError, match=r"b\.safetensors, which is missing"):
        load_checkpoint(checkpoint_dir)
    (checkpoint_dir / "model.safetensors.index.json").write_text('{"weight_map": {"x": "../x.safetensors"}}')
    with pytest.raises(InputError, match="of the same directory"):
        load_checkpoint(checkpoint_dir)


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
