"""The form for ONNX Runtime's CUDA provider: checked by ONNX Runtime, and run by ONNX's reference evaluator."""

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from known_graphs import known_graph
from onnx import helper
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun
from onnxruntime.capi.onnxruntime_pybind11_state import NotImplemented
from testbed import as_numpy, make_batch, make_student, one_thread
from tolerances import assert_within_oracle, oracle_on

from adtp_export.contract import ATTENTION, PRUNERS
from adtp_export.graph import program
from adtp_export.graph.debug import debug_form
from adtp_export.graph.passes import ORT_CUDA, run_passes
from adtp_export.ops import onnx_layout
from adtp_export.runtimes import onnxruntime as adapter
from adtp_export.verify.oracle import for_precision, typed
from adtp_export.verify.parity import compare


class PackedMultiHeadAttention(OpRun):
    """As the operator's schema describes it: unpack by token_offset, attend under a mask, pack again."""

    op_domain = "com.microsoft"

    def _run(self, query, key, value, bias, token_offset, cumulative_sequence_length, num_heads=None, scale=None):
        assert bias is None
        batch, longest = token_offset.shape
        order, tokens = token_offset.reshape(-1), len(query)
        padded = np.zeros((3, batch * longest, query.shape[1]), query.dtype)
        padded[:, order[:tokens]] = query, key, value
        q, k, v = padded.reshape(3, batch, longest, num_heads, -1).transpose(0, 1, 3, 2, 4)
        is_token = np.arange(longest) < np.diff(cumulative_sequence_length)[:, None]
        scores = q @ k.swapaxes(2, 3) * scale + np.where(is_token, 0, -1e4)[:, None, None]
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        context = (weights / weights.sum(-1, keepdims=True)) @ v
        return (context.transpose(0, 2, 1, 3).reshape(batch * longest, -1)[order[:tokens]].astype(query.dtype),)


class SkipLayerNormalization(OpRun):
    op_domain = "com.microsoft"

    def _run(self, left, right, gamma, beta=None, bias=None, epsilon=None):
        x = left + right + (0 if bias is None else bias)
        x = x - x.mean(-1, keepdims=True)
        return ((x / np.sqrt((x**2).mean(-1, keepdims=True) + epsilon) * gamma + beta).astype(left.dtype),)


class BiasGelu(OpRun):
    op_domain = "com.microsoft"

    def _run(self, x, bias):
        return (torch.nn.functional.gelu(torch.tensor(x + bias)).numpy(),)


OF_MICROSOFT = [PackedMultiHeadAttention, SkipLayerNormalization, BiasGelu]


@pytest.fixture(scope="module")
def student():
    made = make_student(["1.attention", "2.ffn"])
    generator = torch.Generator().manual_seed(1)
    for name, parameter in made.named_parameters():
        if name.endswith("bias"):  # born as zeros, which exporters leave out
            torch.nn.init.normal_(parameter, std=0.1, generator=generator)
    return made


@pytest.fixture(scope="module")
def files(tmp_path_factory, student):
    directory = tmp_path_factory.mktemp("ort-cuda")
    metadata = {"version": "test", "precision": "fp32", "prune_sites": list(student.site_names)}
    program.save(known_graph(student, metadata), directory / "model.onnx")
    program.lower_to_ort_cuda(directory / "model.onnx", directory / "model.ort-cuda.fp32.onnx")
    return directory / "model.onnx", directory / "model.ort-cuda.fp32.onnx"


def test_every_layer_is_lowered_and_each_cut_has_one_offset_table(files):
    model = onnx.load(files[1])
    onnx.checker.check_model(model)
    kinds = [node.op_type for node in model.graph.node if node.domain]
    assert kinds.count("PackedMultiHeadAttention") == 3
    assert kinds.count("AdtpTokenOffset") == 2  # before the first cut, and after it; no layer follows the second
    assert ATTENTION not in kinds + [function.name for function in model.functions]


