"""Attention received: the torch op against a dense computation, and the ONNX body against the torch op in two runtimes."""

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx_ir.passes.common import InlinePass
from ragged_inputs import HEAD_SIZE, HEADS, RAGGED, bounds, make_inputs, probabilities
from testbed import one_thread

from adtp_export.contract import ATTENTION, ATTENTION_FROM_OTHERS, ATTENTION_RECEIVED, DOMAIN
from adtp_export.graph.passes.lower_to_ort_packed_attention import LowerToOrtPackedAttention
from adtp_export.graph.passes.ship_bodies import ShipBodies
from adtp_export.graph.program import quiet_exporter
from adtp_export.ops import onnx_function
from adtp_export.ops.ragged_attention import (
    ragged_attention,
    ragged_attention_from_others,
    ragged_attention_received,
)

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=12)


@pytest.mark.parametrize("lengths", RAGGED, ids=str)
def test_equals_dense_attention(lengths):
    q, k, v, *rest = make_inputs(lengths, dtype=torch.float64)
    output, received = ragged_attention_received(q, k, v, *rest)
    p = probabilities(q, k, *rest)
    torch.testing.assert_close(received, p.sum((0, 1)), rtol=1e-12, atol=1e-12)
    same, from_others = ragged_attention_from_others(q, k, v, *rest)
    assert torch.equal(same, output)
    others = p.masked_fill(torch.eye(len(q), dtype=torch.bool), 0)
    torch.testing.assert_close(from_others, others.sum((0, 1)), rtol=1e-12, atol=1e-12)


@given(LENGTHS, st.integers(0, 2**16))
@settings(max_examples=40, deadline=None)
def test_a_sequence_receives_what_its_queries_give(lengths, seed):
    _, received = ragged_attention_received(*make_inputs(lengths, seed=seed, dtype=torch.float64))
    sums = [float(part.sum()) for part in received.split(lengths)]
    np.testing.assert_allclose(sums, [HEADS * n for n in lengths], rtol=1e-12)
    assert (received >= 0).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_types(dtype):
    inputs = make_inputs([9, 1, 30], dtype=dtype)
    output, received = ragged_attention_received(*inputs)
    assert torch.equal(output, ragged_attention(*inputs))
    assert received.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    _, _, exact, allowed = bounds(*inputs)
    assert (np.abs(received.double().numpy() - exact) <= allowed).all()


def test_half_precision_is_summed_in_fp32():
    """Scores of 0, 1 and 2 have no rounding in fp16, so that what is left is that of the probabilities and their sum."""
    k = (torch.arange(3000) % 3).half()[:, None]
    _, received = ragged_attention_received(
        torch.ones_like(k), k, k, torch.tensor([0, 3000], dtype=torch.int32), 1, 1.0
    )
    expected = 3 * np.exp([0, 1, 2]) / np.exp([0, 1, 2]).sum()
    np.testing.assert_allclose(received[:3].numpy(), expected, rtol=1e-5)


@pytest.mark.parametrize("name", ["ragged_attention_received", "ragged_attention_from_others"])
def test_custom_op_passes_pytorchs_own_checks(name):
    torch.library.opcheck(getattr(torch.ops.adtp, name).default, make_inputs([3, 8, 1]))


class Plain(torch.nn.Module):
    """Attention as in a graph: the bounds of the sequences are computed there, once for all layers."""

    def forward(self, q, k, v, lengths):
        cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
        return self.attend(q, k, v, cu_seqlens, HEADS, HEAD_SIZE**-0.5)

    def attend(self, *arguments):
        return ragged_attention(*arguments)


class Received(Plain):
    def attend(self, *arguments):
        return ragged_attention_received(*arguments)


class FromOthers(Plain):
    def attend(self, *arguments):
        return ragged_attention_from_others(*arguments)


class TwoLayers(Plain):
    """Both operators on the same sequences, as in front of a site that reads what was received."""

    def attend(self, *arguments):
        return ragged_attention(*arguments), *ragged_attention_received(*arguments)


class BothOfThem(Plain):
    """What tokens received from all, and from others."""

    def attend(self, *arguments):
        return *ragged_attention_received(*arguments), *ragged_attention_from_others(*arguments)


