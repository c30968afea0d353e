"""Quantized files: what is in them, that runtimes take them, and that they answer like PyTorch rounding alike."""

import copy
import dataclasses
from types import SimpleNamespace

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from known_graphs import known_graph
from onnx import numpy_helper
from testbed import as_numpy, make_batch, make_student, one_thread

from adtp_export.calibration import recipes
from adtp_export.calibration.collect import RANDOM_ROWS, RANDOM_TOKENS, collect, collect_random
from adtp_export.calibration.plan import BEHIND_NORMS, _largest, _smooth, make_quantization_plan, products
from adtp_export.calibration.quantize import stored_weight, write_quantized
from adtp_export.calibration.simulate import Cost, sensitivity, simulate
from adtp_export.contract import ATTENTION, BF16_PRODUCTS, INTERMEDIATE, QKV
from adtp_export.contract import product as name_of
from adtp_export.errors import InputError, VerificationError
from adtp_export.graph import program
from adtp_export.pipeline.export.quantize import _first, _hold_accuracy
from adtp_export.pipeline.progress import Steps
from adtp_export.runtimes.onnxruntime import OnnxRuntimeEngine
from adtp_export.verify.oracle import for_precision, run_oracle
from adtp_export.verify.parity import compare

SITES = ["1.attention", "2.ffn"]
BUILT_IN = {path.stem: recipes.read(path) for path in sorted(recipes.DIRECTORY.glob("*.toml"))}


@pytest.fixture(scope="module")
def student():
    student = make_student(SITES, initializer_range=0.2)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in student.named_parameters():
        if name.endswith("bias"):
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 10)
    return student


@pytest.fixture(scope="module")
def batches():
    return [as_numpy(make_batch([9, 32, 1], 32)), as_numpy(make_batch([5, 20] * 8, 20, seed=1))]


@pytest.fixture(scope="module")
def seen(student, batches):
    return collect(student, batches)


@pytest.fixture(scope="module")
def source(student, tmp_path_factory):
    path = tmp_path_factory.mktemp("fp32") / "model.onnx"
    model = known_graph(student, {"version": "test", "precision": "fp32"})
    program.add_debug_outputs(model)
    program.save(model, path)
    return path


@pytest.fixture(scope="module")
def files(student, seen, source, tmp_path_factory):
    directory = tmp_path_factory.mktemp("quantized")
    for name, recipe in BUILT_IN.items():
        write_quantized(source, directory / f"{name}.onnx", make_quantization_plan(recipe, student, seen))
    return directory


def test_ranges_are_those_of_real_tokens(student):
    """Padding enters none: the same rows, padded wider and in other batches, give the same histograms."""
    wide = make_batch([9, 4, 7], 40)
    narrow = [as_numpy({name: t[i : i + 1, : [9, 4, 7][i]] for name, t in wide.items()}) for i in range(3)]
    a, b = collect(student, [as_numpy(wide)]), collect(student, narrow)
    assert list(a) == list(products(student))
    for name in a:
        assert a[name].counts.sum() == b[name].counts.sum() > 0
        assert a[name].largest == pytest.approx(b[name].largest, rel=1e-5)


def test_collecting_leaves_the_student_alone(student, seen, batches):
    assert not any(module._forward_pre_hooks for module in student.modules())
    training = copy.deepcopy(student).train()
    assert collect(training, batches)[name_of(0, QKV)].counts.tolist() == seen[name_of(0, QKV)].counts.tolist()
    assert all(module.training for module in training.modules())


def test_biases_of_rows_that_are_nearly_zero_stay(student, batches, tmp_path):
    """Their weights have the least of scales, of which 32 bits hold no bias."""
    changed = copy.deepcopy(student)
    dense = changed.backbone.feed_forward(0).intermediate_dense
    for row, factor in ((0, 0.0), (1, 1e-12), (2, 1e-6)):
        dense.weight[row] *= factor
        dense.bias[row] = 0.7
    seen_of_changed = collect(changed, batches)
    plan = make_quantization_plan(BUILT_IN["ort-cpu.int8"], changed, seen_of_changed)
    model = known_graph(changed, {"version": "test", "precision": "fp32"})
    program.save(model, tmp_path / "fp32.onnx")
    write_quantized(tmp_path / "fp32.onnx", tmp_path / "int8.onnx", plan)
    name = name_of(0, INTERMEDIATE)
    stored = {value.name: numpy_helper.to_array(value) for value in onnx.load(tmp_path / "int8.onnx").graph.initializer}
    bias = stored[f"{name}.bias/stored"] * stored[f"{name}.bias/scale"].astype(np.float64)
    np.testing.assert_allclose(bias[:3], 0.7, rtol=1e-5)
    others = make_quantization_plan(dataclasses.replace(plan.recipe, bias="float"), changed, seen_of_changed)
    assert plan.scales[name].weight[1] > others.scales[name].weight[1]
    np.testing.assert_array_equal(plan.scales[name].weight[3:], others.scales[name].weight[3:])


