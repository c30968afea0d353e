"""Families that follow Llama: padded is transformers, packed and exported is padded, and what is refused."""

import dataclasses
import json

import numpy as np
import pytest
import torch
from decoder_models import DECODERS, GEMMA, HEADS, SHAPE, YARN, batch_of, has_head, make_decoder
from testbed import as_numpy
from tolerances import assert_within_network, assert_within_oracle, oracle_on
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModel

from adtp_export.contract import OUTPUTS
from adtp_export.errors import InputError
from adtp_export.graph import program
from adtp_export.model import PrunedEncoderConfig
from adtp_export.model.backbones import base
from adtp_export.model.flops import Shape, encoder_flops
from adtp_export.model.heads import head_class
from adtp_export.model.packed import PackedInputs, PackedStudent
from adtp_export.model.plain import with_format
from adtp_export.model.registry import fields
from adtp_export.runtimes.onnxruntime import OnnxRuntimeEngine
from adtp_export.runtimes.openvino import OpenVinoEngine
from adtp_export.verify.oracle import run_oracle
from adtp_export.verify.parity import compare

LENGTHS = ([24], [1], [1, 9, 4, 9], [24, 3, 1, 1, 11])
WINDOWS = [({}, (15, 0)), ({"is_causal": False}, (16, 16))]
every_decoder = pytest.mark.parametrize("name", DECODERS)


@every_decoder
def test_logits_are_those_of_transformers(name):
    """Also with the padding on the left, where transformers sees it."""
    model = make_decoder(name)
    for lengths in LENGTHS:
        batch = batch_of(lengths)
        found = model(**batch).logits
        assert_within_network(model.dense, batch, found)
        if model.backbone.classifier_pooling == "last" and model.backbone.causal(model.dense.config):
            for row, n in enumerate(lengths):
                ids, mask = (batch[key][row : row + 1, :n] for key in ("input_ids", "attention_mask"))
                padded = {
                    "input_ids": torch.nn.functional.pad(ids, (3, 0)),
                    "attention_mask": torch.nn.functional.pad(mask, (3, 0)),
                }
                padded["position_ids"] = (padded["attention_mask"].cumsum(1) - 1).clamp(min=0)
                assert_within_network(model.dense, padded, found[row : row + 1])


@pytest.mark.parametrize(("name", "head"), [(n, h) for n in DECODERS for h in HEADS if has_head(n, h)])
def test_packed_is_padded(name, head):
    model = make_decoder(name, head)
    batches = [batch_of(lengths) for lengths in LENGTHS]
    oracle, packed = oracle_on(model, *batches), PackedStudent(model)
    assert_within_oracle(oracle, *(dict(zip(OUTPUTS[head], packed(**batch)[0], strict=True)) for batch in batches))


def memory(*models):
    """Bytes of the parameters of some models together."""
    held = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for m in models for p in m.parameters()}
    return sum(held.values())


@pytest.mark.parametrize("name", ["qwen3", "llama"])
def test_weights_are_in_memory_once(name):
    """Also the joined ones, and whoever joins them next."""
    model, batch = make_decoder(name), batch_of([5, 9])
    before, size = model(**batch).logits, memory(model)
    packed = PackedStudent(model), PackedStudent(model)
    assert memory(model, *packed) == size
    assert torch.equal(model(**batch).logits, before)
    model.requires_grad_(True)
    learns = [*model.parameters()]
    PackedStudent(model)
    assert all(a is b for a, b in zip(model.parameters(), learns, strict=True))


@pytest.mark.parametrize("name", ["qwen3", "mistral", "eurobert"])
def test_packed_inputs_with_an_empty_text(name):
    model, batch = make_decoder(name), batch_of([5, 9])
    ids = batch["input_ids"][batch["attention_mask"].bool()]
    (logits,), _ = PackedInputs(model)(ids, torch.tensor([0, 5, 5, 14], dtype=torch.int32))
    assert not logits[1].any()
    assert_within_oracle(oracle_on(model, batch), {"logits": logits[[0, 2]]})


