"""Sums and norms behind products in lower precision: which become one operator with them, and that the answers stay."""

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from known_graphs import known_graph
from testbed import TINY_BACKBONES, as_numpy, make_batch, make_encoder, make_student, one_thread

from adtp_export.contract import (
    ADD_NORM,
    BF16_FEED_FORWARD,
    BF16_LINEAR,
    DOMAIN,
    GELU,
    IN_THREE,
    INT8_FEED_FORWARD,
    INT8_LINEAR,
    INTERMEDIATE,
    QKV,
)
from adtp_export.graph.passes import FuseAddNorm, Int8Weight, LowerLinear, linear, run_passes

LAYERS = 3
"""Of the tiny student."""
NAMES = {"bf16": (BF16_LINEAR, BF16_FEED_FORWARD), "int8": (INT8_LINEAR, INT8_FEED_FORWARD)}


def lowered(student, precision):
    """A student's graph with products in lower precision, nothing fused."""
    model = known_graph(student)
    run_passes(model, (LowerLinear(None if precision == "bf16" else int8_weights(model)),))
    return model


def int8_weights(model):
    """With random factors where a plan has them."""
    chosen, generator = {}, np.random.default_rng(0)
    for node in model.graph:
        if node.op_type == "Gemm" and node.name.startswith("layers."):
            weight = node.inputs[1].const_value.numpy()
            scale = np.abs(weight).max(1) / np.float32(127)
            stored = np.rint(weight / scale[:, None]).astype(np.int8)
            name = node.name.removesuffix("/Gemm")
            size = weight.shape[1] if name.endswith((QKV, INTERMEDIATE)) else 1
            factors = generator.lognormal(size=size) if size > 1 else np.ones(1)
            chosen[name] = Int8Weight(stored, scale, factors.astype(np.float32))
    return chosen


def operators(model):
    return sorted(node.op_type for node in model.graph if node.domain == DOMAIN and "Attention" not in node.op_type)


def with_bodies(model):
    """A copy."""
    copy = ir.from_proto(ir.to_proto(model))
    run_passes(copy, linear()[-1:])
    return copy


def answers(model, batch, level):
    options = one_thread()
    options.graph_optimization_level, options.log_severity_level = level, 4
    data = ir.to_proto(with_bodies(model)).SerializeToString()
    session = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    return session.run(None, {value.name: batch[value.name] for value in session.get_inputs()})


@pytest.mark.parametrize("precision", NAMES)
@pytest.mark.parametrize("sites", [[], ["1.ffn"], ["1.attention"]], ids=["dense", "ffn", "attention"])
def test_layers_are_three_operators_and_attention(precision, sites):
    """Tokens may go between the operators; a norm is still one with what stands before it."""
    linear, feed_forward = NAMES[precision]
    model = lowered(make_student(sites), precision)
    batch = as_numpy(make_batch([9, 3, 5], 9))
    levels = [getattr(onnxruntime.GraphOptimizationLevel, f"ORT_{name}") for name in ("DISABLE_ALL", "ENABLE_ALL")]
    before = [answers(model, batch, level) for level in levels]
    run_passes(model, (FuseAddNorm(),))
    whole = with_bodies(model)
    onnx.checker.check_model(ir.to_proto(whole), full_check=False)
    assert operators(model) == sorted([f"{linear}{IN_THREE}", f"{linear}{ADD_NORM}", feed_forward] * LAYERS)
    norms = [node for node in model.graph if node.op_type == "LayerNormalization"]
    assert all(node.name.startswith("unpad") for node in norms)  # of embeddings
    assert {name for domain, name, _ in whole.functions if "Attention" not in name} == set(operators(model))
    for level, were in zip(levels, before):
        for found, was in zip(answers(model, batch, level), were, strict=True):
            np.testing.assert_array_equal(found, was)


@pytest.mark.parametrize("precision", NAMES)
def test_where_norms_stand_before_products_the_last_one_is_fused(precision):
    """The other sums are residuals of what comes next, too."""
    linear, _ = NAMES[precision]
    model = lowered(make_encoder("modernbert", "none"), precision)
    before = operators(model)
    run_passes(model, (FuseAddNorm(),))
    assert sorted([*operators(model), linear]) == sorted([*before, f"{linear}{ADD_NORM}"])


@pytest.mark.parametrize("precision", NAMES)
def test_a_gelu_by_tanh_stays(monkeypatch, precision):
    """Operators apply the one by the error function, whose results differ."""
    monkeypatch.setitem(TINY_BACKBONES["bert"], "hidden_act", "gelu_pytorch_tanh")
    linear, _ = NAMES[precision]
    model = lowered(make_encoder("bert", "none"), precision)
    run_passes(model, (FuseAddNorm(),))
    gelus = [node for node in model.graph if node.op_type == "Gelu"]
    assert operators(model) == sorted([f"{linear}{IN_THREE}", linear, *[f"{linear}{ADD_NORM}"] * 2] * len(gelus))
    assert [node.attributes["approximate"].as_string() for node in gelus] == ["tanh"] * LAYERS


@pytest.mark.parametrize("precision", NAMES)
@pytest.mark.parametrize("hidden_size", [64, 40])
def test_queries_keys_and_values_are_results_of_their_product(monkeypatch, precision, hidden_size):
    """Unless their width is no multiple of 16, of which blocks of weights have as many columns."""
    monkeypatch.setitem(TINY_BACKBONES["bert"], "hidden_size", hidden_size)
    linear, _ = NAMES[precision]
    found = [(node.domain, node.op_type) for node in lowered(make_encoder("bert", "none"), precision).graph]
    (used, other) = ((DOMAIN, f"{linear}{IN_THREE}"), ("", "Split"))[:: 1 if hidden_size == 64 else -1]
    assert (found.count(used), found.count(other)) == (LAYERS, 0)


@pytest.mark.parametrize("read", ["total", "product", "inner"])
def test_what_something_else_reads_stays(read):
    model = lowered(make_student([]), "bf16")
    add = next(node for node in model.graph if node.op_type == "Add" and "layers.0.ffn" in node.name)
    product = next(value.producer() for value in add.inputs if value.producer().op_type == BF16_LINEAR)
    value = {"total": add, "product": product, "inner": product.inputs[0].producer()}[read].outputs[0]
    model.graph.outputs.append(value)
    run_passes(model, (FuseAddNorm(),))
    found = operators(model)
    assert found.count(BF16_FEED_FORWARD) == LAYERS - 1
    assert found.count(f"{BF16_LINEAR}{GELU}") == 1
    assert found.count(f"{BF16_LINEAR}{ADD_NORM}") == LAYERS + (read == "inner")
