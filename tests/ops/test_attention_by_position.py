"""Attention that depends on positions: the torch ops against dense attention, and the ONNX bodies against them in two runtimes."""

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx_ir.passes.common import InlinePass
from ragged_inputs import HEAD_SIZE, HEADS, bounds, distance_terms, make_distances, make_inputs, probabilities
from testbed import one_thread

from adtp_export.contract import ATTENTION_DISENTANGLED, ATTENTION_RELATIVE, ATTENTION_WINDOW, DOMAIN, RECEIVED
from adtp_export.graph.passes.drop_unused_received import DropUnusedReceived
from adtp_export.graph.passes.ship_bodies import ShipBodies
from adtp_export.graph.program import quiet_exporter
from adtp_export.ops import onnx_function
from adtp_export.ops.disentangled_attention import ragged_attention_disentangled
from adtp_export.ops.ragged_attention import ragged_attention, ragged_attention_relative, ragged_attention_window

REACH, WINDOW, NARROW = 128, 20, 3
"""Positions are below the first; one window is wider than the least block, 16, and one narrower."""
WIDE = f"{ATTENTION_WINDOW}{RECEIVED}"
TEXTS = st.lists(
    st.lists(st.integers(0, REACH - 1), min_size=1, max_size=70, unique=True).map(sorted), min_size=1, max_size=6
)
"""Positions of the tokens that are left of each text: gaps are where tokens were dropped."""
CUT = ([[0]], [[5], [0], [127]], [list(range(90)), [0, 1, 127], list(range(0, 128, 3))], [list(range(40, 57)), [9]])


def make(texts, seed=0, dtype=torch.float32):
    q, k, v, cu_seqlens, heads, scale = make_inputs([len(text) for text in texts], seed=seed, dtype=dtype)
    generator = torch.Generator().manual_seed(seed)
    table = torch.randn(2 * REACH - 1, HEADS, generator=generator).to(dtype)
    positions = torch.tensor([place for text in texts for place in text], dtype=torch.int32)
    return (q, k, v, cu_seqlens, positions), table, (heads, scale)


def every_form(texts, seed=0, dtype=torch.float32):
    """Outputs and what tokens received: with the table, in the wide window, in the narrow one, with products with distances."""
    tensors, table, settings = make(texts, seed, dtype)
    wide, narrow = (ragged_attention_window(*tensors, *settings, window) for window in (WINDOW, NARROW))
    apart = ragged_attention_disentangled(*tensors, *make_distances(HEADS, HEAD_SIZE, dtype=dtype).values(), *settings)
    return [*ragged_attention_relative(*tensors, table, *settings), *wide, *narrow, *apart]


def distances(positions):
    return positions - positions[:, None]


@pytest.mark.parametrize("texts", CUT, ids=str)
def test_equals_dense_attention(texts):
    """The definition, over all tokens at once: scores with a bias, or with nothing from outside the window."""
    (q, k, v, cu_seqlens, positions), table, (heads, scale) = make(texts, dtype=torch.float64)
    sequence = torch.bucketize(torch.arange(len(q)), cu_seqlens[1:], right=True)
    scores = torch.einsum("qnd,knd->nqk", *(t.unflatten(1, (heads, -1)) for t in (q, k))) * scale
    far = distances(positions).abs()
    biased = scores + table[distances(positions) + REACH - 1].permute(2, 0, 1)
    apart = scores + scale * distance_terms(
        q, k, positions, *make_distances(HEADS, HEAD_SIZE, dtype=q.dtype).values(), heads
    )
    expected = []
    for values in (biased, *(scores.masked_fill(far > window, -torch.inf) for window in (WINDOW, NARROW)), apart):
        p = values.masked_fill(sequence[:, None] != sequence, -torch.inf).softmax(-1)
        expected += [torch.einsum("nqk,knd->qnd", p, v.unflatten(1, (heads, -1))).flatten(1), p.sum((0, 1))]
    for found, right in zip(every_form(texts, dtype=torch.float64), expected, strict=True):
        torch.testing.assert_close(found, right, rtol=1e-12, atol=1e-12)


def test_a_window_that_holds_the_text_is_attention():
    tensors, table, settings = make([list(range(9)), [0]], dtype=torch.float64)
    plain = ragged_attention(*tensors[:4], *settings)
    torch.testing.assert_close(ragged_attention_window(*tensors, *settings, 8)[0], plain, rtol=1e-12, atol=1e-12)
    same = ragged_attention_relative(*tensors, torch.zeros_like(table), *settings)[0]
    torch.testing.assert_close(same, plain, rtol=1e-12, atol=1e-12)
    nothing = {name: torch.zeros_like(t) for name, t in make_distances(HEADS, HEAD_SIZE, dtype=torch.float64).items()}
    same = ragged_attention_disentangled(*tensors, *nothing.values(), *settings)[0]
    torch.testing.assert_close(same, plain, rtol=1e-12, atol=1e-12)
    p = probabilities(*tensors[:2], tensors[3], *settings)
    received = ragged_attention_window(*tensors, *settings, 8)[1]
    torch.testing.assert_close(received, p.sum((0, 1)), rtol=1e-12, atol=1e-12)


