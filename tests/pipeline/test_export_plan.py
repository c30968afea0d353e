"""The plan of an export: complete before anything is written, and made in modules that know no step."""

import ast
import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from adtp_export.artifacts.records import UNVERIFIED
from adtp_export.contract import (
    HUB,
    MODEL,
    PACKED_MODEL,
    PLAIN,
    PRECOMPUTED_MODEL,
    layout_path,
    model_name,
)
from adtp_export.errors import MissingDependencyError
from adtp_export.pipeline.export import plan as planning
from adtp_export.pipeline.export.options import ExportOptions
from adtp_export.pipeline.export.request import read_request
from adtp_export.pipeline.progress import Steps
from adtp_export.plugins import operators
from adtp_export.plugins.encoder import planner
from adtp_export.runtimes import onnxruntime, openvino

PIPELINE = Path(planning.__file__).parent.parent


def planned(model, tmp_path, **options):
    return planning.make_export_plan(ExportOptions(model, tmp_path / "out", **options), Steps())


def test_it_has_every_file_and_target_before_anything_is_written(tmp_path, small):
    sizes = {"static_tokens": "40,96", "batch": "1:4:8", "seq": "1:32:96"}
    options = {
        "precisions": "fp32,fp16",
        "precompute_embedding_projections": True,
        "ort_cuda": True,
        "inline": True,
        "with_tokenizer": True,
    }
    plan = planned(small, tmp_path, packed_inputs=True, attention="decomposed", **options, **sizes)
    assert list(tmp_path.iterdir()) == []
    assert [file.name for file in plan.files] == [
        "model.onnx",
        "model.strings.onnx",
        "model.precomputed.fp32.onnx",
        "model.packed.onnx",
        "model.static_96x8.onnx",
        "model.static_40x8.onnx",
        "model.fp16.onnx",
        "model.packed.fp16.onnx",
        "model.static_96x8.fp16.onnx",
        "model.static_40x8.fp16.onnx",
        "model.inline.onnx",
        "model.inline.fp16.onnx",
        "model.ort-cuda.fp32.onnx",
        "model.ort-cuda.fp16.onnx",
    ]
    assert [str(target.spec) for target in plan.targets] == [
        "onnxruntime-cpu-fp32",
        "onnxruntime-cpu-fp32-precomputed",
        "onnxruntime-cpu-fp32-packed",
        "onnxruntime-cpu-fp32-static_96x8",
        "onnxruntime-cpu-fp32-static_40x8",
        "onnxruntime-cpu-fp16",
        "onnxruntime-cpu-fp16-packed",
        "onnxruntime-cpu-fp16-static_96x8",
        "onnxruntime-cpu-fp16-static_40x8",
        "onnxruntime-cpu-fp32-inline",
        "onnxruntime-cpu-fp16-inline",
        "onnxruntime-cuda-fp32",
        "onnxruntime-cuda-fp16",
    ]
    files = {file.name: file for file in plan.files}
    assert files["model.static_40x8.fp16.onnx"].wider == files["model.static_96x8.fp16.onnx"]
    made = [file.source.name for file in plan.files if file.source]
    assert all(source in files for source in made)
    assert plan.notes == ()


def test_what_no_runtime_here_takes_is_planned_as_unverified(tmp_path, small, monkeypatch):
    monkeypatch.setattr(openvino, "installed", lambda: None)
    targets = {str(target.spec): target for target in planned(small, tmp_path, precisions="fp32,bf16").targets}
    assert {name: target.status for name, target in targets.items()} == {
        "onnxruntime-cpu-fp32": None,
        "openvino-cpu-bf16": UNVERIFIED,
        "onnxruntime-cpu-bf16-linear": None,
    }
    assert targets["openvino-cpu-bf16"].why == (
        "ONNX Runtime's CPU provider has no bf16; type: pip install 'adtp-export[openvino]'"
    )
    monkeypatch.setattr(onnxruntime, "installed", lambda: None)
    with pytest.raises(MissingDependencyError, match="verification needs a runtime, and none is installed"):
        read_request(ExportOptions("MODEL"))
    (target,) = planned(small, tmp_path, skip_parity_check=True).targets
    assert (target.status, target.why) == (
        UNVERIFIED,
        "no runtime is installed; type: pip install 'adtp-export[cpu]'",
    )


def test_missing_operators_are_told_once_it_is_known_that_a_layer_could_have_them(tmp_path, small, monkeypatch):
    assert planned(small, tmp_path).notes == ()  # nobody needs to be told that he has switched them off
    monkeypatch.delenv(operators.SWITCH)
    monkeypatch.setattr(onnxruntime, "operators_obstacle", lambda: "they are not here")
    plan = planned(small, tmp_path)
    assert [note.text for note in plan.notes] == [
        "batches of unequal lengths cost more than they must: they are not here; then export again"
    ]
    assert not any(target.spec.attention == "plugin" for target in plan.targets)
    with pytest.raises(MissingDependencyError, match="--attention plugin: they are not here"):
        planned(small, tmp_path, attention="plugin")


