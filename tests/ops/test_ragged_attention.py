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
    model = helper.make_model(
        graph, opset_imports=imports, functions=[onnx_function.portable_function()], ir_version=10
    )
    onnx.checker.check_model(model, full_check=True)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
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
    names = ["long_rows", "long_bias", "short_rows", "short_bias", "back"]
    value, floats, integers = helper.make_tensor_value_info, onnx.TensorProto.FLOAT, onnx.TensorProto.INT64
    node = helper.make_node("Layout", ["cu"], names, domain=DOMAIN, num_heads=HEADS)
    outputs = [value(name, floats if name.endswith("bias") else integers, None) for name in names]
    graph = helper.make_graph([node], "g", [value("cu", onnx.TensorProto.INT32, ["B1"])], outputs)
    imports = [helper.make_opsetid("", 20), helper.make_opsetid("adtp", 1)]
    parts = (onnx_function.Layout, onnx_function.Divide, onnx_function.Rectangles, onnx_function.WayBack)
    functions = [part.to_function_proto() for part in parts]
    model = helper.make_model(graph, opset_imports=imports, functions=functions, ir_version=10)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return lambda lengths: session.run(None, {"cu": np.array([0, *np.cumsum(lengths)], np.int32)})


@given(st.lists(st.integers(1, 60), min_size=1, max_size=12))
@settings(max_examples=60, deadline=None)
def test_two_groups_of_the_smallest_area(layout, lengths):
    """No two groups of the sorted sequences have less padding, and every head of every token finds its way back."""
    long_rows, long_bias, short_rows, short_bias, back = layout(lengths)
    n, ordered = len(lengths), sorted(lengths, reverse=True)
    areas = [k * ordered[0] ** 2 + (n - k) * ordered[k] ** 2 for k in range(n)]
    k = int(np.argmin(areas))
    if k:
        assert long_rows.shape == (k, HEADS, ordered[0])
        assert len(long_rows) * long_rows.shape[2] ** 2 + len(short_rows) * short_rows.shape[2] ** 2 == min(areas)
    else:
        assert long_rows.shape == (1, HEADS, 1)  # stands in
    assert short_rows.shape == (n - k, HEADS, ordered[k])
    live = [(bias[:, 0, 0] == 0).sum(1) for bias in (long_bias, short_bias)]
    assert [*(live[0] if k else []), *live[1]] == ordered
    sources = np.concatenate([long_rows.ravel(), short_rows.ravel()])[back]
    assert np.array_equal(sources, np.arange(sum(lengths) * HEADS).reshape(-1, HEADS))


def test_one_long_text_is_no_rectangle_of_the_batch(layout):
    long_rows, _, short_rows, *_ = layout([512] + [10] * 31)
    assert (long_rows.shape, short_rows.shape) == ((1, HEADS, 512), (31, HEADS, 10))


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
        (lambda a: [*a[:4], 5, a[5]], "num_heads must divide"),
    ],
)
def test_wrong_use_is_named(operator, change, message):
    with pytest.raises(ValueError, match=message):
        operator(*change(list(make_inputs([4, 2]))))
