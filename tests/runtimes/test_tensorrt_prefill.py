"""Engines of models that generate text: TensorRT-RTX builds them without a GPU, the greedy choices as loops among it."""

import pytest
from language_models import STAGES, save_llava

from adtp_export.artifacts.records import ShapeRange
from adtp_export.contract import PREFILL_MODEL, STEP_MODEL
from adtp_export.graph import program
from adtp_export.graph.decoder import EXPORTS
from adtp_export.model.decoder import load_decoder
from adtp_export.runtimes import tensorrt

PROFILE = {"batch": ShapeRange(1, 1, 4), "seq": ShapeRange(1, 32, 64)}
GPUS = ("sm_86", "sm_89", "sm_120")


@pytest.mark.slow  # half a minute for each engine
@pytest.mark.usefixtures("has_rtx")
@pytest.mark.parametrize(
    ("name", "method"), [(PREFILL_MODEL, "btp"), (PREFILL_MODEL, None), (STEP_MODEL, "btp")], ids=str
)
def test_engines_are_built(tmp_path, name, method):
    save_llava(tmp_path)
    decoder = load_decoder(tmp_path, {"method": method, "stages": STAGES[method]} if method else None)
    model = EXPORTS[name](decoder, {"version": "test"})
    assert any(node.op_type == "Loop" for node in model.graph) == (name == PREFILL_MODEL and method == "btp")
    program.save(model, tmp_path / name)
    engine, details = tensorrt.build(tensorrt.RTX, tmp_path / name, PROFILE, GPUS)
    assert len(memoryview(engine))
    assert details["gpus"] == list(GPUS)
