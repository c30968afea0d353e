"""`adtp-export --cuda` and `load`, on the emulated GPU."""

import json
from dataclasses import asdict

import emulated_gpu
import encoder_files
import numpy as np
import pytest
import runner_builds
import templated_models

import adtp_export
from adtp_export.errors import InputError
from adtp_export.plugins import runner
from adtp_export.runtimes import encoder_file
from benchmarks.gpu import launches, narrow
from benchmarks.harness.records import RECORDS

TEXTS = ["a fine film", "it never ends , and nobody should see it"]
TARGET = "adtp-cuda-fp32"
RECORD = json.loads((RECORDS / "launches.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def out(demo, tmp_path_factory):
    """The demo student, exported where there is no GPU."""
    made = tmp_path_factory.mktemp("cuda") / "out"
    adtp_export.export(demo, made, cuda=True, skip_parity_check=True)
    return made


def test_load_answers_and_says_what_stays(out, monkeypatch):
    expected = adtp_export.load(out, target="onnxruntime-cpu-fp32")(TEXTS, return_kept=True)
    encoder_files.use_emulated_gpu(monkeypatch)
    loaded = adtp_export.load(out, target=TARGET)
    for answer, wanted in zip(loaded(TEXTS, return_kept=True), expected, strict=True):
        assert (answer.label, answer.kept) == (wanted.label, wanted.kept)
        assert answer.dropped_at == wanted.dropped_at
        np.testing.assert_allclose([*answer.scores.values()], [*wanted.scores.values()], atol=1e-5)
    loaded.inspector().close()


def test_the_portable_body_is_a_target_that_load_takes(out):
    expected, found = (
        adtp_export.load(out, target=target)(TEXTS, return_kept=True)
        for target in ("onnxruntime-cpu-fp32", "onnxruntime-cpu-adtp.fp32")
    )
    assert [(each.label, each.kept) for each in found] == [(each.label, each.kept) for each in expected]
    assert adtp_export.load(out).target == "onnxruntime-cpu-fp32"


@pytest.mark.slow
def test_a_decoder_style_model_of_vectors_is_verified_and_answers(tmp_path, monkeypatch):
    """As sentence-transformers saves it; the engine is verified as on a GPU."""
    encoder_files.use_emulated_gpu(monkeypatch)
    templated_models.write_embedder(tmp_path / "model", after=(None,))
    manifest = adtp_export.export(tmp_path / "model", tmp_path / "out", cuda=True)
    assert manifest.targets[TARGET].status == "verified"
    expected, found = (
        adtp_export.load(tmp_path / "out", target=name).encode(TEXTS) for name in ("onnxruntime-cpu-fp32", TARGET)
    )
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_without_the_library_one_message_says_what_to_type(out, monkeypatch):
    monkeypatch.setattr(runner, "built", lambda: None)
    with pytest.raises(
        InputError,
        match=rf"{TARGET} cannot run on this machine \({runner.FILE} is not built; type: adtp-plugin build --cuda\)",
    ):
        adtp_export.load(out, target=TARGET)


@pytest.mark.usefixtures("known_graphs")
def test_a_library_is_put_beside_the_file(small, tmp_path, monkeypatch):
    (tmp_path / runner.FILE).write_bytes(b"a library")
    monkeypatch.setattr(runner, "built", lambda: tmp_path / runner.FILE)
    monkeypatch.setattr(runner, "obstacle", lambda: "there is no GPU")
    manifest = adtp_export.export(small, tmp_path / "out", cuda=True, skip_parity_check=True)
    assert (tmp_path / "out" / "plugins" / runner.FILE).read_bytes() == b"a library"
    assert manifest.targets[TARGET].status == "built-not-run"
    assert manifest.targets["onnxruntime-cuda-fp32-plugin"].file == "model.cuda.fp32.onnx"


def test_launches_are_counted_from_the_plan_of_a_file(out):
    """Four layers of seven, two cuts of two, two for ids, two for the head."""
    counts = launches.of_file(out / "model.cuda.fp32.onnx")
    total = launches.total(counts)
    assert (total.launches, total.copies, total.waits) == (4 * 7 + 2 * 2 + 2 + 2, 2, 1)
    assert counts["layer 3"].launches == 7
    assert len(encoder_file.read(out / "model.cuda.fp32.onnx").plan.buckets[-1].launches) == total.launches


@pytest.mark.parametrize("name", launches.RUNS)
def test_the_record_has_what_the_plan_says(name):
    counts = launches.of_plan(narrow.planned(launches.RUNS[name], launches.PRECISION).plan)
    assert {part: asdict(count) for part, count in counts.items()} == RECORD[name]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("runner", 6 * 7 + 2 + 2 + 2),
        pytest.param("runner_decoder", 6 * 8 + 2 + 3, marks=pytest.mark.slow),
        pytest.param("runner_decoder_student", 6 * 8 + 3 + 2 + 2 + 3, marks=pytest.mark.slow),
    ],
)
def test_the_record_has_what_the_runner_does(name, expected):
    """As the emulated driver wrote it down: six layers of seven, a cut of two, two for ids, two for the head.

    Decoder-style layers take eight, their head three, and a cut three and two behind the layers.
    """
    built = runner_builds.for_this_process()
    counts = launches.of_runner(built[0], emulated_gpu.settings(runner_builds.NEWER), launches.RUNS[name])
    everything = launches.total(counts)
    assert (everything.launches, everything.copies, everything.waits) == (expected, 2, 1)
    assert {part: asdict(count) for part, count in counts.items()} == RECORD[name]


@pytest.mark.slow
def test_a_driver_that_does_something_else_than_the_plan_is_noticed(monkeypatch):
    built = runner_builds.for_this_process()
    monkeypatch.setattr(launches, "of_driver_log", lambda lines: {launches.IN_GRAPHS: launches.Count(launches=47)})
    with pytest.raises(RuntimeError, match="the plan says .*launches=48.* the driver did .*launches=47"):
        launches.of_runner(built[0], emulated_gpu.settings(runner_builds.NEWER))