@pytest.mark.parametrize(
    ("name", "head", "pruning"),
    [
        ("qwen2-local", "sequence", "none"),
        *(
            pytest.param(*row, marks=pytest.mark.slow)
            for row in (
                ("qwen3", "embedding", "received-twice"),
                ("gemma-bidirectional", "embedding", "none"),
                ("qwen3", "embedding", "none"),
                ("llama-one-group", "tokens", "top"),
                ("llama", "sequence", "transkimmer"),
                ("qwen3", "sequence", "adtp"),
                ("mistral", "tokens", "ltp"),
                ("mistral-bidirectional", "sequence", "schedule"),
                ("eurobert-mean", "sequence", "ltp"),
                ("eurobert", "sequence", "none"),
                ("gemma", "sequence", "none"),
            )
        ),
    ],
)
@pytest.mark.usefixtures("has_openvino")
def test_files_equal_the_oracle(tmp_path, name, head, pruning):
    """And keep the same tokens."""
    model, path = make_decoder(name, head, pruning), tmp_path / "model.onnx"
    graph = program.export_portable(model, {"version": "test"})
    program.add_debug_outputs(graph)
    program.save(graph, path)
    oracle = run_oracle(model, [as_numpy(batch_of(lengths)) for lengths in LENGTHS])
    for load in (OnnxRuntimeEngine, OpenVinoEngine):
        parity = compare(oracle, load(path))
        assert parity.failure is None
        assert parity.kept_token_agreement == 1


@every_decoder
def test_flops_are_what_pytorch_counts(name):
    """The padded form computes the scores of all pairs, and those of the groups with repeated keys."""
    model, batch = make_decoder(name, "embedding"), batch_of([23, 7])
    shape = Shape.of(fields(model.dense.config))
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(**batch)
    tokens = np.full(2, 24)
    pairs = 4 * 24**2 * 2 * (shape.width or 32) * shape.layers
    seen = encoder_flops(shape, [tokens])
    layer = model.backbone.attention
    inside = 0
    for i in range(shape.layers):
        back, ahead = layer(i).reach
        gap = np.arange(24)[None] - np.arange(24)[:, None]
        near = ((gap >= -back) | (back < 0)) & ((gap <= ahead) | (ahead < 0))
        inside += 4 * 2 * int(near.sum()) * (shape.width or 32)
    assert seen - inside + pairs == counter.get_total_flops()


@pytest.mark.parametrize(("name", "seen"), [("qwen3", 20), ("mistral", 5), ("eurobert", 20)])
def test_flops_of_a_last_layer_for_one_token(name, seen):
    """Its attention, the projection behind it and the feed-forward count one query."""
    shape = Shape.of(fields(make_decoder(name).dense.config))
    width, kv_width = shape.width or 32, shape.kv_width
    last = 2 * 20 * 32 * (width + 2 * kv_width) + 4 * seen * width + 2 * 32 * width + 6 * 32 * shape.intermediate
    whole = encoder_flops(dataclasses.replace(shape, layers=1), [np.array([20])])
    assert encoder_flops(shape, [np.array([20])], cls_only_last_layer=True) == whole + last


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "'dynamic' .it depends on"),
        ({"num_key_value_heads": 3}, "num_key_value_heads must divide num_attention_heads, got 3 and 4"),
        ({"rope_parameters": {**YARN, "partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5; accepted is 1"),
        ({"is_causal": None}, "is_causal: got None; accepted are true and false"),
        (
            {"model_type": "qwen2", "layer_types": ["sliding_attention"] * SHAPE["num_hidden_layers"]},
            "sliding_window is missing",
        ),
        (
            {"model_type": "mistral", "sliding_window": 5, "layer_types": ["full_attention", "sliding_attention"]},
            "reads such a .* as ministral.* 'sliding_attention' in all layers",
        ),
        (
            {"model_type": "modernbert", "num_attention_heads": SHAPE["hidden_size"]},
            "heads of an even size are accepted",
        ),
        (
            {
                "model_type": "modernbert",
                "rope_parameters": {"full_attention": {**YARN}, "sliding_attention": {**YARN}},
            },
            "rope_parameters: got the rope_type 'yarn'; accepted is 'default'",
        ),
        ({"model_type": "eurobert", "is_causal": True}, "is_causal: got true; accepted are encoders"),
        (
            {"model_type": "nomic_bert", "type_vocab_size": 0},
            "type_vocab_size: got 0; accepted is an integer of at least 1",
        ),
        ({"model_type": "gte", "is_causal": True}, "is_causal: got true; accepted are encoders"),
        ({**GEMMA, "query_pre_attn_scalar": 0}, "query_pre_attn_scalar: got 0; accepted is an integer of at least 1"),
        (
            {**GEMMA, "use_bidirectional_attention": True, "sliding_window": None},
            "sliding_window: got .*; accepted is an integer",
        ),
        (
            {
                **GEMMA,
                "rope_parameters": {
                    "full_attention": {"rope_type": "longrope", "short_factor": [1.0] * 6, "long_factor": [1.0] * 6}
                },
            },
            "'longrope' .it depends on",
        ),
    ],
)
def test_what_cannot_be_is_told(changes, message):
    with pytest.raises(InputError, match=message):
        PrunedEncoderConfig(backbone={**SHAPE, "model_type": "llama", **changes})


