"""Backbones whose attention depends on positions: what the tests over the table of backbones do not reach."""

import copy
import dataclasses
from types import SimpleNamespace

import pytest
import torch
from decoder_models import make_decoder
from known_graphs import known_graph
from testbed import TINY_BACKBONES, make_batch, make_encoder
from tolerances import assert_within_oracle, oracle_on
from torch import nn

from adtp_export.calibration import recipes
from adtp_export.calibration.collect import collect
from adtp_export.calibration.plan import make_quantization_plan
from adtp_export.contract import INTERMEDIATE, QKV, product
from adtp_export.errors import InputError
from adtp_export.model import PrunedEncoderConfig
from adtp_export.model.backbones.modernbert import GLOBAL, LOCAL, layer_kinds, rotation, theta
from adtp_export.model.checkpoint import Uninitialised
from adtp_export.model.packed import PackedStudent
from adtp_export.model.positions import Rotary, frequencies, to_precision
from adtp_export.training.differentiable import DifferentiableAttention

LENGTHS = [30, 3, 1, 17]
POSITIONAL = ("mpnet", "modernbert")
TRAINED = {"mpnet": "relative_attention_bias", "modernbert": "Wqkv", "deberta-v2": "rel_embeddings"}
"""What of each family's weights attention alone reads."""


def batch_of(lengths=LENGTHS):
    batch = make_batch(lengths, max(lengths) + 2, types=1)
    batch["input_ids"][(batch["input_ids"] == 1) & batch["attention_mask"].bool()] = 5  # MPNet counts positions from 1s
    return batch


def configured(backbone, **fields):
    return PrunedEncoderConfig(backbone={**TINY_BACKBONES[backbone], **fields}, num_labels=3)


@pytest.mark.parametrize("window", [2, 5, 6])
def test_windows_end_where_transformers_ends_them(window, monkeypatch):
    """Both ends are inside. Its eager attention has a softmax in fp32, whatever the dtype, so that bounds the difference.
    It makes NaN of padding in fp64, so there is none.
    """
    monkeypatch.setitem(TINY_BACKBONES["modernbert"], "local_attention", window)
    model = make_encoder("modernbert", "none").double()
    batch = {name: tensor[:, :30] for name, tensor in batch_of([30]).items()}
    model.dense.set_attn_implementation("eager")
    expected = model.dense(**batch).logits
    allowed = 100 * torch.finfo(torch.float32).eps * expected.abs().max()
    assert (model(**batch).logits - expected).abs().max() <= allowed
    monkeypatch.setitem(TINY_BACKBONES["modernbert"], "local_attention", window + 2)
    assert (make_encoder("modernbert", "none").double()(**batch).logits - expected).abs().max() > allowed


@pytest.mark.parametrize("pruning", ["none", "adtp"])
def test_the_mean_of_a_text_has_all_its_tokens(pruning, monkeypatch):
    monkeypatch.setitem(TINY_BACKBONES["modernbert"], "classifier_pooling", "mean")
    model = make_encoder("modernbert", pruning)
    batch, exact = batch_of(), copy.deepcopy(model).double()
    expected = exact(**batch).logits
    if pruning == "none":
        torch.testing.assert_close(expected, exact.dense(**batch).logits, rtol=1e-12, atol=1e-12)
    assert not model.reads_first
    assert_within_oracle(oracle_on(model, batch), {"logits": PackedStudent(model)(**batch)[0][0]})
    assert (
        exact.backbone.classifier(exact.encode(**batch, token_type_ids=None)[0][:, 0]) - expected
    ).abs().max() > 0.01


@pytest.mark.parametrize("backbone", TRAINED)
@pytest.mark.parametrize("pruning", ["adtp", "received-twice"])
def test_training_computes_the_packed_model(backbone, pruning):
    """Gradients reach all that the attention has, the table of biases included, and none is NaN: no query sees nothing."""
    model = make_encoder(backbone, pruning).double()
    batch, expected = batch_of(), model(**batch_of())
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    logits = PackedStudent(model, DifferentiableAttention)(**batch)[0][0]
    torch.testing.assert_close(logits, expected.logits, rtol=1e-12, atol=1e-12)
    logits.square().sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if not name.startswith("pruners")}
    assert all(torch.isfinite(grad).all() for grad in gradients.values() if grad is not None)
    assert all(grad.abs().sum() > 0 for name, grad in gradients.items() if TRAINED[backbone] in name)