def test_activations_without_a_range_are_refused(batches):
    student = make_student(["0.ffn"])
    student.backbone.feed_forward(1).intermediate_dense.weight.zero_()
    with pytest.raises(
        InputError, match=r"every value that reaches layers.1.ffn.output.dense is 0, so it has no range"
    ):
        collect(student, batches)


@pytest.mark.parametrize(
    "name", [name for name in BUILT_IN if name != "linear.int8"]
)  # its operators have no such nodes
def test_scales_are_symmetric_and_per_channel(files, student, name):
    path, recipe = files / f"{name}.onnx", BUILT_IN[name]
    onnx.checker.check_model(path, full_check=True)
    model = ir.load(path)
    kind = {"int8": ir.DataType.INT8, "fp8": ir.DataType.FLOAT8E4M3FN}[recipe.format]
    base = {"fp32": ir.DataType.FLOAT, "fp16": ir.DataType.FLOAT16}[recipe.base]
    constants = {name: value.const_value for name, value in model.graph.initializers.items()}
    for product, weight in products(student).items():
        stored, scale = constants[f"{product}.weight/stored"], constants[f"{product}.weight/scale"]
        assert (stored.dtype, scale.dtype) == (kind, base)
        assert tuple(stored.shape) == weight.shape
        assert tuple(scale.shape) == ((len(weight),) if recipe.per_channel else ())
        assert (scale.numpy() > 0).all()
        assert f"{product}.weight" not in constants
        if recipe.activations == "static":
            assert constants[f"{product}.input/scale"].numpy().shape == ()
        real = stored.numpy().astype(np.float32) * scale.numpy().astype(np.float32).reshape(-1, 1)
        if not recipe.smooth:
            step = 1 / 127 if recipe.format == "int8" else 1 / 8
            assert np.abs(real - weight).max() < step * np.abs(weight).max()
    zeros = [value.numpy() for name, value in constants.items() if name.endswith("zero_point")]
    assert zeros
    assert all((zero.astype(np.float32) == 0).all() for zero in zeros)
    assert model.metadata_props["adtp.precision"] == recipe.format
    assert model.metadata_props["adtp.recipe"] == recipe.name


@pytest.mark.parametrize("name", BUILT_IN)
def test_decisions_are_made_in_fp32(files, name):
    model = ir.load(files / f"{name}.onnx")
    weights = [v for n, v in model.graph.initializers.items() if n.startswith("cuts.")]
    assert len(weights) >= 8
    assert {value.dtype for value in weights} == {ir.DataType.FLOAT}


def test_onnxruntime_makes_integer_products(files, student, tmp_path):
    options = one_thread()
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    options.log_severity_level = 3
    ort.InferenceSession(str(files / "ort-cpu.int8.onnx"), options, providers=["CPUExecutionProvider"])
    operators = [node.op_type for node in onnx.load(tmp_path / "optimized.onnx").graph.node]
    assert operators.count("QGemm") == len(products(student))


class Stranger:
    """A student with other weights, as an engine: what agreement is worth where nothing is known."""

    inputs, outputs = ("input_ids", "attention_mask", "token_type_ids"), ("logits", "kept_site")

    def run(self, batch):
        said = make_student(SITES, seed=1)(**{name: torch.from_numpy(array) for name, array in batch.items()})
        return {"logits": said.logits.numpy(), "kept_site": said.kept_site.numpy()}


