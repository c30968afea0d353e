"""Attention from some tokens to others, with fewer heads of keys than of queries: its bodies against the torch operator.

`model/test_decoders.py` runs them in whole files, in OpenVINO too.
"""

import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from cpu_operators import LEVELS, attend, kinds_that_ran, model_of, session
from hypothesis import given, settings
from hypothesis import strategies as st
from testbed import one_thread

from adtp_export.contract import (
    ATTENTION_GROUPED,
    ATTENTION_GROUPED_RECEIVED,
    ATTENTION_GROUPED_WINDOW,
    DOMAIN,
    KV_HEADS,
    NUM_HEADS,
    SCALE,
    WINDOW_AHEAD,
    WINDOW_BACK,
)
from adtp_export.ops.grouped_attention import (
    grouped_received_bound,
    grouped_rounding_bound,
    ragged_attention_grouped,
    ragged_attention_grouped_received,
)
from adtp_export.ops.onnx_fixed import fixed_functions
from adtp_export.ops.onnx_grouped_window import BLOCK

HEADS, GROUPS, SIZE = 6, 2, 4
REACHES = {
    "all": (-1, -1),
    "causal": (-1, 0),
    "ahead alone": (-1, 4),
    "causal window": (5, 0),
    "uneven window": (3, 8),
    "wide window": (900, 2),
}
NAMES = ["q", "k", "v", "cu_q", "cu_k", "positions_q", "positions_k"]
DEAD = 3
"""Rows behind the last text."""


@st.composite
def texts(draw):
    """Positions of the keys that each text has left, some several times, and which are queries: all, the last one, some, or none."""

    def one():
        length = draw(st.sampled_from([1, 2, 7, 40, BLOCK, BLOCK + 1, 3 * BLOCK - 5]))
        kept = [0, *(i for i in range(1, length) if draw_gaps or i % 3)]
        kept = [i for i in kept for _ in range(1 + (repeated and i % 4))]
        return kept, {"all": kept, "last": kept[-1:], "some": kept[::7], "none": []}[draw(st.sampled_from(asks))]

    draw_gaps, repeated = draw(st.booleans()), draw(st.booleans())
    asks = draw(st.sampled_from([["all"], ["last"], ["all", "last", "some", "none"]]))
    made = [one() for _ in range(draw(st.integers(1, 6)))]
    return made if any(queries for _, queries in made) else [*made, ([0, 1], [1])]


def make(made, dtype=torch.float32):
    generator = torch.Generator().manual_seed(len(made))
    keys, queries = [kept for kept, _ in made], [asked for _, asked in made]
    rows = [sum(map(len, queries)), *[sum(map(len, keys))] * 2]
    tensors = [
        torch.randn(n, heads * SIZE, generator=generator).to(dtype) for n, heads in zip(rows, (HEADS, GROUPS, GROUPS))
    ]
    bounds = [
        torch.tensor([0, *np.cumsum([len(part) for part in side])], dtype=torch.int32) for side in (queries, keys)
    ]
    places = [torch.tensor([place for part in side for place in part], dtype=torch.int32) for side in (queries, keys)]
    return [*tensors, *bounds, *places]


def file_of(reach, functions=None, received=False) -> onnx.ModelProto:
    """A node with its portable body, or one of `functions`."""
    numbers = {NUM_HEADS: HEADS, KV_HEADS: GROUPS, SCALE: SIZE**-0.5, WINDOW_BACK: reach[0], WINDOW_AHEAD: reach[1]}
    name = ATTENTION_GROUPED if min(reach) < 0 else ATTENTION_GROUPED_WINDOW
    name, outputs = (ATTENTION_GROUPED_RECEIVED, ["out", "received"]) if received else (name, ["out"])
    node = onnx.helper.make_node(name, NAMES, outputs, domain=DOMAIN, **numbers)
    model = model_of([node], dict.fromkeys(outputs, onnx.TensorProto.FLOAT))
    del model.graph.input[:]
    shapes = {name: ["T" if name == "q" else "K", heads * SIZE] for name, heads in zip("qkv", (HEADS, GROUPS, GROUPS))}
    shapes |= {"cu_q": ["B"], "cu_k": ["B"], "positions_q": ["T"], "positions_k": ["K"]}
    for name, shape in shapes.items():
        kind = onnx.TensorProto.FLOAT if name in "qkv" else onnx.TensorProto.INT32
        model.graph.input.append(onnx.helper.make_tensor_value_info(name, kind, shape))
    if functions is not None:
        del model.functions[:]
        model.functions.extend(function for function in functions if function.name == node.op_type)
    return model


