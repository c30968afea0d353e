"""All attention operators in ONNX Runtime, in all types: each alone, and in models of the families that have them."""

import sys

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from cpu_operators import FLOAT, INT32, attend, feed, kinds_that_ran, model_of, session
from known_graphs import known_graph
from onnx import helper
from testbed import ROOT, as_numpy, exported_graph, make_batch, make_encoder

from adtp_export.contract import (
    ATTENTION_FROM_OTHERS,
    ATTENTION_GROUPED,
    DOMAIN,
    KV_HEADS,
    NUM_HEADS,
    SCALE,
    WINDOW,
    WINDOW_AHEAD,
    WINDOW_BACK,
)
from adtp_export.graph import program
from adtp_export.graph.debug import debug_form
from adtp_export.graph.passes import PRECISION, run_passes
from adtp_export.ops.onnx_function import portable_functions
from adtp_export.plugins import operators
from adtp_export.runtimes.onnxruntime import OnnxRuntimeEngine
from adtp_export.verify.oracle import run_oracle
from adtp_export.verify.parity import compare

sys.path.insert(0, str(ROOT / "tests" / "ops"))
from ragged_inputs import HEAD_SIZE, HEADS, make_distances, make_inputs

SAME = {"cu_q": "cu_seqlens", "cu_k": "cu_seqlens", "positions_q": "positions", "positions_k": "positions"}
"""Inputs of grouped queries, which are the same tokens as the keys here, as other operators call them."""


TABLES = {
    "table": np.zeros((599, HEADS), np.float32),
    **{n: t.numpy() for n, t in make_distances(HEADS, HEAD_SIZE).items()},
}
"""What is multiplied by distances, or added by them, in fp32."""


def all_operators(heads, scale, window, kind=FLOAT) -> onnx.ModelProto:
    """A model with a node of each operator, whose outputs are called like it: in q's type, and received in fp32."""
    nodes, outputs = [], {}
    numbers = {NUM_HEADS: heads, SCALE: scale, WINDOW: window, KV_HEADS: heads, WINDOW_BACK: window, WINDOW_AHEAD: 0}
    for function in portable_functions():
        settings = {name: numbers[name] for name in function.attribute}
        inputs = [SAME.get(name, name) for name in function.input]
        results = [f"{function.name}/{i}" for i in range(len(function.output))]
        outputs |= dict(zip(results, (kind, FLOAT)))
        nodes.append(helper.make_node(function.name, inputs, results, domain=DOMAIN, **settings))
    distances = {name: (kind, ["H", "X"]) for name in ("distance_keys", "distance_queries")}
    tables = {"table": (kind, ["R", "N"]), **distances, "buckets": (INT32, ["P"])}
    return model_of(nodes, outputs, kind, positions=(INT32, ["T"]), **tables)


