"""fp16 and bf16 files: what is typed, what stays in fp32, and that they answer like PyTorch in that precision."""

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from known_graphs import known_graph
from testbed import as_numpy, exported_graph, make_batch, make_encoder, make_student

from adtp_export.contract import ATTENTION_RECEIVED, DOMAIN, PRUNERS, ROTATE
from adtp_export.errors import InputError, VerificationError
from adtp_export.graph import program
from adtp_export.graph.debug import debug_form
from adtp_export.runtimes import onnxruntime, openvino
from adtp_export.verify.oracle import for_precision, run_oracle, typed
from adtp_export.verify.parity import compare

SITES = ["1.attention", "2.ffn"]
TYPES = {"fp16": ir.DataType.FLOAT16, "bf16": ir.DataType.BFLOAT16}


@pytest.fixture(scope="module")
def student():
    return make_student(SITES)


@pytest.fixture(scope="module")
def files(student, tmp_path_factory):
    """The fp32, fp16 and bf16 files, each with debug outputs."""
    directory = tmp_path_factory.mktemp("precision")
    model = ir.from_proto(onnx.load_from_string(exported_graph(*SITES)))
    program.add_debug_outputs(model)
    program.save(model, directory / "fp32.onnx")
    for precision in TYPES:
        program.convert_precision(directory / "fp32.onnx", directory / f"{precision}.onnx", precision)
    return directory


@pytest.fixture(scope="module")
def oracle(student):
    return run_oracle(student, [as_numpy(make_batch([9, 32, 1], 32)), as_numpy(make_batch([5, 20] * 8, 20, seed=1))])


@pytest.mark.parametrize("precision", TYPES)
def test_all_but_the_decisions_is_typed(files, precision):
    path = files / f"{precision}.onnx"
    onnx.checker.check_model(path, full_check=False)
    model = ir.load(path)
    kinds = {name: value.dtype for name, value in model.graph.initializers.items() if value.dtype.is_floating_point()}
    for name, kind in kinds.items():
        is_precise = name.startswith((PRUNERS, "const/"))  # the floating constants are the saliency mask's
        assert kind == (ir.DataType.FLOAT if is_precise else TYPES[precision]), name
    assert {o.name: o.dtype for o in model.graph.outputs} == {
        "logits": ir.DataType.FLOAT,
        "kept_site": ir.DataType.INT32,
    }
    for node in model.graph:
        if node.op_type in ("Gemm", "LayerNormalization", "AdtpRaggedAttention", "Gelu"):
            expected = ir.DataType.FLOAT if PRUNERS in node.name else TYPES[precision]
            assert node.outputs[0].dtype == expected, node.name
        if node.op_type == "LayerNormalization":
            assert node.attributes.get_int("stash_type", 1) == 1  # statistics in fp32
    assert model.metadata_props["adtp.precision"] == precision


@pytest.mark.parametrize("precision", TYPES)
def test_file_is_half_as_large(files, precision):
    assert (files / f"{precision}.onnx").stat().st_size < 0.8 * (files / "fp32.onnx").stat().st_size


def test_fp16_answers_like_pytorch_in_fp16(student, oracle, files):
    check_answers(student, oracle, files, "fp16", onnxruntime.OnnxRuntimeEngine)


@pytest.mark.usefixtures("has_openvino")
def test_bf16_answers_like_pytorch_in_bf16(student, oracle, files):
    """ONNX Runtime's CPU provider has no bf16."""
    check_answers(student, oracle, files, "bf16", openvino.OpenVinoEngine)


def check_answers(student, oracle, files, precision, runtime):
    judged = for_precision(oracle, typed(student, precision), precision)
    parity = compare(judged, runtime(files / f"{precision}.onnx"))
    assert parity.failure is None
    assert parity.max_abs_logit_diff > 10 * oracle.output_errors["logits"]  # it is another arithmetic than fp32


