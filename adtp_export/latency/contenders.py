"""What a student is timed against: dense BERT of the same width, padded and packed, at its depth and at 12 layers."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ..errors import InputError, MissingDependencyError, did_you_mean
from ..model.flops import Shape
from .processes import Contender

if TYPE_CHECKING:
    import torch
    from transformers import BertForSequenceClassification

    from ..model.student import AdtpBertForSequenceClassification

    ModelT = TypeVar("ModelT", bound=torch.nn.Module)

SHAPES = {
    "minilm": Shape(384, 1536, 12, 12),
    "bert-mini": Shape(256, 1024, 4, 4),
    "bert-small": Shape(512, 2048, 8, 4),
    "bert-base": Shape(768, 3072, 12, 12),
    "bert-large": Shape(1024, 4096, 16, 24),
}
"""Widths by name; `--layers` changes the depth."""

FULL_DEPTH = 12
TABLES = ("vocab_size", "max_position_embeddings", "type_vocab_size")
"""Fields of a student's configuration that size its embeddings; dense BERT gets the same."""


def named_shape(name: str, layers: int | None) -> Shape:
    """Raises InputError where the name or the depth is not accepted."""
    if name not in SHAPES:
        raise InputError(f"--shape: got {name!r}; accepted are {', '.join(SHAPES)}{did_you_mean(name, SHAPES)}")
    if layers is not None and layers < 1:
        raise InputError(f"--layers: got {layers}; accepted is at least 1")
    shape = SHAPES[name]
    return shape if layers is None else replace(shape, layers=layers)


def forced_student(
    shape: Shape, sites: Sequence[str], retention: float, folder: Path, ratios: Sequence[float] = ()
) -> tuple[Contender, Path, AdtpBertForSequenceClassification]:
    """Export a student with random weights that keeps the share `retention` at its first site, all at later ones.

    The candidate ratios are `retention`, `ratios` and 1.0, and the ratio predictor is a bias, so the graph keeps its
    data-dependent K. Returns the contender, its debug form, and the student.

    Raises:
        InputError: a site or ratio that a checkpoint could not have.
    """
    import torch

    from ..export import program

    ratios = sorted({retention, *ratios, 1.0})
    student = _random_student(shape, sites, ratios)
    for i, retainer in enumerate(student.bert.encoder.retainers.values()):
        retainer.ratio_predictor.weight.data.zero_()
        retainer.ratio_predictor.bias.data = torch.zeros(len(ratios))
        retainer.ratio_predictor.bias.data[ratios.index(retention) if i == 0 else -1] = 1.0
    model = program.export_portable(student, {"version": "bench"})
    path, debug = folder / "student.onnx", folder / "student.debug.onnx"
    program.save(model, path)
    program.add_debug_outputs(model)
    program.save(model, debug)
    return Contender("student", path, shape.layers, False, tuple(sites), narrow=True), debug, student


def lowered_to_ort_cpu(student: Contender, folder: Path) -> Contender:
    """Make the student's file for ONNX Runtime on CPUs, which has tables in place of the first projections."""
    from ..export import program

    path = folder / "model.ort-cpu.fp32.onnx"
    program.lower_to_ort_cpu(student.path, path)
    return replace(student, name=f"{student.name}-lookup", path=path, looked_up=True)


def dense_baselines(
    shape: Shape,
    folder: Path,
    progress: Callable[[int, int], None],
    tables: Mapping[str, int] | None = None,
    depths: Sequence[int] = (),
) -> list[Contender]:
    """Export dense BERT with random weights: packed and padded, at the student's depth and at 12 layers.

    Args:
        tables: `TABLES` of the student; default: BERT's.
        depths: other depths than those.
    """
    from ..export import program

    depths = depths or sorted({shape.layers, FULL_DEPTH})
    contenders: list[Contender] = []
    for depth in depths:
        sized = replace(shape, layers=depth)
        packed, padded = folder / f"packed-{depth}.onnx", folder / f"padded-{depth}.onnx"
        program.save(program.export_portable(_random_student(sized, (), [1.0], tables), {"version": "bench"}), packed)
        progress(len(contenders) + 1, 2 * len(depths))
        _export_padded(sized, padded, tables)
        contenders.append(Contender(f"packed-dense-{depth}", packed, depth, False, narrow=True))
        contenders.append(Contender(f"padded-dense-{depth}", padded, depth, True))
        progress(len(contenders), 2 * len(depths))
    return contenders


