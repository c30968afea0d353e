"""Products in lower precision in ONNX Runtime, as operators and as the portable bodies; and the two walls that bodies avoid."""

import contextlib
import json
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from linear_calls import constants, expected, make_factors, make_product, normed
from onnx import helper, numpy_helper

from adtp_export.contract import (
    ADD_NORM,
    BF16_FEED_FORWARD,
    BF16_LINEAR,
    DOMAIN,
    DOMAIN_VERSION,
    EPSILON,
    GELU,
    IN_FEATURES,
    IN_THREE,
    INNER_FEATURES,
    INT8_FEED_FORWARD,
    INT8_LINEAR,
)
from adtp_export.errors import EngineBuildError
from adtp_export.ops.onnx_linear import linear_functions
from adtp_export.runtimes.onnxruntime import OnnxRuntimeEngine
from adtp_export.runtimes.openvino import OpenVinoEngine

OPERATORS = {"bf16": BF16_LINEAR, "int8": INT8_LINEAR}
FEED_FORWARD = {"bf16": BF16_FEED_FORWARD, "int8": INT8_FEED_FORWARD}
FLOAT = onnx.TensorProto.FLOAT
LEVELS = [
    getattr(onnxruntime.GraphOptimizationLevel, f"ORT_{name}")
    for name in ("DISABLE_ALL", "ENABLE_BASIC", "ENABLE_EXTENDED", "ENABLE_ALL")
]


def one_node(name, x_width, tensors, width, results=("y",), **attributes):
    """A model of one node with its portable body: rows of x times constants are rows of y, or of several results."""
    node = helper.make_node(name, ["x", *tensors], results, domain=DOMAIN, **attributes)
    graph = helper.make_graph(
        [node],
        "node",
        [helper.make_tensor_value_info("x", FLOAT, ["T", x_width])],
        [helper.make_tensor_value_info(result, FLOAT, ["T", width]) for result in results],
        [numpy_helper.from_array(array, key) for key, array in tensors.items()],
    )
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid(DOMAIN, DOMAIN_VERSION)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10, functions=linear_functions())


def one_product(precision, weight, bias, gelu=False, factors=None):
    tensors = {**constants(precision, weight, factors), "bias": bias}
    name = f"{OPERATORS[precision]}{GELU if gelu else ''}"
    return one_node(name, weight.shape[1], tensors, len(bias), **{IN_FEATURES: weight.shape[1]})


def session(model, library=None, level=LEVELS[-1], written=None, profile=None):
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level, options.graph_optimization_level = 2, 4, level
    if written:
        options.optimized_model_filepath = str(written)
    if profile:
        options.enable_profiling, options.profile_file_prefix = True, str(profile)
    if library:
        options.register_custom_ops_library(str(library))
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


@pytest.mark.parametrize("precision", OPERATORS)
@pytest.mark.parametrize("gelu", [False, True], ids=["", "gelu"])
@pytest.mark.parametrize("level", LEVELS, ids=lambda level: level.name)
@pytest.mark.parametrize(("m", "k", "n"), [(7, 64, 48), (1, 33, 17)])
def test_bodies_at_every_level(precision, gelu, level, m, k, n):
    """A row's scale differs from its neighbours', so that a bias which is added before it shows."""
    x, weight, bias = make_product(m, k, n)
    bias *= 5
    exact, allowed = expected(precision, x, weight, bias, gelu)
    (found,) = session(one_product(precision, weight, bias, gelu), level=level).run(None, {"x": x})
    assert found.shape == exact.shape
    assert (np.abs(found - exact) <= allowed).all()


@pytest.mark.parametrize("level", LEVELS, ids=lambda level: level.name)
@pytest.mark.parametrize("gelu", [False, True], ids=["", "gelu"])
def test_factors(operators_library, gelu, level):
    """Operators and bodies multiply rows before they round them; the bounds tell factors that are ignored."""
    x, weight, bias = make_product(9, 70, 40)
    factors = make_factors(70)
    exact, allowed = expected("int8", x * factors, weight, bias, gelu)
    for library in (None, operators_library):
        (found,) = session(one_product("int8", weight, bias, gelu, factors), library, level).run(None, {"x": x})
        assert (np.abs(found - exact) <= allowed).all()
        (ignored,) = session(one_product("int8", weight, bias, gelu), library, level).run(None, {"x": x})
        assert (np.abs(ignored - exact) > allowed).any()


def test_a_single_factor_is_1(operators_library):
    x, weight, bias = make_product(5, 32, 16)
    model = one_product("int8", weight, bias, factors=np.full(1, 2, np.float32))
    with pytest.raises(Exception, match="do not fit one another"):
        session(model, operators_library).run(None, {"x": x})


