"""A graph as the body of `adtp::AdtpEncoder`: everybody who does not know the operator computes what the graph computed."""

import encoder_files
import encoder_runs
import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from representatives import only
from testbed import as_numpy, make_batch, one_thread

from adtp_export.graph import encoder_function
from adtp_export.graph.debug import debug_form
from adtp_export.graph.inlined import inlined
from adtp_export.plugins import plan as plans
from adtp_export.runtimes import encoder_file, openvino

CASES = {
    **{backbone: (backbone, "adtp", "fp32") for backbone in encoder_runs.BACKBONES},
    **{pruning: ("bert", pruning, "fp32") for pruning in encoder_runs.PRUNINGS if pruning != "adtp"},
    "embeddings": ("bert", "adtp", "fp32", "embedding"),
    "half": ("bert", "adtp", "fp16"),
    "half, by tables": ("distilbert", "top", "fp16"),
}
QUICK = ("bert-pruned", "received", "embeddings", "half, by tables")


def answers(path, batch, rewritten=False):
    """Answers of the graph as it is, or as ONNX Runtime rewrites it: it does not find the same patterns in both files."""
    options = one_thread()
    if not rewritten:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"]).run(None, batch)


@pytest.fixture
def files(request, tmp_path):
    """A student, its ordinary file, and the one for our own kernels."""
    backbone, pruning, precision, *head = request.param
    student = encoder_runs.make(backbone, pruning, 0, *head)
    return student, *encoder_files.write(student, tmp_path, precision)


@pytest.mark.parametrize("files", only(CASES.values(), map(CASES.get, QUICK)), ids=CASES, indirect=True)
def test_onnx_runtime_gives_the_same_bits(files):
    """Of answers, and of kept tokens."""
    student, plain, enclosed = files
    batch = as_numpy(make_batch((17, 3, 12), 20, types=len(student.input_names) - 1))
    onnx.checker.check_model(enclosed, full_check=True)
    assert [node.op_type for node in onnx.load(enclosed).graph.node] == ["AdtpEncoder"]
    for expected, found in zip(answers(plain, batch), answers(enclosed, batch), strict=True):
        assert np.array_equal(expected, found)
    atol = 1e-5 if enclosed.name.endswith(".fp32.onnx") else 5e-3
    for expected, found in zip(answers(plain, batch, True), answers(enclosed, batch, True), strict=True):
        np.testing.assert_allclose(found, expected, atol=atol)
    with debug_form(plain) as first, debug_form(enclosed) as second:
        for expected, found in zip(answers(first, batch), answers(second, batch), strict=True):
            assert np.array_equal(expected, found)


@pytest.mark.parametrize("files", [("bert", "adtp", "fp32")], indirect=True)
def test_the_file_has_each_weight_once(files):
    _, plain, enclosed = files
    function = next(f for f in ir.load(enclosed).functions.values() if f.name == "AdtpEncoder")
    constants = [node.attributes["value"].as_tensor().nbytes for node in function if node.op_type == "Constant"]
    assert max(constants) < 100
    assert sum(array.nbytes for array in encoder_file.read(enclosed).weights) < 1.1 * plain.stat().st_size


@pytest.mark.parametrize("files", [("bert", "adtp", "fp32")], indirect=True)
def test_others_inline_it(files):
    _, plain, enclosed = files
    nodes = [
        [node.op_type for node in inlined(path).graph if node.op_type not in ("Constant", "Slice")]
        for path in files[1:]
    ]
    assert nodes[0] == nodes[1]
    if openvino.installed() is None:
        pytest.skip("OpenVINO is not installed")
    batch = as_numpy(make_batch((17, 3, 12), 20))
    expected, found = (openvino.OpenVinoEngine(path).run(batch)["logits"] for path in (plain, enclosed))
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("files", [("bert", "adtp", "fp32")], indirect=True)
def test_the_reader_finds_what_was_written(files):
    student, _, enclosed = files
    read = encoder_file.read(enclosed)
    assert read.inputs == dict.fromkeys(student.input_names, ("int64", "texts", "length"))
    assert read.outputs == {"logits": ("float32", "texts", "3")}
    assert tuple(array.nbytes for array in read.weights) == read.plan.weights
    assert read.metadata["adtp.precision"] == "fp32"


@pytest.mark.parametrize("files", [("bert", "adtp", "fp32")], indirect=True)
def test_the_default_file_is_as_it_was(files):
    assert not any(node.op_type == "AdtpEncoder" for node in ir.load(files[1]).graph)


@pytest.mark.parametrize("files", [("bert", "adtp", "fp32")], indirect=True)
def test_an_output_that_the_plan_does_not_give_is_left_out(files):
    """As `--debug-outputs` leaves it in the ordinary file."""
    _, plain, enclosed = files
    read = encoder_file.read(enclosed)
    with debug_form(plain) as debug:
        made = encoder_function.enclosed(
            ir.load(debug), plans.write(read.plan), encoder_files.planned(files[0]).weights
        )
    assert [output.name for output in made.graph.outputs] == ["logits"]
    nodes = [
        [node.op_type for node in model.functions["adtp", "AdtpEncoder", ""]] for model in (made, ir.load(enclosed))
    ]
    assert nodes[0] == nodes[1]