def export(module, dtype=torch.float32) -> ir.Model:
    """The module through PyTorch's exporter, with the bodies of what it calls."""
    tokens = {0: torch.export.Dim("tokens")}
    lengths = torch.tensor([4, 3])
    with quiet_exporter():
        program = torch.onnx.export(
            module.eval(),
            (*make_inputs(lengths.tolist(), dtype=dtype)[:3], lengths),
            dynamo=True,
            verbose=False,
            opset_version=20,
            input_names=["q", "k", "v", "lengths"],
            dynamic_shapes=(tokens, tokens, tokens, {0: torch.export.Dim("sequences")}),
            custom_translation_table=onnx_function.translations(),
        )
    ShipBodies(onnx_function.portable_functions)(program.model)
    return program.model


def session(model: onnx.ModelProto, **options) -> onnxruntime.InferenceSession:
    settings = one_thread()
    for name, value in options.items():
        setattr(settings, name, value)
    return onnxruntime.InferenceSession(model.SerializeToString(), settings, providers=["CPUExecutionProvider"])


def inlined(model: ir.Model) -> onnx.ModelProto:
    model = ir.from_proto(ir.to_proto(model))
    InlinePass()(model)
    return ir.to_proto(model)


def check(outputs, inputs):
    first, output, received = outputs
    exact, allowed, exact_received, allowed_received = bounds(*inputs)
    assert (np.abs(first - exact) <= allowed).all()
    assert (np.abs(output - exact) <= allowed).all()
    assert received.dtype == np.float32
    assert (np.abs(received - exact_received) <= allowed_received).all()


def feeds(inputs):
    *qkv, cu_seqlens = (t.numpy() for t in inputs[:4])
    return dict(zip("qkv", qkv)) | {"lengths": np.diff(cu_seqlens).astype(np.int64)}


def check_from_others(outputs, inputs):
    """Less by what each token gives itself, which is off by no more than the sum that it is a part of."""
    output, received, same, from_others = outputs
    assert np.array_equal(same, output)
    _, _, exact, allowed = bounds(*inputs)
    q, k, _, *rest = (t.double() if torch.is_tensor(t) and t.is_floating_point() else t for t in inputs)
    itself = probabilities(q, k, *rest).diagonal(dim1=1, dim2=2).sum(0).numpy()
    assert (np.abs(from_others - (exact - itself)) <= 2 * allowed).all()
    assert (np.abs(received - exact) <= allowed).all()
    assert (itself > 2 * allowed).any()  # so that one taken for the other is noticed


@pytest.fixture(scope="module")
def both_of_them() -> ir.Model:
    return export(BothOfThem())


@given(LENGTHS, st.integers(0, 2**16))
@settings(max_examples=40, deadline=None)
def test_from_others_in_onnx_runtime(both_in_onnx_runtime, lengths, seed):
    inputs = make_inputs(lengths, seed=seed)
    check_from_others(both_in_onnx_runtime(inputs), inputs)


@pytest.fixture(scope="module")
def both_in_onnx_runtime(both_of_them):
    model = ir.to_proto(both_of_them)
    onnx.checker.check_model(model, full_check=True)
    loaded = session(model)
    return lambda inputs: loaded.run(None, feeds(inputs))


@pytest.mark.parametrize("lengths", RAGGED, ids=str)
def test_from_others_in_openvino(both_in_openvino, lengths):
    inputs = make_inputs(lengths)
    check_from_others(both_in_openvino(inputs), inputs)


@pytest.fixture(scope="module")
def both_in_openvino(both_of_them, tmp_path_factory):
    return openvino_of(both_of_them, tmp_path_factory.mktemp("openvino") / "model.onnx")


@pytest.fixture(scope="module")
def two_layers() -> ir.Model:
    return export(TwoLayers())


@pytest.fixture(scope="module")
def in_onnx_runtime(two_layers):
    model = ir.to_proto(two_layers)
    onnx.checker.check_model(model, full_check=True)
    loaded = session(model)
    return lambda inputs: loaded.run(None, feeds(inputs))