def test_custom_ops_pass_pytorchs_own_checks():
    tensors, table, settings = make([[0, 2, 5], [1]])
    torch.library.opcheck(torch.ops.adtp.ragged_attention_relative.default, (*tensors, table, *settings))
    torch.library.opcheck(torch.ops.adtp.ragged_attention_window.default, (*tensors, *settings, WINDOW))
    apart = make_distances(HEADS, HEAD_SIZE).values()
    torch.library.opcheck(torch.ops.adtp.ragged_attention_disentangled.default, (*tensors, *apart, *settings))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"positions": torch.tensor([0, 1])}, "positions must be"),
        ({"positions": torch.tensor([0, REACH], dtype=torch.int32)}, "must lie from 0 to 127"),
        ({"table": torch.zeros(4, HEADS)}, "table must be"),
        ({"table": torch.zeros(2 * REACH - 1, 1)}, "table must be"),
        ({"window": 0}, "window must be"),
        ({"distance_queries": torch.zeros(HEADS * HEAD_SIZE, 39)}, "must share one shape"),
        ({"distance_keys": torch.zeros(HEADS * HEAD_SIZE, 40).double()}, "must have q's dtype"),
        ({"buckets": torch.zeros(4, dtype=torch.int32)}, "buckets must be"),
        ({"buckets": torch.tensor([0, 2, 1], dtype=torch.int32)}, "buckets must rise"),
        ({"buckets": torch.tensor([0, 2, 40], dtype=torch.int32)}, "from 0 to 39"),
    ],
    ids=str,
)
def test_wrong_use_is_named(change, message):
    (*qkv, cu_seqlens, positions), table, settings = make([[0, 1]])
    fields = {"positions": positions, "table": table, **change}
    operator = ragged_attention_relative
    arguments = [*qkv, cu_seqlens, fields["positions"], fields["table"], *settings]
    if "window" in change:
        operator, arguments = ragged_attention_window, [*qkv, cu_seqlens, positions, *settings, change["window"]]
    if (distances := make_distances(HEADS, HEAD_SIZE)).keys() & change.keys():
        operator = ragged_attention_disentangled
        arguments = [*qkv, cu_seqlens, positions, *{**distances, **change}.values(), *settings]
    with pytest.raises(ValueError, match=message):
        operator(*arguments)


@pytest.mark.parametrize(
    ("places", "refused"), [([1, 0], [True] * 3), ([-1, 3], [True] * 3), ([2, 2], [False, True, False])], ids=str
)
def test_positions_that_do_not_rise_are_refused(places, refused):
    """Equal ones only in windows, whose bodies look tokens up by position."""
    tensors, table, settings = make([[0], places, [0, 1]])
    distances = make_distances(HEADS, HEAD_SIZE).values()
    calls = [(ragged_attention_relative, (table, *settings)), (ragged_attention_window, (*settings, WINDOW))]
    for (operator, others), is_refused in zip(
        [*calls, (ragged_attention_disentangled, (*distances, *settings))], refused, strict=True
    ):
        if is_refused:
            with pytest.raises(
                ValueError, match="positions must rise from 0 or more in each sequence(, and none may be there twice)?$"
            ):
                operator(*tensors, *others)
        else:
            operator(*tensors, *others)


class EveryForm(torch.nn.Module):
    """Two layers of each form; of the second, nobody reads what tokens received."""

    def __init__(self, table):
        super().__init__()
        self.table = torch.nn.Parameter(table)
        for name, tensor in make_distances(HEADS, HEAD_SIZE).items():
            self.register_buffer(name, tensor)

    def forward(self, q, k, v, lengths, positions):
        cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
        tensors, settings = (q, k, v, cu_seqlens, positions.to(torch.int32)), (HEADS, HEAD_SIZE**-0.5)
        first = ragged_attention_relative(*tensors, self.table, *settings)
        wide, narrow = (ragged_attention_window(*tensors, *settings, window) for window in (WINDOW, NARROW))
        again = ragged_attention_relative(first[0], *tensors[1:], self.table, *settings)[0]
        twice = ragged_attention_window(wide[0], *tensors[1:], *settings, WINDOW)[0]
        distances = (self.distance_keys, self.distance_queries, self.buckets)
        apart = ragged_attention_disentangled(*tensors, *distances, *settings)
        at_last = ragged_attention_disentangled(apart[0], *tensors[1:], *distances, *settings)[0]
        return *first, *wide, *narrow, *apart, again, twice, at_last