def test_an_export_has_the_name_by_which_its_model_was_given(tmp_path, monkeypatch):
    (tmp_path / "real").mkdir()
    (tmp_path / "mine").symlink_to("real")
    assert ExportOptions(model_dir=tmp_path / "mine").directory == Path("mine-export")
    monkeypatch.chdir(tmp_path / "real")
    assert ExportOptions(model_dir=".").directory == Path("real-export")
    assert ExportOptions(model_dir="..", out="x").directory == Path("x")


def test_names_of_files():
    assert (MODEL, PACKED_MODEL, model_name("strings")) == ("model.onnx", "model.packed.onnx", "model.strings.onnx")
    assert PRECOMPUTED_MODEL == "model.precomputed.fp32.onnx"
    assert model_name("packed", "fp16") == "model.packed.fp16.onnx"
    assert model_name(precision="fp8", made_for="trt") == "model.trt.fp8.onnx"
    assert [layout_path(model_name(precision="fp16"), layout) for layout in (PLAIN, HUB)] == [
        "model.fp16.onnx",
        "onnx/model_fp16.onnx",
    ]


def imports_within(path):
    """Modules of `pipeline` that a module imports, at its head, inside functions, and for types."""
    package = ["pipeline", *path.relative_to(PIPELINE).parts[:-1]]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level and node.level <= len(package):
            base = [*package[: len(package) - node.level + 1], *(node.module or "").split(".")]
            base = [part for part in base if part]
            for place in (base, *([*base, alias.name] for alias in node.names)):
                file = PIPELINE.parent.joinpath(*place).with_suffix(".py")
                if place[0] == "pipeline" and file.is_file():
                    yield file


def test_no_module_of_the_pipeline_imports_what_imports_it():
    reached = {path: set(imports_within(path)) for path in PIPELINE.rglob("*.py")}
    assert reached[PIPELINE / "export" / "export.py"] >= {PIPELINE / "export" / "plan.py", PIPELINE / "progress.py"}
    growing = True
    while growing:
        before = sum(map(len, reached.values()))
        reached = {path: found.union(*(reached[each] for each in found)) for path, found in reached.items()}
        growing = sum(map(len, reached.values())) > before
    assert [str(path.relative_to(PIPELINE)) for path, found in reached.items() if path in found] == []
    steps = {"model_files", "quantize", "reference", "verify", "timing", "engines", "manifest", "publish"}
    assert not steps & {path.stem for path in reached[PIPELINE / "export" / "plan.py"]}


def test_files_for_our_own_kernels(tmp_path, small, monkeypatch):
    monkeypatch.setattr(planner, "make", None)  # launches are planned once, when the file is written
    plan = planned(small, tmp_path, precisions="fp32,fp16", cuda=True, skip_parity_check=True)
    assert [file.name for file in plan.files][-2:] == ["model.cuda.fp32.onnx", "model.cuda.fp16.onnx"]
    assert {
        str(target.spec): target.status for target in plan.targets if target.file.name == "model.cuda.fp16.onnx"
    } == {
        "onnxruntime-cpu-adtp.fp16": None,
        "adtp-cuda-fp16": "built-not-run",
        "onnxruntime-cuda-fp16-plugin": "built-not-run",
    }


def test_a_part_without_kernels_is_named(tmp_path, small):
    copy = Path(shutil.copytree(small, tmp_path / "student"))
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"hidden_act": "relu"}))
    plan = planned(copy, tmp_path, cuda=True, skip_parity_check=True)
    assert [file.name for file in plan.files] == ["model.onnx"]
    assert [str(note.text) for note in plan.notes] == [
        "no file for our own CUDA kernels in fp32: encoder on a GPU: got hidden_act 'relu'; accepted: 'gelu'. The portable files hold "
        "the model as it is"
    ]


def test_a_cut_that_no_kernel_runs_is_named(tmp_path, small):
    copy = Path(shutil.copytree(small, tmp_path / "student"))
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"prune_sites": ["1.ffn"]}))
    weights = load_file(copy / "model.safetensors")
    moved = {name.replace("retainers.1_attention", "retainers.1_ffn"): array for name, array in weights.items()}
    save_file(moved, copy / "model.safetensors", {"format": "pt"})
    plan = planned(copy, tmp_path, cuda=True, skip_parity_check=True)
    assert [file.name for file in plan.files] == ["model.onnx"]
    assert [str(note.text) for note in plan.notes] == [
        "no file for our own CUDA kernels in fp32: encoder on a GPU: got a cut at 1.ffn, after the last attention. It decides about no "
        "answer, so no kernel runs it, and nobody could say which tokens it keeps; accepted: cuts up to 1.attention. The portable files "
        "hold the model as it is"
    ]
