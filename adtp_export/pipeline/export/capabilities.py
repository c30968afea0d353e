"""What this model can have on these GPUs and this machine: asked while an export is planned, before anything is written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ...contract import FROM_OTHERS, HEAD_HYBRID, HEAD_MASKED, HEAD_SPANS, HEAD_VECTORS
from ...errors import InputError
from ...graph import strings
from ...graph.program import INLINE_LIMIT_BYTES
from ...model.backbones.base import AttentionParts
from ...model.checkpoint import Checkpoint
from ...model.padded import layers_read
from ...plugins.encoder import planner
from ...plugins.encoder.checks import checked
from ...plugins.encoder.launches import Sizes
from ...plugins.encoder.planner import Planned
from ...plugins.variants import DTYPES
from ...runtimes import onnxruntime, tensorrt
from ...runtimes.described import describe
from ...targets.specs import RUNTIMES, TargetSpec

EARLIEST = "0.attention"
MOST_TOKENS = 65_536
"""Of a call of our own CUDA kernels, padding included: larger ones run in parts."""


def _has_kernel(attention: AttentionParts) -> bool:
    """Whether we have a GPU kernel for such attention. There is none for scores by distance, nor for windows alike on both sides."""
    return attention.grouped or not attention.positional


def fp32_bytes(network: torch.nn.Module) -> int:
    """Return how much the weights of a network take in fp32; a file may have some of them in another form, or not at all."""
    return 4 * sum(weight.numel() for weight in network.parameters())


@dataclass(frozen=True)
class Capabilities:
    """Each member says why a model cannot have something here, as the rest of a sentence, or None where it can."""

    checkpoint: Checkpoint

    @property
    def precomputed(self) -> str | None:
        """Tables in place of the first layer's projections."""
        student = self.checkpoint.student
        if EARLIEST in student.site_names:
            return f" after a cut at {EARLIEST!r}"
        obstacle = student.backbone.precompute_obstacle(student.dense.config)
        return f": {obstacle}" if obstacle else None

    @property
    def fp16(self) -> str | None:
        """Everything in fp16."""
        backbone = self.checkpoint.student.backbone
        return backbone.fp16_obstacle(backbone.config)

    @property
    def kernels(self) -> str | None:
        """Attention kernels of ours for GPUs, in any layer. The others stay decomposed."""
        student = self.checkpoint.student
        backbone, read = student.backbone, layers_read(student.pruners)
        left = [i for i in range(backbone.num_layers) if _has_kernel(student.attention(i))]
        if any(read.get(i) != FROM_OTHERS for i in left):
            return None
        if left:
            return (
                f"in every layer the pruner {student.config.method!r} reads what attention tokens received from others, and there is no "
                "kernel that gives it"
            )
        return (
            f"in every layer of this {backbone.config.model_type} model attention depends on how far apart tokens are, and no GPU kernel "
            "computes its form"
        )

    def engine_kernels(self, gpus: Sequence[str], precision: str = "fp32") -> str | None:
        """The attention plugin in engines for these GPUs. In INT8 and FP8 attention is as in fp32."""
        if self.kernels:
            return f"{self.kernels}; use --attention decomposed"
        student = self.checkpoint.student
        parts = filter(_has_kernel, map(student.attention, range(student.backbone.num_layers)))
        precision = precision if precision in DTYPES else "fp32"
        sizes = sorted({(each.dense.in_features // each.heads, each.grouped) for each in parts})
        found = (tensorrt.plugin_obstacle(precision, size, gpus, grouped=grouped) for size, grouped in sizes)
        return next(filter(None, found), None)

    @property
    def engines(self) -> str | None:
        """Engines of TensorRT and TensorRT-RTX. The builder of RTX 1.7 ends the process, or fails, on what this refuses."""
        student = self.checkpoint.student
        if student.expansion is None or not layers_read(student.pruners):
            return None
        return (
            f"the pruner {student.config.method!r} reads received attention, queries are filled up with tokens that are not attended to, "
            "and TensorRT builds no engine of a graph with both"
        )

    @property
    def operators(self) -> str | None:
        """The attention operators of ONNX Runtime, on this machine's CPU."""
        return onnxruntime.operators_obstacle()

    def packed_attention(self) -> tuple[bool, str]:
        """Say whether any layer can have the packed attention of ONNX Runtime's CUDA provider, and of which others that is not true."""
        student = self.checkpoint.student
        layers = range(student.backbone.num_layers)
        attention = [student.attention(i) for i in layers]
        positional = {i for i in layers if attention[i].positional or attention[i].grouped}
        left = len(positional | layers_read(student.pruners).keys())
        if not left:
            return True, ""
        lacks = "knows no distances between tokens" if positional else "cannot say what tokens received"
        if student.expansion is not None:
            lacks = "attends to all tokens that query"
        return left < len(layers), (
            f"ONNX Runtime's packed attention {lacks}, and {left} of {len(layers)} layers need that. They keep the decomposed form in "
            "files for its CUDA provider"
        )

    def encoder(self, precision: str) -> str | None:
        """Our own CUDA kernels for everything from ids to answers."""
        try:
            encoder = describe(self.checkpoint.student)
            launched = checked(encoder, precision).cuts
        except InputError as error:
            return str(error)
        for site in encoder.cuts.keys() - launched.keys():
            return (
                f"encoder on a GPU: got a cut at {site}, after the last attention. It decides about no answer, so no kernel runs it, and "
                f"nobody could say which tokens it keeps; accepted: cuts up to {len(encoder.layers) - 1}.attention"
            )
        return None

    def planned(self, precision: str, max_tokens: int = 0) -> Planned:
        """Plan the launches of a whole encoder, for calls of so many tokens; one text of the largest length always fits.

        Raises:
            InputError: there is no kernel for a part of the model, which the message names.
        """
        student = self.checkpoint.student
        sizes = Sizes(max_tokens=max(min(max_tokens, MOST_TOKENS), student.max_tokens))
        return planner.make(describe(student), precision, sizes)

    @property
    def packed_inputs(self) -> str | None:
        """A file whose inputs are packed, or of fixed sizes, which are packed as well."""
        if self.checkpoint.student.config.head == HEAD_MASKED:
            return "the model answers for masked tokens alone, and how many a text has is no fixed size"
        if self.checkpoint.student.expansion is None:
            return None
        return "the model fills queries up with tokens that are not attended to, and packed inputs have no place to say which these are"

    @property
    def triton(self) -> str | None:
        """Models of a Triton repository."""
        head = self.checkpoint.student.config.head
        if head == HEAD_MASKED:
            return (
                "the model fills in masked tokens, and the repository's models take no number of tokens to answer with"
            )
        if head not in (HEAD_VECTORS, HEAD_HYBRID):
            return None
        return "the model gives several vectors of each text, and the repository's models answer with one record each"

    @property
    def tokenizer(self) -> str | None:
        """A file that takes texts."""
        if self.checkpoint.student.config.head == HEAD_SPANS:
            return "the model answers questions about a context, and the file takes single texts"
        if self.checkpoint.student.config.head == HEAD_MASKED:
            return "the model fills in masked tokens, and the file's tokenizer takes those for words"
        if self.checkpoint.sides is not None:
            return "the model tells queries from documents, and the file takes texts as they are"
        if self.checkpoint.template is not None:
            return "the model reads texts in a chat template, and the file takes them as they are"
        if (why := strings.obstacle(self.checkpoint.tokenizer)) is not None:
            return f"the tokenizer cannot be expressed in ONNX: {why}"
        if (size := fp32_bytes(self.checkpoint.student)) > INLINE_LIMIT_BYTES:
            most = f"{INLINE_LIMIT_BYTES / 1e9:.2f} GB"
            return f"the model's weights take {size / 1e9:.2f} GB in fp32, and a file with its tokenizer holds at most {most}"
        return None

    def run(self, spec: TargetSpec) -> bool:
        """Say whether a target can be tried on this machine."""
        return RUNTIMES[spec.runtime].runs_here(spec)