@pytest.fixture(scope="module")
def in_openvino(two_layers, tmp_path_factory):
    return openvino_of(two_layers, tmp_path_factory.mktemp("openvino") / "model.onnx")


def openvino_of(model, path):
    openvino = pytest.importorskip("openvino", reason="OpenVINO is not installed")
    onnx.save(inlined(model), path)
    compiled = openvino.compile_model(path, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    return lambda inputs: [np.array(value) for value in compiled(feeds(inputs)).values()]


@given(LENGTHS, st.integers(0, 2**16))
@settings(max_examples=40, deadline=None)
def test_onnx_runtime_on_any_lengths(in_onnx_runtime, lengths, seed):
    inputs = make_inputs(lengths, seed=seed)
    check(in_onnx_runtime(inputs), inputs)


@pytest.mark.parametrize("lengths", RAGGED, ids=str)
def test_openvino(in_openvino, lengths):
    inputs = make_inputs(lengths)
    check(in_openvino(inputs), inputs)


@pytest.mark.parametrize("lengths", RAGGED, ids=str)
def test_fp16_in_onnx_runtime(half, lengths):
    inputs = make_inputs(lengths, dtype=torch.float16)
    check(half.run(None, feeds(inputs)), inputs)


@pytest.fixture(scope="module")
def half():
    return session(ir.to_proto(export(TwoLayers(), torch.float16)))


def test_operators_are_portable_and_shared_between_layers(two_layers, tmp_path):
    proto = inlined(two_layers)
    kinds = [node.op_type for node in proto.graph.node]
    assert not set(kinds) & {"NonZero", "Compress", "Unique", "Loop", "If", "Scan"}
    assert not any(node.domain for node in proto.graph.node)
    optimized = tmp_path / "optimized.onnx"
    session(
        ir.to_proto(two_layers),
        optimized_model_filepath=str(optimized),
        graph_optimization_level=onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    )
    left = [node.op_type for node in onnx.load(optimized).graph.node]
    index_arithmetic = ("TopK", "ScatterElements", "CumSum", "LessOrEqual", "Range")
    assert [kinds.count(kind) for kind in index_arithmetic] == [2, 6, 5, 2, 14]
    assert [left.count(kind) for kind in index_arithmetic] == [1, 3, 3, 1, 2]  # the Range over heads is a constant


def test_a_model_ships_the_functions_that_it_calls(two_layers):
    def names(model):
        return [name for _, name, _ in model.functions]

    assert names(export(Plain())) == [ATTENTION]
    assert names(export(Received())) == [ATTENTION_RECEIVED]
    assert names(export(FromOthers())) == [ATTENTION_FROM_OTHERS]
    assert names(two_layers) == [ATTENTION, ATTENTION_RECEIVED]


def test_the_packed_kernel_takes_only_layers_without_received(two_layers):
    model = ir.from_proto(ir.to_proto(two_layers))
    LowerToOrtPackedAttention()(model)
    onnx.checker.check_model(ir.to_proto(model))
    kinds = [node.op_type for node in model.graph if node.domain]
    assert kinds == ["AdtpTokenOffset", "PackedMultiHeadAttention", ATTENTION_RECEIVED]
    assert {name for _, name, _ in model.functions} == {"AdtpTokenOffset", ATTENTION_RECEIVED}


def test_a_graph_with_nothing_for_the_packed_kernel_stays_as_it_is():
    model = export(Received())
    before = ir.to_proto(model).SerializeToString(deterministic=True)
    assert not LowerToOrtPackedAttention()(model).modified
    assert ir.to_proto(model).SerializeToString(deterministic=True) == before


def test_exported_nodes_name_the_plugin(two_layers):
    nodes = [node for node in two_layers.graph if node.domain == DOMAIN]
    assert [node.op_type for node in nodes] == [ATTENTION, ATTENTION_RECEIVED]
    for node in nodes:
        assert {name: attribute.value for name, attribute in node.attributes.items()} == {
            "num_heads": HEADS, "scale": pytest.approx(HEAD_SIZE**-0.5), "plugin_version": "1", "plugin_namespace": ""
        }  # fmt: skip
