"""`adtp::AdtpEncoder` in ONNX Runtime with a student's whole plan: ids and weights in, logits out, on the emulated GPU."""

import encoder_runs
import numpy as np
import pytest
import runner_builds
from conftest import as_numpy, make_batch
from onnx import TensorProto, helper
from test_runner_operator import ON_CPU, reachable, run, session

from adtp_export.plugins import plan
from adtp_export.plugins.encoder import planner
from adtp_export.runtimes.described import describe
from adtp_export.verify.oracle import run_oracle


def model(planned, given):
    """One node, whose inputs are those of the plan, then its weights."""
    arrays = {**given, **{f"weight {i}": array for i, array in enumerate(planned.weights)}}
    node = helper.make_node(
        "AdtpEncoder", list(arrays), ["out"], domain="adtp", plan=plan.write(planned.plan), types=" ".join(["int64"] * len(given)),
        shapes="texts 3",
    )  # fmt: skip
    inputs = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
        for name, array in arrays.items()
    ]
    outputs = [helper.make_tensor_value_info("out", TensorProto.FLOAT, None)]
    versions = [helper.make_opsetid("", 20), helper.make_opsetid("adtp", 1)]
    graph = helper.make_graph([node], "encoder", inputs, outputs)
    return helper.make_model(graph, opset_imports=versions, ir_version=10).SerializeToString(), arrays


@pytest.fixture
def student():
    return encoder_runs.make()


@pytest.fixture
def planned(student):
    return planner.make(describe(student), "fp32", encoder_runs.SIZES)


@pytest.fixture
def built(planned):
    return runner_builds.for_this_process(planned.plan.variants, ON_CPU)


@pytest.fixture
def device(built, monkeypatch):
    with runner_builds.device_of(built, monkeypatch) as made:
        yield made


def test_a_session_answers_from_ids_to_logits(student, planned, built, device):
    batch = as_numpy(make_batch((17, 0, 12), 20))
    oracle = run_oracle(student, [batch])
    content, arrays = model(planned, batch)
    opened = session(built[0], content)
    with reachable(device, *arrays.values(), np.full((3, 3), np.nan, np.float32)) as (*given, logits):
        run(opened, dict(zip(arrays, given)), logits)
        assert np.abs(logits - oracle.batches[0].references["logits"]).max() <= oracle.tolerances["logits"]
