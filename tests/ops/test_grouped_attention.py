"""Attention with fewer heads of keys than of queries: the portable body against the torch operator.

`model/test_decoders.py` runs it in whole files, in OpenVINO too.
"""

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from cpu_operators import model_of
from hypothesis import given, settings
from hypothesis import strategies as st

from adtp_export.contract import (
    ATTENTION_GROUPED,
    DOMAIN,
    KV_HEADS,
    NUM_HEADS,
    SCALE,
    WINDOW_AHEAD,
    WINDOW_BACK,
)
from adtp_export.ops.ragged_attention import ragged_attention_grouped

HEADS, GROUPS, SIZE = 6, 2, 4
REACHES = {"all": (-1, -1), "causal": (-1, 0), "causal window": (5, 0), "uneven window": (3, 8)}
NAMES = ["q", "k", "v", "cu_seqlens", "positions"]
LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=7)


def make(lengths, dtype=torch.float32):
    generator = torch.Generator().manual_seed(len(lengths))
    widths = [heads * SIZE for heads in (HEADS, GROUPS, GROUPS)]
    tensors = [torch.randn(sum(lengths), width, generator=generator).to(dtype) for width in widths]
    places = torch.cat([2 * torch.arange(length) for length in lengths]).to(
        torch.int32
    )  # every second token was dropped
    return [*tensors, torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32), places]


def file_of(reach) -> onnx.ModelProto:
    numbers = {NUM_HEADS: HEADS, KV_HEADS: GROUPS, SCALE: SIZE**-0.5, WINDOW_BACK: reach[0], WINDOW_AHEAD: reach[1]}
    node = onnx.helper.make_node(ATTENTION_GROUPED, NAMES, ["out"], domain=DOMAIN, **numbers)
    model = model_of([node], {"out": onnx.TensorProto.FLOAT}, positions=(onnx.TensorProto.INT32, ["T"]))
    for value, heads in zip(model.graph.input, (HEADS, GROUPS, GROUPS)):
        value.type.tensor_type.shape.dim[1].dim_value = heads * SIZE
    return model


def check(found, lengths, reach):
    """Four times the error that fp32 itself makes against fp64 on the same input."""
    settings = (HEADS, GROUPS, SIZE**-0.5, *reach)
    exact, own = (ragged_attention_grouped(*make(lengths, kind), *settings) for kind in (torch.float64, torch.float32))
    rounding = torch.finfo(torch.float32).eps * exact.abs().max()
    assert np.abs(found - exact.numpy()).max() <= 4 * float(max((own - exact).abs().max(), rounding))


@pytest.fixture(scope="module", params=REACHES)
def reach(request):
    return REACHES[request.param]


@pytest.fixture(scope="module")
def in_onnx_runtime(reach):
    session = onnxruntime.InferenceSession(file_of(reach).SerializeToString(), providers=["CPUExecutionProvider"])
    return lambda inputs: session.run(None, dict(zip(NAMES, (t.numpy() for t in inputs))))[0]


@given(LENGTHS)
@settings(max_examples=30, deadline=None)
def test_onnx_runtime_on_any_lengths(in_onnx_runtime, reach, lengths):
    check(in_onnx_runtime(make(lengths)), lengths, reach)


def test_by_definition(reach):
    """Over all pairs of one text, each query head beside the keys of its group."""
    q, k, v, _, places = inputs = make([17], torch.float64)
    heads = [t.unflatten(1, (-1, SIZE)).transpose(0, 1) for t in (q, k, v)]
    keys, values = (t.repeat_interleave(HEADS // GROUPS, 0) for t in heads[1:])
    apart = places - places[:, None]
    back, ahead = (10**6 if bound < 0 else bound for bound in reach)
    scores = (heads[0] @ keys.transpose(1, 2) * SIZE**-0.5).masked_fill((apart < -back) | (apart > ahead), -torch.inf)
    expected = (scores.softmax(-1) @ values).transpose(0, 1).flatten(1)
    found = ragged_attention_grouped(*inputs, HEADS, GROUPS, SIZE**-0.5, *reach)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