def three_results(precision, weight, bias):
    name, tensors = f"{OPERATORS[precision]}{IN_THREE}", {**constants(precision, weight), "bias": bias}
    return one_node(name, weight.shape[1], tensors, len(bias) // 3, ("q", "k", "v"), **{IN_FEATURES: weight.shape[1]})


@pytest.mark.parametrize("precision", OPERATORS)
@pytest.mark.parametrize("m", [0, 1, 300])
def test_three_results_are_the_columns_of_one(operators_library, precision, m):
    """To the bit, in operators and in bodies; of no rows, bodies cannot be run."""
    x, weight, bias = make_product(m, 96, 3 * 48)
    for library in (operators_library, None) if m else (operators_library,):
        (whole,) = session(one_product(precision, weight, bias), library).run(None, {"x": x})
        found = session(three_results(precision, weight, bias), library).run(None, {"x": x})
        np.testing.assert_array_equal(np.stack(found), whole.reshape(m, 3, 48).transpose(1, 0, 2))


@pytest.mark.parametrize("precision", OPERATORS)
def test_three_results_of_other_widths_are_an_error(operators_library, precision):
    x, weight, bias = make_product(2, 32, 3 * 40)
    with pytest.raises(Exception, match="must each have a multiple of 16 columns"):
        session(three_results(precision, weight, bias), operators_library).run(None, {"x": x})


@pytest.mark.parametrize("precision", OPERATORS)
@pytest.mark.parametrize("gelu", [False, True], ids=["", "gelu"])
def test_no_rows(operators_library, precision, gelu):
    x, weight, bias = make_product(0, 8, 16)
    (found,) = session(one_product(precision, weight, bias, gelu), operators_library).run(None, {"x": x})
    assert found.shape == (0, 16)


@pytest.mark.parametrize("precision", OPERATORS)
@pytest.mark.parametrize("gelu", [False, True], ids=["", "gelu"])
def test_operators_take_the_place_of_bodies(operators_library, tmp_path, precision, gelu):
    x, weight, bias = make_product(300, 96, 130)
    exact, allowed = expected(precision, x, weight, bias, gelu)
    model = one_product(precision, weight, bias, gelu)
    profiled = session(model, operators_library, profile=tmp_path / "profile")
    (found,) = profiled.run(None, {"x": x})
    assert (np.abs(found - exact) <= allowed).all()
    (body,) = session(model).run(None, {"x": x})
    assert (np.abs(found - body) <= 2 * allowed).all()
    events = json.loads(Path(profiled.end_profiling()).read_text(encoding="utf-8"))
    kinds = {event["args"]["op_name"] for event in events if event.get("cat") == "Node"}
    assert kinds == {f"{OPERATORS[precision]}{GELU if gelu else ''}"}


def one_chain(precision, x, weights, residual, gamma, beta, factors=(None, None)):
    """One product or two with the sum and norm behind them. Two have the rows themselves as residual."""
    tensors, two = {}, len(weights) > 1
    for i, (weight, bias) in enumerate(weights):
        for key, array in {**constants(precision, weight, factors[i]), "bias": bias}.items():
            tensors[f"{key}{i}"] = array
    tensors |= {"gamma": gamma, "beta": beta} if two else {"residual": residual, "gamma": gamma, "beta": beta}
    name = FEED_FORWARD[precision] if two else f"{OPERATORS[precision]}{ADD_NORM}"
    attributes = {IN_FEATURES: x.shape[1], EPSILON: 1e-5} | ({INNER_FEATURES: len(weights[0][1])} if two else {})
    return one_node(name, x.shape[1], tensors, len(beta), **attributes)


def make_chain(m, two):
    """Rows, weights, residual, gamma and beta."""
    x, weight, bias = make_product(m, 96, 130)
    weights = [(weight, bias), make_product(1, 130, 96)[1:]] if two else [(weight, bias)]
    width = len(weights[-1][1])
    gamma, beta = np.random.default_rng(1).normal(size=(2, width)).astype(np.float32)
    residual = x if two else np.random.default_rng(2).normal(size=(m, width)).astype(np.float32)
    return x, weights, residual, gamma, beta


@pytest.mark.parametrize("precision", [*OPERATORS, "int8 with factors"])
@pytest.mark.parametrize("two", [False, True], ids=["linear", "feed forward"])
@pytest.mark.parametrize("m", [7, 700])
def test_sums_and_norms_in_the_same_operator(operators_library, tmp_path, precision, two, m):
    """Few rows, and so many that pieces of them go through all of it."""
    x, weights, residual, gamma, beta = make_chain(m, two)
    rows, factors = x, [None] * 2
    if "factors" in precision:
        precision, factors = "int8", [make_factors(weight.shape[1]) for weight, _ in weights]
    for i, (weight, bias) in enumerate(weights):
        product = one_product(precision, weight, bias, i + 1 < len(weights), factors[i])
        (rows,) = session(product, operators_library).run(None, {"x": rows})
    exact, allowed = normed(rows, residual, gamma, beta)
    model = one_chain(precision, x, weights, residual, gamma, beta, factors)
    profiled = session(model, operators_library, profile=tmp_path / "profile")
    (found,) = profiled.run(None, {"x": x})
    assert (np.abs(found - exact) <= allowed).all()
    events = json.loads(Path(profiled.end_profiling()).read_text(encoding="utf-8"))
    kinds = {event["args"]["op_name"] for event in events if event.get("cat") == "Node"}
    assert kinds == {model.graph.node[0].op_type}


@pytest.mark.parametrize("precision", OPERATORS)
@pytest.mark.parametrize("two", [False, True], ids=["linear", "feed forward"])
def test_a_chain_whose_tensors_do_not_fit_is_an_error(operators_library, precision, two):
    x, weights, residual, gamma, beta = make_chain(5, two)
    model = one_chain(precision, x, weights, residual, gamma, beta)
    for place, tensor in enumerate(model.graph.initializer):
        spoilt = onnx.ModelProto.FromString(model.SerializeToString())
        array = np.ascontiguousarray(numpy_helper.to_array(tensor)[:-1])
        spoilt.graph.initializer[place].CopyFrom(numpy_helper.from_array(array, tensor.name))
        with pytest.raises(Exception, match="do not fit one another"):
            session(spoilt, operators_library).run(None, {"x": x})
    model.graph.input[0].type.tensor_type.shape.dim[1].dim_value += 1
    wide = session(model, operators_library)
    with pytest.raises(Exception, match="x must be"):
        wide.run(None, {"x": np.zeros((5, x.shape[1] + 1), np.float32)})


@pytest.mark.parametrize("precision", OPERATORS)
def test_weights_are_unpacked_once(tmp_path, precision):
    """ONNX Runtime folds the constants, so no run pays for the order of the file."""
    _, weight, bias = make_product(1, 64, 48)
    session(one_product(precision, weight, bias), level=LEVELS[1], written=tmp_path / "optimized.onnx")
    left = [node.op_type for node in onnx.load(tmp_path / "optimized.onnx").graph.node]
    assert not {"Transpose", "Flatten", "Slice", "Shape"} & set(left)
    assert {"bf16": "Gemm", "int8": "MatMulInteger"}[precision] in left


def test_a_single_factor_costs_bodies_nothing(tmp_path):
    """ONNX Runtime leaves out a Mul by one number, 1, of what another node gives."""
    left = []
    for factors in (None, make_factors(130)):
        model = one_chain("int8", *make_chain(7, True), factors=(None, factors))
        session(model, level=LEVELS[1], written=tmp_path / "optimized.onnx")
        nodes = onnx.load(tmp_path / "optimized.onnx").graph.node
        left.append([node.op_type for node in nodes].count("Mul"))
    assert left[1] == left[0] + 1


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("factors", [None, make_factors(32)], ids=["", "factors"])
def test_a_number_that_is_none_stays_in_its_row(operators_library, wrong, factors):
    x, weight, bias = make_product(5, 32, 16)
    model = one_product("int8", weight, bias, factors=factors)
    for library in (None, operators_library):
        run = session(model, library)
        (before,) = run.run(None, {"x": x})
        broken = x.copy()
        broken[2, 7] = wrong
        (after,) = run.run(None, {"x": broken})
        assert np.isnan(after[2]).all()
        np.testing.assert_array_equal(np.delete(after, 2, 0), np.delete(before, 2, 0))


@pytest.mark.usefixtures("with_operators")
def test_a_file_of_an_earlier_version_says_so(tmp_path):
    """Its INT8 operators took no factors."""
    _, weight, bias = make_product(3, 16, 8)
    model = one_product("int8", weight, bias)
    del model.functions[:]
    model.graph.node[0].input.remove("factors")
    onnx.save(model, tmp_path / "old.onnx")
    with pytest.raises(
        EngineBuildError, match=r"refuses old\.onnx: .*An earlier version wrote it; export the model again"
    ):
        OnnxRuntimeEngine(tmp_path / "old.onnx", plugin=True)


@pytest.mark.parametrize("precision", OPERATORS)
def test_wrong_shapes_are_errors(operators_library, precision):
    x, weight, bias = make_product(5, 32, 40)
    for key in constants(precision, weight):
        model = one_product(precision, weight, bias, factors=make_factors(32))
        tensor = next(t for t in model.graph.initializer if t.name == key)
        array = numpy_helper.to_array(tensor)
        tensor.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(array[:-1]), key))
        with pytest.raises(Exception, match="do not fit one another"):
            session(model, operators_library).run(None, {"x": x})


