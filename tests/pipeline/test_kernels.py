"""Which kernels a model's attention can have, and what is said where there are none."""

import contextlib
from types import SimpleNamespace

import pytest
from decoder_models import make_decoder
from known_graphs import known_graph
from testbed import TINY_BACKBONES, make_encoder

from adtp_export.artifacts.records import PLUGIN, ShapeRange
from adtp_export.contract import ATTENTION, ATTENTION_WINDOW, PLAIN
from adtp_export.errors import InputError, MissingDependencyError
from adtp_export.graph import program
from adtp_export.graph.passes import ORT_CUDA, run_passes
from adtp_export.pipeline.export.capabilities import Capabilities
from adtp_export.pipeline.export.file_plan import plan_files, plan_targets
from adtp_export.pipeline.export.options import ExportOptions
from adtp_export.pipeline.export.request import fit_profile, read_request
from adtp_export.runtimes import openvino, tensorrt

VECTORS = {"projections": [[32, 8, False, "none", False]]}


def checkpoint(backbone, pruning="none"):
    model = make_encoder(backbone, pruning)
    return SimpleNamespace(student=model, max_tokens=model.max_tokens)


@pytest.mark.parametrize("backbone", TINY_BACKBONES)
def test_all_but_two_have_layers_with_kernels(backbone):
    can = Capabilities(checkpoint(backbone))
    obstacle = can.kernels
    assert (obstacle is None) == (backbone not in ("mpnet", "deberta-v2"))
    if obstacle:
        assert f"in every layer of this {backbone} model attention depends on how far apart tokens are" in obstacle
        assert can.engine_kernels(("sm_86",)) == f"{obstacle}; use --attention decomposed"


@pytest.mark.parametrize(
    ("size", "precision", "message"),
    [
        (64, "fp32", None),
        (256, "bf16", None),
        (256, "fp32", "got head size 256; accepted in fp32 are multiples of 8 up to 128"),
        (12, "fp16", "got head size 12; accepted in fp16 are multiples of 8 up to 256"),
    ],
)
def test_causal_attention_has_kernels_for_some_head_sizes(size, precision, message):
    student = make_decoder("qwen3", "embedding", head_dim=size)
    can = Capabilities(SimpleNamespace(student=student, max_tokens=student.max_tokens))
    assert can.kernels is None
    found = can.engine_kernels(("sm_86",), precision)
    assert (found is None) if message is None else (message in found)


@pytest.mark.usefixtures("has_rtx")
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_the_plugin_is_refused_in_the_precisions_without_a_kernel(precision):
    student = make_decoder("qwen3", "embedding", head_dim=256)
    made = SimpleNamespace(student=student, max_tokens=student.max_tokens)
    options = ExportOptions("model", precisions=precision, trt=True, gpu="sm_86", attention="plugin")
    expected = (
        contextlib.nullcontext()
        if precision == "fp16"
        else pytest.raises(InputError, match="--attention plugin: .*got head size 256; accepted in fp32 are")
    )
    request = read_request(options)
    with expected:
        fit_profile(request, made, Capabilities(made))


def test_openvino_that_is_asked_for_and_not_there_is_no_silence(monkeypatch):
    monkeypatch.setattr(openvino, "installed", lambda: None)
    with pytest.raises(
        MissingDependencyError, match="--openvino: it is not installed; type: pip install 'adtp-export\\[openvino\\]'"
    ):
        read_request(ExportOptions("model", openvino=True))
    assert read_request(ExportOptions("model", openvino=True, skip_parity_check=True)).options.openvino


def test_tokens_that_only_query_take_the_kernels_of_grouped_attention():
    """Which are there for more head sizes, such as 8."""
    student = make_encoder("bert", "none", head="vectors", vectors=VECTORS)
    expanded = make_encoder("bert", "none", head="vectors", vectors=VECTORS | {"expansion": 5})
    plain, grouped = (
        Capabilities(SimpleNamespace(student=each)).engine_kernels(("sm_86",)) for each in (student, expanded)
    )
    assert "got head size 8; accepted are 32, 64, 128" in plain
    assert grouped is None