def test_bounds_follow_the_precision(student, oracle):
    fp16, bf16 = (for_precision(oracle, typed(student, precision), precision) for precision in TYPES)
    assert oracle.output_errors["logits"] < fp16.output_errors["logits"] / 50 < bf16.output_errors["logits"] / 100
    assert (oracle.decision_errors < fp16.decision_errors).all()
    assert (fp16.decision_errors < bf16.decision_errors).all()


def test_a_student_that_overflows_in_fp16_is_not_judged_by_it():
    student = make_student(["0.ffn"])
    for layer in range(student.backbone.num_layers):
        student.backbone.feed_forward(layer).intermediate_dense.weight.mul_(3e4)
    oracle = run_oracle(student, [as_numpy(make_batch([9, 4], 9))])
    with pytest.raises(VerificationError, match="the PyTorch model overflows in fp16"):
        for_precision(oracle, typed(student, "fp16"), "fp16")


def test_forms_of_a_large_file_have_their_weights_to_themselves(tmp_path):
    """Though they are small enough for one file, and take some weights as they are."""
    large, forms = tmp_path / "large.onnx", {}
    program.save(ir.from_proto(onnx.load_from_string(exported_graph(*SITES))), large, inline_limit_bytes=10_000)
    (tmp_path / "forms").mkdir()
    for name, make in {
        "fp16": lambda path: program.convert_precision(large, path, "fp16"),
        "linear": lambda path: program.lower_linear(large, path),
        "precomputed": lambda path: program.precompute_projections(large, path),
    }.items():
        forms[name] = tmp_path / "forms" / f"{name}.onnx"
        make(forms[name])
    assert large.with_name("large.onnx.data").is_file()
    for path in forms.values():
        stored = onnx.load(path, load_external_data=False)
        assert not any(tensor.external_data for tensor in stored.graph.initializer)
    assert sorted(path.name for path in (tmp_path / "forms").iterdir()) == sorted(f"{name}.onnx" for name in forms)


def test_weights_beyond_fp16_are_refused(tmp_path):
    model = ir.from_proto(onnx.load_from_string(exported_graph(*SITES)))
    (weight,) = (value for name, value in model.graph.initializers.items() if name.endswith("classifier.weight"))
    beyond = weight.const_value.numpy().copy()
    beyond[0, 0] = 1e5
    weight.const_value = ir.tensor(beyond, name=weight.name)
    program.save(model, tmp_path / "model.onnx")
    with pytest.raises(
        InputError, match=r"classifier.weight holds 1e\+05, beyond FLOAT16's 6.55e\+04.*--precision bf16"
    ):
        program.convert_precision(tmp_path / "model.onnx", tmp_path / "fp16.onnx", "fp16")
    program.convert_precision(tmp_path / "model.onnx", tmp_path / "bf16.onnx", "bf16")
    weight.const_value = ir.tensor(np.full_like(beyond, -np.inf), name=weight.name)  # as masks have it
    program.save(model, tmp_path / "model.onnx")
    program.convert_precision(tmp_path / "model.onnx", tmp_path / "fp16.onnx", "fp16")
    assert np.isneginf(ir.load(tmp_path / "fp16.onnx").graph.initializers[weight.name].const_value.numpy()).all()


def test_what_tokens_received_stays_in_fp32(tmp_path):
    """LTP's scores: its thresholds are near 1 / n, where fp16 would decide by rounding."""
    model = make_encoder("bert", "ltp")
    program.save(program.export_portable(model, {"version": "test"}), tmp_path / "fp32.onnx")
    program.convert_precision(tmp_path / "fp32.onnx", tmp_path / "fp16.onnx", "fp16")
    graph = ir.load(tmp_path / "fp16.onnx").graph
    nodes = [node for node in graph if node.op_type == ATTENTION_RECEIVED]
    assert len(nodes) == 3
    for node in nodes:
        assert [value.dtype for value in node.outputs] == [ir.DataType.FLOAT16, ir.DataType.FLOAT]
    oracle = run_oracle(model, [as_numpy(make_batch([9, 32, 1], 32)), as_numpy(make_batch([5, 20] * 8, 20, seed=1))])
    with debug_form(tmp_path / "fp16.onnx") as debug:
        engine = onnxruntime.OnnxRuntimeEngine(debug)
        assert compare(for_precision(oracle, typed(model, "fp16"), "fp16"), engine).failure is None


