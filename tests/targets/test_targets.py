"""Targets as values: their names, and the table of runtimes."""

import re
import tempfile

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from testbed import as_numpy, exported_graph, make_batch, make_student

from adtp_export.artifacts.records import DECOMPOSED, ORT_PACKED, PLUGIN, ShapeRange
from adtp_export.errors import EngineBuildError, InputError
from adtp_export.graph.debug import debug_form
from adtp_export.runtimes import cuda
from adtp_export.targets.specs import PRECISIONS, RUNTIMES, TargetSpec

GPUS = ("sm_86", "sm_89", "sm_120")
NAMES = {
    "onnxruntime-cpu-fp32": {"runtime": "onnxruntime", "device": "cpu", "precision": "fp32"},
    "onnxruntime-cpu-fp32-precomputed": {
        "runtime": "onnxruntime",
        "device": "cpu",
        "precision": "fp32",
        "form": "precomputed",
    },
    "onnxruntime-cpu-fp32-plugin": {
        "runtime": "onnxruntime",
        "device": "cpu",
        "precision": "fp32",
        "attention": PLUGIN,
    },
    "onnxruntime-cpu-fp32-precomputed-plugin": {
        "runtime": "onnxruntime",
        "device": "cpu",
        "precision": "fp32",
        "form": "precomputed",
        "attention": PLUGIN,
    },
    "openvino-cpu-fp32-packed": {"runtime": "openvino", "device": "cpu", "precision": "fp32", "form": "packed"},
    "onnxruntime-cpu-fp32-packed-plugin": {
        "runtime": "onnxruntime",
        "device": "cpu",
        "precision": "fp32",
        "form": "packed",
        "attention": PLUGIN,
    },
    "onnxruntime-cpu-int8": {"runtime": "onnxruntime", "device": "cpu", "precision": "int8"},
    "onnxruntime-cpu-trt.int8": {"runtime": "onnxruntime", "device": "cpu", "precision": "int8", "form": "trt"},
    "onnxruntime-cpu-rtx.fp8": {"runtime": "onnxruntime", "device": "cpu", "precision": "fp8", "form": "rtx"},
    "openvino-cpu-bf16": {"runtime": "openvino", "device": "cpu", "precision": "bf16"},
    "onnxruntime-cpu-adtp.fp16": {"runtime": "onnxruntime", "device": "cpu", "precision": "fp16", "form": "adtp"},
    "adtp-cuda-bf16": {"runtime": "adtp", "device": "cuda", "precision": "bf16", "attention": PLUGIN},
    "onnxruntime-cuda-fp16-plugin": {
        "runtime": "onnxruntime",
        "device": "cuda",
        "precision": "fp16",
        "attention": PLUGIN,
    },
    "onnxruntime-cuda-fp16": {
        "runtime": "onnxruntime",
        "device": "cuda",
        "precision": "fp16",
        "attention": ORT_PACKED,
    },
    "rtx-sm_86+sm_89+sm_120-fp32-plugin": {
        "runtime": "rtx",
        "device": "cuda",
        "precision": "fp32",
        "gpus": GPUS,
        "attention": PLUGIN,
    },
    "rtx-sm_86+sm_89+sm_120-fp32-plugin-static_512x32": {
        "runtime": "rtx",
        "device": "cuda",
        "precision": "fp32",
        "gpus": GPUS,
        "attention": PLUGIN,
        "form": "static_512x32",
    },
    "openvino-cpu-bf16-static_128x8": {
        "runtime": "openvino",
        "device": "cpu",
        "precision": "bf16",
        "form": "static_128x8",
    },
    "trt-sm_89-int8-decomposed": {"runtime": "trt", "device": "cuda", "precision": "int8", "gpus": ("sm_89",)},
    "trt-sm_90-fp16-plugin-packed": {
        "runtime": "trt",
        "device": "cuda",
        "precision": "fp16",
        "gpus": ("sm_90",),
        "attention": "plugin",
        "form": "packed",
    },
}

