"""`adtp-export DIR` on directories as transformers saves them, with a tokenizer of the family's kind."""

import json

import numpy as np
import pytest
import torch
from plain_models import WORDS, deberta_tokenizer
from testbed import HEAD_FIELDS, TINY_BACKBONES, make_encoder, run_cli
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import AutoConfig, AutoModelForSequenceClassification

import adtp_export
from adtp_export.errors import InputError
from adtp_export.model.checkpoint import load_checkpoint
from adtp_export.model.registry import fields


def word_piece():
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS, *"abcdefghijklmnopqrstuvwxyz"[1:]]
    tokenizer = Tokenizer(models.WordPiece({word: i for i, word in enumerate(vocabulary)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    return tokenizer


def sentence_piece():
    special = [(token, 0.0) for token in ("<s>", "<pad>", "</s>", "<unk>")]
    tokenizer = Tokenizer(models.Unigram([*special, *((f"▁{word}", -2.0) for word in WORDS)], unk_id=3))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    return tokenizer


KINDS = {
    **dict.fromkeys(["bert", "distilbert", "electra", "bert-pruned", "modernbert"], word_piece),
    "deberta-v2": deberta_tokenizer,
}


def write(directory, family, **changes):
    """Save a random classifier as transformers does; return it."""
    model = make_encoder(family, "none", **HEAD_FIELDS["sequence"]).dense
    model.save_pretrained(directory)
    KINDS.get(family, sentence_piece)().save(str(directory / "tokenizer.json"))
    path = directory / "config.json"
    stored = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({name: value for name, value in stored.items() if value is not None}))
    return model


@pytest.mark.parametrize(
    "family",
    [
        "xlm-roberta",
        "modernbert",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("deberta-v2", "distilbert", "camembert", "electra", "bert-pruned", "mpnet")
        ),
    ],
)
def test_a_plain_directory_is_exported(tmp_path, family):
    """OUT answers as transformers does, and its config.json is one that transformers loads."""
    model, out = write(tmp_path / "model", family), tmp_path / "out"
    precomputed = [] if family == "electra" else ["--precompute-embedding-projections"]
    result = run_cli(
        "adtp-export", tmp_path / "model", "--out", out, "--json", "--precision", "fp32,fp16", *precomputed
    )
    assert result.returncode == 0, result.stderr
    targets = json.loads(result.stdout)["targets"]
    assert {target["status"] for target in targets.values()} == {"verified"}
    assert {"onnxruntime-cpu-fp32", "onnxruntime-cpu-fp16"} <= set(targets)
    config = AutoConfig.from_pretrained(out)
    assert fields(config) == fields(model.config)
    assert type(config) is type(model.config)
    loaded = adtp_export.load(out, target="onnxruntime-cpu-fp32")
    texts = ["the food was cold", ("a good film", "and 2 words"), ""]
    rows = loaded.tokenizer.encode_batch(texts)
    longest, pad = max(len(row.ids) for row in rows), model.config.pad_token_id
    ids = np.array([row.ids + [pad] * (longest - len(row.ids)) for row in rows])
    batch = {
        "input_ids": ids,
        "attention_mask": (np.arange(longest) < [[len(row.ids)] for row in rows]).astype(np.int64),
    }
    if fields(config)["type_vocab_size"] > 1:
        batch["token_type_ids"] = np.array([row.type_ids + [0] * (longest - len(row.ids)) for row in rows])
    with torch.inference_mode():
        expected = model(**{name: torch.from_numpy(array) for name, array in batch.items()}).logits.numpy()
    tolerance = targets["onnxruntime-cpu-fp32"]["tolerance"]
    assert np.abs(loaded.run(batch) - expected).max() <= tolerance
    for answer, logits in zip(loaded(texts), expected):
        assert answer.label == model.config.id2label[int(logits.argmax())]
    assert loaded.max_tokens == 64


def test_sizes_of_layers_are_read_from_the_weights(tmp_path):
    """As CoFi saves them: shapes differ between layers, and the configuration is silent."""
    model = write(tmp_path, "bert-pruned", pruned_heads=None, intermediate_sizes=None)
    student = load_checkpoint(tmp_path).student
    assert [student.backbone.attention(i).heads for i in range(3)] == [3, 4, 1]
    batch = {name: torch.ones(2, 5, dtype=torch.int64) for name in ("input_ids", "attention_mask")}
    assert torch.equal(student(**batch).logits, make_encoder("bert-pruned", "none", num_labels=3)(**batch).logits)
    assert model.config.pruned_heads


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("bert-pruned", {"pruned_heads": {"7": [0]}}, "pruned_heads: got layer 7; accepted are 0 to 2"),
        ("bert-pruned", {"pruned_heads": {"0": [4]}}, "pruned_heads: got head 4 in layer 0; accepted are 0 to 3"),
        ("bert-pruned", {"pruned_heads": {"1": [0, 1, 2, 3]}}, "layer 1 has none of its 4 heads left"),
        ("bert-pruned", {"pruned_heads": [1]}, "accepted is an object of layers and heads"),
        ("bert-pruned", {"pruned_heads": {"0": [1]}}, r"query.weight is \(8, 32\), not \(32, 32\)"),
        ("bert-pruned", {"intermediate_sizes": [48, 17]}, "accepted is a list of 3 sizes, one per layer"),
        (
            "bert-pruned",
            {"intermediate_sizes": [48, 0, 5]},
            "intermediate_sizes: got 0; accepted is an integer of at least 1",
        ),
        ("distilbert", {"n_heads": 5}, "n_heads must divide dim, got 5 and 32"),
        ("distilbert", {"hidden_dim": 0}, "hidden_dim: got 0; accepted is an integer of at least 1"),
        ("distilbert", {"activation": "gelo"}, "activation is 'gelo'; did you mean 'gelu'"),
        ("electra", {"position_embedding_type": "relative_key"}, "got 'relative_key'; accepted is 'absolute'"),
        ("xlm-roberta", {"is_decoder": True}, "is_decoder: got true; accepted are encoders"),
        (
            "bert",
            {"model_type": "t5"},
            "model_type is 't5'; accepted are 'adtp_bert', 'pruned_encoder', 'bert', 'roberta'",
        ),
        ("bert", {"model_type": "gpt2"}, "model_type is 'gpt2'; accepted are"),
    ],
)
def test_what_cannot_be_is_told_in_one_line(tmp_path, family, changes, message):
    write(tmp_path, family, **changes)
    with pytest.raises(InputError, match=message) as raised:
        load_checkpoint(tmp_path)
    assert "\n" not in str(raised.value)


