"""What a student is timed against: dense BERT of the same width, padded and packed, at its depth and at 12 layers.

All weights here are random: a latency depends on sizes and on how many tokens stay, not on weights.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ..contract import HEAD_SEQUENCE, HEAD_TOKENS, PRECOMPUTED_MODEL
from ..errors import InputError, did_you_mean, quoted
from ..model.flops import Shape
from .processes import STUDENT, Contender

if TYPE_CHECKING:
    import torch
    from onnx_ir.passes import InPlacePass
    from transformers import BertConfig, BertForSequenceClassification

    from ..model.encoder import PrunedEncoder
    from .layer_cloning import Layered

    ModelT = TypeVar("ModelT", bound=torch.nn.Module)

SHAPES = {
    "minilm": Shape(hidden=384, intermediate=1536, heads=12, layers=12),
    "bert-mini": Shape(hidden=256, intermediate=1024, heads=4, layers=4),
    "bert-small": Shape(hidden=512, intermediate=2048, heads=8, layers=4),
    "bert-base": Shape(hidden=768, intermediate=3072, heads=12, layers=12),
    "bert-large": Shape(hidden=1024, intermediate=4096, heads=16, layers=24),
}
"""Widths by name; `--layers` changes the depth."""

FULL_DEPTH = 12
BERT_TABLES = {"vocab_size": 30522, "max_position_embeddings": 512, "type_vocab_size": 2}
SALIENCY_HIDDEN_SIZE = 96


@dataclass(frozen=True)
class Architecture:
    """What dense BERT shares with the student: the size of its layers, and of its tables (fields of `config.json`).

    unlike: what dense BERT does not share, in words. every_token: the head reads all tokens, so that the last layer works for all of
    them, and not for the first of each text alone.
    """

    shape: Shape
    tables: Mapping[str, int] = field(default_factory=lambda: BERT_TABLES)
    unlike: tuple[str, ...] = ()
    every_token: bool = False

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Architecture:
        """Read it from fields under BERT's names (`Shape.of`)."""
        shape = Shape.of(fields)
        differences = {
            "it has all heads and whole feed-forwards, which structured pruning took from this model": shape.sizes,
            "all its tokens see each other, and some layers of this model have a window": any(shape.windows),
            "its feed-forwards have no gates": shape.gated,
            "its attention has no bias by distance": "relative_attention_num_buckets" in fields,
            "its attention has no products with distances": shape.distances > 0,
            "its embeddings are as wide as its layers, and this model projects narrower ones": fields.get(
                "embedding_size", shape.hidden
            )
            != shape.hidden,
        }
        unlike = tuple(text for text, there in differences.items() if there)
        return cls(shape, {table: fields[table] for table in BERT_TABLES}, unlike)

    def deep(self, layers: int) -> Architecture:
        """The same with another number of layers, all of them BERT's."""
        return replace(self, shape=self.shape.whole(layers))

    @property
    def fields(self) -> dict[str, Any]:
        """Fields of a BERT's configuration."""
        return {
            **self.tables,
            "hidden_size": self.shape.hidden,
            "intermediate_size": self.shape.intermediate,
            "num_attention_heads": self.shape.heads,
            "num_hidden_layers": self.shape.layers,
        }

    @property
    def bert_config(self) -> BertConfig:
        """A configuration of transformers' BERT."""
        from transformers import BertConfig

        # CTranslate2's converter reads a field that transformers 5 no longer has.
        return BertConfig(**{**self.fields, "position_embedding_type": "absolute", "attn_implementation": "eager"})

    @property
    def input_names(self) -> tuple[str, ...]:
        """Names of the inputs of its graphs, in order."""
        from ..model.registry import input_names

        return input_names(self.bert_config)


def named_shape(name: str, layers: int | None) -> Shape:
    """Raises InputError where the name or the depth is not accepted."""
    if name not in SHAPES:
        raise InputError(f"--shape: got {quoted(name)}; accepted are {', '.join(SHAPES)}{did_you_mean(name, SHAPES)}")
    if layers is not None and layers < 1:
        raise InputError(f"--layers: got {layers}; accepted is at least 1")
    shape = SHAPES[name]
    return shape if layers is None else replace(shape, layers=layers)