@pytest.mark.parametrize("kind", [FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16])
def test_all_forms_in_all_types(operators_library, tmp_path, kind):
    """Through ONNX Runtime's own tensors, so that it needs no array of bfloat16."""
    dtype = {FLOAT: torch.float32, onnx.TensorProto.FLOAT16: torch.float16}.get(kind, torch.bfloat16)
    q, k, v, cu_seqlens, heads, scale = make_inputs([9, 130, 1], dtype=dtype)
    positions = torch.cat([torch.arange(9), torch.arange(130) * 2, torch.tensor([7])]).int()
    table = torch.randn(599, heads, generator=torch.Generator().manual_seed(0)).to(dtype)
    profiled = session(all_operators(heads, scale, 20, kind), operators_library, profile=tmp_path / "profile")
    tensors = {"q": q, "k": k, "v": v, "cu_seqlens": cu_seqlens, "positions": positions, "table": table}
    distances = make_distances(heads, q.shape[1] // heads, dtype=dtype)
    tensors |= distances
    values = {name: ort_value(tensor) for name, tensor in tensors.items()}
    names = [o.name for o in profiled.get_outputs()]
    found = dict(zip(names, profiled.run_with_ort_values(names, values)))
    assert kinds_that_ran(profiled) == {function.name for function in portable_functions()}
    for function in portable_functions():
        form = {name: tensors[name] for name in function.input if name in ("positions", "table", *distances)}
        form |= {"window": 20} if WINDOW in function.attribute else {}
        form |= {"positions": positions, "reach": (20, 0)} if KV_HEADS in function.attribute else {}
        expected = attend(
            operators_library, q, k, v, cu_seqlens, heads, scale,
            received=len(function.output) == 2, from_others=function.name == ATTENTION_FROM_OTHERS, **form,
        )  # fmt: skip
        for i, right in zip(range(len(function.output)), expected):
            np.testing.assert_array_equal(as_fp32(found[f"{function.name}/{i}"]), right)


def ort_value(tensor):
    if tensor.dtype != torch.bfloat16:
        return onnxruntime.OrtValue.ortvalue_from_numpy(tensor.numpy())
    kind = onnx.TensorProto.BFLOAT16
    return onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(tensor.view(torch.int16).numpy(), kind)


def as_fp32(value):
    if "bfloat16" not in value.data_type():
        return value.numpy().astype(np.float32)
    return torch.utils.dlpack.from_dlpack(value._ortvalue.to_dlpack()).float().numpy()


@pytest.mark.parametrize(
    ("positions", "message"),
    [
        (np.array([0, 2, 1, 3]), "positions must rise"),
        (np.array([-1, 0, 1, 2]), "positions must rise"),
        (np.array([0, 1, 2, 300]), "positions must be below P"),
        (np.array([0, 1, 2]), r"positions(_q)? must be \(T,\)"),
    ],
)
def test_positions_that_are_none_are_refused(operators_library, positions, message):
    q, k, v, cu_seqlens, heads, scale = make_inputs([4])
    wrong = {**feed(q, k, v, cu_seqlens), "positions": positions.astype(np.int32)}
    asked = session(all_operators(heads, scale, 20), operators_library)
    with pytest.raises(Exception, match=message):
        asked.run(None, {**wrong, **TABLES})


@pytest.mark.parametrize("wrong", ["cu_q", "cu_k"])
def test_bounds_of_grouped_queries_are_refused_by_name(operators_library, wrong):
    q, k, v, _, heads, scale = make_inputs([4])
    settings = {NUM_HEADS: heads, SCALE: scale, KV_HEADS: heads, WINDOW_BACK: -1, WINDOW_AHEAD: 0}
    inputs = [*"qkv", "cu_q", "cu_k", "positions", "positions"]
    node = helper.make_node(ATTENTION_GROUPED, inputs, ["output"], domain=DOMAIN, **settings)
    model = model_of([node], {"output": FLOAT}, positions=(INT32, ["T"]), cu_q=(INT32, ["B"]), cu_k=(INT32, ["B"]))
    given = {name: np.array([0, 4], np.int32) for name in ("cu_q", "cu_k", "cu_seqlens")}
    given |= {"q": q.numpy(), "k": k.numpy(), "v": v.numpy(), "positions": np.arange(4, dtype=np.int32)}
    asked = session(model, operators_library)
    asked.run(None, given)
    with pytest.raises(Exception, match=f"{wrong} must be"):
        asked.run(None, {**given, wrong: np.array([0, 3], np.int32)})


def test_tables_and_windows_that_are_none_are_refused(operators_library):
    q, k, v, cu_seqlens, heads, scale = make_inputs([4])
    given = {**feed(q, k, v, cu_seqlens), "positions": np.arange(4, dtype=np.int32)}
    asked = session(all_operators(heads, scale, 20), operators_library)
    for shape in ((598, heads), (599, heads + 1)):
        with pytest.raises(Exception, match=r"table must be \(2P-1, N\)"):
            asked.run(None, {**given, **TABLES, "table": np.zeros(shape, np.float32)})
    wrong = {
        "distance_keys": np.zeros((8, 40), np.float32),
        "distance_queries": np.zeros((32, 39), np.float32),
        "buckets": np.zeros(4, np.int32),
    }
    for name, bad in wrong.items():
        with pytest.raises(Exception, match="share one shape|buckets must be"):
            asked.run(None, {**given, **TABLES, name: bad})
    for buckets in ([0, 1, 40], [-1, 0, 1], [0, 2, 1]):
        with pytest.raises(Exception, match="buckets must rise, and be columns"):
            asked.run(None, {**given, **TABLES, "buckets": np.array(buckets, np.int32)})
    with pytest.raises(Exception, match="window must be at least 1"):
        session(all_operators(heads, scale, 0), operators_library)


@pytest.mark.slow
@pytest.mark.usefixtures("with_operators")
@pytest.mark.parametrize(
    ("backbone", "pruning"),
    [
        ("bert", "ltp"),
        ("bert", "from-others"),
        ("mpnet", "ltp"),
        ("mpnet", "none"),
        ("modernbert", "ltp"),
        ("deberta-v2", "ltp"),
    ],
)
def test_models_of_all_forms_decide_alike(tmp_path, backbone, pruning):
    student, path = make_encoder(backbone, pruning), tmp_path / "model.onnx"
    metadata = {"version": "test", "prune_sites": list(student.site_names)}
    program.save(known_graph(student, metadata), path)
    given = make_batch([5, 60, 1, 2], 64)
    given["input_ids"] = given["input_ids"].clamp(min=2) * given["attention_mask"]  # 1 is padding in MPNet
    oracle = run_oracle(student, [as_numpy(given)])
    with debug_form(path) as debug:
        assert compare(oracle, *(OnnxRuntimeEngine(p, plugin=True) for p in (path, debug)), True).failure is None
    ours = {node.op_type for node in onnx.load(path).graph.node if node.domain == DOMAIN}
    batch = {name: oracle.batches[0].batch[name] for name in student.input_names}
    profiled = session(onnx.load(path), operators.built(), profile=tmp_path / "profile")
    profiled.run(None, batch)
    assert ours <= kinds_that_ran(profiled)


@pytest.mark.usefixtures("with_operators")
def test_fp16_files_load_with_them():
    """Casts are inside the operator, and answers are those of the file without it, as near as fp16 is."""
    model = ir.serde.deserialize_model(onnx.load_from_string(exported_graph("1.attention", "2.ffn")))
    run_passes(model, PRECISION["fp16"])
    batch = as_numpy(make_batch([5, 60, 1, 2], 64))
    typed = ir.to_proto(model)
    without, with_them = (session(typed, library).run(None, batch)[0] for library in (None, operators.built()))
    np.testing.assert_allclose(with_them, without, rtol=0.02, atol=0.02)