@pytest.fixture(scope="module")
def graph() -> ir.Model:
    tensors, table, _ = make([[0, 1, 2, 3], [0, 4, 9]])
    tokens = {0: torch.export.Dim("tokens")}
    with quiet_exporter():
        program = torch.onnx.export(
            EveryForm(table).eval(),
            (*tensors[:3], torch.tensor([4, 3]), tensors[4].long()),
            dynamo=True,
            verbose=False,
            opset_version=20,
            input_names=["q", "k", "v", "lengths", "positions"],
            dynamic_shapes=(tokens, tokens, tokens, {0: torch.export.Dim("sequences")}, tokens),
            custom_translation_table=onnx_function.translations(),
        )
    DropUnusedReceived()(program.model)
    ShipBodies(onnx_function.portable_functions)(program.model)
    return program.model


def feeds(texts, seed):
    (*qkv, _, positions), _, _ = make(texts, seed)
    lengths = np.array([len(text) for text in texts])
    return dict(zip("qkv", (t.numpy() for t in qkv))) | {"lengths": lengths, "positions": positions.long().numpy()}


def check(found, texts, seed):
    (*qkv, cu_seqlens, positions), table, settings = make(texts, seed)
    forms = [{"table": table}, {"window": WINDOW}, {"window": NARROW}, make_distances(HEADS, HEAD_SIZE)]
    ends = [bounds(*qkv, cu_seqlens, *settings, positions=positions, **form) for form in forms]
    for answer, exact, allowed in zip(found[:8], *(sum(ends, ())[start::2] for start in (0, 1)), strict=True):
        assert (np.abs(answer - exact) <= allowed).all()


@pytest.fixture(scope="module")
def in_onnx_runtime(graph):
    model = ir.to_proto(graph)
    onnx.checker.check_model(model, full_check=True)
    session = onnxruntime.InferenceSession(model.SerializeToString(), one_thread(), providers=["CPUExecutionProvider"])
    return lambda feed: session.run(None, feed)


@given(TEXTS)
@settings(max_examples=40, deadline=None)
def test_onnx_runtime_on_any_positions(in_onnx_runtime, texts):
    check(in_onnx_runtime(feeds(texts, 0)), texts, 0)


@pytest.fixture(scope="module")
def in_openvino(graph, tmp_path_factory):
    openvino = pytest.importorskip("openvino", reason="OpenVINO is not installed")
    inlined = ir.from_proto(ir.to_proto(graph))
    InlinePass()(inlined)
    path = tmp_path_factory.mktemp("openvino") / "model.onnx"
    onnx.save(ir.to_proto(inlined), path)
    compiled = openvino.compile_model(path, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    return lambda feed: [np.array(value) for value in compiled(feed).values()]


@pytest.mark.parametrize("texts", CUT, ids=str)
def test_openvino(in_openvino, texts):
    check(in_openvino(feeds(texts, 0)), texts, 0)


def test_texts_do_not_see_each_other(in_onnx_runtime):
    """The first text has the same answers, to the bit, whatever the others are made of."""
    feed = feeds([list(range(30)), list(range(7))], 0)
    changed = {name: value.copy() for name, value in feed.items()}
    for name in "qkv":
        changed[name][30:] = 1e3
    for before, after in zip(in_onnx_runtime(feed), in_onnx_runtime(changed)):
        assert np.array_equal(before[:30], after[:30])


def test_nobody_computes_what_nobody_reads(graph):
    names = [node.op_type for node in graph.graph if node.domain == DOMAIN]
    relative = f"{ATTENTION_RELATIVE}{RECEIVED}"
    apart = [ATTENTION_DISENTANGLED, f"{ATTENTION_DISENTANGLED}{RECEIVED}"]
    assert sorted(names) == sorted([relative, WIDE, WIDE, ATTENTION_RELATIVE, ATTENTION_WINDOW, *apart])
    assert {name for _, name, _ in graph.functions} == set(names)


def test_index_arithmetic_is_shared_between_layers(graph, tmp_path):
    """Of what depends on positions and lengths alone, ONNX Runtime keeps one of each kind, however many layers there are."""
    optimized, options = tmp_path / "optimized.onnx", one_thread()
    options.optimized_model_filepath = str(optimized)
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    onnxruntime.InferenceSession(ir.to_proto(graph).SerializeToString(), options, providers=["CPUExecutionProvider"])
    kinds = [node.op_type for node in onnx.load(optimized).graph.node]
    assert not set(kinds) & {"NonZero", "Compress", "Unique", "Loop", "If", "Scan"}
    assert kinds.count("Abs") == 2  # one for each window
    assert kinds.count("TopK") == 1  # texts are divided once
    # Four groups' keys, two windows' keys, which both layers share; the table, for each group; heads of queries twice, of keys once.
    assert kinds.count("Transpose") == 13
