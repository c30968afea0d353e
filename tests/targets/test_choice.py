"""Which target is taken: rules tried on the manifest of an exported directory, edited."""

import json
import logging
import shutil

import pytest
from testbed import relist

import adtp_export
from adtp_export.artifacts.records import Manifest
from adtp_export.environment import fingerprint, machine
from adtp_export.errors import InputError, MissingDependencyError
from adtp_export.graph import program
from adtp_export.runtimes import onnxruntime, tensorrt
from adtp_export.targets import choice
from adtp_export.targets.choice import choose
from adtp_export.targets.sizes import sizes_of

PLAIN, PRECOMPUTED, FP16 = "onnxruntime-cpu-fp32", "onnxruntime-cpu-fp32-precomputed", "onnxruntime-cpu-fp16"
OPENVINO = "openvino-cpu-fp32"
INT8, BF16 = "onnxruntime-cpu-int8-linear-plugin", "onnxruntime-cpu-bf16-linear-plugin"
ENGINE = "rtx-sm_86+sm_89-fp32-plugin"


@pytest.fixture(scope="module")
def several(exported, tmp_path_factory):
    """The exported demo with two verified targets in fp32 and one in fp16."""
    out = shutil.copytree(exported, tmp_path_factory.mktemp("several") / "out")
    program.precompute_projections(out / "model.onnx", out / "model.precomputed.fp32.onnx")
    program.convert_precision(out / "model.onnx", out / "model.fp16.onnx", "fp16")
    document = json.loads((out / "manifest.json").read_text())
    plain = document["targets"][PLAIN]
    assert plain["status"] == "verified"
    files = {PLAIN: plain["file"], PRECOMPUTED: "model.precomputed.fp32.onnx", FP16: "model.fp16.onnx"}
    document["targets"] = {name: {**plain, "file": file} for name, file in files.items()}
    for target in document["targets"].values():
        for name in ("p50_ms", "timed_on", "machine", "fingerprint"):
            target.pop(name, None)
    (out / "manifest.json").write_text(json.dumps(document))
    return relist(out)


@pytest.fixture
def edited(several, tmp_path):
    """Return a function that copies the directory and changes targets of its manifest; None takes a target away, and a target
    that is not there is made of the first one.
    """

    def edit(**changes):
        out = shutil.copytree(several, tmp_path / f"edited-{len(list(tmp_path.iterdir()))}")
        document = json.loads((out / "manifest.json").read_text())
        targets = document["targets"]
        plain = targets[PLAIN]
        for name, change in changes.items():
            if change is None:
                del targets[name]
            else:
                targets[name] = {**targets.get(name, plain), **change}
        (out / "manifest.json").write_text(json.dumps(document))
        return out

    return edit


def timed(ms, shape="8x64", where=None):
    return {"p50_ms": ms, "timed_on": shape, "machine": machine(), "fingerprint": where or fingerprint()}


@pytest.fixture
def on_sm_89(has_rtx, monkeypatch):
    """A choice looks at which GPU is here; it opens nothing."""
    monkeypatch.setattr(tensorrt, "local_gpu", lambda: "sm_89")


def chosen(out, prefer="precision"):
    return choose(Manifest.read(out), None, prefer, out)


def test_the_fastest_of_equal_precision(edited):
    deployment = adtp_export.load(edited(**{PLAIN: timed(4.1), PRECOMPUTED: timed(5.0)}))
    assert deployment.target == PLAIN
    assert deployment.reason == "fastest of 2 verified fp32 targets measured on this kind of machine: 4.1 ms on 8x64"
    assert adtp_export.load(edited(**{PLAIN: timed(5.0), PRECOMPUTED: timed(4.1)})).target == PRECOMPUTED


def test_another_runtime_is_taken_where_it_is_faster(edited, has_openvino):
    slower = {PLAIN: timed(266), PRECOMPUTED: timed(250)}
    deployment = adtp_export.load(edited(**slower, **{OPENVINO: timed(228)}))
    assert deployment.target == OPENVINO
    assert deployment("a wonderful film")[0].label == "positive"
    assert chosen(edited(**slower, **{OPENVINO: timed(270)})).name == PRECOMPUTED


def test_lower_precisions_are_for_speed_alone(edited):
    out = edited(**{PLAIN: timed(4.1), PRECOMPUTED: timed(5.0), FP16: timed(2.0)})
    assert adtp_export.load(out).target == PLAIN
    deployment = adtp_export.load(out, prefer="speed")
    assert deployment.target == FP16
    assert deployment.reason == "fastest of 3 verified targets measured on this kind of machine: 2.0 ms on 8x64"
    slow = edited(**{PLAIN: timed(4.1), PRECOMPUTED: timed(5.0), FP16: timed(6.0)})
    assert adtp_export.load(slow, prefer="speed").target == PLAIN
    only = edited(**{PLAIN: None, PRECOMPUTED: None})
    assert (chosen(only).name, chosen(only).reason) == (FP16, "the only verified fp16 target that runs here")


