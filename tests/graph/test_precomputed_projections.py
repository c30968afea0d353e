"""The form for ONNX Runtime on CPUs: tables in place of the first projections, and the same answers."""

import functools

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx_ir.passes import PreconditionError
from testbed import as_numpy, make_batch, make_student
from tolerances import assert_within_oracle, oracle_on

from adtp_export.graph import program
from adtp_export.runtimes.onnxruntime import OnnxRuntimeEngine
from adtp_export.verify.oracle import run_oracle
from adtp_export.verify.parity import compare

SIZES = {
    "few words": {"vocab_size": 40},  # fewer than positions
    "no token types, one layer": {"type_vocab_size": 1, "num_hidden_layers": 1},
    "tiny": {},
    "no token types": {"type_vocab_size": 1},
    "one layer": {"num_hidden_layers": 1},
}
LEAN = 2
"""So many of them have each size once; more words than positions are in `test_equals_the_portable_file_on_any_batch`, too."""


def trained(student):
    """Draw what training moves away from 0 and 1: biases, and LayerNorm's scale."""
    generator = np.random.default_rng(0)
    for name, parameter in student.named_parameters():
        if name.endswith("bias") or "LayerNorm.weight" in name:
            drawn = generator.normal("weight" in name, 0.3, parameter.shape)
            parameter.copy_(parameter.new_tensor(drawn))
    return student


def export(student, directory):
    portable, precomputed = directory / "model.onnx", directory / "model.precomputed.fp32.onnx"
    model = program.export_portable(student, {"version": "test"})
    program.add_debug_outputs(model)
    program.save(model, portable)
    program.precompute_projections(portable, precomputed)
    return portable, precomputed


@functools.cache
def without_sites():
    return trained(make_student([], num_hidden_layers=2))


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Without a site: a near tie could go either way."""
    return export(without_sites(), tmp_path_factory.mktemp("ort-cpu"))


@pytest.fixture(scope="module")
def engines(files):
    return [OnnxRuntimeEngine(path) for path in files]


def test_layer_0_alone_has_tables_and_no_projections(files):
    before, after = (onnx.load(path) for path in files)
    onnx.checker.check_model(after, full_check=True)
    products = [{node.name for node in model.graph.node if node.op_type == "Gemm"} for model in (before, after)]
    assert products[0] - products[1] == {"layers.0.attention.qkv/Gemm"}
    tables = {tensor.name: tuple(tensor.dims) for tensor in after.graph.initializer}
    assert tables["layers.0.attention.qkv.words"] == (97, 96)
    assert tables["layers.0.attention.qkv.pairs"] == (2 * 64, 96)
    assert "layers.0.attention.qkv.weight" not in tables
    assert [o.name for o in after.graph.output] == [o.name for o in before.graph.output]
    assert after.metadata_props == before.metadata_props


@given(
    lengths=st.lists(st.integers(1, 64), min_size=1, max_size=6),
    padding=st.integers(0, 3),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=30, deadline=None)
def test_equals_the_portable_file_on_any_batch(engines, lengths, padding, seed):
    batch = make_batch(lengths, min(64, max(lengths) + padding), seed=seed)
    oracle = oracle_on(without_sites(), batch)
    for engine in engines:
        assert_within_oracle(oracle, {"logits": engine.run(as_numpy(batch))["logits"]})


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param(sizes, id=name, marks=[pytest.mark.slow] if i >= LEAN else [])
        for i, (name, sizes) in enumerate(SIZES.items())
    ],
)
def test_as_near_to_the_oracle_whatever_the_shape(tmp_path, sizes):
    student = trained(make_student(["0.ffn"], **{"num_hidden_layers": 2, **sizes}))
    types, words = sizes.get("type_vocab_size", 2), sizes.get("vocab_size", 97)
    batches = [
        as_numpy(make_batch(lengths, max(lengths), words, types)) for lengths in ([9, 32, 1], [64], [5, 5, 7, 30])
    ]
    portable, precomputed = export(student, tmp_path)
    oracle = run_oracle(student, batches)
    for file in (portable, precomputed):
        parity = compare(oracle, OnnxRuntimeEngine(file))
        assert not parity.failure
        assert parity.kept_token_agreement > 0.95


def test_a_file_without_the_product_is_refused(files, tmp_path):
    with pytest.raises(PreconditionError, match=r"no layers\.0\.attention\.qkv/Gemm"):
        program.precompute_projections(files[1], tmp_path / "twice.onnx")