onnxruntime_specs = st.one_of(
    st.builds(
        TargetSpec,
        runtime=st.just("onnxruntime"),
        device=st.just("cpu"),
        precision=st.sampled_from(PRECISIONS),
        form=st.sampled_from(["", "precomputed", "packed", "trt", "rtx"]),
    ),
    st.builds(
        TargetSpec,
        runtime=st.just("onnxruntime"),
        device=st.just("cpu"),
        precision=st.sampled_from(PRECISIONS),
        form=st.sampled_from(["", "precomputed", "packed"]),
        attention=st.just(PLUGIN),
    ),
    st.builds(
        TargetSpec,
        runtime=st.just("onnxruntime"),
        device=st.just("cuda"),
        precision=st.sampled_from(PRECISIONS),
        attention=st.just(ORT_PACKED),
    ),
)
openvino_specs = st.builds(
    TargetSpec,
    runtime=st.just("openvino"),
    device=st.just("cpu"),
    precision=st.sampled_from(PRECISIONS),
    form=st.sampled_from(["", "packed"]),
)
engine_specs = st.builds(
    TargetSpec,
    runtime=st.sampled_from(["trt", "rtx"]),
    device=st.just("cuda"),
    precision=st.sampled_from(PRECISIONS),
    gpus=st.lists(st.integers(50, 130).map("sm_{}".format), min_size=1, max_size=4).map(tuple),
    attention=st.sampled_from([PLUGIN, DECOMPOSED]),
    form=st.sampled_from(["", "static_512x32", "static_7x1"]),
)
WORDS = (
    "onnxruntime",
    "openvino",
    "trt",
    "rtx",
    "cpu",
    "cuda",
    "precomputed",
    "packed",
    "plugin",
    "sm_86",
    *PRECISIONS,
)


@pytest.mark.parametrize("name", NAMES)
def test_names_are_those_of_manifests(name):
    spec = TargetSpec(**NAMES[name])
    assert str(spec) == name
    assert TargetSpec.parse(name) == spec


@given(st.one_of(onnxruntime_specs, openvino_specs, engine_specs))
def test_parse_undoes_str(spec):
    assert TargetSpec.parse(str(spec)) == spec


@given(st.one_of(st.text(), st.lists(st.sampled_from(WORDS), max_size=5).map("-".join), st.sampled_from(list(NAMES))))
def test_str_undoes_parse_and_other_text_is_refused(text):
    try:
        spec = TargetSpec.parse(text)
    except InputError:
        spec = None
    assert spec is None or (str(spec) == text and spec.runtime in RUNTIMES)
    assert spec is not None or text not in NAMES


@pytest.mark.parametrize(
    "text",
    [
        "",
        "onnxruntime",
        "onnxruntime-cpu-fp64",
        "onnxruntime-cpu-fp32\n",
        "onnxruntime-cpu-trt.int8-precomputed",
        "openvino-cuda-fp32",
        "openvino-cpu-fp32-precomputed",
        "rtx--fp32-plugin",
        "rtx-sm_86+-fp32-plugin",
        "rtx-sm_86-fp32",
        "rtx-sm_86-fp32-plugin-static_0x4",
        "rtx-sm_86-fp32-plugin-packed",
        "onnxruntime-cpu-fp32-static_512x32-plugin",
        "rtx-sm_٨٦-fp32-plugin",
        "tensorrt-sm_86-fp32-plugin",
    ],
)
def test_names_that_are_none(text):
    with pytest.raises(InputError, match=re.escape(f"got {text!r}; accepted are onnxruntime-cpu-fp32, ")):
        TargetSpec.parse(text)