def test_no_index_is_padded_on_the_cpu(files):
    """The CUDA provider has no Pad of int64: each would wait for a copy to the host."""
    before, after = ([node.op_type for node in onnx.load(file).graph.node] for file in files)
    assert before.count("Pad") == 6  # two for the input, two for each cut
    assert "Pad" not in after
    assert (
        after.count("Concat") == before.count("Concat") + 6 - 2
    )  # each cut no longer needs the shape of its rectangle


def nodes(path):
    return ir.load(path).graph


def test_sums_and_biases_go_into_one_operator_with_what_follows(files):
    """Three layers of 9 nodes: two norms with the sum before them, a GELU, and three products without a bias. QKV keeps its."""
    before, after = (nodes(file) for file in files)
    kinds = [node.op_type for node in after]
    assert (kinds.count("SkipLayerNormalization"), kinds.count("BiasGelu")) == (2 * 3 + 1, 3)
    assert not {"LayerNormalization", "Gelu"} & set(kinds)
    bare = [node.name for node in after if node.op_type == "Gemm" and len(node.inputs) == 2]
    assert len(bare) == 3 * 3
    assert all(name.endswith(".dense/Gemm") for name in bare)
    biased = [node.name for node in before if node.op_type == "Gemm" and len(node.inputs) == 3]
    kept = [node.name for node in after if node.op_type == "Gemm" and len(node.inputs) == 3]
    assert set(biased) - set(bare) == set(kept)
    assert {name for name in kept if name.startswith(PRUNERS)} == {name for name in biased if name.startswith(PRUNERS)}
    assert {node.name for node in after if node.op_type == "SkipLayerNormalization"} == {
        node.name for node in before if node.op_type == "LayerNormalization"
    }
    layer = [node.op_type for node in after if (node.name or "").startswith("layers.0.")]
    assert len(layer) == 9 + 1  # and a Cast of cu_seqlens


def test_nothing_is_left_that_nobody_reads(files):
    graph = nodes(files[1])
    read = {value.name for node in graph for value in node.inputs if value is not None}
    assert all(value.name in read for value in graph.initializers.values())
    assert all(any(o.uses() or o.is_graph_output() for o in node.outputs) for node in graph)


@pytest.fixture(scope="module")
def on_cpu(files):
    """The file but for its attention, which stays the portable function: the CPU provider has kernels of all the rest."""
    paths = {}
    for name, source in (("fp32", files[0]), ("fp16", files[0].with_name("model.fp16.onnx"))):
        if name == "fp16":
            program.convert_precision(files[0], source, "fp16")
        model = ir.load(source)
        run_passes(model, ORT_CUDA[1:])
        paths[name] = source.with_name(f"rewritten.{name}.onnx")
        program.save(model, paths[name])
    return paths


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_what_is_rewritten_is_verified_on_the_cpu(on_cpu, student, precision):
    """By the verdict of any file, against PyTorch: answers within the bounds of the precision, and the same tokens kept."""
    batches = [make_batch(lengths, max(lengths), seed=i) for i, lengths in enumerate([[9, 32, 1], [5], [16, 16]])]
    oracle = oracle_on(student, *batches)
    if precision != "fp32":
        oracle = for_precision(oracle, typed(student, precision), precision)
    with debug_form(on_cpu[precision]) as debug:
        parity = compare(oracle, adapter.OnnxRuntimeEngine(debug))
    assert parity.failure is None
    assert parity.kept_token_agreement == 1
    assert parity.rows == 6


def small(nodes_, outputs=("y",)):
    value = helper.make_tensor_value_info
    numbers = {"gamma": 4, "beta": 4, "bias": 4, "one_bias": 1}
    graph = helper.make_graph(
        nodes_,
        "g",
        [value(name, onnx.TensorProto.FLOAT, ["t", 4]) for name in ("x", "r")],
        [value(name, onnx.TensorProto.FLOAT, ["t", 4]) for name in outputs],
        [
            helper.make_tensor("w", onnx.TensorProto.FLOAT, [4, 4], np.eye(4, dtype=np.float32).ravel()),
            *(helper.make_tensor(n, onnx.TensorProto.FLOAT, [k], np.arange(1, k + 1)) for n, k in numbers.items()),
        ],
    )
    model = onnx.shape_inference.infer_shapes(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    )
    return ir.serde.deserialize_model(model)


