"""DeBERTa-v2 and v3: every configuration against transformers, its buckets, what is refused, and a judge of natural language inference."""

import itertools

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_models import SHAPE, deberta_tokenizer
from safetensors.torch import save_file
from testbed import HEAD_FIELDS, as_numpy, make_batch
from tiny_models import PRUNINGS, TINY_BACKBONES
from tolerances import assert_within_oracle, oracle_on
from transformers.models.deberta_v2.modeling_deberta_v2 import build_relative_position

import adtp_export
from adtp_export.contract import OUTPUTS
from adtp_export.errors import InputError
from adtp_export.graph import program
from adtp_export.imports import ReadOptions, open_checkpoint
from adtp_export.model import PrunedEncoderConfig
from adtp_export.model.backbones.deberta import buckets_of
from adtp_export.model.heads import head_class
from adtp_export.model.packed import PackedStudent
from adtp_export.runtimes.onnxruntime import OnnxRuntimeEngine
from adtp_export.runtimes.openvino import OpenVinoEngine
from adtp_export.verify.oracle import run_oracle
from adtp_export.verify.parity import compare

NORMAL = TINY_BACKBONES["deberta-v2"]
LENGTHS = ([7], [1, 40, 4, 9], [20, 3, 1])


def make(head="sequence", pruning="none", **fields):
    """A random model of any shape; biases and norms are drawn, too."""
    torch.manual_seed(0)
    config = PrunedEncoderConfig(
        backbone={**NORMAL, **fields}, pruning=PRUNINGS[pruning], head=head, **HEAD_FIELDS[head]
    )
    model = head_class(head)(config).eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if name.startswith(("deberta", "pooler")):
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def batches_of(model):
    """No text has a token twice: without positions, both would have one score."""
    types = 2 if "token_type_ids" in model.input_names else 1
    batches = [make_batch(lengths, max(lengths) + 1, types=types, seed=i) for i, lengths in enumerate(LENGTHS)]
    for batch in batches:
        drawn = torch.rand(len(batch["input_ids"]), 96, generator=torch.Generator().manual_seed(0)).argsort(1) + 1
        batch["input_ids"] = drawn[:, : batch["input_ids"].shape[1]] * batch["attention_mask"]
    return batches


@st.composite
def shapes(draw):
    """Fields of a model."""
    pick = lambda *values: draw(st.sampled_from(values))  # noqa: E731
    return {
        "pos_att_type": pick(["c2p", "p2c"], ["p2c", "c2p"], ["c2p"], ["p2c"], "c2p|p2c", [], None),
        "relative_attention": pick(True, True, True, False),
        "share_att_key": pick(True, False),
        "norm_rel_ebd": pick("layer_norm", "none"),
        "position_biased_input": pick(True, False),
        "type_vocab_size": pick(0, 1, 2),
        "embedding_size": pick(32, 16),
        "position_buckets": pick(-1, 4, 7, 16),
        "max_relative_positions": pick(-1, 24, 100),
        "pooler_hidden_act": pick("gelu", "tanh", "relu"),
        "num_attention_heads": pick(1, 4, 8),
    }


@given(
    shapes(),
    st.sampled_from(["sequence", "tokens", "spans", "embedding"]),
    st.sampled_from(["none", "adtp", "received-twice"]),
)
@settings(max_examples=15, deadline=None)
def test_any_shape(fields, head, pruning):
    """In fp64: padded is transformers, where no token is dropped, and packed is padded."""
    model = make(head, pruning, **fields).double()
    packed, names = PackedStudent(model), OUTPUTS[head]
    for batch in batches_of(model):
        expected, live = model(**batch), batch["attention_mask"].bool()
        answers = dict(zip(names, packed(**batch)[0], strict=True))
        theirs = model.dense(**batch) if pruning == "none" and head != "embedding" else expected
        for name, found in answers.items():
            for right in (expected[name], theirs[name]):
                shown = live if found.shape[:2] == live.shape else slice(None)
                torch.testing.assert_close(found[shown], right[shown], rtol=1e-12, atol=1e-11)


@pytest.mark.parametrize(
    ("fields", "pruning", "head"),
    [
        ({"share_att_key": False, "type_vocab_size": 2, "position_biased_input": True, "embedding_size": 16}, "ltp", "tokens"),
        ({"pos_att_type": ["c2p"], "position_buckets": -1}, "none", "spans"),
        ({"pos_att_type": [], "norm_rel_ebd": "none"}, "adtp", "sequence"),
    ],
    ids=["all", "without buckets", "without terms"],
)  # fmt: skip
@pytest.mark.slow
@pytest.mark.usefixtures("has_openvino", "traced_once", "with_operators")
def test_files_equal_the_oracle(tmp_path, fields, pruning, head):
    """The body in both runtimes, and the kernel. Quick tests compare the operator's on tokens with gaps, and export a plain model below."""
    model, path = make(head, pruning, **fields), tmp_path / "model.onnx"
    graph = program.export_portable(model, {"version": "test"})
    program.add_debug_outputs(graph)
    program.save(graph, path)
    oracle = run_oracle(model, [as_numpy(batch) for batch in batches_of(model)])
    for engine in (OnnxRuntimeEngine(path), OnnxRuntimeEngine(path, plugin=True), OpenVinoEngine(path)):
        assert compare(oracle, engine).failure is None


def test_packed_answers_in_fp32():
    model = make()
    batches = batches_of(model)
    answers = [{"logits": PackedStudent(model)(**batch)[0][0]} for batch in batches]
    assert_within_oracle(oracle_on(model, *batches), *answers)


