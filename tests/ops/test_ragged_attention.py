"""The reference against PyTorch's own attention, and the ONNX body against the reference."""

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import helper
from ragged_inputs import HEADS, RAGGED, make_inputs
from testbed import one_thread

from adtp_export.contract import ATTENTION, DOMAIN
from adtp_export.ops import onnx_function
from adtp_export.ops.ragged_attention import ragged_attention, ragged_attention_received


@pytest.fixture(scope="module")
def body():
    """The portable body alone, in ONNX Runtime."""
    onnx_function.register_schemas()
    value = helper.make_tensor_value_info
    node = helper.make_node(
        ATTENTION, ["q", "k", "v", "cu"], ["out"], domain=DOMAIN, num_heads=4, scale=8**-0.5,
        plugin_version="1", plugin_namespace="",
    )  # fmt: skip
    floats = [value(n, onnx.TensorProto.FLOAT, ["T", 32]) for n in "qkv"]
    graph = helper.make_graph(
        [node],
        "g",
        [*floats, value("cu", onnx.TensorProto.INT32, ["B1"])],
        [value("out", onnx.TensorProto.FLOAT, ["T", 32])],
    )
    imports = [helper.make_opsetid("", 20), helper.make_opsetid("adtp", 1)]
    model = helper.make_model(graph, opset_imports=imports, functions=onnx_function.portable_functions(), ir_version=10)
    onnx.checker.check_model(model, full_check=True)
    session = onnxruntime.InferenceSession(model.SerializeToString(), one_thread(), providers=["CPUExecutionProvider"])
    return lambda q, k, v, cu: session.run(None, {"q": q.numpy(), "k": k.numpy(), "v": v.numpy(), "cu": cu.numpy()})[0]


def bound(q, k, v, cu_seqlens, heads, scale):
    """Four times the error that fp32 itself makes against fp64 on the same input."""
    exact = ragged_attention(q.double(), k.double(), v.double(), cu_seqlens, heads, scale)
    single = ragged_attention(q, k, v, cu_seqlens, heads, scale)
    rounding = torch.finfo(torch.float32).eps * exact.abs().max()
    return exact.numpy(), 4 * float(max((single - exact).abs().max(), rounding))


@pytest.mark.parametrize("lengths", RAGGED, ids=str)
def test_reference_equals_pytorch_attention(lengths):
    q, k, v, cu_seqlens, heads, scale = make_inputs(lengths)
    out = ragged_attention(q, k, v, cu_seqlens, heads, scale)
    for begin, end in zip(cu_seqlens[:-1], cu_seqlens[1:]):
        split = [t[begin:end].unflatten(1, (heads, -1)).transpose(0, 1) for t in (q, k, v)]
        expected = torch.nn.functional.scaled_dot_product_attention(*split, scale=scale).transpose(0, 1).flatten(1)
        torch.testing.assert_close(out[begin:end], expected)


@pytest.mark.parametrize("lengths", RAGGED, ids=str)
def test_onnx_body_equals_reference(body, lengths):
    inputs = make_inputs(lengths)
    exact, allowed = bound(*inputs)
    assert np.abs(body(*inputs[:4]) - exact).max() <= allowed


@given(st.lists(st.integers(1, 40), min_size=1, max_size=12), st.integers(0, 2**16))
@settings(max_examples=40, deadline=None)
def test_onnx_body_on_any_lengths(body, lengths, seed):
    inputs = make_inputs(lengths, seed=seed)
    exact, allowed = bound(*inputs)
    assert np.abs(body(*inputs[:4]) - exact).max() <= allowed


@pytest.fixture(scope="module")
def layout():
    """The index arithmetic of the portable body alone, in ONNX Runtime."""
    names = [*(f"rows_{group}" for group in range(4)), *(f"bias_{group}" for group in range(4)), "back"]
    value, floats, integers = helper.make_tensor_value_info, onnx.TensorProto.FLOAT, onnx.TensorProto.INT64
    node = helper.make_node("Layout", ["cu"], names, domain=DOMAIN, num_heads=HEADS)
    outputs = [value(name, floats if name.startswith("bias") else integers, None) for name in names]
    graph = helper.make_graph([node], "g", [value("cu", onnx.TensorProto.INT32, ["B1"])], outputs)
    imports = [helper.make_opsetid("", 20), helper.make_opsetid("adtp", 1)]
    parts = (onnx_function.Layout, onnx_function.Divide, onnx_function.Rectangle, onnx_function.WayBack)
    functions = [part.to_function_proto() for part in parts]
    model = helper.make_model(graph, opset_imports=imports, functions=functions, ir_version=10)
    session = onnxruntime.InferenceSession(model.SerializeToString(), one_thread(), providers=["CPUExecutionProvider"])

    def run(lengths):
        """Rows and biases of the groups, and the way back."""
        answer = session.run(None, {"cu": np.array([0, *np.cumsum(lengths)], np.int32)})
        return answer[:4], answer[4:8], answer[8]

    return run