def bounds_of(made, reach):
    """Answers and what keys received, each with what fp32 may change on exactly these inputs."""
    q, k, v, *rest = make(made)
    given = (*rest, HEADS, GROUPS, SIZE**-0.5, *reach)
    return grouped_rounding_bound(q, k, v, *given), grouped_received_bound(q, k, *given)


def check(found, bounds):
    """found: answers, and what keys received where it was asked."""
    for written, (exact, allowed) in zip(found, bounds):
        error = np.abs(np.asarray(written)[: len(exact)] - exact.numpy())
        assert (error <= allowed.numpy()).all(), f"{np.nanmax(error / allowed.numpy()):.2f} of what is allowed"


@pytest.fixture(scope="module", params=REACHES)
def reach(request):
    return REACHES[request.param]


def runner(model):
    session = onnxruntime.InferenceSession(model.SerializeToString(), one_thread(), providers=["CPUExecutionProvider"])
    return lambda inputs: session.run(None, dict(zip(NAMES, (t.numpy() for t in inputs))))


@pytest.fixture(scope="module")
def portable(reach):
    return runner(file_of(reach))


@pytest.fixture(scope="module")
def fixed(reach):
    return runner(file_of(reach, fixed_functions()))


@pytest.fixture(scope="module")
def receiving(reach):
    """The form that says what keys received, in both bodies."""
    return [runner(file_of(reach, functions, received=True)) for functions in (None, fixed_functions())]


@given(texts())
@settings(max_examples=40, deadline=None)
def test_onnx_runtime_on_any_texts(portable, fixed, receiving, reach, made):
    inputs, bounds = make(made), bounds_of(made, reach)
    for body in (portable, fixed, *receiving):
        check(body(inputs), bounds)


def test_rows_of_no_text_may_hold_nan(portable, fixed, receiving, reach):
    made = [(list(range(9)), [0, 8]), (list(range(100)), list(range(100)))]
    q, k, v, cu_q, cu_k, *positions = make(made)
    padded = [torch.cat([t, torch.full((DEAD, t.shape[1]), torch.nan)]) for t in (q, k, v)]
    places = [torch.cat([t, t.new_zeros(DEAD)]) for t in positions]
    bounds = bounds_of(made, reach)
    for body in (portable, fixed, *receiving):
        check(body([*padded, cu_q, cu_k, *places]), bounds)


def test_a_text_of_nan_leaves_the_others_alone(portable, receiving, reach):
    made = [(list(range(length)), list(range(length))) for length in (20, 30, 25)]
    clean, spoilt = make(made), make(made)
    for tensor in spoilt[:3]:
        tensor[20:50] = torch.nan
    for body in (portable, receiving[0]):
        for found, expected in zip(body(spoilt), body(clean)):
            assert np.isnan(found[20:50]).all()
            assert np.array_equal(np.delete(found, slice(20, 50), 0), np.delete(expected, slice(20, 50), 0))


@given(texts())
@settings(max_examples=25, deadline=None)
def test_kernels_on_any_texts(operators_library, reach, made):
    """Each that this processor runs, in fp32; `runtimes/test_cpu_forms_in_models.py` has other types."""
    q, k, v, cu_q, cu_k, own, places = make(made)
    form = {"key_heads": GROUPS, "cu_k": cu_k, "positions": own, "key_positions": places, "reach": reach}
    bounds = bounds_of(made, reach)
    for level in LEVELS:
        found = attend(operators_library, q, k, v, cu_q, HEADS, SIZE**-0.5, level=level, **form)
        if found is not None:
            check(found, bounds)