def test_times_of_other_machines_do_not_count(edited):
    elsewhere = {**timed(1.0, where="0123456789ab"), "machine": "some other processor, 64 cores"}
    choice = chosen(edited(**{PLAIN: elsewhere, PRECOMPUTED: {}}))
    assert choice.name == PRECOMPUTED
    assert choice.reason == "first by default of 2 verified fp32 targets: none was measured on this kind of machine"
    without = {"p50_ms": 1.0, "timed_on": "8x64"}  # as earlier versions wrote it
    assert chosen(edited(**{PLAIN: without})).name == PRECOMPUTED
    assert "times of" not in choice.reason
    one = chosen(edited(**{PLAIN: timed(9.0), PRECOMPUTED: elsewhere}))
    assert one.name == PLAIN
    assert one.reason.startswith("the only one of 2 verified fp32 targets measured")


@pytest.mark.parametrize(
    ("theirs", "told"), [({"fingerprint": "0123456789ab"}, "0123456789ab"), ({}, "none")], ids=["another", "none"]
)
def test_times_of_a_machine_of_the_same_name_do_not_count(edited, theirs, told):
    """Clouds call very different processors by one name; older manifests know no more than that name."""
    of_that_name = {"p50_ms": 1.0, "timed_on": "8x64", "machine": machine(), **theirs}
    choice = chosen(edited(**{PLAIN: of_that_name, PRECOMPUTED: {**of_that_name, "p50_ms": 9.0}}), "speed")
    assert choice.name == PRECOMPUTED
    assert choice.reason == (
        "first by default of 3 verified targets: none was measured on this kind of machine (times of "
        f"{machine()} do not count: their fingerprint is {told}, and here it is {fingerprint()})"
    )


def test_times_on_different_texts_are_not_compared(edited, has_openvino):
    out = edited(**{PLAIN: timed(4.1, "8x64"), PRECOMPUTED: timed(4.0, "8x64"), OPENVINO: timed(1.0, "1x16")})
    assert chosen(out).name == PRECOMPUTED


def test_verified_ones_first_and_failed_ones_never(edited, monkeypatch):
    fast = timed(0.1)
    out = edited(**{PLAIN: {**fast, "status": "unverified"}, PRECOMPUTED: timed(9.0)})
    assert chosen(out).name == PRECOMPUTED
    unverified = edited(**{PLAIN: {"status": "unverified"}, PRECOMPUTED: {"status": "built-not-run"}, FP16: None})
    assert (chosen(unverified).name, chosen(unverified).reason) == (
        PLAIN,
        "the only unverified fp32 target that runs here",
    )
    built = edited(**{PLAIN: {**fast, "status": "failed"}, PRECOMPUTED: {"status": "built-not-run"}, FP16: None})
    assert chosen(built).name == PRECOMPUTED
    with pytest.raises(InputError, match=f"{PLAIN} cannot run on this machine; {PRECOMPUTED} can"):
        adtp_export.load(built, target=PLAIN)
    nothing = edited(**{PLAIN: {"status": "failed"}, PRECOMPUTED: None, FP16: None})
    with pytest.raises(
        MissingDependencyError, match=rf"none of its targets \({PLAIN}\) runs here: they are for another"
    ):
        adtp_export.load(nothing)
    monkeypatch.setattr(onnxruntime, "installed", lambda: None)
    with pytest.raises(MissingDependencyError, match="no runtime is installed for any target; type: pip install"):
        adtp_export.load(nothing)


def test_a_gpu_before_the_cpu_but_not_before_precision(edited, on_sm_89):
    """`gpus` in the manifest is what a target's name says, too."""
    engine = {"file": "model.onnx", "attention": "plugin", "gpus": ["sm_86", "sm_89"]}
    fast = {PLAIN: timed(0.1)}
    choice = chosen(edited(**fast, **{ENGINE: engine}))
    assert (choice.name, choice.reason) == (ENGINE, "the only verified fp32 GPU target that runs here")
    assert chosen(edited(**fast, **{ENGINE: {**engine, "status": "built-not-run"}})).name == PLAIN
    assert chosen(edited(**fast, **{ENGINE: {**engine, "status": "emulated"}})).name == PLAIN
    elsewhere = ENGINE.replace("sm_89", "sm_120")
    assert chosen(edited(**fast, **{elsewhere: engine})).name == PLAIN
    half = ENGINE.replace("fp32", "fp16")
    assert chosen(edited(**fast, **{half: engine})).name == PLAIN
    assert chosen(edited(**fast, **{half: engine}), "speed").name == half
    assert chosen(edited(**{ENGINE: engine, half: engine}), "speed").name == half
    portable = ENGINE.replace("plugin", "decomposed")
    assert chosen(edited(**{portable: {**engine, "attention": "decomposed"}, ENGINE: engine})).name == ENGINE