@pytest.mark.parametrize("precision", OPERATORS)
def test_sums_of_bytes_that_may_leave_32_bits_are_an_error(operators_library, precision):
    _, weight, bias = make_product(1, 65_794, 16)
    refused = pytest.raises(Exception, match="in_features and inner_features must be at most 65793")
    with refused if precision == "int8" else contextlib.nullcontext():
        session(one_product(precision, weight, bias), operators_library)
    session(one_product(precision, weight[:, 1:], bias), operators_library)


def test_openvino_runs_the_bodies(tmp_path):
    """It leaves out the rounding of rows, a pair of casts, so it may be off by what that is."""
    pytest.importorskip("openvino")
    x, weight, bias = make_product(9, 64, 48)
    exact, allowed = expected("bf16", x, weight, bias, True)
    onnx.save(one_product("bf16", weight, bias, True), tmp_path / "model.onnx")
    found = OpenVinoEngine(tmp_path / "model.onnx").run({"x": x})["y"]
    rounding = 1.13 * 2.0**-8 * (np.abs(x) @ np.abs(weight.T))
    assert (np.abs(found - exact) <= allowed + rounding).all()


# The walls: what ONNX Runtime does to plain nodes that are written in the obvious way. Where one of these tests fails, ONNX Runtime
# has changed, and the body may become simpler.


