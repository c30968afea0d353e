"""The plan of an export: every option is resolved and checked here, before any work."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...artifacts.records import DECOMPOSED, PLUGIN, ShapeRange
from ...contract import FROM_OTHERS, ORT_CPU
from ...data.rows import TextSource
from ...errors import InputError, MissingDependencyError, quoted
from .options import MAX_ACCURACY_DROP, QUANTIZED, ExportOptions, default_out, parse_precisions, parse_static_tokens

if TYPE_CHECKING:
    from ...calibration.recipes import Recipe
    from ...model.checkpoint import Checkpoint
    from ...runtimes.tensorrt import Flavor

MIN_LENGTH = 4
EARLIEST = "0.attention"


@dataclass(frozen=True, kw_only=True)
class EnginePlan:
    """Engines to build. gpus: all that were asked for; groups: by precision, the GPUs of each engine."""

    flavor: Flavor
    gpus: tuple[str, ...]
    groups: dict[str, tuple[tuple[str, ...], ...]]
    attention: str


@dataclass(frozen=True, kw_only=True)
class ExportPlan:
    """One export, resolved. cpu_plugin: run ONNX Runtime with the attention operators, too, where they can run. static_sizes: tokens and
    bounds of each, the largest first. verify_text: None stands for the built-in sentences. points: that a quantized target may lose."""

    model_dir: Path
    out: Path
    precisions: tuple[str, ...]
    batch: ShapeRange
    seq: ShapeRange | None
    engines: EnginePlan | None
    cpu_plugin: bool
    static_sizes: tuple[tuple[int, ...], ...]
    recipes: tuple[Recipe, ...]
    calibration: TextSource | None
    points: float
    verify_text: TextSource | None
    options: ExportOptions

    @property
    def triton_name(self) -> str:
        """What models of a Triton repository are called."""
        name = self.options.triton_name
        return self.model_dir.resolve().name if name is None else name

    @property
    def typed(self) -> tuple[str, ...]:
        """The lower floating precisions."""
        return tuple(p for p in self.precisions if p != "fp32" and p not in QUANTIZED)


def make_export_plan(options: ExportOptions) -> ExportPlan:
    """Resolve and check everything that can be known without the checkpoint.

    Raises:
        InputError: a value that is not accepted, or options that contradict one another.
        MissingDependencyError: the flavour of TensorRT is not installed.
    """
    batch = ShapeRange.parse(options.batch, "--batch")
    seq = ShapeRange.parse(options.seq, "--seq") if options.seq else None
    precisions, formats = parse_precisions(options.precisions), options.formats
    engines = _engines(options, precisions) if options.trt else None
    from .quantize import find_recipes

    if options.with_tokenizer and not options.skip_parity_check:
        from ...runtimes import onnxruntime

        onnxruntime.extensions_library()
    files = [Path(file) for file in options.recipes]
    drop = options.max_accuracy_drop
    column = options.text_column
    calibration = TextSource(Path(options.calibration_data), column) if options.calibration_data else None
    model_dir = Path(options.model_dir)
    return ExportPlan(
        model_dir=model_dir,
        out=default_out(model_dir) if options.out is None else Path(options.out),
        precisions=precisions,
        batch=batch,
        seq=seq,
        engines=engines,
        cpu_plugin=_cpu_plugin(options),
        static_sizes=parse_static_tokens(options.static_tokens),
        recipes=tuple(find_recipes(formats, (ORT_CPU, *(("trt", "rtx") if engines else ())), files)),
        calibration=calibration,
        points=MAX_ACCURACY_DROP if drop is None else drop,
        verify_text=TextSource(Path(options.verify_data), column, options.label_column, options.verify_rows)
        if options.verify_data
        else calibration,  # a loss shows on many texts only
        options=options,
    )


def fit_profile(plan: ExportPlan, checkpoint: Checkpoint) -> dict[str, ShapeRange]:
    """Return the ranges of the axes "batch" and "seq", and check what depends on the checkpoint.

    Raises:
        InputError: the model reads less than was asked for, has several answers for a text, or no plugin kernel.
    """
    from ...runtimes import tensorrt

    windows = getattr(checkpoint.student.config, "windows", {})  # a trained student reads contexts in its own
    profile = {"batch": plan.batch, "seq": _fit(plan.seq, checkpoint.max_tokens, windows.get("max_tokens", 0))}
    if plan.engines:
        tensorrt.check_profile(profile)
        if plan.engines.attention == PLUGIN and (obstacle := plugin_obstacle(checkpoint, plan.engines.gpus)):
            raise InputError(f"--attention plugin: {obstacle}")
    if plan.cpu_plugin and plan.options.attention == PLUGIN and (obstacle := kernel_obstacle(checkpoint)):
        raise InputError(
            f"--attention plugin with --precompute-embedding-projections: {obstacle}; use --attention decomposed"
        )
    if plan.options.precompute_embedding_projections and (obstacle := precompute_obstacle(checkpoint)):
        raise InputError(
            f"--precompute-embedding-projections: the first layer's projections cannot be precomputed{obstacle}; leave it out"
        )
    if plan.options.with_tokenizer:
        from . import strings

        if obstacle := strings.obstacle(checkpoint):
            raise InputError(f"--with-tokenizer: {obstacle}; leave it out")
    _check_columns(plan, checkpoint.student.config)
    check_static_sizes(plan, profile, len(checkpoint.student.site_names))
    return profile


def check_static_sizes(plan: ExportPlan, profile: dict[str, ShapeRange], sites: int) -> None:
    """Raises InputError where bounds are not those of the sites, or the largest size does not hold a text of the largest length."""
    longest, texts = profile["seq"].max, profile["batch"].max
    for tokens, *bounds in plan.static_sizes:
        typed = ":".join(map(str, (tokens, *bounds)))
        if bounds and (len(bounds) != sites or any(a < b for a, b in zip((tokens, *bounds), bounds))):
            raise InputError(
                f"--static-tokens: got {typed}; accepted after the tokens is one bound for each cut of the model ({sites}), none larger "
                "than the number before it"
                if sites
                else f"--static-tokens: got {typed}; the model has no cuts, so type {tokens} alone"
            )
        if tokens <= texts:
            raise InputError(
                f"--static-tokens: got {typed}; a batch has up to {texts} texts, so accepted are more tokens than that"
            )
    if plan.static_sizes and (held := min(plan.static_sizes[0])) < longest:
        shorter = f", or --seq 1:{min(profile['seq'].opt, held)}:{held}" if held >= MIN_LENGTH else ""
        raise InputError(
            f"--static-tokens: the largest one has {':'.join(map(str, plan.static_sizes[0]))}; a text may have {longest} tokens and keep "
            f"all, so give one of at least {longest}{shorter}"
        )


def _check_columns(plan: ExportPlan, config: Any) -> None:
    """Raises InputError where --label-column or --text-column name what a head has no use for."""
    from ...contract import HEAD_SEQUENCE, HEAD_SPANS, HEAD_TOKENS
    from ...data.labelled import ANSWERS, CONTEXT, QUESTION
    from ...inference.answers.sequence import MULTI_LABEL, REGRESSION

    label, column, kind = plan.options.label_column, plan.options.text_column, config.problem_type
    outputs = config.num_labels or 1
    if config.head == HEAD_TOKENS and column is not None and "," in column:
        raise InputError(
            f"--text-column: got {quoted(column)}; the model tags words, so accepted is one column, of lists of words"
        )
    if not label:
        return
    if config.head == HEAD_SEQUENCE and (kind == MULTI_LABEL or (kind == REGRESSION and outputs > 1)):
        raise InputError(
            f"--label-column: takes one class or one number for each text; the model's task is {kind} with {outputs} outputs"
        )
    if config.head == HEAD_SPANS and (label != ANSWERS or column not in (None, f"{QUESTION},{CONTEXT}")):
        raise InputError(
            f"--label-column: the model finds answers, so --verify-data is read as SQuAD's JSON lines with {QUESTION}, {CONTEXT} "
            f"and {ANSWERS}; type --label-column {ANSWERS}, and no --text-column"
        )


def precompute_obstacle(checkpoint: Checkpoint) -> str | None:
    """Say why the first layer's projections cannot be precomputed, as the rest of a sentence; None where they can."""
    student = checkpoint.student
    if EARLIEST in student.site_names:
        return f" after a cut at {EARLIEST!r}"
    obstacle = student.backbone.precompute_obstacle(student.dense.config)
    return f": {obstacle}" if obstacle else None


