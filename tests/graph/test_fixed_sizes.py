"""The form of fixed sizes: the same answers as the oracle, whatever is in dead rows, and nothing dynamic in the engine's network."""

import itertools
from functools import partial

import numpy as np
import onnx
import pytest
import torch
from decoder_models import batch_of, make_decoder
from hypothesis import given, settings
from onnx import helper
from onnxscript import opset20 as op
from onnxscript import script
from test_family_graphs import batches_of
from test_packed_inputs import BOUNDS, check_bounds, with_gaps
from testbed import HEAD_FIELDS, PRUNINGS, TINY_BACKBONES, as_numpy, make_encoder
from tolerances import assert_within_oracle, oracle_on

from adtp_export.artifacts.records import DECOMPOSED, PLUGIN, ShapeRange
from adtp_export.contract import CU_SEQLENS, DOMAIN, DOMAIN_VERSION, OVERFLOW
from adtp_export.errors import InputError
from adtp_export.graph import program
from adtp_export.graph.debug import debug_form
from adtp_export.model.fixed import static_size
from adtp_export.model.selection import KeepAbove, KeepAboveShare, KeepBest, KeepRanks, Rows, compact_fixed
from adtp_export.ops.onnx_layout import END, INT64, OURS
from adtp_export.plugins import tensorrt as host
from adtp_export.runtimes import tensorrt
from adtp_export.runtimes.onnxruntime import OnnxRuntimeEngine
from adtp_export.runtimes.openvino import OpenVinoEngine
from adtp_export.runtimes.packed import FixedEngine, StaticEngines
from adtp_export.verify.oracle import for_precision, run_oracle, typed
from adtp_export.verify.parity import compare

LEAN = [("modernbert", "top", "spans"), ("bert", "from-others", "tokens")]
"""A window with rotations, and scores without a kernel; further tests look at AD-TP and at each rule."""
LATE = {
    "top": {**PRUNINGS["top"], "sites": ["2.attention"], "bins": ["1011010"]},
    "from-others": {**PRUNINGS["from-others"], "sites": ["1.ffn"], "lengths": [6]},
}
"""Nothing is cut before layer 1. So it sees what layer 0 left in dead rows, which a cut would drop."""
ALL = [*zip(TINY_BACKBONES, itertools.cycle(PRUNINGS), itertools.cycle(HEAD_FIELDS))]
LENGTHS = ([1], [1, 1, 1], [5, 30, 2, 17], [64, 1, 33], [7] * 11, [64, 64, 64, 8])
TOKENS, TEXTS = 200, 14


def export(model, path, tokens=TOKENS, texts=TEXTS, kept=()):
    size = static_size(model, tokens, texts, kept)
    program.save(program.export_portable(model, {"version": "test"}, partial(program.fixed_form, size)), path)
    return path


def opened(path, tokens=TOKENS, texts=TEXTS, load=OnnxRuntimeEngine):
    return StaticEngines([FixedEngine(load(path), tokens, texts)])


def judged(path, oracle, load=OnnxRuntimeEngine, gaps=None):
    """Compare a file with the oracle; gaps: the head, where empty texts shall stand between the others."""
    with debug_form(path) as debug:
        pair = opened(path, load=load), opened(debug, load=load)
        for engine in pair if gaps else ():
            engine.engines = [with_gaps(engine.engines[0], gaps)]
        return compare(oracle, *pair, load is OnnxRuntimeEngine)


@pytest.mark.parametrize(
    ("backbone", "pruning", "head"),
    [*LEAN, *(pytest.param(*row, marks=pytest.mark.slow) for row in ALL)],
)
@pytest.mark.usefixtures("traced_once")
def test_equals_the_oracle(tmp_path, monkeypatch, backbone, pruning, head):
    """Also where attention leaves NaN in dead rows, and with empty texts between the others."""
    if (backbone, pruning, head) in LEAN:
        monkeypatch.setitem(TINY_BACKBONES["modernbert"], "num_hidden_layers", 4)
        monkeypatch.setitem(PRUNINGS, pruning, LATE.get(pruning, PRUNINGS[pruning]))
    model = make_encoder(backbone, pruning, head=head, **HEAD_FIELDS[head])
    oracle = run_oracle(model, [as_numpy(batch) for batch in batches_of(model, *LENGTHS)])
    path = export(model, tmp_path / "model.onnx")
    for file, gaps in ((path, None), (leaving_nan(path), head)):
        parity = judged(file, oracle, gaps=gaps)
        assert parity.failure is None
        assert parity.prediction_agreement == parity.kept_token_agreement == 1
    program.convert_precision(path, tmp_path / "fp16.onnx", "fp16")  # no constant of it is beyond fp16's range


