"""What `adtp-bench OUT --write` measured decides which target is taken; what does not count is named, and never in the way."""

import dataclasses
import json
import math
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
from testbed import relist, run_cli

import adtp_export
from adtp_export import environment
from adtp_export.artifacts.manifest import add_file
from adtp_export.artifacts.records import Manifest, Target
from adtp_export.benchmarking.workloads import Workload
from adtp_export.errors import InputError
from adtp_export.graph import program
from adtp_export.pipeline.bench import targets as targets_timed
from adtp_export.runtimes import tensorrt
from adtp_export.targets import measured
from adtp_export.targets.choice import choose
from adtp_export.targets.measured import Measured, Place, Timed

PLAIN, PRECOMPUTED, FP16 = "onnxruntime-cpu-fp32", "onnxruntime-cpu-fp32-precomputed", "onnxruntime-cpu-fp16"
ENGINE = "rtx-sm_86+sm_89-fp32-decomposed"
ELSEWHERE = Place("some other processor, 64 cores", None, 0)
CHANGED, UNTIMED, UNSHARED = "changed since: ", "not timed: ", "no shape of batch was timed on all of "
MS = {PLAIN: {"1x32": 1.0, "8x128": 9.0}, PRECOMPUTED: {"1x32": 4.0, "8x128": 4.0}, FP16: {"1x32": 1.0, "8x128": 4.0}}


@pytest.fixture(scope="module")
def three(exported, tmp_path_factory):
    """The exported demo with two verified targets in fp32 and one in fp16, of which its manifest knows no times."""
    heavy = shutil.ignore_patterns("engines", "report.html")
    out = shutil.copytree(exported, tmp_path_factory.mktemp("three") / "out", ignore=heavy)
    program.precompute_projections(out / "model.onnx", out / "model.precomputed.fp32.onnx")
    program.convert_precision(out / "model.onnx", out / "model.fp16.onnx", "fp16")
    document = json.loads((out / "manifest.json").read_text())
    plain = {name: value for name, value in document["targets"][PLAIN].items() if name != "p50_ms"}
    files = {PLAIN: plain["file"], PRECOMPUTED: "model.precomputed.fp32.onnx", FP16: "model.fp16.onnx"}
    document["targets"] = {name: {**plain, "file": file} for name, file in files.items()}
    (out / "manifest.json").write_text(json.dumps(document))
    return relist(out)


@pytest.fixture
def timed(three, tmp_path):
    """Return a function that copies the directory and writes times into it; `change` edits each target's, `targets` the manifest's."""

    def write(ms=MS, place=None, change=lambda each: each, targets=None):
        out = relist(shutil.copytree(three, tmp_path / f"out-{len(list(tmp_path.iterdir()))}"), targets)
        manifest = Manifest.read(out)
        known = {name: change(Timed.of(name, manifest, p50_ms)) for name, p50_ms in ms.items()}
        add_file(out, manifest, measured.NAME, measured.text([Measured(place or Place.here(0), known)]))
        return out

    return write


def chosen(out, prefer="precision", threads=0):
    return choose(Manifest.read(out), None, prefer, out, threads)


def test_the_fastest_on_this_machine_by_the_geometric_mean_of_all_shapes(timed):
    """By the sum of the same times the tables would be faster than the plain file: 8 ms against 10."""
    out = timed()
    deployment = adtp_export.load(out)
    assert (deployment.target, deployment.reason) == (
        PLAIN,
        "fastest of 2 verified fp32 targets measured on this machine: 3.00 ms on the geometric mean of 1x32, 8x128; next "
        f"{PRECOMPUTED}, 4.00 ms",
    )
    assert deployment("a wonderful film")[0].label == "positive"
    fastest = chosen(out, "speed")
    assert (fastest.name, fastest.reason) == (
        FP16,
        "fastest of 3 verified targets measured on this machine: 2.00 ms on the geometric mean of 1x32, 8x128; next "
        f"{PLAIN}, 3.00 ms",
    )


def test_one_shape_is_a_choice_for_that_shape(timed):
    long = {name: {"8x128": ms["8x128"]} for name, ms in MS.items()}
    choice = chosen(timed(long))
    assert choice.name == PRECOMPUTED
    assert ": 4.00 ms on 8x128; next " in choice.reason
    mixed = chosen(timed({**MS, PLAIN: {"1x32": 9.0, "32x64": 0.1}}))  # shapes that not all were timed on do not count
    assert mixed.name == PRECOMPUTED
    assert ": 4.00 ms on 1x32; next " in mixed.reason