def test_a_layer_without_attention_is_refused(tmp_path):
    """CoFi removes whole sublayers, and their norms with them."""
    model = make_encoder("bert", "none").dense
    gone = "encoder.layer.1.attention.self."
    model.save_pretrained(tmp_path, state_dict={n: w for n, w in model.state_dict().items() if gone not in n})
    word_piece().save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(InputError, match="layer 1 has no attention, as CoFi leaves it"):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize("config", [True, False])
def test_an_adapter_is_not_a_model(tmp_path, config):
    """PEFT saves what it learned alone; some write the base model's configuration beside it."""
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "base", "peft_type": "LORA"}))
    if config:
        (tmp_path / "config.json").write_text(json.dumps({**TINY_BACKBONES["bert"]}))
    with pytest.raises(InputError, match=r"holds an adapter.*merge_and_unload\(\)"):
        load_checkpoint(tmp_path)


def test_projections_behind_narrow_embeddings_are_not_precomputed(tmp_path):
    write(tmp_path / "model", "electra")
    with pytest.raises(
        InputError,
        match="--precompute-embedding-projections: .* embeddings of 16 are projected to 32 .*; leave it out",
    ):
        adtp_export.export(tmp_path / "model", tmp_path / "out", precompute_embedding_projections=True)
    assert not (tmp_path / "out").exists()


def test_auto_classes_load_what_was_written(tmp_path):
    """The directories of these tests are transformers' own."""
    model = write(tmp_path, "distilbert")
    assert type(AutoModelForSequenceClassification.from_pretrained(tmp_path)) is type(model)
