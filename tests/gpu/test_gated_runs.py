"""Decoder-style encoders from padded ids to vectors on the emulated GPU, by one plan: by the verdict's own rule."""

import dataclasses

import pytest
import runner_builds
from conftest import as_numpy
from decoder_models import batch_of, make_decoder
from encoder_runs import Emulated, argument_of, changed, with_argument

from adtp_export.plugins.encoder.launches import Sizes
from adtp_export.plugins.plan import Number
from adtp_export.verify.oracle import for_precision, run_oracle, typed
from adtp_export.verify.parity import compare

LENGTHS = (17, 1, 9, 20, 2)
SIZES = Sizes(max_tokens=128, processors=3, mean_length=16)


@pytest.fixture
def run(monkeypatch):
    """Makes engines, and closes them."""
    built, made = runner_builds.for_this_process(), []
    runner_builds.driver_of(built, monkeypatch)

    def engine(student, precision, **further):
        made.append(Emulated(student, precision, SIZES, **further))
        return made[-1]

    yield engine
    for each in made:
        each.close()


def oracle_for(student, precision, *lengths):
    oracle = run_oracle(student, [as_numpy(batch_of(each, pad=5)) for each in lengths])
    return oracle if precision == "fp32" else for_precision(oracle, typed(student, precision), precision)


MODELS = ("qwen3", "qwen3-bidirectional", "qwen2-local", "llama", "llama-ungrouped", "mistral", "mistral-bidirectional")


@pytest.mark.parametrize("name", MODELS)
def test_every_family(run, name):
    student = make_decoder(name, "embedding")
    assert compare(oracle_for(student, "fp32", LENGTHS, (20,)), run(student, "fp32")).failure is None