@pytest.mark.parametrize(
    "changed",
    [
        {"runtime": "tensorrt"},
        {"device": "gpu"},
        {"device": "cuda"},  # its attention is always packed
        {"precision": "fp64"},
        {"form": "hub"},
        {"gpus": GPUS},
        {"attention": PLUGIN, "form": "trt"},
        {"attention": PLUGIN, "runtime": "openvino"},
        {"runtime": "rtx", "device": "cuda"},  # for no GPU
        {"runtime": "rtx", "device": "cpu", "gpus": GPUS},
        {"runtime": "rtx", "device": "cuda", "gpus": GPUS, "form": "precomputed"},
        {"runtime": "rtx", "device": "cuda", "gpus": ("sm_86+sm_89",)},
    ],
)
def test_a_target_without_a_name_cannot_be_made(changed):
    with pytest.raises(InputError, match="there is none like"):
        TargetSpec(**{**NAMES["onnxruntime-cpu-fp32"], **changed})


def test_the_table_says_what_runs_here():
    """ONNX Runtime is a dependency of these tests; its CPU provider has no bf16, and a GPU that nobody makes is never here."""
    runs = {name: RUNTIMES[(spec := TargetSpec.parse(name)).runtime].runs_here(spec) for name in NAMES}
    assert all(runs[name] for name in NAMES if name.startswith("onnxruntime-cpu") and "plugin" not in name)
    bf16 = TargetSpec.parse("onnxruntime-cpu-bf16")
    assert not RUNTIMES[bf16.runtime].runs_here(bf16)
    for runtime in ("trt", "rtx"):
        assert not RUNTIMES[runtime].runs_here(TargetSpec.parse(f"{runtime}-sm_999-fp32-decomposed"))


def test_runtimes_are_ranked_and_name_themselves():
    ranks = [runtime.rank for runtime in RUNTIMES.values()]
    assert ranks == sorted(set(ranks))
    assert re.match(r"\d+\.", RUNTIMES["onnxruntime"].installed())


@pytest.fixture(scope="module")
def student():
    return make_student(["1.attention", "2.ffn"])


@pytest.fixture(scope="module")
def model(student, tmp_path_factory):
    path = tmp_path_factory.mktemp("targets") / "model.onnx"
    path.write_bytes(exported_graph(*student.site_names))
    return path


@pytest.mark.parametrize("stop_spinning", [False, True])
def test_a_file_opens_and_answers(student, model, stop_spinning):
    spec = TargetSpec.parse("onnxruntime-cpu-fp32")
    engine = RUNTIMES[spec.runtime].open(model, spec, threads=1, stop_spinning=stop_spinning)
    batch = make_batch([5, 9], 9)
    np.testing.assert_allclose(
        engine.run(as_numpy(batch))["logits"], student(**batch).logits.numpy(), atol=1e-5, rtol=0
    )


def test_no_engine_is_built_without_a_gpu(model, no_gpu):
    spec = TargetSpec.parse("rtx-sm_86-fp32-decomposed")
    profile = {"batch": ShapeRange(1, 2, 4), "seq": ShapeRange(1, 8, 32)}
    with pytest.raises(EngineBuildError, match="without a GPU"):
        RUNTIMES[spec.runtime].open_model(model, spec, profile)


@pytest.fixture
def rtx_as_if_on_sm_86(has_rtx, no_gpu, monkeypatch):
    monkeypatch.setattr(cuda, "local_gpu", lambda: "sm_86")


def test_an_engine_is_built_of_a_debug_form(model, tmp_path, monkeypatch, rtx_as_if_on_sm_86):
    """As far as that goes without a GPU: it is built, and only then refused."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    spec = TargetSpec.parse("rtx-sm_86+sm_89-fp32-decomposed")
    profile = {"batch": ShapeRange(1, 2, 4), "seq": ShapeRange(1, 8, 32)}
    with debug_form(model) as debug, pytest.raises(EngineBuildError, match="cannot load model.engine"):
        RUNTIMES[spec.runtime].open_model(debug, spec, profile)
    assert list(tmp_path.iterdir()) == []
