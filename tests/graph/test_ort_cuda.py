"""The form for ONNX Runtime's CUDA provider: checked by ONNX Runtime, and run by ONNX's reference evaluator."""

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from conftest import as_numpy, exported_graph, make_batch, make_student
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import helper
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun
from onnxruntime.capi.onnxruntime_pybind11_state import NotImplemented
from tolerances import assert_within_oracle, oracle_on

from adtp_export.contract import ATTENTION
from adtp_export.graph import program
from adtp_export.ops import onnx_function


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


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    directory = tmp_path_factory.mktemp("ort-cuda")
    (directory / "model.onnx").write_bytes(exported_graph("1.attention", "2.ffn"))
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
    assert after.count("Concat") == before.count("Concat") + 6


@pytest.fixture
def cpu_alone():
    if "CUDAExecutionProvider" in onnxruntime.get_available_providers():
        pytest.skip("this ONNX Runtime has the kernel")


@pytest.mark.usefixtures("cpu_alone")
def test_onnx_runtime_knows_every_operator_and_lacks_only_its_cpu_kernel(files):
    with pytest.raises(NotImplemented, match="NOT_IMPLEMENTED.*PackedMultiHeadAttention"):
        onnxruntime.InferenceSession(str(files[1]), providers=["CPUExecutionProvider"])


@pytest.mark.parametrize("lengths", [[9, 32, 1], [5], [16, 16]], ids=str)
def test_equals_the_portable_file(files, lengths):
    batch = make_batch(lengths, max(lengths))
    oracle = oracle_on(make_student(["1.attention", "2.ffn"]), batch)
    expected = onnxruntime.InferenceSession(str(files[0]), providers=["CPUExecutionProvider"]).run(
        None, as_numpy(batch)
    )[0]
    found = ReferenceEvaluator(str(files[1]), new_ops=[PackedMultiHeadAttention]).run(None, as_numpy(batch))[0]
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
    functions = [onnx_function.token_offset_function()]
    model = helper.make_model(graph, opset_imports=imports, functions=functions, ir_version=10)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
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