@pytest.mark.parametrize(
    ("name", "head", "pruning"),
    [
        ("qwen3", "embedding", "received-twice"),
        *(
            pytest.param(*row, marks=pytest.mark.slow)
            for row in (
                ("qwen3", "embedding", "none"),
                ("qwen2-local", "sequence", "none"),
                ("mistral", "sequence", "ltp"),
                ("mistral-bidirectional", "sequence", "none"),
                ("llama-one-group", "sequence", "top"),
                ("eurobert-mean", "sequence", "none"),
                ("gemma", "sequence", "none"),
            )
        ),
    ],
)
def test_decoders_equal_the_oracle(tmp_path, name, head, pruning):
    """They read the last token, in dead rows too where a text is missing, and some see what is near alone."""
    model = make_decoder(name, head, pruning)
    oracle = run_oracle(model, [as_numpy(batch_of(lengths)) for lengths in ([1], [5, 24, 2, 17], [7] * 11)])
    path = export(model, tmp_path / "model.onnx")
    for file, gaps in ((path, None), (leaving_nan(path), head)):
        assert judged(file, oracle, gaps=gaps).failure is None


@script(OURS)
def LeaveNan(x, cu_seqlens):
    """Put NaN into the rows that no text has."""
    zero = op.Constant(value_ints=[0])
    end = op.Slice(op.Cast(cu_seqlens, to=INT64), op.Constant(value_ints=[-1]), op.Constant(value_ints=[END]))
    dead = op.Sub(op.Shape(x, start=0, end=1), end)
    nothing = op.CastLike(op.Constant(value_float=np.nan), x)
    return op.Pad(op.Slice(x, zero, end, zero), op.Concat(zero, dead, axis=0), nothing, zero)


def leaving_nan(path):
    """Write a file whose attention leaves NaN in dead rows, as a kernel may: it writes to the rows of texts alone.

    Which layers have kernels differs between models and GPUs, so here all do.
    """
    model = onnx.load(path)
    for function in model.functions:
        for node in function.node:
            node.output[:] = [f"{name}_written" if name in function.output else name for name in node.output]
        for name in function.output:
            made = [f"{name}_written", function.input[3]]
            function.node.append(helper.make_node("LeaveNan", made, [name], domain=DOMAIN))
        function.opset_import.append(helper.make_opsetid(DOMAIN, DOMAIN_VERSION))
    model.functions.append(LeaveNan.to_function_proto())
    onnx.save(model, path.with_name("leaving_nan.onnx"))
    return path.with_name("leaving_nan.onnx")


@pytest.fixture(scope="module")
def scheduled(tmp_path_factory):
    """A model whose cuts leave few rows, and its file."""
    model = make_encoder("bert", "schedule")
    return model, export(model, tmp_path_factory.mktemp("fixed") / "model.onnx")


def test_shapes_shrink_after_each_cut(scheduled):
    """0.5 and 0.9 of at most 200 tokens, each text rounded up: 114, and of these 117."""
    model, path = scheduled
    assert static_size(model, TOKENS, TEXTS).kept == (114, 114)
    assert static_size(model, TOKENS, TEXTS, (90, 90)).kept == (90, 90)
    graph = onnx.shape_inference.infer_shapes(onnx.load(path)).graph
    shapes = {v.name: [d.dim_value for d in v.type.tensor_type.shape.dim] for v in (*graph.value_info, *graph.output)}
    assert shapes["layers.0.attention.qkv/Gemm"] == [200, 96]
    assert shapes["layers.0.ffn.intermediate.dense/Gemm"] == [114, 48]
    assert shapes["logits"] == [14, 2]
    assert not any(d.dim_param for v in (*graph.input, *graph.output) for d in v.type.tensor_type.shape.dim)