def test_tables_are_made_without_dropout():
    """Of a model in training, too, whose own attention has it."""
    model = make(hidden_dropout_prob=0.5)
    expected, found = (PackedStudent(each).state_dict() for each in (model, model.train()))
    assert any("distances" in name for name in found)
    assert all(torch.equal(expected[name], t) for name, t in found.items())
    x, distances = torch.randn(1, 4, 5, 8), torch.arange(5)[:, None] - torch.arange(5)
    products = model.backbone.attention(0).distances
    assert not torch.equal(products(x, x, distances), products(x, x, distances))


SIZES = [(256, 512), (8, 24), (-1, 24), (7, 40), (5, 16), (64, 512), (16, 10**9), (-1, 1)]


@pytest.mark.parametrize(("buckets", "farthest"), SIZES)
def test_buckets_are_those_of_transformers(buckets, farthest):
    """Bit for bit, and beyond what is stored: farther tokens are as far apart as the farthest that are told apart."""
    span, all_tokens, one = buckets if buckets > 0 else farthest, torch.empty(1500, 1), torch.empty(1, 1)
    ahead, back = (
        build_relative_position(*sides, bucket_size=buckets, max_position=farthest).flatten()
        for sides in ((one, all_tokens), (all_tokens, one))
    )
    rows = buckets_of(buckets, farthest)
    middle, place = len(rows) // 2, torch.arange(len(all_tokens))
    for expected, distances in ((ahead, -place), (back, place)):
        found = rows[(distances + middle).clamp(0, 2 * middle)]
        assert torch.equal(found.long(), (expected + span).clamp(0, 2 * span - 1))
    assert (rows.diff() >= 0).all()


def test_what_pretraining_left_in_a_file_is_passed_over(tmp_path):
    """Two heads and the positions that only their decoder read, as files of DeBERTa have them; a model that has positions keeps its own."""
    config = transformers.DebertaV2Config(**{**NORMAL, "vocab_size": 15})
    model = transformers.DebertaV2Model(config)
    weights = {f"deberta.{name}": t for name, t in model.state_dict().items()}
    for name in ("lm_predictions.lm_head.dense.weight", "lm_predictions.lm_head.bias", "mask_predictions.dense.weight"):
        weights[name] = torch.zeros(15)
    weights["deberta.embeddings.position_embeddings.weight"] = torch.zeros(64, 32)
    save_file(weights, tmp_path / "model.safetensors")
    config.save_pretrained(tmp_path)
    deberta_tokenizer().save(str(tmp_path / "tokenizer.json"))
    checkpoint = open_checkpoint(tmp_path, ReadOptions(head="embedding"))
    read = checkpoint.student.state_dict()
    assert all(torch.equal(read[name], t) for name, t in model.state_dict().items())
    assert any("does not use: " in note and "lm_predictions.lm_head.bias" in note for note in checkpoint.notes)
    config.position_biased_input = True
    config.save_pretrained(tmp_path)
    positions = open_checkpoint(tmp_path, ReadOptions(head="embedding")).student.dense.embeddings.position_embeddings
    assert (positions.weight == 0).all()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"conv_kernel_size": 3}, "conv_kernel_size: got 3, a convolution beside the first layer; accepted are models without"),
        ({"attention_head_size": 4}, "attention_head_size: got 4; accepted is 8, which hidden_size 32"),
        ({"pooler_hidden_size": 8}, "pooler_hidden_size: got 8; accepted is 32"),
        ({"embedding_size": 0}, "embedding_size: got 0; accepted is an integer of at least 1"),
        ({"position_buckets": 2}, "position_buckets: got 2, with distances up to 24; accepted are 4 or more"),
        ({"position_buckets": 48}, "half is less than max_relative_positions - 1"),
        ({"pruned_heads": {"0": [1]}}, "'deberta-v2' models have no such field"),
        ({"type_vocab_size": -1}, "type_vocab_size: got -1; accepted is an integer of at least 0"),
        ({"model_type": "deberta"}, "got 'deberta'; accepted are .*deberta-v2.*did you mean 'deberta-v2'"),
    ],
    ids=str,
)  # fmt: skip
def test_what_cannot_be_served_is_refused(fields, message):
    with pytest.raises(InputError, match=message):
        make(**fields)


@pytest.mark.usefixtures("has_openvino")
def test_a_judge_of_natural_language_inference(tmp_path):
    """A plain directory is exported and verified; labels of the caller get the scores of transformers' pipeline."""
    torch.manual_seed(0)
    names = {0: "contradiction", 1: "neutral", 2: "entailment"}
    rest = {name: value for name, value in NORMAL.items() if name not in ("model_type", "vocab_size")}
    labels = {"id2label": names, "label2id": {name: i for i, name in names.items()}}
    config = transformers.DebertaV2Config(**{**rest, **SHAPE, **labels, "vocab_size": 15})
    transformers.DebertaV2ForSequenceClassification(config).eval().save_pretrained(tmp_path / "model")
    special = {"cls_token": "[CLS]", "sep_token": "[SEP]", "unk_token": "[UNK]", "pad_token": "[PAD]"}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=deberta_tokenizer(), model_max_length=64, **special
    )
    tokenizer.save_pretrained(tmp_path / "model")
    manifest = adtp_export.export(tmp_path / "model", tmp_path / "out")
    assert {target.status for target in manifest.targets.values()} == {"verified"}
    peer = transformers.pipeline("zero-shot-classification", model=str(tmp_path / "model"), device="cpu")
    asked, texts = ["food", "a good film", "words"], ["the food was cold", "a film , and 2 good words", "good " * 90]
    loaded = adtp_export.load(tmp_path / "out")
    for several, text in itertools.product((False, True), texts):
        found = loaded.zero_shot([text], asked, multi_label=several)[0]
        expected = peer(text, candidate_labels=asked, multi_label=several)
        assert found.labels == expected["labels"]
        np.testing.assert_allclose(found.scores, expected["scores"], atol=1e-5)