@pytest.mark.parametrize("name", BUILT_IN)
def test_answers_like_pytorch_rounding_alike(student, batches, seen, files, name):
    oracle = run_oracle(student, batches)
    judged = for_precision(oracle, simulate(student, make_quantization_plan(BUILT_IN[name], student, seen)), name)
    engine = OnnxRuntimeEngine(files / f"{name}.onnx", disable_qdq_fusion=not name.startswith("ort-cpu"))
    parity = compare(judged, engine)
    assert parity.failure is None
    assert parity.max_abs_logit_diff > 100 * oracle.output_errors["logits"]
    other = compare(judged, Stranger())
    assert (
        1 - parity.kept_token_agreement < (1 - other.kept_token_agreement) / 4
    )  # nearer than a student that knows nothing


def test_a_limit_that_nothing_holds_is_told_with_what_was_tried(student, batches, seen):
    """A file in which nothing is quantized is never the answer."""
    plan = make_quantization_plan(BUILT_IN["ort-cpu.int8"], student, seen)
    costs = [Cost(name, 0.0, 0.0) for name in plan.scales]
    run = SimpleNamespace(steps=Steps(), checkpoint=SimpleNamespace(student=student))
    with pytest.raises(VerificationError, match=r"on 19 texts, with 1 of 12 products quantized; allow more, or leave"):
        _hold_accuracy(run, run_oracle(student, batches), plan, costs, limit=-1000)
    assert len(run.steps.durations_s) == 12


@pytest.mark.parametrize("rows", [1, 3, 8, 19, 32])
def test_sensitivity_is_of_so_many_rows(batches, rows):
    taken = _first(batches, rows, 1e9, lambda tokens: tokens)
    assert sum(len(batch["attention_mask"]) for batch in taken) == min(rows, 19)


def test_sensitivity_of_a_large_model_is_of_fewer_rows(batches):
    texts = np.concatenate([batch["attention_mask"].sum(1) for batch in batches])
    for most in (0, 1, texts[0], batches[0]["attention_mask"].sum(), texts.sum() / 2, texts.sum()):
        taken = _first(batches, 32, most, lambda tokens: tokens)
        lengths = np.concatenate([batch["attention_mask"].sum(1) for batch in taken])
        assert lengths.sum() <= max(most, texts[0])
        assert lengths.sum() + texts.max() > min(most, texts.sum())  # padding counts for nothing


def test_a_wrong_scale_is_found(student, batches, seen, files, tmp_path):
    recipe = BUILT_IN["ort-cpu.int8"]
    judged = for_precision(
        run_oracle(student, batches), simulate(student, make_quantization_plan(recipe, student, seen)), "int8"
    )
    model = ir.load(files / "ort-cpu.int8.onnx")
    scale = model.graph.initializers["layers.1.ffn.output.dense.weight/scale"]
    scale.const_value = ir.tensor(scale.const_value.numpy() * np.float32(3), name=scale.name)
    ir.save(model, tmp_path / "wrong.onnx")
    assert compare(judged, OnnxRuntimeEngine(tmp_path / "wrong.onnx")).failure


def test_a_smoothed_file_is_its_simulation(batches, tmp_path):
    """They are nearer to one another than to fp32: sums in another order round few numbers otherwise."""
    student = make_student([], initializer_range=0.2)
    program.save(known_graph(student, {"version": "test", "precision": "fp32"}), tmp_path / "model.onnx")
    plan = make_quantization_plan(BUILT_IN["linear.int8"], student, {})
    write_quantized(tmp_path / "model.onnx", tmp_path / "linear.onnx", plan)
    engine, rounded = OnnxRuntimeEngine(tmp_path / "linear.onnx"), simulate(student, plan)
    for batch in batches:
        inputs = {name: torch.from_numpy(array) for name, array in batch.items()}
        exact, expected = (model(**inputs).logits.detach().numpy() for model in (student, rounded))
        off = np.abs(expected - exact).mean()
        assert 0 < off < np.abs(exact).mean() / 10
        assert np.abs(engine.run(batch)["logits"] - expected).mean() < off / 10