PEERS = ("optimum", "openvino", "ctranslate2", "torch", "sorted", "ltp")
"""Dense BERT of 12 layers as others run it. optimum: exported and fused as optimum does, in ONNX Runtime; sorted: ONNX
Runtime, each batch split by length into parts of `SORTED_ROWS`. ltp: token pruning by LTP, of the student's depth and
retention, in PyTorch."""

SORTED_ROWS = 8
TORCHSCRIPT_OPSET = 17
"""That of optimum's BERT today; ONNX Runtime's fusions look for its patterns."""


def choose_peers(text: str, forced: bool) -> list[str]:
    """Return the peers of a comma list, or of ``all`` those that can run here.

    Args:
        forced: the student's retention is; LTP's thresholds would have to be learned otherwise.

    Raises:
        InputError: a name that is none of `PEERS`, or LTP without `forced`.
        MissingDependencyError: the runtime of a peer is not installed.
    """
    from ..engines import ctranslate2, openvino

    missing = {
        name for name, room in {"openvino": openvino, "ctranslate2": ctranslate2}.items() if not room.installed()
    }
    if text == "all":
        return [name for name in PEERS if name not in missing and (forced or name != "ltp")]
    for name in (names := text.split(",")):
        if name not in PEERS:
            raise InputError(f"--peers: got {name!r}; accepted are all, {', '.join(PEERS)}{did_you_mean(name, PEERS)}")
        if name in missing:
            raise MissingDependencyError(
                f"--peers {name}: {name} is not installed; type: pip install 'adtp-export[openvino,peers]'"
            )
        if name == "ltp" and not forced:
            raise InputError("--peers ltp goes with --shape: its thresholds would have to be learned")
    return names


def peers(
    names: Sequence[str],
    student: Contender,
    shape: Shape,
    folder: Path,
    tables: Mapping[str, int] | None = None,
    retention: float | None = None,
) -> list[Contender]:
    """Make the named peers, and the student in OpenVINO where that is one.

    Args:
        shape: the student's; peers have its width and 12 layers.
        folder: has what `dense_baselines` wrote.
        retention: of the student, where it is forced; LTP is given the same.
    """
    from ..engines import onnxruntime, openvino

    full = replace(shape, layers=FULL_DEPTH)
    padded, plain, fused, weights = (
        folder / f"{name}-{FULL_DEPTH}{suffix}"
        for name, suffix in (("padded", ".onnx"), ("optimum", ".onnx"), ("fused", ".onnx"), ("dense", ""))
    )
    made: list[Contender] = []

    def add(name: str, path: Path, engine: str, precision: str = "fp32", padded: bool = True, rows: int = 0) -> None:
        made.append(
            Contender(
                f"{name}-dense-{FULL_DEPTH}", path, FULL_DEPTH, padded, (), False, engine, precision, sorted_by=rows
            )
        )

    if "optimum" in names:
        _export_padded(full, plain, tables, torchscript=True)
        onnxruntime.fuse_transformer(plain, fused, full.heads, full.hidden)
        add("optimum", plain, "onnxruntime")
        add("optimum-fused", fused, "onnxruntime")
    if "openvino" in names:
        made.append(replace(student, name="student-openvino", engine="openvino"))
        add("openvino", padded, "openvino")
        if openvino.has_bf16():
            add("openvino-bf16", padded, "openvino", "bf16")
    if "ctranslate2" in names or "torch" in names:
        dense_bert(full, tables).save_pretrained(weights)
    if "ctranslate2" in names:
        add("ctranslate2", weights, "ctranslate2", padded=False)
        add("ctranslate2-int8", weights, "ctranslate2", "int8", padded=False)
    if "torch" in names:
        for engine in ("torch-eager", "torch-sdpa", "torch-compile"):
            add(engine, weights, engine)
    if "sorted" in names:
        add("sorted", padded, "onnxruntime", rows=SORTED_ROWS)
    if "ltp" in names:
        assert retention is not None
        backbone = folder / f"ltp-{shape.layers}"
        dense_bert(shape, tables).save_pretrained(backbone)
        made.append(Contender(backbone.name, backbone, shape.layers, False, engine="ltp", retention=retention))
    return made