def scheduled_student(
    architecture: Architecture, sites: Sequence[str], retention: float, folder: Path
) -> tuple[Contender, PrunedEncoder]:
    """Export a student with random weights that keeps the share `retention` at its first site, all at later ones.

    Raises:
        InputError: a site or a ratio that cannot be.
    """
    ratios = [retention, *[1.0] * (len(sites) - 1)]
    return _exported(STUDENT, architecture, schedule(sites, ratios), folder / "student.onnx")


def adjustable_student(
    architecture: Architecture, sites: Sequence[str], path: Path, name: str = STUDENT, min_tokens: int = 1
) -> tuple[Contender, PrunedEncoder]:
    """Export a student with random weights that takes the share it keeps at each site as an input, as `sweep.settings` gives it.

    Raises:
        InputError: a site that cannot be.
    """
    from ..graph.passes import MEASURED
    from ..model.selection import PERMILLE

    # Exporters merge equal constants, so each ratio is another.
    ratios = [(PERMILLE // 2 + i) / PERMILLE for i in range(len(sites))]
    return _exported(name, architecture, schedule(sites, ratios, min_tokens), path, MEASURED)


def _exported(
    name: str, architecture: Architecture, pruning: Mapping[str, Any], path: Path, passes: tuple[InPlacePass, ...] = ()
) -> tuple[Contender, PrunedEncoder]:
    """Write a student with random weights to `path`."""
    from ..graph import program
    from ..graph.passes import run_passes

    student = random_encoder(architecture, pruning)
    model = program.export_portable(student, {"version": "bench"})
    run_passes(model, passes)
    program.save(model, path)
    made = Contender(
        name=name,
        path=path,
        layers=architecture.shape.layers,
        padded=False,
        sites=tuple(pruning["sites"]),
        cls_only_last_layer=not architecture.every_token,
    )
    return made, student


def schedule(sites: Sequence[str], ratios: Sequence[float], min_tokens: int = 1) -> dict[str, Any]:
    """Return the ``pruning`` of a configuration that keeps these shares, one per site, by a saliency predictor's scores."""
    return {
        "method": "schedule",
        "sites": list(sites),
        "ratios": list(ratios),
        "saliency_hidden_size": SALIENCY_HIDDEN_SIZE,
        "min_tokens": min_tokens,
    }


def with_precomputed_projections(student: Contender, folder: Path) -> Contender:
    """Make the student's file for ONNX Runtime on CPUs, which has tables in place of the first projections.

    Raises:
        InputError: they do not read the embeddings.
    """
    from onnx_ir.passes import PreconditionError

    from ..graph import program

    path = folder / PRECOMPUTED_MODEL
    try:
        program.precompute_projections(student.path, path)
    except PreconditionError as error:
        raise InputError(f"--precompute-embedding-projections: {error}; leave it out") from error
    return replace(student, name=f"{student.name}-precomputed", path=path, precomputed_first_layer=True)


def dense_baselines(
    architecture: Architecture,
    folder: Path,
    progress: Callable[[int, int], None] = lambda done, total: None,
    depths: Sequence[int] = (),
    plain: bool = False,
) -> list[Contender]:
    """Export dense BERT with random weights: packed and padded, at the student's depth and at 12 layers.

    Args:
        architecture: the student's.
        depths: other depths than those.
        plain: the student has no sites, so it is packed dense BERT itself: that form is left out at its depth.
    """
    from ..graph import program

    depths = depths or sorted({architecture.shape.layers, FULL_DEPTH})
    packed, padded = packed_dense(architecture), padded_dense(architecture)
    contenders: list[Contender] = []
    for done, depth in enumerate(depths):
        if not (plain and depth == architecture.shape.layers):
            path = folder / f"packed-{depth}.onnx"
            program.save(program.finish(packed.graph(depth), {"version": "bench"}), path)
            contenders.append(
                Contender(
                    name=f"packed-dense-{depth}",
                    path=path,
                    layers=depth,
                    padded=False,
                    cls_only_last_layer=not architecture.every_token,
                )
            )
        progress(2 * done + 1, 2 * len(depths))
        path = folder / f"padded-{depth}.onnx"
        graph = padded.graph(depth)
        graph.optimize()
        graph.save(path)
        contenders.append(Contender(name=f"padded-dense-{depth}", path=path, layers=depth, padded=True))
        progress(2 * done + 2, 2 * len(depths))
    return contenders


def packed_dense(architecture: Architecture) -> Layered:
    """Dense BERT as this project exports it."""
    from ..graph import program
    from ..model.packed import PackedStudent
    from .layer_cloning import Layered

    return Layered(
        trace=lambda depth: program.trace(random_encoder(architecture.deep(depth))),
        weights=lambda depth: PackedStudent(random_encoder(architecture.deep(depth))).state_dict(),
        layers="layers.",
    )


def padded_dense(architecture: Architecture) -> Layered:
    """transformers' own BERT as users export it, by PyTorch's exporter of today."""
    from transformers import BertForSequenceClassification

    from .layer_cloning import Layered

    return Layered(
        trace=lambda depth: trace_padded(architecture.deep(depth)),
        weights=lambda depth: as_users_call(architecture.deep(depth)).state_dict(),
        layers=f"model.{BertForSequenceClassification.base_model_prefix}.encoder.layer.",
    )


def random_encoder(architecture: Architecture, pruning: Mapping[str, Any] | None = None) -> PrunedEncoder:
    """Return a BERT with random weights that drops tokens as `pruning` says, in eval mode; None: it drops none.

    It classifies texts, or tags tokens where the head reads all of them.

    Raises:
        InputError: a site or a value that the method does not accept.
    """
    import torch

    from ..model import PrunedEncoderConfig
    from ..model.heads import head_class

    torch.manual_seed(0)
    head = HEAD_TOKENS if architecture.every_token else HEAD_SEQUENCE
    config = PrunedEncoderConfig(backbone={"model_type": "bert", **architecture.fields}, pruning=pruning, head=head)
    student: PrunedEncoder = _with_biases(head_class(head)(config)).eval()
    return student


def dense_bert(architecture: Architecture) -> BertForSequenceClassification:
    """Return transformers' own BERT with random weights, in eval mode."""
    import torch
    from transformers import BertForSequenceClassification
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()  # saving and loading it is nothing to report
    transformers_logging.disable_progress_bar()
    torch.manual_seed(0)
    return _with_biases(BertForSequenceClassification(architecture.bert_config)).eval()


def _with_biases(model: ModelT) -> ModelT:
    """Draw the biases, which are born as zeros: exporters leave those out, and the graph would not be a trained one's."""
    import torch

    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            drawn = torch.Generator().manual_seed(zlib.crc32(name.encode()))  # whatever else the model has
            torch.nn.init.normal_(parameter, std=0.02, generator=drawn)
    return model


TORCHSCRIPT_OPSET = 17
"""That of optimum's BERT today; ONNX Runtime's fusions look for its patterns."""


def as_users_call(architecture: Architecture) -> torch.nn.Module:
    """Return `dense_bert` as a module that takes the inputs of its graph, in order, and gives logits."""
    import torch

    class Padded(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = dense_bert(architecture)

        def forward(
            self, input_ids: torch.Tensor, mask: torch.Tensor, types: torch.Tensor | None = None
        ) -> torch.Tensor:
            return self.model(input_ids=input_ids, attention_mask=mask, token_type_ids=types).logits

    return Padded()


def trace_padded(architecture: Architecture) -> torch.onnx.ONNXProgram:
    """Trace transformers' own BERT with PyTorch's exporter of today, and optimise nothing yet."""
    import torch

    from ..graph.program import OPSET, quiet_exporter

    names, longest = architecture.input_names, architecture.tables["max_position_embeddings"]
    dims = {0: torch.export.Dim("batch"), 1: torch.export.Dim("sequence", max=longest)}
    with torch.no_grad(), quiet_exporter():
        traced = torch.onnx.export(
            as_users_call(architecture),
            _example(architecture),
            dynamo=True,
            verbose=False,
            optimize=False,
            opset_version=OPSET,
            input_names=list(names),
            output_names=["logits"],
            dynamic_shapes=(dims,) * len(names),
        )
    assert traced is not None
    return traced


def export_torchscript(architecture: Architecture, path: Path, opset: int = TORCHSCRIPT_OPSET) -> None:
    """Export transformers' own BERT with PyTorch's older exporter, which optimum uses."""
    import torch

    from ..graph.program import quiet_exporter

    names = architecture.input_names
    with torch.no_grad(), quiet_exporter():
        torch.onnx.export(
            as_users_call(architecture),
            _example(architecture),
            path,
            dynamo=False,
            opset_version=opset,
            input_names=list(names),
            output_names=["logits"],
            dynamic_axes={name: {0: "batch", 1: "sequence"} for name in names},
        )


def _example(architecture: Architecture) -> tuple[torch.Tensor, ...]:
    import torch

    return tuple(torch.ones(3, 7, dtype=torch.int64) for _ in architecture.input_names)