def test_a_family_that_transformers_does_not_have_yet(monkeypatch):
    monkeypatch.setattr(base, "VERSION", (5, 3))
    with pytest.raises(InputError, match="'jina_embeddings_v3', which .* does not have; .*'transformers>=5.4'"):
        PrunedEncoderConfig(backbone={**SHAPE, "model_type": "jina_embeddings_v3"})
    PrunedEncoderConfig(backbone={**SHAPE, "model_type": "eurobert"})


def reach_of(config):
    """How far back and ahead a state of transformers' own model depends on tokens, in one layer with a window."""
    torch.manual_seed(0)
    model = AutoModel.from_config(config).eval()
    ids = torch.arange(4, 44)[None]
    before = model(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state
    other = ids.clone()
    other[0, 20] = 50
    after = model(input_ids=other, attention_mask=torch.ones_like(ids)).last_hidden_state
    (moved,) = (before != after).any(-1)[0].nonzero(as_tuple=True)
    return int(moved.max()) - 20, 20 - int(moved.min())


@pytest.mark.parametrize(
    ("family", "fields", "expected"),
    [
        ("gemma3_text", {}, (15, 0)),
        ("gemma3_text", {"use_bidirectional_attention": True}, (8, 8)),
        ("gemma3_text", {"use_bidirectional_attention": True, "is_causal": True}, (8, 8)),
        ("gemma3_text", {"is_causal": False}, (16, 16)),
        ("gemma3_text", {"use_bidirectional_attention": True, "is_causal": False}, (9, 9)),
        *((name, fields, reach) for name in ("mistral", "qwen2", "qwen3") for fields, reach in WINDOWS),
    ],
)
def test_windows_of_16_tokens(family, fields, expected):
    """As transformers computes, and as is said here; written and read again, they stay."""
    kinds = {"layer_types": ["sliding_attention"], "num_hidden_layers": 1, "max_position_embeddings": 64}
    backbone = {**SHAPE, **kinds, "use_sliding_window": True, "sliding_window": 16, "model_type": family, **fields}
    model = head_class("embedding")(PrunedEncoderConfig(backbone=backbone, head="embedding"))
    config = model.dense.config
    assert reach_of(config) == expected == model.backbone.attention(0).reach
    again = type(config)(**config.to_dict())
    assert model.backbone.windows(again) == model.backbone.windows(config) == [expected[0]]


def test_a_model_that_generates_is_read_for_its_states(tmp_path):
    raw = {**SHAPE, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
    with pytest.raises(InputError, match="generates text .Qwen3ForCausalLM.; accepted are .* --head embedding"):
        with_format(raw, tmp_path / "config.json")
    for more, pooling in (({}, {"embedding": {"pooling": "last"}}), ({"is_causal": False}, {})):
        found = with_format(json.loads(json.dumps({**raw, **more})), tmp_path / "config.json", "embedding")
        assert {**found, "head": "embedding", **pooling} == found  # as sentence-transformers pools such a directory
        assert ("embedding" in found) == bool(pooling)
