"""The ONNX file is what the contract says, and answers like the oracle on every kind of student."""

import itertools
import json
from collections import Counter

import numpy as np
import onnx
import onnx.inliner
import onnx_ir as ir
import pytest
import quick_traces
import torch
from known_graphs import known_graph
from testbed import (
    PRUNINGS,
    SITE_SETS,
    TINY_BACKBONES,
    as_numpy,
    exported_graph,
    make_batch,
    make_encoder,
    make_student,
)
from tolerances import assert_within_oracle, oracle_on

from adtp_export.graph import program
from adtp_export.model.registry import fields
from adtp_export.runtimes.onnxruntime import OnnxRuntimeEngine
from adtp_export.runtimes.openvino import OpenVinoEngine
from adtp_export.verify.oracle import run_oracle
from adtp_export.verify.parity import compare

SAME_CLASS = ("bert", "xlm-roberta", "camembert", "distilbert-pruned")
"""BERT is there with all pruners, and the classes of the others with another name."""
LENGTHS = ([1], [30], [1, 1, 1], [5, 30, 2, 17], [64, 1, 33], [7] * 11)
"""In each of them, some of attention's four groups have no text: rectangles without rows, which runtimes have to take."""


def export(student, path, **options):
    model = known_graph(student, {"version": "test", "prune_sites": list(student.site_names)})
    program.save(model, path, **options)
    program.add_debug_outputs(model)
    debug = path.with_name("debug.onnx")
    program.save(model, debug)
    return path, debug


@pytest.fixture(scope="module")
def graph(tmp_path_factory):
    """Model proto and path of a student with two sites and token types."""
    path = tmp_path_factory.mktemp("graph") / "model.onnx"
    path.write_bytes(exported_graph("1.attention", "2.ffn"))
    return onnx.load(path), path


@pytest.mark.parametrize(
    ("sites", "types"),
    [
        (SITE_SETS[1], 2),
        pytest.param(SITE_SETS[1], 1, marks=pytest.mark.slow),  # no token types: test_precomputed_projections.py
        *(pytest.param(sites, 2, marks=pytest.mark.slow) for sites in SITE_SETS if sites != SITE_SETS[1]),
    ],
    ids=str,
)
def test_equals_the_oracle(tmp_path, sites, types):
    """Format 1. Other sites are covered by the table of pruners."""
    student = make_student(sites, type_vocab_size=types)
    path, debug = export(student, tmp_path / "model.onnx")
    batches = [
        as_numpy(make_batch(n, max(n) + i, types=types, seed=i)) for i, n in enumerate(LENGTHS) if max(n) + i <= 64
    ]
    oracle = run_oracle(student, batches)
    parity = compare(oracle, OnnxRuntimeEngine(path), OnnxRuntimeEngine(debug))
    assert parity.failure is None
    assert parity.prediction_agreement == parity.kept_token_agreement == 1


ELSEWHERE = ("adtp", "ltp", "top", "transkimmer", "none", "schedule", "received-twice")
"""Compared elsewhere, too: the first three in tests/imports and, like schedules, in other forms of input and in runs of training that
export their student; a plain BERT in pipeline/test_export_api.py, AD-TP in test_packed_inputs.py, and the last one with decoders."""


@pytest.mark.parametrize(
    ("backbone", "pruning"),
    [
        *(pytest.param("bert", name, marks=[pytest.mark.slow] if name in ELSEWHERE else []) for name in PRUNINGS),
        *(
            pytest.param(name, "ltp", marks=[] if name == "modernbert" else [pytest.mark.slow])
            for name in TINY_BACKBONES
            if name not in SAME_CLASS
        ),
    ],
)
@pytest.mark.usefixtures("has_openvino", "traced_once")
def test_every_backbone_and_pruner_equals_the_oracle(tmp_path, backbone, pruning):
    """A plain model is compared with transformers' own forward: that is what the oracle runs where there is no site."""
    model = make_encoder(backbone, pruning, num_labels=3)
    path, debug = export(model, tmp_path / "model.onnx")
    types, pad = fields(model.dense.config)["type_vocab_size"], model.dense.config.pad_token_id
    batches = [as_numpy(make_batch(n, max(n), types=types, seed=i)) for i, n in enumerate(LENGTHS)]
    for batch in batches:  # RoBERTa takes the padding id for padding, wherever it stands
        batch["input_ids"][(batch["input_ids"] == pad) & (batch["attention_mask"] == 1)] = 5
    oracle = run_oracle(model, batches)
    for load, exact in ((OnnxRuntimeEngine, True), (OpenVinoEngine, False)):
        parity = compare(oracle, load(path), load(debug), exact_debug=exact)
        assert parity.failure is None
        assert parity.prediction_agreement == parity.kept_token_agreement == 1