def product(beta=1.0, bias="bias"):
    return helper.make_node("Gemm", ["x", "w", bias], ["p"], beta=beta)


NORM = helper.make_node("LayerNormalization", ["s", "gamma", "beta"], ["y"], axis=-1)
SUM = helper.make_node("Add", ["p", "r"], ["s"])


@pytest.mark.parametrize(
    ("made", "outputs", "expected"),
    [
        ([product(), SUM, NORM], ("y",), ["Gemm", "SkipLayerNormalization"]),
        ([product(), helper.make_node("Add", ["r", "p"], ["s"]), NORM], ("y",), ["Gemm", "SkipLayerNormalization"]),
        ([product(), SUM, NORM], ("y", "s"), ["Gemm", "Add", "LayerNormalization"]),
        (
            [product(), helper.make_node("Add", ["p", "gamma"], ["s"]), NORM],
            ("y",),
            ["Gemm", "Add", "LayerNormalization"],
        ),
        (
            [product(), SUM, helper.make_node("LayerNormalization", ["s", "gamma"], ["y"], axis=1, epsilon=1e-3)],
            ("y",),
            ["Gemm", "SkipLayerNormalization"],
        ),
        ([product(), helper.make_node("Gelu", ["p"], ["y"])], ("y",), ["Gemm", "BiasGelu"]),
        ([product(0.5), helper.make_node("Gelu", ["p"], ["y"])], ("y",), ["Gemm", "Gelu"]),
        ([product(), helper.make_node("Gelu", ["p"], ["y"])], ("y", "p"), ["Gemm", "Gelu"]),
        ([product(), helper.make_node("Gelu", ["p"], ["y"], approximate="tanh")], ("y",), ["Gemm", "Gelu"]),
        ([product(bias="one_bias"), helper.make_node("Gelu", ["p"], ["y"])], ("y",), ["Gemm", "Gelu"]),
        (
            [product(bias="one_bias"), SUM, NORM],
            ("y",),
            ["Gemm", "SkipLayerNormalization"],
        ),
    ],
    ids=[
        "sum",
        "turned sum",
        "sum read twice",
        "broadcast sum",
        "no offset",
        "gelu",
        "scaled bias",
        "product read",
        "tanh",
        "one bias for all columns",
        "sum after one bias for all columns",
    ],
)
def test_only_what_means_the_same_is_rewritten(made, outputs, expected):
    model = small(made, outputs)
    proto = ir.serde.serialize_model(model)
    run_passes(model, ORT_CUDA)
    assert [node.op_type for node in model.graph] == expected
    feed = {name: np.random.default_rng(i).normal(size=(3, 4)).astype(np.float32) for i, name in enumerate("xr")}
    before, after = (
        onnxruntime.InferenceSession(p.SerializeToString(), one_thread(), providers=["CPUExecutionProvider"]).run(
            None, feed
        )
        for p in (proto, ir.serde.serialize_model(model))
    )
    np.testing.assert_allclose(after[0], before[0], rtol=1e-5, atol=1e-5)


GELU = helper.make_node("Gelu", ["p"], ["y"])


@pytest.mark.parametrize(
    ("made", "foreign"),
    [([product(), SUM, NORM], "Add"), ([product(), SUM, NORM], "LayerNormalization"), ([product(), GELU], "Gemm")],
    ids=["sum", "norm", "product"],
)
def test_an_operator_of_another_domain_stays(made, foreign):
    model = small(made)
    (node,) = (node for node in model.graph if node.op_type == foreign)
    node.domain = "other"
    run_passes(model, ORT_CUDA)
    assert {node.op_type for node in made} == {node.op_type for node in model.graph}


def test_a_sum_that_may_be_broadcast_stays():
    """Two sizes of which nothing is known need not be equal."""
    model = small([product(), SUM, NORM])
    for value in (*model.graph.inputs, *(value for node in model.graph for value in node.outputs)):
        value.shape = ir.Shape([None, 4])
    run_passes(model, ORT_CUDA)
    assert [node.op_type for node in model.graph] == ["Gemm", "Add", "LayerNormalization"]