def test_it_comes_before_what_the_manifest_says_of_such_machines(timed):
    fast = {"p50_ms": 0.1, "timed_on": "8x64", "fingerprint": Place.here(0).fingerprint}
    plain = json.loads((timed() / "manifest.json").read_text())["targets"][PRECOMPUTED]
    assert chosen(timed(targets={PRECOMPUTED: {**plain, **fast}})).name == PLAIN


def test_it_comes_before_the_gpu_and_after_trust(timed, has_rtx, monkeypatch):
    monkeypatch.setattr(tensorrt, "local_gpu", lambda: "sm_89")
    document = json.loads((timed() / "manifest.json").read_text())["targets"]
    engine = {ENGINE: {**document[PLAIN], "attention": "decomposed"}}
    times = {**MS, ENGINE: {"1x32": 5.0, "8x128": 5.0}}
    assert chosen(timed(times, ELSEWHERE, targets=engine)).name == ENGINE
    assert chosen(timed(times, targets=engine)).name == PLAIN
    doubted = {PLAIN: {**document[PLAIN], "status": "unverified"}, FP16: {**document[FP16], "status": "failed"}}
    assert chosen(timed(targets=doubted), "speed").reason == "the only verified target that runs here"


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({"place": ELSEWHERE}, "it has no times of"),
        ({"place": dataclasses.replace(Place.here(0), gpu="NVIDIA of Theseus")}, "it has no times of"),
        ({"place": dataclasses.replace(Place.here(0), threads=3)}, "it has no times of"),
        (
            {"place": dataclasses.replace(Place.here(0), fingerprint="0123456789ab")},
            f"it has no times of {Place.here(0)}, only of machines of that name with the fingerprint 0123456789ab; ",
        ),
        ({"change": lambda each: dataclasses.replace(each, runtime="0.1")}, f"{CHANGED}{PLAIN}, {PRECOMPUTED}; "),
        (
            {"change": lambda each: dataclasses.replace(each, files={"model.onnx": "0" * 64})},
            f"{CHANGED}{PLAIN}, {PRECOMPUTED}; ",
        ),
        ({"ms": {PLAIN: MS[PLAIN]}}, f"{UNTIMED}{PRECOMPUTED}; "),
        ({"ms": {**MS, PRECOMPUTED: {"32x64": 1.0}}}, UNSHARED),
    ],
)
def test_what_was_measured_elsewhere_or_on_something_else_is_ignored(timed, asked, why):
    out = timed(**asked)
    choice = chosen(out)
    assert choice.name == PRECOMPUTED
    assert choice.reason.startswith(
        "first by default of 2 verified fp32 targets: none was measured on this kind of machine; "
    )
    assert f"measured.json is ignored: {why}" in choice.reason
    whole = " --budget 0" if why.startswith((UNTIMED, UNSHARED)) else ""
    assert choice.reason.endswith(f"; type adtp-bench {out} --write{whole}")


def test_files_of_earlier_versions_have_no_fingerprint_and_are_ignored(timed):
    out = timed()
    document = json.loads((out / measured.NAME).read_text())
    del document["measured"][0]["place"]["fingerprint"]
    add_file(out, Manifest.read(out), measured.NAME, json.dumps(document))
    choice = chosen(out)
    assert choice.name == PRECOMPUTED
    assert "only of machines of that name with the fingerprint none; type adtp-bench" in choice.reason


def test_times_of_one_size_are_of_all_its_sizes(three):
    """All of them are opened, so that a batch finds the smallest that it fits."""
    manifest = Manifest.read(three)
    names = {f"{PLAIN}-static_{size}": f"model.static_{size}.onnx" for size in ("64x4", "512x32")}
    targets = {name: dataclasses.replace(manifest.targets[PLAIN], file=file) for name, file in names.items()}
    files = {file: {"sha256": file, "bytes": 1} for file in names.values()}
    small, large = names
    timed = Timed.of(small, dataclasses.replace(manifest, targets=targets, files=files), {"1x32": 1.0})
    assert timed.holds(large, dataclasses.replace(manifest, targets=targets, files=files))
    changed = {**files, names[large]: {"sha256": "0", "bytes": 1}}
    assert not timed.holds(small, dataclasses.replace(manifest, targets=targets, files=changed))


def test_threads_are_part_of_the_place(timed):
    out = timed(place=Place.here(3))
    assert chosen(out, threads=3).reason.startswith("fastest of 2")
    assert chosen(out, threads=2).reason.endswith(f"type adtp-bench {out} --write --threads 2")


