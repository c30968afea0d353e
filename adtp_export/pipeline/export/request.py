"""What an export is asked for, as values, and whether a checkpoint can have it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...artifacts.records import DECOMPOSED, PLUGIN, ShapeRange
from ...contract import HEAD_MASKED, HEAD_SEQUENCE, HEAD_SPANS, HEAD_TOKENS, HEAD_VECTORS, LINEAR, ORT_CPU
from ...errors import InputError, MissingDependencyError, quoted
from .options import MAX_ACCURACY_DROP, QUANTIZED, ExportOptions, parse_precisions, parse_static_tokens

if TYPE_CHECKING:
    from ...calibration.recipes import Recipe
    from ...data.rows import TextSource
    from ...model.checkpoint import Checkpoint
    from ...runtimes.tensorrt import Flavor
    from .capabilities import Capabilities

MIN_LENGTH = 4


@dataclass(frozen=True, kw_only=True)
class EngineRequest:
    """Engines to build. gpus: all that were asked for; groups: by precision, the GPUs of each engine."""

    flavor: Flavor
    gpus: tuple[str, ...]
    groups: Mapping[str, tuple[tuple[str, ...], ...]]


@dataclass(frozen=True, kw_only=True)
class Request:
    """Options of an export, as values. precisions: from the highest down. static_sizes: tokens and bounds of each, the largest first.
    verify_text: None stands for the built-in sentences. points: that a quantized target may lose."""

    options: ExportOptions
    precisions: tuple[str, ...]
    batch: ShapeRange
    seq: ShapeRange | None
    engines: EngineRequest | None
    static_sizes: tuple[tuple[int, ...], ...]
    recipes: tuple[Recipe, ...]
    calibration: TextSource | None
    verify_text: TextSource | None
    points: float

    @property
    def operators(self) -> bool:
        """Whether files for ONNX Runtime on CPUs are to run with the attention operators as well, where they can."""
        return self.options.attention != DECOMPOSED

    @property
    def operators_needed(self) -> bool:
        """Whether they must."""
        options = self.options
        return options.attention == PLUGIN and (options.precompute_embedding_projections or not options.trt)

    @property
    def typed(self) -> tuple[str, ...]:
        """The lower floating precisions."""
        return tuple(p for p in self.precisions if p != "fp32" and p not in QUANTIZED)

    @property
    def bounds_lengths(self) -> bool:
        """Whether a file takes texts of some lengths only."""
        return self.seq is not None or self.engines is not None or bool(self.static_sizes)


def read_request(options: ExportOptions) -> Request:
    """Read and check everything that can be known without the checkpoint.

    Raises:
        InputError: a value that is not accepted, or options that contradict one another.
        MissingDependencyError: the flavour of TensorRT is not installed, or there is nothing to verify in.
    """
    batch = ShapeRange.parse(options.batch, "--batch")
    seq = ShapeRange.parse(options.seq, "--seq") if options.seq is not None else None
    precisions = parse_precisions(options.precisions)
    engines = _engines(options, precisions) if options.trt else None
    from ...calibration.recipes import find_recipes
    from ...data.rows import TextSource
    from ...runtimes import onnxruntime, openvino

    if options.with_tokenizer and not options.skip_parity_check:
        onnxruntime.extensions_library()
    if not options.skip_parity_check and not onnxruntime.installed() and not openvino.installed():
        raise MissingDependencyError(
            "verification needs a runtime, and none is installed; type: pip install 'adtp-export[cpu]', or add --skip-parity-check"
        )
    if options.openvino and not options.skip_parity_check and not openvino.installed():
        raise MissingDependencyError(
            "--openvino: it is not installed; type: pip install 'adtp-export[openvino]', or leave --openvino out"
        )
    column, drop = options.text_column, options.max_accuracy_drop
    calibration = TextSource(Path(options.calibration_data), column) if options.calibration_data else None
    targets = (ORT_CPU if calibration else LINEAR, *(("trt", "rtx") if engines else ()))
    return Request(
        options=options,
        precisions=precisions,
        batch=batch,
        seq=seq,
        engines=engines,
        static_sizes=parse_static_tokens(options.static_tokens),
        recipes=tuple(find_recipes(options.formats, targets, [Path(file) for file in options.recipes])),
        calibration=calibration,
        verify_text=TextSource(Path(options.verify_data), column, options.label_column, options.verify_rows)
        if options.verify_data
        else calibration,  # a loss shows on many texts only
        points=MAX_ACCURACY_DROP if drop is None else drop,
    )


def _engines(options: ExportOptions, precisions: tuple[str, ...]) -> EngineRequest:
    from ...runtimes import tensorrt

    flavor = tensorrt.choose_flavor(options.trt_flavor)
    asked = options.gpu if options.gpu is None or isinstance(options.gpu, str) else ",".join(options.gpu)
    gpus = tensorrt.parse_gpus(asked, flavor)
    groups: dict[str, tuple[tuple[str, ...], ...]] = {}
    for precision in precisions:
        chosen = tensorrt.gpus_for(precision, gpus, chosen=asked is not None)
        groups[precision] = tuple((gpu,) for gpu in chosen) if options.per_gpu else (chosen,)
    return EngineRequest(flavor=flavor, gpus=gpus, groups=groups)


def _kernel_obstacle(engines: EngineRequest, can: Capabilities) -> str | None:
    """Say why the plugin has no kernel for one of the engines; None where it has all."""
    asked = ((precision, gpu) for precision, groups in engines.groups.items() for group in groups for gpu in group)
    return next(filter(None, (can.engine_kernels([gpu], precision) for precision, gpu in asked)), None)


def fit_profile(request: Request, checkpoint: Checkpoint, can: Capabilities) -> dict[str, ShapeRange]:
    """Return the ranges of the axes "batch" and "seq", and refuse what this model cannot have.

    Raises:
        InputError: the model reads less than was asked for, has several answers for a text, or no plugin kernel.
        MissingDependencyError: the attention operators that were asked for cannot run here.
    """
    from ...runtimes import tensorrt

    options, engines = request.options, request.engines
    windows = getattr(checkpoint.student.config, "windows", {})  # a trained student reads contexts in its own
    profile = {"batch": request.batch, "seq": _fit(request.seq, checkpoint.max_tokens, windows.get("max_tokens", 0))}
    if engines:
        tensorrt.check_profile(profile)
        if obstacle := can.engines:
            raise InputError(f"--trt: {obstacle}; leave it out")
        if options.attention == PLUGIN and (obstacle := _kernel_obstacle(engines, can)):
            raise InputError(f"--attention plugin: {obstacle}")
    if request.operators_needed and (obstacle := can.operators):
        raise MissingDependencyError(f"--attention plugin: {obstacle}")
    if obstacle := can.fp16:
        _check_fp16(request, obstacle)
    if options.precompute_embedding_projections and (obstacle := can.precomputed):
        raise InputError(
            f"--precompute-embedding-projections: the first layer's projections cannot be precomputed{obstacle}; leave it out"
        )
    if options.with_tokenizer and (obstacle := can.tokenizer):
        raise InputError(f"--with-tokenizer: {obstacle}; leave it out")
    asked = {"--packed-inputs": options.packed_inputs, "--static-tokens": bool(request.static_sizes)}
    if (obstacle := can.packed_inputs) and (names := [name for name, wanted in asked.items() if wanted]):
        raise InputError(f"{names[0]}: {obstacle}; leave it out")
    if options.triton is not None and (obstacle := can.triton):
        raise InputError(f"--triton: {obstacle}; leave it out")
    _check_columns(options, checkpoint.student.config)
    check_static_sizes(request.static_sizes, profile, len(checkpoint.student.site_names))
    return profile


def _check_fp16(request: Request, obstacle: str) -> None:
    """Raises InputError where a model is asked for in fp16, or quantized with all else in fp16, and does not work in it."""
    if "fp16" in request.precisions:
        raise InputError(f"--precision fp16: {obstacle}; bf16 has fp32's range, type: --precision bf16")
    if names := [recipe.name for recipe in request.recipes if recipe.base == "fp16"]:
        raise InputError(
            f"--precision: the recipes {' and '.join(names)} compute in fp16 what they leave, and {obstacle}; type --recipe FILE for each, "
            'with base = "fp32", or leave --trt out'
        )


def _fit(seq: ShapeRange | None, longest: int, window: int) -> ShapeRange:
    if seq is not None and seq.max < MIN_LENGTH:
        raise InputError(
            f"--seq: got a MAX of {seq.max}; accepted is at least {MIN_LENGTH}: [CLS], [SEP] twice, and a token"
        )
    if seq is None:
        return ShapeRange(1, min(128, longest), min(max(512, window), longest))
    if seq.max > longest:
        raise InputError(
            f"--seq: got a MAX of {seq.max}; the model reads at most {longest} tokens, "
            f"type --seq {min(seq.min, longest)}:{min(seq.opt, longest)}:{longest}"
        )
    return seq


def check_static_sizes(
    static_sizes: tuple[tuple[int, ...], ...], profile: Mapping[str, ShapeRange], sites: int
) -> None:
    """Raises InputError where bounds are not those of the sites, or the largest size does not hold a text of the largest length."""
    longest, texts = profile["seq"].max, profile["batch"].max
    for tokens, *bounds in static_sizes:
        typed = ":".join(map(str, (tokens, *bounds)))
        if bounds and (len(bounds) != sites or any(a < b for a, b in zip((tokens, *bounds), bounds))):
            raise InputError(
                f"--static-tokens: got {typed}; accepted after the tokens is one bound for each cut of the model ({sites}), none "
                "larger than the number before it"
                if sites
                else f"--static-tokens: got {typed}; the model has no cuts, so type {tokens} alone"
            )
        if tokens <= texts:
            raise InputError(
                f"--static-tokens: got {typed}; a batch has up to {texts} texts, so accepted are more tokens than that"
            )
    if static_sizes and (held := min(static_sizes[0])) < longest:
        shorter = f", or --seq 1:{min(profile['seq'].opt, held)}:{held}" if held >= MIN_LENGTH else ""
        raise InputError(
            f"--static-tokens: the largest one has {':'.join(map(str, static_sizes[0]))}; a text may have {longest} tokens and keep all, "
            f"so give one of at least {longest}{shorter}"
        )


def _check_columns(options: ExportOptions, config: Any) -> None:
    """Raises InputError where --label-column or --text-column name what a head has no use for."""
    from ...data.labelled import ANSWERS, CONTEXT, QUESTION
    from ...inference.answers.sequence import MULTI_LABEL, REGRESSION

    label, column, kind = options.label_column, options.text_column, config.problem_type
    outputs = config.num_labels or 1
    if config.head == HEAD_TOKENS and column is not None and "," in column:
        raise InputError(
            f"--text-column: got {quoted(column)}; the model tags words, so accepted is one column, of lists of words"
        )
    if not label:
        return
    if config.head in (HEAD_VECTORS, HEAD_MASKED):
        answer = "a vector for each token" if config.head == HEAD_VECTORS else "tokens for masked ones"
        raise InputError(
            f"--label-column: the model gives {answer}, and no label says which of those are right; leave it out"
        )
    if config.head == HEAD_SEQUENCE and (kind == MULTI_LABEL or (kind == REGRESSION and outputs > 1)):
        raise InputError(
            f"--label-column: takes one class or one number for each text; the model's task is {kind} with {outputs} outputs"
        )
    if config.head == HEAD_SPANS and (label != ANSWERS or column not in (None, f"{QUESTION},{CONTEXT}")):
        raise InputError(
            f"--label-column: the model finds answers, so --verify-data is read as SQuAD's JSON lines with {QUESTION}, {CONTEXT} "
            f"and {ANSWERS}; type --label-column {ANSWERS}, and no --text-column"
        )