def test_factors_that_are_ignored_are_found(student, batches, seen, files, tmp_path):
    """With each product's own, the file answers like the simulation: `test_answers_like_pytorch_rounding_alike`."""
    plan = make_quantization_plan(BUILT_IN["linear.int8"], student, seen)
    judged = for_precision(run_oracle(student, batches), simulate(student, plan), "int8")
    model = ir.load(files / "linear.int8.onnx")
    factors = {name: value for name, value in model.graph.initializers.items() if name.endswith("/factors")}
    assert {name.split(".Adtp")[0]: value.shape[0] for name, value in factors.items()} == {
        name: len(scales.smooth) for name, scales in plan.scales.items()
    }
    for name, value in factors.items():
        value.const_value = ir.tensor(np.ones(value.shape.numpy(), np.float32), name=name)
    ir.save(model, tmp_path / "ignored.onnx")
    assert compare(judged, OnnxRuntimeEngine(tmp_path / "ignored.onnx")).failure


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 9), st.integers(1, 33), st.integers(0, 2**32 - 1))
def test_no_pair_of_products_overflows_16_bits(rows, columns, seed):
    recipe = BUILT_IN["ort-cpu.int8"]
    rng = np.random.default_rng(seed)
    weight = (rng.standard_normal((rows, columns)) ** 3).astype(np.float32)
    scale = np.maximum(_largest(weight, recipe) / 127, 1e-30)
    stored = np.clip(np.rint(weight / scale[:, None]), -127, 127).astype(np.int64)
    pairs = np.pad(stored, ((0, 0), (0, columns % 2))).reshape(rows, -1, 2)
    worst = 255 * np.maximum(np.maximum(pairs, 0).sum(2), -np.minimum(pairs, 0).sum(2))
    assert worst.max() < 2**15


def test_smoothing_alone_changes_nothing(student, seen):
    plan = make_quantization_plan(BUILT_IN["ort-cpu.int8"], student, seen)
    name = "layers.1.ffn.intermediate.dense"
    weight, scales = products(student)[name], plan.scales[name]
    x = np.random.default_rng(0).standard_normal((5, weight.shape[1])).astype(np.float32)
    smoothed, plain = (x / scales.smooth) @ (weight * scales.smooth).T, x @ weight.T
    roundings = 2 * len(scales.smooth) + 2  # a sum and its products on each side, and two factors
    assert (np.abs(smoothed - plain) <= roundings * np.finfo(np.float32).eps * (np.abs(x) @ np.abs(weight).T)).all()
    assert scales.smooth.max() > 1.1 * scales.smooth.min()
    stored = stored_weight(weight, scales, plan) * scales.weight[:, None] / scales.smooth
    assert np.abs(stored - weight).max() < 0.05 * np.abs(weight).max()


@pytest.mark.parametrize("channels", ["seen", "random"])
def test_by_token_inputs_behind_norms_alone_are_smoothed(student, seen, channels):
    """Of what random tokens show where no text is given."""
    plan = make_quantization_plan(BUILT_IN["linear.int8"], student, seen if channels == "seen" else {})
    shown = seen if channels == "seen" else collect_random(student)
    for name, weight in products(student).items():
        scales, expected = plan.scales[name], np.ones(1, np.float32)
        assert scales.activation is None
        if name.endswith(BEHIND_NORMS):
            expected = _smooth(shown[name].channels, np.abs(weight).max(0), 0.5)
            assert expected.max() > 1.1 * expected.min()
        np.testing.assert_array_equal(scales.smooth, expected)
        np.testing.assert_allclose(scales.weight, np.abs(weight * expected).max(1) / 127, rtol=1e-6)


def test_without_smoothing_nothing_is_run(student, monkeypatch):
    recipe = dataclasses.replace(BUILT_IN["linear.int8"], smooth=0.0)
    monkeypatch.setattr("adtp_export.calibration.plan.collect_random", None)
    plan = make_quantization_plan(recipe, student, {})
    assert {len(scales.smooth) for scales in plan.scales.values()} == {1}


def test_random_tokens_are_always_the_same(student):
    first, second = collect_random(student), collect_random(student)
    assert first[name_of(0, QKV)].counts.sum() == RANDOM_ROWS * min(RANDOM_TOKENS, student.max_tokens) * 32
    for name, histogram in first.items():
        np.testing.assert_array_equal(second[name].channels, histogram.channels)
        assert (histogram.channels > 0).any()


def test_random_tokens_of_a_vocabulary_of_padding():
    student = make_student([], vocab_size=1)
    assert collect_random(student)[name_of(0, QKV)].counts.sum() > 0