def test_the_packed_model_has_the_biases_of_when_it_was_made():
    """Training makes it again and again, of the same backbone; all layers share one table."""
    model = make_encoder("mpnet", "none")
    before = PackedStudent(model)(**batch_of())[0][0]
    old = oracle_on(model, batch_of())
    model.backbone.attention(0).bias.weight.weight.mul_(-2)
    packed = PackedStudent(model)
    after = packed(**batch_of())[0][0]
    assert_within_oracle(old, {"logits": before})
    assert_within_oracle(oracle_on(model, batch_of()), {"logits": after})
    with pytest.raises(AssertionError):
        assert_within_oracle(old, {"logits": after})
    assert len({id(layer.attention.bias) for layer in packed.layers}) == 1


def test_feed_forwards_of_mpnet_may_differ_in_size():
    from adtp_export.model.heads import head_class

    torch.manual_seed(0)
    model = head_class("sequence")(configured("mpnet", intermediate_sizes=[48, 17, 5])).eval().requires_grad_(False)
    assert [model.backbone.feed_forward(i).intermediate_dense.out_features for i in range(3)] == [48, 17, 5]
    oracle = oracle_on(model, batch_of())  # without sites, transformers' own forward
    for logits in (model(**batch_of()).logits, PackedStudent(model)(**batch_of())[0][0]):
        assert_within_oracle(oracle, {"logits": logits})


def test_positions_survive_cuts():
    """A text that lost its middle has other answers than one that never had it: the gap is seen."""
    model = make_encoder("modernbert", "none").double()
    states = torch.randn(3, 32, dtype=torch.float64)
    parts = [model.backbone.attention(i) for i in (0, 1)]  # one sees the text, one a window
    bounds = torch.tensor([0, 3])

    def attend(positions, part):
        from adtp_export.model.sequences import Packed

        tokens = Packed(states, bounds, torch.tensor(positions), torch.tensor(positions))
        return DifferentiableAttention(part, wanted=None)(tokens, None)[0]

    for part in parts:
        near, gap, shifted = (attend(places, part) for places in ([0, 1, 2], [0, 1, 9], [4, 5, 6]))
        torch.testing.assert_close(shifted, near, rtol=1e-5, atol=1e-6)  # distances alone count, up to fp32's angles
        assert not torch.allclose(gap, near, rtol=1e-3)
    alone = dataclasses.replace(parts[1], rotate=None)  # nothing of a token outside the window is left
    states[2] += 1
    moved = attend([0, 1, 9], alone)
    states[2] -= 1
    assert torch.equal(moved[:2], attend([0, 1, 9], alone)[:2])


def test_rotary_tables_are_fp32_and_free_of_the_callers_mode():
    with torch.inference_mode():
        rotary = Rotary(frequencies(12345.0, 8), 50)
    x = torch.randn(5, 2, 8, requires_grad=True)
    turned = rotary(x, torch.arange(5))
    turned.sum().backward()
    assert x.grad is not None
    assert rotary.cos.dtype == torch.float32
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1))
    torch.testing.assert_close(turned[0], x[0])
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        assert rotary(x.to(dtype), torch.arange(5)).dtype == dtype


def test_fields_of_transformers_4():
    old = SimpleNamespace(
        num_hidden_layers=5, global_attn_every_n_layers=3, global_rope_theta=160000.0, local_rope_theta=10000.0
    )
    assert layer_kinds(old) == [GLOBAL, LOCAL, LOCAL, GLOBAL, LOCAL]
    assert (theta(old, GLOBAL), theta(old, LOCAL)) == (160000.0, 10000.0)
    assert theta(SimpleNamespace(global_rope_theta=7.0, local_rope_theta=None), LOCAL) == 7.0
    assert rotation(SimpleNamespace(**vars(old), rope_scaling={"rope_type": "yarn"}), LOCAL)["rope_type"] == "yarn"


