"""Checkpoints of format 2, and plain transformers encoders: what is read, and what is refused."""

import json

import pytest
import torch
from safetensors.torch import load_file
from testbed import PRUNINGS, TINY_BACKBONES, make_encoder
from tiny_models import edit_weights

from adtp_export.errors import InputError
from adtp_export.model.checkpoint import load_checkpoint
from adtp_export.model.config import PrunedEncoderConfig
from adtp_export.model.heads import head_class


@pytest.fixture
def edit_format_2(tmp_path, demo):
    """Write a small format 2 checkpoint whose config.json is edited: dotted names reach into objects, None removes."""

    def edit(changes, backbone="bert", pruning="adtp"):
        directory = tmp_path / "format2"
        make_encoder(backbone, pruning).save_pretrained(directory)
        config = json.loads((directory / "config.json").read_text())
        for name, value in changes.items():
            *outer, last = name.split(".")
            place = config
            for key in outer:
                place = place[key]
            if value is None:
                place.pop(last)
            else:
                place[last] = value
        (directory / "config.json").write_text(json.dumps(config))
        words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{i}" for i in range(90))]
        if backbone == "roberta":  # whose padding is 1
            words[:2] = "[UNK]", "[PAD]"
        (directory / "vocab.txt").write_text("\n".join(words))
        return directory

    return edit


@pytest.mark.parametrize("pruning", PRUNINGS)
@pytest.mark.parametrize("backbone", ["bert", "roberta"])
def test_format_2_loads(edit_format_2, backbone, pruning):
    student = load_checkpoint(edit_format_2({}, backbone, pruning)).student
    expected = make_encoder(backbone, pruning)
    assert student.site_names == expected.site_names
    assert all(torch.equal(a, b) for a, b in zip(student.state_dict().values(), expected.state_dict().values()))


@pytest.mark.parametrize(
    ("pruning", "changes", "message"),
    [
        (
            "adtp",
            {"pruning.method": "adpt"},
            "pruning.method: got 'adpt'; accepted are adtp, ltp, schedule, top, transkimmer; did you mean",
        ),
        ("adtp", {"backbone.model_type": "deberta"}, "backbone.model_type: got 'deberta'; accepted are bert, roberta"),
        (
            "adtp",
            {"head": "sequences"},
            "got 'sequences'; accepted are sequence, tokens, spans, embedding, sparse, masked, vectors, hybrid; did you mean 'sequence'",
        ),
        ("adtp", {"head": None}, "field 'head' is missing; checkpoint format 2 needs backbone, head"),
        ("adtp", {"backbone": None}, "field 'backbone' is missing"),
        ("adtp", {"backbone": []}, "backbone: got \\[\\]; accepted is an object"),
        ("adtp", {"pruning.sites": ["0.attention"]}, "same for every input"),
        ("adtp", {"pruning.sites": None}, "pruning.sites is missing"),
        ("adtp", {"pruning.sites": ["7.ffn"]}, "in a model of 3 layers"),
        ("adtp", {"pruning.method": None}, "pruning.method is missing"),
        ("adtp", {"pruning.retention_ratio": [1.0]}, "no such field; accepted are retention_ratios"),
        ("adtp", {"pruning.retention_ratios": None}, "pruning.retention_ratios is missing"),
        ("adtp", {"pruning.retention_ratios": [0.5]}, "end with 1.0"),
        ("adtp", {"prune_sites": ["0.ffn"]}, "keep those of one format"),
        ("ltp", {"pruning.padded_length": 0}, "padded_length: got 0; accepted is an integer of at least 1"),
        ("ltp", {"pruning.sites": ["1.attention"]}, "LTP drops tokens after a layer's attention"),
        ("schedule", {"pruning.ratios": [0.5]}, "got \\[0.5\\] for 2 sites"),
        ("schedule", {"pruning.ratios": [0.5, 1.5]}, "multiples of 0.001 above 0, up to 1"),
        ("schedule", {"pruning.lengths": [4, 4]}, "either ratios or lengths"),
        ("schedule", {"pruning.order": "saliance"}, "accepted are saliency, received"),
        ("from-others", {"pruning.lengths": [9, 0]}, "pruning.lengths: got 0; accepted is an integer of at least 1"),
        ("from-others", {"pruning.sites": ["0.attention", "1.ffn"]}, "no token has received attention"),
        ("top", {"pruning.bins": ["11", "1x"]}, "got '1x'; accepted is a list of texts of 0 and 1, up to 1000 long"),
        ("top", {"pruning.bins": ["11"]}, "for 2 sites; accepted is a list"),
        ("top", {"pruning.bins": ["11", ""]}, "got ''; accepted"),
        ("top", {"pruning.bins": "11"}, "got '11' for 2 sites"),
        ("top", {"pruning.sites": ["0.attention", "1.attention"]}, "accepted are 'i.attention' from 1 on"),
        ("top", {"pruning.sites": ["1.attention", "1.ffn"]}, "got '1.ffn'; ToP ranks tokens by what they received"),
        ("transkimmer", {"pruning.bins": ["1"]}, "has no such field; accepted are none"),
        ("from-others", {"pruning.keep_first": 0}, "pruning.keep_first: got 0; accepted are true, false"),
        ("from-others", {"pruning.restore": "layers"}, "pruning.restore: got 'layers'; accepted are cut, layer"),
        ("none", {"backbone.num_attention_heads": 5}, "num_attention_heads"),
        ("none", {"backbone.is_decoder": True}, "is_decoder: got true"),
    ],
)
def test_bad_format_2(edit_format_2, pruning, changes, message):
    with pytest.raises(InputError, match=message):
        load_checkpoint(edit_format_2(changes, "bert", pruning))