@pytest.fixture(scope="module")
def modernbert(tmp_path_factory):
    path = tmp_path_factory.mktemp("modernbert") / "fp32.onnx"
    program.save(known_graph(make_encoder("modernbert", "adtp")), path)
    return path


@pytest.mark.parametrize("precision", TYPES)
def test_queries_and_keys_are_turned_in_fp32(tmp_path, modernbert, precision):
    """Tables, and all that is computed of them; what goes into the attention operator has the type again."""
    program.convert_precision(modernbert, tmp_path / "typed.onnx", precision)
    graph = ir.load(tmp_path / "typed.onnx").graph
    tables = [value for name, value in graph.initializers.items() if name.endswith((".rotate.cos", ".rotate.sin"))]
    assert len(tables) == 4  # of two kinds of layers
    turning = [value for node in graph if ROTATE in node.name and node.op_type != "Cast" for value in node.outputs]
    assert len([value for value in turning if value.producer().op_type == "Mul"]) == 4 * 3
    assert {value.dtype for value in (*tables, *turning)} == {ir.DataType.FLOAT}
    attention = [value.dtype for node in graph if node.domain == DOMAIN for value in node.inputs[:3]]
    assert attention == [TYPES[precision]] * 9


def test_long_vectors_are_normalized_in_fp32(tmp_path):
    """The squares of such states are beyond fp16's range, the states are not."""
    settings = {"pooling": "mean", "normalize": True, "projections": []}
    model = make_encoder("bert", "none", head="embedding", embedding=settings)
    last = model.backbone.feed_forward(2).output.LayerNorm
    last.weight.mul_(300)
    last.bias.mul_(300)
    program.save(program.export_portable(model, {"version": "test"}), tmp_path / "fp32.onnx")
    program.convert_precision(tmp_path / "fp32.onnx", tmp_path / "fp16.onnx", "fp16")
    graph = ir.load(tmp_path / "fp16.onnx").graph
    assert [node.outputs[0].dtype for node in graph if node.op_type == "ReduceL2"] == [ir.DataType.FLOAT]
    oracle = run_oracle(model, [as_numpy(make_batch([9, 32, 1], 32))])
    assert np.square(oracle.batches[0].outputs["last_hidden_state"]).sum(2).max() > np.finfo(np.float16).max
    with debug_form(tmp_path / "fp16.onnx") as debug:
        engine = onnxruntime.OnnxRuntimeEngine(debug)
        assert compare(for_precision(oracle, typed(model, "fp16"), "fp16"), engine).failure is None


def test_a_constant_may_serve_both_types(tmp_path):
    """A length is computed in fp32, and with it the 0 that other nodes read, too."""
    text = """<ir_version: 10, opset_import: ["": 21]> agraph (int64[2, 4] ids) => (float[1, 1] n, float[2, 4] y)
        <float zero = {0}, float[2, 4] x, float[1, 1] length>
        { x = Cast <to = 1> (ids)  y = Add (x, zero)  length = ReduceL2 (x)  n = Add (length, zero) }"""
    onnx.save(onnx.parser.parse_model(text), tmp_path / "fp32.onnx")
    program.convert_precision(tmp_path / "fp32.onnx", tmp_path / "fp16.onnx", "fp16")
    found = {name: value.dtype for name, value in ir.load(tmp_path / "fp16.onnx").graph.initializers.items()}
    assert found == {"zero": ir.DataType.FLOAT, "zero/own": ir.DataType.FLOAT16}