def test_all_cores_are_the_default_number_of_threads(on_cores):
    on_cores(4)
    assert [Place.here(threads) == Place.here(0) for threads in (4, 2)] == [True, False]


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "[]",
        lambda text: text.replace('"schema": 1', '"schema": 2'),
        lambda text: text.replace("9.0", "NaN"),
        lambda text: text.replace("9.0", "-9.0"),
        lambda text: text.replace("9.0", '"9"'),
        lambda text: text.replace('"place"', '"where"'),
    ],
)
def test_a_damaged_file_is_ignored(timed, damage):
    out = timed()
    path = out / measured.NAME
    path.write_text(damaged := damage(path.read_text()))
    listed = chosen(out).reason  # not the file that the manifest lists
    assert "measured.json is ignored" in listed
    assert "is damaged" in listed
    add_file(out, Manifest.read(out), measured.NAME, damaged)
    choice = chosen(out)
    assert choice.name == PRECOMPUTED
    assert f"measured.json is ignored: {path} is damaged" in choice.reason
    assert choice.reason.count("type ") == 1
    assert f"; type adtp-bench {out} --write" in choice.reason


def test_a_missing_file_is_not_a_reason(timed):
    out = timed()
    (out / measured.NAME).unlink()
    assert "measured.json is ignored" in adtp_export.load(out).reason  # the manifest lists it
    assert "measured.json" not in chosen(relist(out)).reason


def test_adtp_bench_writes_what_load_takes(exported, has_openvino, tmp_path):
    """Times of another machine stay; the targets run on batches of the asked shapes."""
    out, threads = shutil.copytree(exported, tmp_path / "out"), environment.usable_cores() + 1  # not the default
    manifest, names = Manifest.read(out), [PLAIN, "openvino-cpu-fp32"]
    other = Measured(ELSEWHERE, {PLAIN: Timed("0.1", {}, {"1x32": 1.0})})
    add_file(out, manifest, measured.NAME, measured.text([other]))
    typed = ["--write", "--workload", "1x32,8x128", "--seconds", "0", "--threads", str(threads)]
    result = run_cli("adtp-bench", out, *typed)
    assert result.returncode == 0, result.stderr
    after = Manifest.read(out)
    assert dict(after.files).keys() == {*manifest.files, measured.NAME}
    assert after.targets == manifest.targets
    kept, here = measured.read(out, after)
    assert (kept, here.place) == (other, Place.here(threads))
    assert list(here.targets) == names
    assert all(list(each.p50_ms) == ["1x32", "8x128"] for each in here.targets.values())
    assert all(each.holds(name, after) for name, each in here.targets.items())
    means = {name: math.prod(each.p50_ms.values()) for name, each in here.targets.items()}
    deployment = adtp_export.load(out, threads=threads)
    assert deployment.target == min(means, key=means.get)
    assert deployment.reason.startswith("fastest of 2 verified fp32 targets measured on this machine: ")
    assert f"prefer=precision takes {deployment.target}: fastest of 2" in result.stdout
    assert all(name in result.stdout for name in names)
    assert "it has no times of" in adtp_export.load(out).reason  # with the default number of threads


@pytest.mark.parametrize(
    ("shapes", "fits"),
    [([(2, 8), (8, 128)], True), ([(2, 8), (9, 128)], False), ([(8, 129)], False), ([(1, 128)], False)],
)
def test_an_engine_is_timed_on_batches_of_its_ranges(shapes, fits):
    profile = {"batch": "2:4:8", "seq": "1:64:128"}
    targets = {name: Target(file=name, status="verified", attention="decomposed") for name in (ENGINE, PLAIN)}
    targets[ENGINE] = dataclasses.replace(targets[ENGINE], details={"profile": profile})
    batches = tuple({"input_ids": np.ones(shape, np.int64)} for shape in shapes)
    able = [
        name for name in targets if targets_timed._takes(SimpleNamespace(targets=targets), name, Workload("x", batches))
    ]
    assert able == ([ENGINE, PLAIN] if fits else [PLAIN])


def test_bad_input_of_writing(tmp_path):
    with pytest.raises(InputError, match="--write goes with OUT"):
        adtp_export.bench(shape="bert-mini", write=True)
    with pytest.raises(InputError, match="--sweep-retention: --write times the targets of OUT and nothing else"):
        adtp_export.bench(tmp_path, write=True, sweep_retention=True)
    for out in (tmp_path, tmp_path / "none"):
        with pytest.raises(InputError, match="is not an exported directory"):
            adtp_export.bench(out, write=True)