def test_what_proves_a_file_for_another_runtime_is_taken_last(edited):
    proof = "onnxruntime-cpu-trt.int8"
    out = edited(**{proof: timed(0.1), PLAIN: timed(4.1)})
    assert chosen(out, "speed").name == PLAIN
    assert chosen(edited(**{proof: {}, PLAIN: None, PRECOMPUTED: None, FP16: None})).name == proof


def test_targets_of_a_later_version_are_passed_over(edited):
    out = edited(**{"tpu-v9-fp32": {}, PRECOMPUTED: None})
    assert chosen(out).name == PLAIN
    with pytest.raises(InputError, match="tpu-v9-fp32 cannot run on this machine"):
        adtp_export.load(out, target="tpu-v9-fp32")


def test_wrong_preferences_and_names(several):
    with pytest.raises(InputError, match="got 'spede'; accepted are precision and speed; did you mean 'speed'"):
        adtp_export.load(several, prefer="spede")
    with pytest.raises(InputError, match=f"did you mean '{PLAIN}'"):
        adtp_export.load(several, target="onnxruntime-cpu-fp3")


def test_a_wish_is_a_reason(several):
    deployment = adtp_export.load(several, target=FP16)
    assert (deployment.target, deployment.reason) == (FP16, "asked for")


def test_the_choice_is_logged(several, caplog):
    with caplog.at_level(logging.INFO, "adtp_export"):
        deployment = adtp_export.load(several)
    assert caplog.messages == [f"{deployment.target}: {deployment.reason}"]


def test_a_file_for_tensorrt_is_run_as_written(edited, monkeypatch):
    """Node by node, as it was verified: integer products of ONNX Runtime round otherwise."""
    asked = []
    original = onnxruntime.OnnxRuntimeEngine.__init__

    def spy(self, *arguments, **options):
        asked.append(options)
        original(self, *arguments, **options)

    monkeypatch.setattr(onnxruntime.OnnxRuntimeEngine, "__init__", spy)
    out = edited(**{"onnxruntime-cpu-rtx.int8": {}})
    for target in ("onnxruntime-cpu-rtx.int8", PLAIN):
        adtp_export.load(out, target=target)("x", return_kept=True)
    assert [options["disable_qdq_fusion"] for options in asked] == [True, True, False, False]
    assert not any(options["cuda"] for options in asked)


@pytest.mark.usefixtures("on_sm_89")
def test_fixed_sizes_come_first_on_a_gpu_and_stand_for_one_another(edited):
    """Somebody asked for them. A size of another status is not one of them."""
    verified = {"status": "verified"}
    sizes = {f"{ENGINE}-static_{size}": verified for size in ("512x32", "128x32")}
    out = edited(**{ENGINE: verified, **sizes, f"{ENGINE}-static_64x32": {"status": "built-not-run"}})
    choice = chosen(out)
    assert choice.name in sizes
    found = sizes_of(Manifest.read(out).targets, choice.spec)
    assert [str(spec) for spec in found] == [f"{ENGINE}-static_128x32", f"{ENGINE}-static_512x32"]
    free = chosen(edited(**{ENGINE: verified})).spec
    assert sizes_of(Manifest.read(out).targets, free) == [free]


def test_fixed_sizes_on_a_cpu_are_proofs(edited):
    """However fast they were."""
    assert chosen(edited(**{f"{PLAIN}-static_512x32": timed(0.1)})).name != f"{PLAIN}-static_512x32"


@pytest.mark.usefixtures("with_operators")
@pytest.mark.parametrize(
    ("instructions", "vendor", "expected"),
    [
        ({"avx2"}, "AuthenticAMD", PRECOMPUTED),
        ({"avx512_vnni", "avx512_bf16"}, "AuthenticAMD", INT8),
        ({"avx_vnni"}, "GenuineIntel", INT8),
        ({"avx512_bf16"}, "AuthenticAMD", BF16),
        ({"avx512_bf16"}, "GenuineIntel", PRECOMPUTED),
        ({"avx512_bf16", "amx_bf16"}, "GenuineIntel", BF16),
    ],
)
def test_where_nothing_was_timed_instructions_say_what_is_fast(edited, monkeypatch, instructions, vendor, expected):
    out = edited(**{INT8: {}, BF16: {}})
    monkeypatch.setattr(choice, "instructions", lambda: instructions)
    monkeypatch.setattr(choice, "hardware", lambda: {"vendor": vendor})
    assert chosen(out, "speed").name == expected
    assert chosen(out).name == PRECOMPUTED
    assert chosen(edited(**{INT8: {}, PLAIN: timed(3.0)}), "speed").name == PLAIN