def one_layer(ratios, min_tokens):
    return make_student(["0.ffn"], retention_ratios=ratios, min_tokens=min_tokens, num_hidden_layers=1)


@pytest.mark.parametrize(
    ("ratios", "min_tokens"),
    [  # of counts and ratios, tests/model/test_selection.py has all
        ([0.001, 1.0], 5),
        *(
            pytest.param(*row, marks=pytest.mark.slow)
            for row in (([1.0], 1), ([0.001, 1.0], 1), ([0.25, 0.333, 1.0], 5))
        ),
    ],
)
def test_ratios_and_floor(tmp_path, ratios, min_tokens):
    student = one_layer(ratios, min_tokens)
    path, debug = export(student, tmp_path / "model.onnx")
    oracle = run_oracle(student, [as_numpy(make_batch([1, 3, 20, 40], 40))])
    assert compare(oracle, OnnxRuntimeEngine(path), OnnxRuntimeEngine(debug)).failure is None


def test_an_empty_row_counts_as_one_token(graph):
    _, path = graph
    batch = as_numpy(make_batch([4, 1], 5))
    empty = {**batch, "attention_mask": batch["attention_mask"] * np.array([[1], [0]])}
    engine = OnnxRuntimeEngine(path)
    assert np.array_equal(engine.run(batch)["logits"], engine.run(empty)["logits"])


def test_inputs_and_outputs(graph):
    model, _ = graph
    onnx.checker.check_model(model, full_check=True)

    def describe(values):
        return [
            (v.name, v.type.tensor_type.elem_type, [d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim])
            for v in values
        ]

    int64, fp32 = onnx.TensorProto.INT64, onnx.TensorProto.FLOAT
    names = ("input_ids", "attention_mask", "token_type_ids")
    assert describe(model.graph.input) == [(name, int64, ["batch", "sequence"]) for name in names]
    assert describe(model.graph.output) == [("logits", fp32, ["batch", 2])]
    assert {o.domain: o.version for o in model.opset_import} == {"": 20, "adtp": 1}


def test_operators(graph):
    model, _ = graph
    flat = onnx.inliner.inline_local_functions(model)
    operators = {node.op_type for node in flat.graph.node}
    assert not operators & {"NonZero", "Compress", "Unique", "Loop", "If", "Scan"}
    top_ks = [node for node in model.graph.node if node.op_type == "TopK"]
    assert len(top_ks) == 4
    for node in top_ks:
        attributes = {a.name: a.i for a in node.attribute}
        assert attributes["sorted"] == 1
        assert attributes["axis"] == 1  # per row
    assert not any(node.domain for node in flat.graph.node)


def test_attention_is_one_operator(graph):
    model, _ = graph
    nodes = [node for node in model.graph.node if node.domain == "adtp"]
    assert [node.op_type for node in nodes] == ["AdtpRaggedAttention"] * 3
    for node in nodes:
        attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        assert attributes == {
            "num_heads": 4, "scale": pytest.approx(8**-0.5), "plugin_version": b"1", "plugin_namespace": b""
        }  # fmt: skip
        assert len(node.input) == 4
    (function,) = model.functions
    assert (function.domain, function.name) == ("adtp", "AdtpRaggedAttention")
    assert not any(node.op_type == "Softmax" for node in model.graph.node)


def behind(values, stop):
    """The nodes that values are computed from, as far back as operators of the kind `stop`, which are the last."""
    seen, left = {}, [value.producer() for value in values]
    while left:
        node = left.pop()
        if node is not None and id(node) not in seen:
            seen[id(node)] = node
            left += [value.producer() for value in node.inputs if value is not None and node.op_type != stop]
    return list(seen.values())


def test_counts_stay_integers(graph):
    """Between the lengths, the chosen ratio and K of every TopK all is int64: in fp32 a count could be rounded."""
    model = ir.from_proto(graph[0])
    ks = [node.inputs[1] for node in model.graph if node.op_type == "TopK"]
    assert len(ks) == 4
    for k in ks[1::2]:  # of the tokens kept at each cut
        nodes = behind([k], "ArgMax")
        assert {"ArgMax", "Mul", "Div", "Clip", "Min", "ReduceMax"} <= {node.op_type for node in nodes}
        assert {value.dtype for node in nodes for value in node.outputs if value.name} == {ir.DataType.INT64}


