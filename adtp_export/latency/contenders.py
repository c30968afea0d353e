"""What a student is timed against: dense BERT of the same width, padded and packed, at its depth and at 12 layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import InputError, did_you_mean
from ..model.flops import Shape

if TYPE_CHECKING:
    from ..model.student import AdtpBertForSequenceClassification

SHAPES = {
    "minilm": Shape(384, 1536, 12, 12),
    "bert-mini": Shape(256, 1024, 4, 4),
    "bert-small": Shape(512, 2048, 8, 4),
    "bert-base": Shape(768, 3072, 12, 12),
    "bert-large": Shape(1024, 4096, 16, 24),
}
"""Widths by name; `--layers` changes the depth."""

FULL_DEPTH = 12


@dataclass(frozen=True)
class Contender:
    """One model file to time. padded: it computes on padding. layers: its depth. sites: where it prunes."""

    name: str
    path: Path
    layers: int
    padded: bool
    sites: tuple[str, ...] = ()


def named_shape(name: str, layers: int | None) -> Shape:
    """Raises InputError where the name or the depth is not accepted."""
    if name not in SHAPES:
        raise InputError(f"--shape: got {name!r}; accepted are {', '.join(SHAPES)}{did_you_mean(name, SHAPES)}")
    if layers is not None and layers < 1:
        raise InputError(f"--layers: got {layers}; accepted is at least 1")
    shape = SHAPES[name]
    return shape if layers is None else Shape(shape.hidden, shape.intermediate, shape.heads, layers)


def forced_student(
    shape: Shape, sites: Sequence[str], retention: float, folder: Path
) -> tuple[Contender, Path, AdtpBertForSequenceClassification]:
    """Export a student with random weights that keeps the share `retention` at its first site, all at later ones.

    The candidate ratios are ``[retention, 1.0]`` and the ratio predictor is a bias, so the graph keeps its
    data-dependent K. Returns the contender, its debug form, and the student.

    Raises:
        InputError: a site or ratio that a checkpoint could not have.
    """
    import torch

    from ..export import program

    ratios = [1.0] if retention == 1 else [retention, 1.0]
    student = _random_student(shape, sites, ratios)
    for i, retainer in enumerate(student.bert.encoder.retainers.values()):
        retainer.ratio_predictor.weight.data.zero_()
        retainer.ratio_predictor.bias.data = torch.zeros(len(ratios))
        retainer.ratio_predictor.bias.data[0 if i == 0 else -1] = 1.0
    model = program.export_portable(student, {"version": "bench"})
    path, debug = folder / "student.onnx", folder / "student.debug.onnx"
    program.save(model, path)
    program.add_debug_outputs(model)
    program.save(model, debug)
    return Contender("student", path, shape.layers, False, tuple(sites)), debug, student


def dense_baselines(
    shape: Shape, folder: Path, progress: Callable[[int, int], None], tables: Mapping[str, int] | None = None
) -> list[Contender]:
    """Export dense BERT with random weights: packed and padded, at the student's depth and at 12 layers.

    Args:
        tables: ``vocab_size``, ``max_position_embeddings`` and ``type_vocab_size`` of the student; default: BERT's.
    """
    from ..export import program

    depths = sorted({shape.layers, FULL_DEPTH})
    contenders: list[Contender] = []
    for depth in depths:
        sized = Shape(shape.hidden, shape.intermediate, shape.heads, depth)
        packed, padded = folder / f"packed-{depth}.onnx", folder / f"padded-{depth}.onnx"
        program.save(program.export_portable(_random_student(sized, (), [1.0], tables), {"version": "bench"}), packed)
        progress(len(contenders) + 1, 2 * len(depths))
        _export_padded(sized, padded, tables)
        contenders.append(Contender(f"packed-dense-{depth}", packed, depth, False))
        contenders.append(Contender(f"padded-dense-{depth}", padded, depth, True))
        progress(len(contenders), 2 * len(depths))
    return contenders


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
    return AdtpBertForSequenceClassification(config).eval()


def _export_padded(shape: Shape, path: Path, tables: Mapping[str, int] | None) -> None:
    """Export transformers' own BERT as users do; it times within a few percent of optimum's export."""
    import torch
    from transformers import BertConfig, BertForSequenceClassification

    from ..export.program import OPSET, input_names, quiet_exporter

    config = BertConfig(**_bert_fields(shape, tables), attn_implementation="eager")

    class Padded(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.model = BertForSequenceClassification(config)

        def forward(
            self, input_ids: torch.Tensor, mask: torch.Tensor, types: torch.Tensor | None = None
        ) -> torch.Tensor:
            return self.model(input_ids=input_ids, attention_mask=mask, token_type_ids=types).logits

    names = input_names(config.type_vocab_size)
    example = tuple(torch.ones(3, 7, dtype=torch.int64) for _ in names)
    dims = {0: torch.export.Dim("batch"), 1: torch.export.Dim("sequence", max=config.max_position_embeddings)}
    with torch.no_grad(), quiet_exporter():
        exported = torch.onnx.export(
            Padded().eval(),
            example,
            dynamo=True,
            verbose=False,
            opset_version=OPSET,
            input_names=names,
            output_names=["logits"],
            dynamic_shapes=(dims,) * len(names),
        )
    assert exported is not None
    exported.save(path)