@pytest.mark.usefixtures("with_operators")
@pytest.mark.parametrize(("backbone", "pruning"), [("mpnet", "none"), ("bert", "from-others")])
def test_operators_for_cpus_serve_what_no_kernel_for_gpus_does(backbone, pruning):
    request = read_request(ExportOptions("MODEL", precompute_embedding_projections=True, attention=PLUGIN))
    model = checkpoint(backbone, pruning)
    can = Capabilities(model)
    fit_profile(request, model, can)
    files, notes = plan_files(request, model.student, can, {}, PLAIN)
    planned = {str(target.spec) for target in plan_targets(files, request, can)}
    assert {f"onnxruntime-cpu-fp32{form}-plugin" for form in ("", "-precomputed")} <= planned
    assert not notes


@pytest.mark.usefixtures("has_rtx")
def test_the_plugin_is_refused_before_any_work():
    request, mpnet = read_request(ExportOptions("MODEL", trt=True, attention=PLUGIN)), checkpoint("mpnet")
    with pytest.raises(InputError, match="--attention plugin: in every layer of this mpnet model"):
        fit_profile(request, mpnet, Capabilities(mpnet))


@pytest.mark.usefixtures("has_rtx")
@pytest.mark.parametrize(
    ("pruning", "expansion", "refused"), [("ltp", 5, True), ("schedule", 5, False), ("ltp", None, False)]
)
def test_engines_that_would_end_the_process_are_refused(pruning, expansion, refused):
    """TensorRT-RTX 1.7 dies in the builder where received attention is read and some tokens only query."""
    model = make_encoder(
        "bert", pruning, head="vectors", vectors=VECTORS | ({"expansion": expansion} if expansion else {})
    )
    request, asked = read_request(ExportOptions("MODEL", trt=True)), SimpleNamespace(student=model, max_tokens=64)
    with (
        pytest.raises(InputError, match="--trt: the pruner 'ltp' reads received")
        if refused
        else contextlib.nullcontext()
    ):
        fit_profile(request, asked, Capabilities(asked))


def test_onnx_runtimes_packed_attention_knows_no_distances():
    """No layer of MPNet can have it, and of ModernBERT those that see the whole text."""
    request, mpnet = read_request(ExportOptions("MODEL", ort_cuda=True)), checkpoint("mpnet")
    files, notes = plan_files(request, mpnet.student, Capabilities(mpnet), {}, PLAIN)
    assert [file.name for file in files] == ["model.onnx"]
    assert notes == [
        "no file for ONNX Runtime's CUDA provider: ONNX Runtime's packed attention knows no distances between tokens, and 3 of 3 "
        "layers need that. They keep the decomposed form in files for its CUDA provider",
    ]
    model = known_graph(make_encoder("modernbert", "none"), {"version": "test"})
    run_passes(model, ORT_CUDA)
    kinds = [node.op_type for node in model.graph if node.domain]
    packed = "PackedMultiHeadAttention"
    assert kinds == ["AdtpTokenOffset", packed, ATTENTION_WINDOW, packed, "SkipLayerNormalization"]
    assert ATTENTION not in {name for _, name, _ in model.functions}


@pytest.mark.slow
@pytest.mark.usefixtures("has_rtx")
def test_an_engine_has_the_plugin_where_a_layer_sees_the_whole_text(tmp_path, monkeypatch):
    monkeypatch.setitem(
        TINY_BACKBONES["modernbert"], "hidden_size", 128
    )  # four heads of 32, for which there are kernels
    path = tmp_path / "model.onnx"
    program.save(known_graph(make_encoder("modernbert", "adtp"), {"version": "test"}), path)
    profile = {"batch": ShapeRange(1, 2, 4), "seq": ShapeRange(1, 8, 32)}
    _, details = tensorrt.build(tensorrt.RTX, path, profile, ["sm_86", "sm_89", "sm_120"], PLUGIN)
    assert details["plugin_layers"] == 2