def area(rows):
    return sum(len(group) * group.shape[2] ** 2 for group in rows)


@given(st.lists(st.integers(1, 60), min_size=1, max_size=12))
@settings(max_examples=60, deadline=None)
def test_four_groups_by_shares_of_the_longest(layout, lengths):
    """A group has the sequences of its share alone, padded to its own longest, and every head of every token finds its way back."""
    rows, biases, back = layout(lengths)
    edges = [max(lengths), *(share * max(lengths) // 10 for share in (7, 4, 2)), 0]
    for group, bias, upper, lower in zip(rows, biases, edges, edges[1:]):
        expected = sorted((length for length in lengths if lower < length <= upper), reverse=True)
        assert [int(count) for count in (bias[:, 0, 0] == 0).sum(1)] == expected
        assert group.shape[:2] == (len(expected), HEADS)
        assert not expected or group.shape[2] == expected[0]
    sources = np.concatenate([group.ravel() for group in rows])[back]
    assert np.array_equal(sources, np.arange(sum(lengths) * HEADS).reshape(-1, HEADS))


@pytest.mark.parametrize("seed", range(5))
def test_groups_waste_less_than_half(layout, seed):
    """A batch of all lengths costs less than half more than if each text were alone."""
    lengths = np.random.default_rng(seed).integers(5, 513, 32)
    assert area(layout(lengths)[0]) < 1.5 * (lengths**2).sum()


@pytest.mark.parametrize("lengths", [[1], [7], [8, 10, 9], [200] * 5], ids=str)
def test_texts_of_like_length_are_one_group(layout, lengths):
    assert [len(group) for group in layout(lengths)[0]] == [len(lengths), 0, 0, 0]


def test_one_long_text_is_no_rectangle_of_the_batch(layout):
    rows, *_ = layout([512] + [10] * 31)
    assert [group.shape[::2] for group in rows if len(group)] == [(1, 512), (31, 10)]


def test_sequences_do_not_see_each_other(body):
    q, k, v, cu_seqlens, *rest = make_inputs([5, 9, 3])
    changed = [t.clone() for t in (q, k, v)]
    for t in changed:
        t[5:14] = 1e3
    before, after = ragged_attention(q, k, v, cu_seqlens, *rest), ragged_attention(*changed, cu_seqlens, *rest)
    assert torch.equal(before[:5], after[:5])
    assert torch.equal(before[14:], after[14:])
    assert np.array_equal(body(q, k, v, cu_seqlens)[:5], body(*changed, cu_seqlens)[:5])


def test_custom_op_passes_pytorchs_own_checks():
    torch.library.opcheck(torch.ops.adtp.ragged_attention.default, make_inputs([3, 8, 1]))


@pytest.mark.parametrize("operator", [ragged_attention, ragged_attention_received])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: [a[0], a[1], a[2], a[3].long(), *a[4:]], "int32"),
        (lambda a: [a[0], a[1], a[2], a[3] + 1, *a[4:]], "rise from 0"),
        (lambda a: [a[0], a[1], a[2], a[3].flip(0), *a[4:]], "rise from 0"),
        (lambda a: [a[0][:-1], *a[1:]], "one shape"),
        (lambda a: [a[0].half(), *a[1:]], "one floating dtype"),
        (lambda a: [a[0], a[1], a[2], a[3][:0], *a[4:]], "rise from 0"),
        (lambda a: [*a[:4], 5, a[5]], "num_heads must divide"),
        (lambda a: [*a[:4], 0, a[5]], "num_heads must divide"),
    ],
)
def test_wrong_use_is_named(operator, change, message):
    with pytest.raises(ValueError, match=message):
        operator(*change(list(make_inputs([4, 2]))))