def test_random_tokens_refuse_no_range():
    """Unlike text: a file can be had of a model that is not trained."""
    student = make_student(["0.ffn"])
    student.backbone.feed_forward(1).intermediate_dense.weight.zero_()
    assert collect_random(student)["layers.1.ffn.output.dense"].largest == 0
    plan = make_quantization_plan(BUILT_IN["linear.int8"], student, {})
    assert all(np.isfinite(scales.smooth).all() for scales in plan.scales.values())


def test_dead_channels_are_not_smoothed_out_of_fp16():
    inputs, weights = np.array([1e-30, 1.0, 0.0, 1e30], np.float32), np.array([1.0, 1e-20, 1.0, 1e-9], np.float32)
    factors = _smooth(inputs, weights, 0.9)
    assert np.isfinite(np.float16(factors)).all()
    assert np.isfinite(np.float16(1 / factors)).all()
    assert (factors > 0).all()


def test_residuals_are_rounded_where_a_recipe_says_so(student, seen, batches, source, tmp_path):
    recipe = dataclasses.replace(BUILT_IN["trt.int8"], residual=True)
    plan = make_quantization_plan(recipe, student, seen)
    write_quantized(source, tmp_path / "model.onnx", plan)
    onnx.checker.check_model(tmp_path / "model.onnx", full_check=True)
    totals = [n for n in ir.load(tmp_path / "model.onnx").graph if n.name.endswith("output/Add")]
    assert len(totals) == 6
    for total in totals:
        assert "DequantizeLinear" in {value.producer().op_type for value in total.inputs if value.producer()}
    judged = for_precision(run_oracle(student, batches), simulate(student, plan), "int8")
    assert compare(judged, OnnxRuntimeEngine(tmp_path / "model.onnx", disable_qdq_fusion=True)).failure is None


def test_excluded_products_stay(student, seen, source, tmp_path):
    recipe = dataclasses.replace(BUILT_IN["ort-cpu.int8"], exclude=("layers.0.*",))
    plan = make_quantization_plan(recipe, student, seen)
    assert len(plan.scales) == len(products(student)) - 4
    write_quantized(source, tmp_path / "model.onnx", plan)
    constants = ir.load(tmp_path / "model.onnx").graph.initializers
    assert constants["layers.0.attention.qkv.weight"].dtype == ir.DataType.FLOAT
    assert "layers.1.attention.qkv.weight/stored" in constants


@pytest.mark.parametrize(("excluded", "rounding"), [("layers.0.*", "12"), ("layers.0.ffn.*", "012")])
def test_attention_rounds_where_its_product_does(tmp_path, excluded, rounding):
    student = make_student([])
    program.save(known_graph(student, {"version": "test", "precision": "fp32"}), tmp_path / "model.onnx")
    recipe = dataclasses.replace(BUILT_IN["linear.int8"], exclude=(excluded,))
    write_quantized(tmp_path / "model.onnx", tmp_path / "linear.onnx", make_quantization_plan(recipe, student, {}))
    attention = [node for node in ir.load(tmp_path / "linear.onnx").graph if node.op_type.startswith(ATTENTION)]
    found = {node.name.split(".")[1] for node in attention if node.attributes.get_int(BF16_PRODUCTS, 0)}
    assert len(attention) == 3
    assert found == set(rounding)


def test_the_costliest_product_comes_first(batches):
    student = make_student([], initializer_range=0.1)  # larger weights amplify any rounding beyond order
    plan = make_quantization_plan(BUILT_IN["trt.fp8"], student, collect(student, batches))
    coarse = dataclasses.replace(
        plan.scales["layers.1.ffn.output.dense"], activation=plan.scales["layers.1.ffn.output.dense"].activation * 1e4
    )
    plan = dataclasses.replace(plan, scales={**plan.scales, "layers.1.ffn.output.dense": coarse})
    costs = sensitivity(student, plan, batches)
    assert costs[0].product == "layers.1.ffn.output.dense"
    assert {cost.product for cost in costs} == set(products(student))
    assert costs[0].max_abs_logit_diff >= costs[0].mean_abs_logit_diff > costs[-1].mean_abs_logit_diff > 0