def test_a_plain_encoder_is_read_as_it_is(plain_bert):
    checkpoint = load_checkpoint(plain_bert)
    assert checkpoint.student.site_names == ()
    assert checkpoint.student.config.id2label == {0: "bad", 1: "good"}
    stored = load_file(plain_bert / "model.safetensors")
    assert all(torch.equal(tensor, stored[name]) for name, tensor in checkpoint.student.state_dict().items())


def test_a_plain_encoder_needs_a_classifier(plain_bert):
    path = plain_bert / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "architectures": ["BertForMaskedLM"]}))
    with pytest.raises(InputError, match="the model is BertForMaskedLM; type --head masked to fill in .*, sparse"):
        load_checkpoint(plain_bert)
    path.write_text(json.dumps(config))
    edit_weights(plain_bert, lambda w: [w.pop(name) for name in ("classifier.weight", "classifier.bias")])
    with pytest.raises(InputError, match="2 missing \\(classifier"):
        load_checkpoint(plain_bert)


def test_names_of_2018_and_leftovers_of_pretraining(plain_bert):
    """LayerNorm's gamma and beta are weight and bias; a language model's head is left behind, and told."""
    expected = load_checkpoint(plain_bert).student.state_dict()

    def age(weights):
        for name in list(weights):
            old = name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
            weights[old] = weights.pop(name)
        weights["cls.predictions.bias"] = torch.zeros(3)
        weights["loss_fct.weight"] = torch.ones(2)  # by which a trainer weighed classes
        for prefix in ("", "bert."):
            weights[f"{prefix}embeddings.token_type_ids"] = torch.zeros(1, 9, dtype=torch.int64)

    edit_weights(plain_bert, age)
    checkpoint = load_checkpoint(plain_bert)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in checkpoint.student.state_dict().items())
    assert any("cls.predictions.bias, loss_fct.weight" in note for note in checkpoint.notes)


def test_a_decoder_is_refused_in_one_line(plain_bert):
    path = plain_bert / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "add_cross_attention": True}))
    with pytest.raises(InputError, match="add_cross_attention: got true"):
        load_checkpoint(plain_bert)


@pytest.mark.parametrize("head", ["sequence", "sparse"])
def test_embeddings_of_format_2_are_resized(tmp_path, head):
    model = make_encoder("bert", "adtp", head=head)
    model.resize_token_embeddings(120)
    model.save_pretrained(tmp_path)
    assert type(model).from_pretrained(tmp_path).get_input_embeddings().weight.shape[0] == 120


@pytest.mark.parametrize(
    ("head", "fields", "message"),
    [
        ("embedding", {"poling": "mean"}, "got the field 'poling'; accepted are pooling, .*did you mean 'pooling'"),
        ("embedding", {"pooling": "sum"}, "embedding.pooling: got 'sum'; accepted are "),
        ("embedding", {"normalize": 1}, "embedding.normalize: got 1; accepted are true and false"),
        ("embedding", {"projections": ["normalize", [8, 4, True, "tanh"]]}, "got one of 8 inputs after 32 outputs"),
        ("embedding", {"projections": [[32, 4, True]]}, "embedding.projections: got .*accepted are 'normalize' and "),
        ("vectors", {"normalise": True}, "got the field 'normalise'; accepted are .*did you mean 'normalize'"),
        ("vectors", {"normalize": 1}, "vectors.normalize: got 1; accepted are true and false"),
        ("vectors", {"projections": [[8, 4, True, "tanh", False]]}, "8 inputs"),
    ],
)
def test_settings_of_vectors_that_cannot_be(head, fields, message):
    with pytest.raises(InputError, match=message):
        PrunedEncoderConfig(backbone=TINY_BACKBONES["bert"], head=head, **{head: fields})


def test_a_class_for_vectors_is_not_one_of_another_head():
    config = make_encoder("bert", "none", head="tokens").config
    with pytest.raises(InputError, match="head: got 'tokens', and this class is for 'embedding'"):
        head_class("embedding")(config)