def test_kernels_in_onnx_runtime(operators_library, reach, tmp_path):
    made = [(list(range(0, 90, 2)), [0, 44, 88]), (list(range(150)), [149]), ([3], [])]
    for received in (False, True):
        model = file_of(reach, received=received)
        profiled = session(model, operators_library, profile=tmp_path / "profile")
        check(profiled.run(None, dict(zip(NAMES, (t.numpy() for t in make(made))))), bounds_of(made, reach))
        assert kinds_that_ran(profiled) == {model.graph.node[0].op_type}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cu_k": [0, 4, 3]}, "must be .* and rise"),
        ({"cu_k": [0, 3]}, "cu_q and cu_k must be"),
        ({"positions_q": [1, 0, 0]}, "positions must rise"),
        ({"positions_k": [5, 6, 0]}, "every query must see a key"),
        ({"cu_k": [0, 0, 3]}, "every query must see a key"),
        ({"positions_k": [0, 1]}, "positions_k .T'."),
    ],
)
def test_kernels_refuse_what_cannot_be(operators_library, change, message):
    inputs = dict(zip(NAMES, make([([0, 1], [0, 1]), ([0], [0])])))
    inputs |= {name: torch.tensor(value, dtype=torch.int32) for name, value in change.items()}
    asked = session(file_of((-1, 0)), operators_library)
    with pytest.raises(Exception, match=message):
        asked.run(None, {name: tensor.numpy() for name, tensor in inputs.items()})


LONG = """
import resource, sys
import torch
from cpu_operators import attend

torch.manual_seed(0)
q, k, v = (torch.randn(8192, heads * 16) for heads in (4, 2, 2))
bounds, places = torch.tensor([0, 8192], dtype=torch.int32), torch.arange(8192, dtype=torch.int32)
form = {"key_heads": 2, "positions": places, "reach": (-1, 0)}
attend(sys.argv[1], q[:9], k[:9], v[:9], torch.tensor([0, 9], dtype=torch.int32), 4, 0.25, **{**form, "positions": places[:9]})
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
attend(sys.argv[1], q, k, v, bounds, 4, 0.25, received=sys.argv[2] == "received", **form)
print(1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before))
"""


@pytest.mark.slow
@pytest.mark.parametrize("received", ["alone", "received"])
def test_no_kernel_makes_a_rectangle(operators_library, received):
    """One text of 8,192 tokens takes less than a quarter of the scores of one head."""
    command = [sys.executable, "-c", LONG, str(operators_library), received]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parent.parent)
    assert int(done.stdout) < 4 * 8192**2 / 4


def test_by_definition(reach):
    """Over all pairs of one text, each query head beside the keys of its group."""
    made = [([*range(0, 34, 2)], [2, 16, 32])]
    q, k, v, _, _, own, places = inputs = make(made, torch.float64)
    heads = [t.unflatten(1, (-1, SIZE)).transpose(0, 1) for t in (q, k, v)]
    keys, values = (t.repeat_interleave(HEADS // GROUPS, 0) for t in heads[1:])
    apart = places - own[:, None]
    back, ahead = (10**6 if bound < 0 else bound for bound in reach)
    scores = (heads[0] @ keys.transpose(1, 2) * SIZE**-0.5).masked_fill((apart < -back) | (apart > ahead), -torch.inf)
    weights = scores.softmax(-1)
    expected = (weights @ values).transpose(0, 1).flatten(1)
    found = ragged_attention_grouped(*inputs, HEADS, GROUPS, SIZE**-0.5, *reach)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    seen_by = torch.isfinite(scores[0]).sum(0)  # queries that see a key
    received = weights.sum((0, 1)) / (seen_by.clamp(min=1) if reach[1] == 0 else 1)
    same, found = ragged_attention_grouped_received(*inputs, HEADS, GROUPS, SIZE**-0.5, *reach)
    torch.testing.assert_close((same, found), (expected, received), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("places", [[5, -1], [1, 0], [-1, 3]])
def test_positions_that_fall_or_are_negative_are_refused(places):
    inputs = make([([0, 1], [0, 1]), ([0, 1], [1])])
    for name in ("positions_q", "positions_k"):
        changed = dict(zip(NAMES, inputs))
        changed[name] = torch.cat([torch.tensor(places, dtype=torch.int32), changed[name][2:]])
        with pytest.raises(ValueError, match="positions must rise from 0 or more in each sequence"):
            ragged_attention_grouped(*changed.values(), HEADS, GROUPS, 1.0, -1, -1)


@pytest.mark.parametrize(("places", "reach"), [([5], (2, 0)), ([], (-1, -1))])
def test_a_query_that_sees_nothing_is_refused(places, reach):
    with pytest.raises(ValueError, match="every query must see a key"):
        ragged_attention_grouped(*make([([0, 1], [0]), (places, [9])]), HEADS, GROUPS, 1.0, *reach)
