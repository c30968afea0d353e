"""The encoder's file in the runner, on the emulated GPU: answers, kept tokens, parts, threads, and what goes wrong."""

import dataclasses
import logging
import subprocess
import sys
import threading

import encoder_files
import encoder_runs
import numpy as np
import pytest
import runner_builds
from representatives import only
from test_encoder_runs import FULL, MANY, ONE, USUAL, oracle_for
from testbed import as_numpy, make_batch

from adtp_export.contract import KEPT_SITE, LOGITS
from adtp_export.errors import CudaError, EngineBuildError, InputError, MissingDependencyError
from adtp_export.plugins import runner
from adtp_export.plugins.plan import Number
from adtp_export.runtimes import encoder, encoder_file
from adtp_export.verify.parity import compare


@pytest.fixture
def gpu(monkeypatch):
    encoder_files.use_emulated_gpu(monkeypatch)


@pytest.fixture(scope="module")
def student():
    return encoder_runs.make()


@pytest.fixture(scope="module")
def file(student, tmp_path_factory):
    return encoder_files.write(student, tmp_path_factory.mktemp("encoder"))[1]


@pytest.fixture
def engine(gpu, file):
    made = encoder_files.opened(file)
    yield made
    made.close()


@pytest.mark.parametrize("pruning", only(encoder_runs.PRUNINGS, ("adtp", "top")))
def test_answers_and_kept_tokens_hold_by_the_verdict(gpu, tmp_path, pruning):
    """`MANY` is 90 tokens, and `USUAL` 100: these run in parts."""
    student = encoder_runs.make(pruning=pruning)
    made = encoder_files.opened(encoder_files.write(student, tmp_path)[1])
    usual = USUAL if student.site_names else FULL
    assert compare(oracle_for(student, "fp32", ONE, usual, MANY), made).failure is None
    made.close()


def test_answers_to_texts_and_to_all_tokens(gpu, tmp_path):
    """`MANY` and `FULL` run in parts; cuts say what they keep, though their rows are read once more at the end."""
    student = encoder_runs.make(head="embedding")
    made = encoder_files.opened(encoder_files.write(student, tmp_path)[1])
    assert compare(oracle_for(student, "fp32", ONE, FULL, MANY), made).failure is None
    made.close()


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_lower_precisions(gpu, tmp_path, student, precision):
    made = encoder_files.opened(encoder_files.write(student, tmp_path, precision)[1])
    assert compare(oracle_for(student, precision, USUAL), made).failure is None
    made.close()


def test_parts_answer_as_single_texts_do(engine):
    batch = as_numpy(make_batch((20, 3, 17, 1, 12, 20, 9), 20))
    whole = engine.run(batch)
    for i in range(7):
        alone = engine.run({name: array[i : i + 1] for name, array in batch.items()})
        np.testing.assert_allclose(whole[LOGITS][i], alone[LOGITS][0], atol=1e-5)
        assert np.array_equal(whole[KEPT_SITE][i], alone[KEPT_SITE][0])


def test_a_call_gives_what_is_wanted(engine):
    batch = as_numpy(make_batch((5, 9), 9))
    assert list(engine.run(batch, [LOGITS])) == [LOGITS]
    assert list(engine.run(batch, [KEPT_SITE])) == [KEPT_SITE]