@pytest.mark.parametrize(("precision", "load"), [("fp16", OnnxRuntimeEngine), ("bf16", OpenVinoEngine)])
@pytest.mark.usefixtures("has_openvino")
def test_lower_precisions_decide_in_fp32(scheduled, tmp_path, precision, load):
    model, path = scheduled
    oracle = run_oracle(model, [as_numpy(batch) for batch in batches_of(model, *LENGTHS)])
    program.convert_precision(path, tmp_path / "typed.onnx", precision)
    assert (
        judged(tmp_path / "typed.onnx", for_precision(oracle, typed(model, precision), precision), load).failure is None
    )


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("missing", "dead"), [(3, torch.nan), (0, 9.0)])
def test_rules_keep_what_their_packed_forms_keep(missing, dead, seed):
    """With ties, texts that are not there, and dead rows of whatever score."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 20, (7,), generator=generator)
    tokens = int(lengths.sum())
    bounds = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    order = torch.randint(0, 6, (tokens,), generator=generator).float()
    count = (torch.rand(7, generator=generator) * lengths).long() + 1
    pruner = make_encoder("bert", "top").pruners["1_attention"]
    more = torch.cat([order, torch.full((9,), dead)])
    further = torch.cat([bounds, bounds[-1:].expand(missing)])
    none = torch.zeros(missing, dtype=torch.int64)
    for rule, fixed in (
        (KeepBest(order, count), KeepBest(more, torch.cat([count, none]))),
        (KeepBest(order, count, keep_first=False), KeepBest(more, torch.cat([count, none]), keep_first=False)),
        (KeepAbove(order, torch.tensor(3.0)), KeepAbove(more, torch.tensor(3.0))),
        (KeepAboveShare(order + 1, torch.tensor(0.5)), KeepAboveShare(more + 1, torch.tensor(0.5))),
        (KeepRanks(order, pruner.keeps), KeepRanks(more, pruner.keeps)),
    ):
        rows, cu_seqlens = rule.packed(bounds)
        found, ends = compact_fixed(fixed.fixed(Rows.of(further, tokens + 9)), further, tokens)
        assert torch.equal(found[: len(rows)], rows)
        assert torch.equal(ends, torch.cat([cu_seqlens, cu_seqlens[-1:].expand(missing)]))


@pytest.fixture(scope="module")
def bounded(tmp_path_factory):
    """AD-TP may keep all, so its rows after cuts are bounded: 40 and 30 of 100, and 200 and 200 of 200."""
    model, folder = make_encoder("bert", "adtp"), tmp_path_factory.mktemp("bounded")
    sizes = {(100, 6): (40, 30), (TOKENS, TEXTS): (200, 200)}
    return model, {size: export(model, folder / f"{size[0]}.onnx", *size, kept) for size, kept in sizes.items()}


def test_a_batch_takes_the_smallest_size_in_which_it_has_room(bounded):
    model, files = bounded
    small, large = (FixedEngine(OnnxRuntimeEngine(path), *size) for size, path in files.items())
    engine = StaticEngines([large, small])
    oracle = run_oracle(model, [as_numpy(batch) for batch in batches_of(model, *LENGTHS)])
    answers = []
    for expected in oracle.batches:
        before = small.rows_run, large.rows_run
        answers.append({"logits": engine.run(expected.batch)["logits"]})
        lengths = expected.batch["attention_mask"].sum(1)
        kept = [(expected.kept_site > site).sum() for site in (0, 1)]
        fits = lengths.sum() <= 100 and len(lengths) <= 6 and kept[0] <= 40 and kept[1] <= 30
        assert (small.rows_run - before[0], large.rows_run - before[1]) == (
            (len(lengths), 0) if fits else (0, len(lengths))
        )
    assert_within_oracle(oracle, *answers)
    assert small.rows_run
    assert large.rows_run


def test_no_live_row_of_ad_tp_sees_what_is_in_dead_rows(bounded):
    model, files = bounded
    oracle = run_oracle(model, [as_numpy(batch) for batch in batches_of(model, *LENGTHS)])
    parity = judged(leaving_nan(files[TOKENS, TEXTS]), oracle, gaps="sequence")
    assert parity.failure is None
    assert parity.prediction_agreement == parity.kept_token_agreement == 1


def test_overflow_is_said_and_divides_a_batch(bounded):
    model, files = bounded
    engine = OnnxRuntimeEngine(files[100, 6])
    assert OVERFLOW in engine.outputs
    (batch,) = batches_of(model, [16] * 6)
    oracle = oracle_on(model, batch)
    assert (oracle.batches[0].kept_site > 0).sum() > 40
    alone = StaticEngines([FixedEngine(engine, 100, 6)])
    assert_within_oracle(oracle, {"logits": alone.run(as_numpy(batch))["logits"]})
    assert alone.engines[0].rows_run == 6
    found = engine.run(
        {
            "input_ids": np.ones(100, np.int64),
            "token_type_ids": np.zeros(100, np.int64),
            CU_SEQLENS: np.array([0, 16, 32, 48, 64, 80, 96], np.int32),
        }
    )
    assert found[OVERFLOW].shape == (2,)


def test_a_text_beyond_the_largest_size_is_refused(bounded):
    _, files = bounded
    batch = {name: np.ones((1, 101), np.int64) for name in ("input_ids", "attention_mask", "token_type_ids")}
    with pytest.raises(InputError, match="got a row of 101 tokens; accepted are at most 100"):
        opened(files[100, 6], 100, 6).run(batch)


@pytest.fixture(scope="module")
def engine(bounded):
    return OnnxRuntimeEngine(bounded[1][100, 6])


@given(BOUNDS)
@settings(max_examples=30, deadline=None)
def test_any_bounds_are_answered(engine, given):
    given = [*given, *given[-1:] * (7 - len(given))]
    meant, found = check_bounds(engine, given, 100)
    np.testing.assert_array_equal(found["logits"].any(1), np.diff(meant) > 0)


PROFILE = {"batch": ShapeRange(1, 4, 6), "seq": ShapeRange(1, 8, 32)}


@pytest.fixture(scope="module")
def wide_files(tmp_path_factory):
    """Students whose heads are as wide as the plugin wants them: one by saliency, one by what tokens received."""
    folder = tmp_path_factory.mktemp("wide")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"hidden_size": 64, "num_attention_heads": 2}.items():
            patch.setitem(TINY_BACKBONES["bert"], name, value)
        return [export(make_encoder("bert", name), folder / f"{name}.onnx") for name in ("adtp", "received-twice")]


@pytest.mark.usefixtures("has_rtx")
@pytest.mark.parametrize("attention", [DECOMPOSED, PLUGIN])
def test_nothing_in_the_network_depends_on_data_but_values(wide_files, attention):
    """No axis is dynamic, and no value of an input becomes a shape. Shapes may be read off tensors: they are constants here."""
    trt = tensorrt.RTX.load()
    for path in wide_files:
        with host.registered(trt, attention == PLUGIN):
            network = trt.Builder(logger := tensorrt.callbacks.logger(trt)).create_network(0)
            parser = trt.OnnxParser(network, logger)
            assert parser.parse_from_file(str(path))
            layers = [network.get_layer(i) for i in range(network.num_layers)]
            from_inputs = {network.get_input(i).name for i in range(network.num_inputs)}
            for layer in layers:
                outputs = [layer.get_output(i) for i in range(layer.num_outputs)]
                inputs = [layer.get_input(i) for i in range(layer.num_inputs)]
                assert all(size >= 0 for tensor in outputs for size in tensor.shape), layer.name
                if layer.type == trt.LayerType.SHAPE or not any(t.name in from_inputs for t in inputs if t):
                    continue
                assert not any(tensor.is_shape_tensor for tensor in outputs), layer.name
                from_inputs |= {tensor.name for tensor in outputs}
            plugins = [layer for layer in layers if layer.type == trt.LayerType.PLUGIN_V3]
            assert len(plugins) == (3 if attention == PLUGIN else 0)
            assert len(from_inputs) > 100


@pytest.mark.usefixtures("has_rtx")
@pytest.mark.parametrize(("which", "attention"), [(0, PLUGIN), pytest.param(1, DECOMPOSED, marks=pytest.mark.slow)])
def test_engines_are_built(wide_files, which, attention):
    engine, details = tensorrt.build(tensorrt.RTX, wide_files[which], PROFILE, ["sm_86", "sm_89", "sm_120"], attention)
    assert engine.nbytes > 0
    assert details["plugin_layers"] == (3 if attention == PLUGIN else 0)


@pytest.mark.usefixtures("has_rtx")
def test_tensorrt_rtx_has_the_setting_that_replays():
    trt = tensorrt.RTX.load()
    assert hasattr(trt.ICudaEngine, "create_runtime_config")
    assert hasattr(trt.IRuntimeConfig, "cuda_graph_strategy")
    assert hasattr(trt.CudaGraphStrategy, "WHOLE_GRAPH_CAPTURE")