def test_names_say_where_a_node_belongs(graph):
    model, _ = graph
    names = [node.name for node in model.graph.node]
    assert len(set(names)) == len(names)
    assert "layers.0.attention.qkv/Gemm" in names
    assert "cuts.1_attention.pruner.ratio_predictor/Gemm" in names
    weights = {i.name for i in model.graph.initializer}
    assert "layers.2.ffn.intermediate.dense.weight" in weights


def test_nothing_of_this_machine_is_in_the_file(graph):
    model, path = graph
    assert not any(node.metadata_props or node.doc_string for node in model.graph.node)
    assert b"site-packages" not in path.read_bytes()


def test_metadata(graph):
    model, _ = graph
    properties = {p.key: p.value for p in model.metadata_props}
    assert properties["adtp.version"] == "test"
    assert json.loads(properties["adtp.prune_sites"]) == ["1.attention", "2.ffn"]
    assert model.producer_name == "adtp-export"


def test_weights_past_the_limit_go_beside_the_graph(tmp_path):
    student = one_layer([0.001, 1.0], 5)
    path, _ = export(student, tmp_path / "model.onnx", inline_limit_bytes=10_000)
    data = tmp_path / "model.onnx.data"
    assert data.stat().st_size > 10_000 > path.stat().st_size - 60_000
    oracle = run_oracle(student, [as_numpy(make_batch([9, 2], 9))])
    assert compare(oracle, OnnxRuntimeEngine(path), OnnxRuntimeEngine(tmp_path / "debug.onnx")).failure is None


@pytest.fixture
def as_users_export(monkeypatch):
    """Without what makes the tests' traces quick."""
    for (owner, name), whole in quick_traces.AS_THEY_ARE.items():
        monkeypatch.setattr(owner, name, whole)
    with torch._dynamo.config.patch(fake_tensor_cache_enabled=True):  # `conftest` turns it off
        yield


@pytest.mark.usefixtures("as_users_export")
def test_two_exports_are_the_same_file(graph):
    """The other one may be of another worker, and of another export before it: so tests may share what was traced, and trace quickly."""
    sites = ["1.attention", "2.ffn"]
    metadata = {"version": "test", "precision": "fp32", "prune_sites": sites}
    made = ir.to_proto(program.export_portable(make_student(sites), metadata)).SerializeToString()
    assert made == graph[1].read_bytes() == exported_graph(*sites)


@pytest.mark.slow
@pytest.mark.parametrize(("backbone", "pruning"), [*zip(TINY_BACKBONES, itertools.cycle(PRUNINGS))])
@pytest.mark.parametrize("form", [program.padded_form, program.packed_form])
def test_quick_traces_are_those_of_users(backbone, pruning, form, request):
    model = make_encoder(backbone, pruning)
    quick = program.export_portable(model, {"version": "test"}, form)
    request.getfixturevalue("as_users_export")
    whole = program.export_portable(model, {"version": "test"}, form)
    assert ir.to_proto(quick).SerializeToString() == ir.to_proto(whole).SerializeToString()


@pytest.mark.slow
def test_an_operator_without_a_translation_is_decomposed(monkeypatch):
    student = make_student(["0.ffn"], num_hidden_layers=1)
    usual = program.export_portable(student, {"version": "test"})
    monkeypatch.setattr(program, "_translations_of_composed", dict)
    found = program.export_portable(student, {"version": "test"})
    assert Counter(node.op_type for node in found.graph) == Counter(node.op_type for node in usual.graph)


def test_graph_does_not_specialize_on_the_example(graph):
    """Batch sizes and lengths around the traced example (3 x 7), and sizes that are special to exporters."""
    student = make_student(["1.attention", "2.ffn"])
    engine = OnnxRuntimeEngine(graph[1])
    for batch, padded in [(1, 1), (1, 2), (2, 1), (2, 2), (3, 7), (7, 3), (33, 5)]:
        inputs = make_batch(torch.randint(1, padded + 1, (batch,)), padded)
        assert_within_oracle(oracle_on(student, inputs), {"logits": engine.run(as_numpy(inputs))["logits"]})