def test_a_norm_that_sums_in_another_type_stays():
    half = helper.make_node("LayerNormalization", ["s", "gamma", "beta"], ["y"], stash_type=onnx.TensorProto.FLOAT16)
    model = small([product(), SUM, half])
    run_passes(model, ORT_CUDA)
    assert [node.op_type for node in model.graph] == ["Gemm", "Add", "LayerNormalization"]


@pytest.mark.parametrize(("cuda", "strict"), [(True, "1"), ("tf32", "0")])
def test_load_asks_for_norms_that_sum_in_fp32(monkeypatch, tmp_path, cuda, strict):
    """Before ONNX Runtime 1.27, the provider's SkipLayerNormalization of fp16 sums in fp16, unless it is asked."""
    asked = {}

    class Session:
        def __init__(self, path, options, providers, **_):
            asked.update(providers[0][1])

        def get_inputs(self):
            return []

        get_outputs = get_inputs

        def get_providers(self):
            return ["CUDAExecutionProvider"]

    monkeypatch.setattr(onnxruntime, "InferenceSession", Session)
    adapter.OnnxRuntimeEngine(tmp_path / "model.onnx", cuda=cuda)
    assert asked["enable_skip_layer_norm_strict_mode"] == strict


@pytest.fixture
def cpu_alone():
    if "CUDAExecutionProvider" in onnxruntime.get_available_providers():
        pytest.skip("this ONNX Runtime has the kernel")


@pytest.mark.usefixtures("cpu_alone")
def test_onnx_runtime_knows_every_operator_and_lacks_only_its_cpu_kernel(files):
    with pytest.raises(NotImplemented, match="NOT_IMPLEMENTED.*PackedMultiHeadAttention"):
        onnxruntime.InferenceSession(str(files[1]), one_thread(), providers=["CPUExecutionProvider"])


@pytest.mark.parametrize("lengths", [[9, 32, 1], [5], [16, 16]], ids=str)
def test_equals_the_portable_file(files, student, lengths):
    batch = make_batch(lengths, max(lengths))
    oracle = oracle_on(student, batch)
    expected = onnxruntime.InferenceSession(str(files[0]), one_thread(), providers=["CPUExecutionProvider"]).run(
        None, as_numpy(batch)
    )[0]
    found = ReferenceEvaluator(str(files[1]), new_ops=OF_MICROSOFT).run(None, as_numpy(batch))[0]
    for logits in (expected, found):
        assert_within_oracle(oracle, {"logits": logits})


@pytest.fixture(scope="module")
def token_offset():
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        [helper.make_node("AdtpTokenOffset", ["cu"], ["offset"], domain="adtp")],
        "g",
        [value("cu", onnx.TensorProto.INT32, ["B1"])],
        [value("offset", onnx.TensorProto.INT32, ["B", "L"])],
    )
    imports = [helper.make_opsetid("", 20), helper.make_opsetid("adtp", 1)]
    functions = [onnx_layout.token_offset_function()]
    model = helper.make_model(graph, opset_imports=imports, functions=functions, ir_version=10)
    session = onnxruntime.InferenceSession(model.SerializeToString(), one_thread(), providers=["CPUExecutionProvider"])
    return lambda bounds: session.run(None, {"cu": np.array(bounds, np.int32)})[0]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=8))
@settings(max_examples=60, deadline=None)
def test_token_offsets_list_tokens_then_padding(token_offset, lengths):
    longest = max(lengths)
    places = [(b * longest + i, i < n) for b, n in enumerate(lengths) for i in range(longest)]
    expected = [place for place, is_token in places if is_token] + [place for place, is_token in places if not is_token]
    assert token_offset([0, *np.cumsum(lengths)]).reshape(-1).tolist() == expected


def test_the_lowered_file_keeps_its_metadata(files):
    assert ir.load(files[1]).metadata_props == ir.load(files[0]).metadata_props