def plain_nodes(weight, bias, columns_first):
    """A scale per row and one per column: multiplied with each other first, or one after the other."""
    scale = np.abs(weight).max(1) / 127
    stored = np.rint(weight / scale[:, None]).astype(np.int8).T
    make = helper.make_node
    scales = (
        [make("Mul", ["real", "columns"], ["some"]), make("Mul", ["some", "rows"], ["product"])]
        if columns_first
        else [make("Mul", ["rows", "columns"], ["both"]), make("Mul", ["real", "both"], ["product"])]
    )
    nodes = [
        make("Abs", ["x"], ["size"]),
        make("ReduceMax", ["size", "axis"], ["largest"], keepdims=1),
        make("Div", ["largest", "steps"], ["rows"]),
        make("Div", ["x", "rows"], ["whole"]),
        make("QuantizeLinear", ["whole", "one", "middle"], ["u"]),
        make("MatMulInteger", ["u", "stored", "middle"], ["integers"]),
        make("Cast", ["integers"], ["real"], to=FLOAT),
        *scales,
        make("Add", ["product", "bias"], ["y"]),
    ]
    values = {
        "axis": np.array([1]),
        "steps": np.float32(127),
        "one": np.float32(1),
        "middle": np.uint8(128),
        "stored": stored,
        "columns": scale.astype(np.float32),
        "bias": bias,
    }
    graph = helper.make_graph(
        nodes,
        "plain",
        [helper.make_tensor_value_info("x", FLOAT, ["T", weight.shape[1]])],
        [helper.make_tensor_value_info("y", FLOAT, ["T", len(bias)])],
        [numpy_helper.from_array(np.asarray(value), key) for key, value in values.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def test_the_first_wall_scales_of_rows_and_columns_in_one_product(tmp_path):
    """ONNX Runtime makes MatMulIntegerToFloat of it, which adds the bias before the scale of a row."""
    x, weight, bias = make_product(6, 64, 32)
    bias *= 5
    exact = x.astype(np.float64) @ weight.T + bias
    off = {}
    for columns_first in (False, True):
        for level in (LEVELS[0], LEVELS[-1]):
            (found,) = session(plain_nodes(weight, bias, columns_first), level=level).run(None, {"x": x})
            off[columns_first, level] = (np.abs(found - exact).max(1) / np.abs(exact).max(1)).max()
    assert off.pop((False, LEVELS[-1])) > 0.3
    assert max(off.values()) < 0.05


def test_the_second_wall_signed_times_signed(tmp_path):
    """The body multiplies u8 by u8: of s8 by s8 ONNX Runtime's kernels take many times as long."""
    for function in linear_functions():
        if function.name == INT8_LINEAR:
            (product,) = (node for node in function.node if node.op_type == "MatMulInteger")
            makers = {output: node for node in function.node for output in node.output}
            types = [next(a.i for a in makers[name].attribute if a.name == "to") for name in product.input]
            assert types == [onnx.TensorProto.UINT8] * 4