def test_threads_take_turns(engine):
    """Each has its own batch, of another size, and gets its own answers."""
    batches = [as_numpy(make_batch((4 + i, 9), 9 + i, seed=i)) for i in range(6)]
    expected = [engine.run(batch, [LOGITS])[LOGITS] for batch in batches]
    found: list = [None] * len(batches)
    go = threading.Barrier(len(batches))

    def call(i):
        go.wait()
        found[i] = engine.run(batches[i], [LOGITS])[LOGITS]

    threads = [threading.Thread(target=call, args=(i,)) for i in range(len(batches))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for answer, wanted in zip(found, expected):
        assert np.array_equal(answer, wanted)


def test_memory_for_fewer_sizes_is_said_once_and_calls_run_in_parts(gpu, file, monkeypatch, caplog):
    batch = as_numpy(make_batch((20, 9, 3), 20))
    whole = encoder_files.opened(file)
    expected = whole.run(batch, [LOGITS])[LOGITS]
    whole.close()
    read = encoder_file.read(file)
    smallest = read.plan.buckets[0]
    places = (*(array.nbytes for array in read.weights), smallest.workspace, *smallest.inputs, *smallest.outputs)
    graph = 64 * 1024
    monkeypatch.setenv("ADTP_EMULATOR_MEMORY", str(sum(-(-size // 256) * 256 for size in places) + graph))
    with caplog.at_level(logging.WARNING):
        made = encoder_files.opened(file)
        answers = made.run(batch, [LOGITS])[LOGITS]
    (record,) = caplog.records
    assert "the GPU's free memory is enough for 32 tokens of 32 texts at a time, not for 64 of 64" in record.message
    assert "larger calls run in parts" in record.message
    np.testing.assert_allclose(answers, expected, atol=1e-5)
    with pytest.raises(InputError, match="input_ids: got rows of 33 tokens; accepted are at most 32"):
        made.run(as_numpy(make_batch((33,), 33)))
    made.close()


def test_too_little_memory_for_anything(gpu, file, monkeypatch):
    monkeypatch.setenv("ADTP_EMULATOR_MEMORY", "1000")
    with pytest.raises(EngineBuildError, match=r"model.cuda.fp32.onnx: .*out of memory \(2\) for weights of"):
        encoder_files.opened(file)


def test_a_gpu_that_is_lost_is_an_error_and_the_next_engine_works(gpu, student, file):
    """A kernel reads rows that are not there."""

    def far(bucket, launch):
        return encoder_runs.with_argument(launch, "a_stride", Number("i32", 2**24))

    batch = as_numpy(make_batch((5, 9), 9))
    made = encoder.EncoderEngine(file)
    made.file = dataclasses.replace(made.file, plan=encoder_runs.changed(made.file.plan, "layer 1 qkv", far))
    made.opened()
    with pytest.raises(CudaError, match=r"\(719\); the GPU is lost .*: load again"):
        made.run(batch)
    with pytest.raises(CudaError, match="the GPU was lost in an earlier call; load it again"):
        made.run(batch)
    another = encoder_files.opened(file)
    assert compare(oracle_for(student, "fp32", ONE), another).failure is None
    another.close()


def test_two_processes_use_one_gpu(gpu, file, engine, tmp_path):
    """Each has its own context and buffers; both have a runner before either calls, and the first to end takes nothing along."""
    library, _ = runner_builds.for_this_process()
    code = f"""
import sys, time
from pathlib import Path
import numpy as np
from adtp_export.plugins import runner
from adtp_export.runtimes.encoder import EncoderEngine
own, other = map(Path, sys.argv[1:])
runner.built = lambda: Path({str(library)!r})
engine = EncoderEngine(Path({str(file)!r})).opened()
own.touch()
while not other.exists():
    time.sleep(0.01)
batch = dict(np.load({str(tmp_path / "batch.npz")!r}))
for i in range(int(own.name)):
    found = engine.run(batch)
np.savez(own.with_suffix(".npz"), **found)
engine.close()
"""
    batch = as_numpy(make_batch((17, 5, 12), 20))
    np.savez(tmp_path / "batch.npz", **batch)
    places = tmp_path / "1", tmp_path / "3"
    processes = [subprocess.Popen([sys.executable, "-c", code, *map(str, pair)]) for pair in (places, places[::-1])]
    try:
        assert [process.wait(240) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
    expected = engine.run(batch)
    for place in places:
        found = np.load(place.with_suffix(".npz"))
        assert all(np.array_equal(found[name], expected[name]) for name in (LOGITS, KEPT_SITE))


def test_arrays_whose_shapes_disagree_are_refused(engine):
    batch = as_numpy(make_batch((5, 9), 9))
    with pytest.raises(
        InputError, match=r"got arrays of shapes \[\(1, 9\), \(2, 9\)\]; accepted are \(B, S\), the same"
    ):
        engine.run({**batch, "attention_mask": batch["attention_mask"][:1]})
    with pytest.raises(InputError, match=r"got arrays of shapes \[\(18,\)\]"):
        engine.run({name: array.reshape(-1) for name, array in batch.items()})


def test_weights_in_a_file_of_their_own(gpu, engine, file, tmp_path):
    import onnx

    onnx.save(
        onnx.load(file),
        tmp_path / "model.onnx",
        save_as_external_data=True,
        location="model.onnx.data",
        size_threshold=0,
    )
    batch = as_numpy(make_batch((5, 9), 9))
    made = encoder_files.opened(tmp_path / "model.onnx")
    assert np.array_equal(made.run(batch)[LOGITS], engine.run(batch)[LOGITS])
    made.close()


def test_files_that_are_none(file, tmp_path):
    whole = file.read_bytes()
    for i, content in enumerate((b"", b"text", whole[: len(whole) // 2], b"\xff" * 100)):
        (tmp_path / f"{i}.onnx").write_bytes(content)
        with pytest.raises(
            InputError, match=r"got no ONNX file with one adtp::AdtpEncoder; accepted: what adtp-export --cuda"
        ):
            encoder_file.read(tmp_path / f"{i}.onnx")
    with pytest.raises(InputError, match="got no ONNX file"):
        encoder_file.read(file.with_name("model.onnx"))


def test_weights_elsewhere_are_refused(file, tmp_path):
    import onnx

    model = onnx.load(file)
    onnx.save(model, tmp_path / "model.onnx", save_as_external_data=True, location="weights", size_threshold=0)
    model = onnx.load(tmp_path / "model.onnx", load_external_data=False)
    next(entry for entry in model.graph.initializer[0].external_data if entry.key == "location").value = "../weights"
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "model.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(InputError, match="got no ONNX file"):
        encoder_file.read(tmp_path / "below" / "model.onnx")


def test_without_what_reads_the_file_one_message_says_what_to_type(gpu, file, monkeypatch):
    assert encoder.obstacle() is None
    monkeypatch.setitem(sys.modules, "onnx_ir", None)
    assert (
        encoder.obstacle() == "onnx-ir, which reads such files, is not installed; type: pip install 'adtp-export[cuda]'"
    )
    assert not encoder.runs_here(in_onnxruntime=False)
    with pytest.raises(MissingDependencyError, match=r"needs the package onnx_ir.*adtp-export\[cuda\]"):
        encoder_file.read(file)


def test_where_nothing_runs(gpu, monkeypatch, tmp_path):
    assert runner.obstacle() is None
    assert encoder.runs_here(in_onnxruntime=False)
    monkeypatch.setenv("ADTP_EMULATOR_SM", "75")
    assert runner.obstacle() == "no kernel for sm_75; accepted are GPUs from sm_80 on"
    (tmp_path / runner.FILE).write_bytes(b"\x7fELF of another machine")
    monkeypatch.setattr(runner, "built", lambda: tmp_path / runner.FILE)
    assert "cannot be loaded" in runner.obstacle()
    assert "type: adtp-plugin build --cuda" in runner.obstacle()
    monkeypatch.setattr(runner, "built", lambda: None)
    assert encoder.obstacle() == runner.obstacle()
    assert runner.obstacle() == f"{runner.FILE} is not built; type: adtp-plugin build --cuda"
    with pytest.raises(MissingDependencyError, match="is not built"):
        encoder.open_encoder(encoder_files.write(encoder_runs.make(), tmp_path)[1], in_onnxruntime=True)
