"""`adtp::AdtpEncoder` in ONNX Runtime with a student's file: ids and weights in, logits out, on the emulated GPU."""

import encoder_files
import encoder_runs
import numpy as np
import onnx
import pytest
import runner_builds
from onnx import helper, numpy_helper
from test_runner_operator import ON_CPU, reachable, run, session
from testbed import as_numpy, make_batch

from adtp_export.runtimes import encoder_file
from adtp_export.verify.oracle import run_oracle


def with_open_weights(file):
    """The file without its functions, and with its weights as inputs: the emulated GPU has to reach them."""
    model = onnx.load(file)
    weights = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    for name, array in weights.items():
        kind = helper.np_dtype_to_tensor_dtype(array.dtype)
        model.graph.input.append(helper.make_tensor_value_info(name, kind, array.shape))
    model.graph.output[0].name = model.graph.node[0].output[0] = "out"
    del model.graph.initializer[:], model.functions[:]
    return model.SerializeToString(), weights


@pytest.fixture(scope="module")
def student():
    return encoder_runs.make()


@pytest.fixture(scope="module")
def file(student, tmp_path_factory):
    return encoder_files.write(student, tmp_path_factory.mktemp("operator"))[1]


@pytest.fixture
def built(file):
    return runner_builds.for_this_process(encoder_file.read(file).plan.variants, ON_CPU)


@pytest.fixture
def device(built, monkeypatch):
    with runner_builds.device_of(built, monkeypatch) as made:
        yield made


@pytest.fixture
def answer(file, built, device):
    """Runs a batch, in a room for its logits that may be larger."""
    content, weights = with_open_weights(file)
    opened = session(built[0], content)

    def answered(batch):
        arrays = {**batch, **weights}
        with reachable(device, *arrays.values(), np.full((len(batch["input_ids"]), 3), np.nan, np.float32)) as (
            *given,
            logits,
        ):
            run(opened, dict(zip(arrays, given)), logits)
            return logits.copy()

    return answered


@pytest.mark.parametrize(
    ("lengths", "padded"),
    [((17, 0, 12), 20), ((17, 3, 1, 12, 20, 9, 4), 9), ((5,) * 13, 9)],
    ids=["whole", "parts", "more parts"],
)
def test_a_session_answers_from_ids_to_logits(student, answer, lengths, padded):
    """The largest bucket has 64 tokens. Parts begin at multiples of 16 bytes: of four texts."""
    batch = as_numpy(make_batch(tuple(min(length, padded) for length in lengths), padded))
    oracle = run_oracle(student, [batch])
    assert np.abs(answer(batch) - oracle.batches[0].references["logits"]).max() <= oracle.tolerances["logits"]


def test_inputs_that_are_smaller_than_ids_say_are_refused(answer):
    batch = as_numpy(make_batch((17, 3, 12), 20))
    for mask in (batch["attention_mask"][:2], batch["attention_mask"][:, :19]):
        with pytest.raises(
            Exception, match=r"input 1 is of shape .*; accepted is \(3, 20\), as of 3 texts and 60 tokens"
        ):
            answer({**batch, "attention_mask": mask})


def test_one_text_that_is_too_long_is_refused(answer):
    with pytest.raises(
        Exception, match="got 65 tokens of 1 texts; accepted are at most 64 tokens of 64 texts: split the call"
    ):
        answer(as_numpy(make_batch((65,), 65)))