def kernel_obstacle(checkpoint: Checkpoint) -> str | None:
    """Say why no layer of a model can have an attention kernel of ours; None where one can. The others stay portable."""
    from ...model.padded import layers_read

    student = checkpoint.student
    backbone, read = student.backbone, layers_read(student.pruners)
    left = [i for i in range(backbone.num_layers) if not backbone.attention(i).positional]
    if any(read.get(i) != FROM_OTHERS for i in left):
        return None
    if left:
        return (
            f"in every layer the pruner {student.config.method!r} reads what attention tokens received from others, and there is no "
            "kernel that gives it"
        )
    return (
        f"in every layer of this {backbone.config.model_type} model attention depends on how far apart tokens are, and there is no "
        "kernel for that"
    )


def plugin_obstacle(checkpoint: Checkpoint, gpus: tuple[str, ...]) -> str | None:
    """Say why engines of a model for these GPUs cannot have the attention plugin; None where they can."""
    from ...runtimes import tensorrt

    if obstacle := kernel_obstacle(checkpoint):
        return f"{obstacle}; use --attention decomposed"
    student = checkpoint.student
    attention = student.backbone.attention(0)
    return tensorrt.plugin_obstacle("fp32", attention.dense.in_features // attention.heads, gpus)


def _engines(options: ExportOptions, precisions: tuple[str, ...]) -> EnginePlan:
    from ...runtimes import tensorrt

    flavor = tensorrt.choose_flavor(options.trt_flavor)
    asked = options.gpu if options.gpu is None or isinstance(options.gpu, str) else ",".join(options.gpu)
    gpus = tensorrt.parse_gpus(asked, flavor)
    groups: dict[str, tuple[tuple[str, ...], ...]] = {}
    for precision in precisions:
        chosen = tensorrt.gpus_for(precision, gpus, chosen=asked is not None)
        groups[precision] = tuple((gpu,) for gpu in chosen) if options.per_gpu else (chosen,)
    return EnginePlan(flavor=flavor, gpus=gpus, groups=groups, attention=options.attention or "auto")


def _cpu_plugin(options: ExportOptions) -> bool:
    """Say whether files for ONNX Runtime on CPUs are to run with the attention operators as well, where they can."""
    from ...runtimes import onnxruntime

    if not options.precompute_embedding_projections or options.attention == DECOMPOSED:
        return False
    if options.attention == PLUGIN and (obstacle := onnxruntime.operators_obstacle()):
        raise MissingDependencyError(f"--attention plugin with --precompute-embedding-projections: {obstacle}")
    return True


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