def _bert_fields(shape: Shape, tables: Mapping[str, int] | None = None) -> dict[str, Any]:
    return {
        **(tables or {}),
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_attention_heads": shape.heads,
        "num_hidden_layers": shape.layers,
    }


def _random_student(
    shape: Shape, sites: Sequence[str], ratios: Sequence[float], tables: Mapping[str, int] | None = None
) -> AdtpBertForSequenceClassification:
    import torch

    from ..model.config import AdtpBertConfig
    from ..model.student import AdtpBertForSequenceClassification

    torch.manual_seed(0)
    config = AdtpBertConfig(prune_sites=list(sites), retention_ratios=list(ratios), **_bert_fields(shape, tables))
    return _with_biases(AdtpBertForSequenceClassification(config)).eval()


def _with_biases(model: ModelT) -> ModelT:
    """Draw the biases, which are born as zeros: exporters leave those out, and the graph would not be a trained one's."""
    import torch

    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            drawn = torch.Generator().manual_seed(zlib.crc32(name.encode()))  # whatever else the model has
            torch.nn.init.normal_(parameter, std=0.02, generator=drawn)
    return model


def dense_bert(shape: Shape, tables: Mapping[str, int] | None = None) -> BertForSequenceClassification:
    """Return transformers' own BERT with random weights, in eval mode."""
    import torch
    from transformers import BertConfig, BertForSequenceClassification
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()  # saving and loading it is nothing to report
    transformers_logging.disable_progress_bar()
    torch.manual_seed(0)
    # CTranslate2's converter reads a field that transformers 5 no longer has.
    config = BertConfig(**_bert_fields(shape, tables), position_embedding_type="absolute", attn_implementation="eager")
    return _with_biases(BertForSequenceClassification(config)).eval()


def _export_padded(shape: Shape, path: Path, tables: Mapping[str, int] | None, torchscript: bool = False) -> None:
    """Export transformers' own BERT as users do: by PyTorch's exporter of today, or the older one, which optimum uses."""
    import torch

    from ..export.program import OPSET, input_names, quiet_exporter

    model = dense_bert(shape, tables)
    names = input_names(model.config.type_vocab_size)

    class Padded(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(
            self, input_ids: torch.Tensor, mask: torch.Tensor, types: torch.Tensor | None = None
        ) -> torch.Tensor:
            return self.model(input_ids=input_ids, attention_mask=mask, token_type_ids=types).logits

    example = tuple(torch.ones(3, 7, dtype=torch.int64) for _ in names)
    common: dict[str, Any] = {"input_names": list(names), "output_names": ["logits"]}
    with torch.no_grad(), quiet_exporter():
        if torchscript:
            axes = {name: {0: "batch", 1: "sequence"} for name in names}
            torch.onnx.export(
                Padded(), example, path, dynamo=False, opset_version=TORCHSCRIPT_OPSET, dynamic_axes=axes, **common
            )
            return
        dims = {0: torch.export.Dim("batch"), 1: torch.export.Dim("sequence", max=model.config.max_position_embeddings)}
        exported = torch.onnx.export(
            Padded(),
            example,
            dynamo=True,
            verbose=False,
            opset_version=OPSET,
            dynamic_shapes=(dims,) * len(names),
            **common,
        )
    assert exported is not None
    exported.save(path)