@pytest.mark.parametrize(
    ("backbone", "fields", "message"),
    [
        ("modernbert", {"hidden_size": 20}, "heads of an even size"),
        ("modernbert", {"local_attention": 1}, "local_attention"),
        ("modernbert", {"num_attention_heads": 5}, "must divide"),
        (
            "modernbert",
            {"intermediate_sizes": [48, 17, 5]},
            "intermediate_sizes: 'modernbert' models have no such field",
        ),
        ("mpnet", {"relative_attention_num_buckets": 16}, "at least 32"),
        ("mpnet", {"max_position_embeddings": 5}, "no room for a text"),
        ("mpnet", {"pad_token_id": 0}, "pad_token_id: got 0; accepted is 1, the id that transformers' MPNet takes"),
    ],
    ids=str,
)
def test_what_cannot_be_served_is_refused(backbone, fields, message):
    with pytest.raises((InputError, ValueError), match=message):
        configured(backbone, **fields)


@pytest.mark.parametrize("kinds", [[GLOBAL], [GLOBAL, "causal"]], ids=str)
def test_kinds_of_layers(kinds):
    with pytest.raises(InputError, match="layer_types: got"):
        layer_kinds(SimpleNamespace(num_hidden_layers=2, layer_types=kinds))


def test_weights_that_are_drawn_until_they_fit_end_without_draws():
    """ModernBERT draws truncated normals; what is allocated and not drawn may never fit."""
    with Uninitialised():
        wide, narrow = torch.full((64,), 1e9), torch.full((64,), 1e9)
        nn.init.trunc_normal_(wide, std=0.02, a=-0.06, b=0.06)
        nn.init.trunc_normal_(narrow, std=0.02, a=-0.002, b=0.002)
    assert not wide.any()
    assert not narrow.any()


def test_a_norm_between_input_and_product_leaves_the_residual_alone():
    recipe = dataclasses.replace(recipes.read(recipes.DIRECTORY / "ort-cpu.int8.toml"), residual=True)
    batches = [{name: tensor.numpy() for name, tensor in batch_of().items()}]
    found = {}
    for backbone in POSITIONAL:
        model = make_encoder(backbone, "none")
        scales = make_quantization_plan(recipe, model, collect(model, batches)).scales
        found[backbone] = {name for name, scale in scales.items() if scale.residual is not None}
    assert found["mpnet"] == {product(i, place) for i in range(3) for place in (QKV, INTERMEDIATE)}
    assert found["modernbert"] == {product(0, QKV)}  # whose norm is that of the embeddings


@pytest.mark.parametrize("backbone", POSITIONAL)
def test_tables_are_in_the_graph_once_and_looked_up_once_per_cut(backbone):
    """Layers of ModernBERT: one sees the text, then after a cut one sees a window, and one the text."""
    graph = known_graph(make_encoder(backbone, "adtp")).graph
    tables = {value for name, value in graph.initializers.items() if name.endswith(("cos", "sin", ".table"))}
    looked_up = [node for node in graph if node.op_type == "Gather" and node.inputs[0] in tables]
    assert (len(tables), len(looked_up)) == {"mpnet": (1, 0), "modernbert": (2 * 2, 2 * 3)}[backbone]


def test_frequencies_stay_in_fp32_where_weights_do_not():
    """As in transformers: angles grow with the position, and so does what rounding their frequencies changes."""
    decoder = make_decoder("llama-ungrouped")
    before = {name: buffer for name, buffer in decoder.named_buffers() if name.endswith("inv_freq")}
    to_precision(decoder, torch.float16)
    assert before
    for name, buffer in before.items():
        assert decoder.get_buffer(name) is buffer
        assert buffer.dtype == torch.float32
    assert {weight.dtype for weight in decoder.parameters()} == {torch.float16}
