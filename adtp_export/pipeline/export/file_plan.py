"""The ONNX files of an export, the targets that each makes, and the engines that are built of them: all chosen before any is written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ...artifacts.records import BUILT_NOT_RUN, DECOMPOSED, ORT_PACKED, PLUGIN, UNVERIFIED, ShapeRange
from ...calibration.recipes import Recipe
from ...contract import LINEAR, ORT_CPU, ORT_CUDA, OWN_CUDA, PRECOMPUTED_MODEL, layout_path, model_name
from ...model.encoder import PrunedEncoder
from ...model.fixed import StaticSize, static_size
from ...runtimes.tensorrt import RTX, TENSORRT, Flavor
from ...targets.specs import ADTP, CPU, CUDA, ENCODER_PRECISIONS, INLINE, PACKED, PRECOMPUTED, TargetSpec, static_form
from .capabilities import Capabilities
from .request import Request

STRINGS = "strings"
"""The form of the file that takes texts. It makes no target."""
ONNXRUNTIME, OPENVINO = "onnxruntime", "openvino"


@dataclass(frozen=True, kw_only=True)
class ModelFile:
    """One ONNX file of an export.

    name: its place in OUT. runtime: the only one that it is for; None: it is for all. form, attention: as of a `TargetSpec`. source: the
    file that it is made of; None: it is traced. size: that it is traced in. wider: of a file of fixed size, the one for texts that do not
    fit. recipe: that it is quantized by. points: of accuracy that it may lose; None where no loss is judged.
    """

    name: str
    precision: str = "fp32"
    runtime: str | None = None
    form: str = ""
    attention: str = DECOMPOSED
    source: ModelFile | None = None
    size: StaticSize | None = None
    wider: ModelFile | None = None
    recipe: Recipe | None = None
    points: float | None = None

    def target(self, runtime: str = ONNXRUNTIME, attention: str | None = None) -> TargetSpec:
        """The target that it is opened as by ONNX Runtime or OpenVINO. What is made for other runtimes runs there node by node."""
        attention = attention or self.attention
        proof = self.runtime if self.runtime in (TENSORRT.short, RTX.short, ADTP) else None
        return TargetSpec(
            runtime=runtime,
            device=CUDA if attention == ORT_PACKED else CPU,
            precision=self.precision,
            form=proof or self.form,
            attention=attention,
        )


@dataclass(frozen=True, kw_only=True)
class TargetPlan:
    """A file, opened as a target. status: of one that cannot be judged on this machine; why: that is so, where users can help it."""

    file: ModelFile
    spec: TargetSpec
    status: str | None = None
    why: str = ""


@dataclass(frozen=True, kw_only=True)
class EnginePlan:
    """An engine to build of a file. specs: by attention, in the order in which they are built until one is verified. runs_here: on this
    machine."""

    file: ModelFile
    flavor: Flavor
    specs: tuple[TargetSpec, ...]
    runs_here: bool


def plan_files(
    request: Request, student: PrunedEncoder, can: Capabilities, profile: Mapping[str, ShapeRange], layout: str
) -> tuple[list[ModelFile], list[str]]:
    """Return the files in the order in which they are written and judged, each after those that it is made of; and what is left out."""
    options, notes = request.options, []
    portable = ModelFile(name=layout_path(model_name(), layout))
    files, sources = [portable], [portable]
    if options.with_tokenizer:
        files.append(ModelFile(name=layout_path(model_name(STRINGS), layout), form=STRINGS, source=portable))
    if options.precompute_embedding_projections:
        name = layout_path(PRECOMPUTED_MODEL, layout)
        files.append(ModelFile(name=name, runtime=ONNXRUNTIME, form=PRECOMPUTED, source=portable))
    if options.packed_inputs or options.triton is not None:
        sources.append(ModelFile(name=layout_path(model_name(PACKED), layout), form=PACKED))
    sources += _of_sizes(request, student, profile, layout)
    files += sources[1:]
    for precision in request.typed:
        files += _typed(sources, precision, layout)
    if "bf16" in request.typed:
        name = layout_path(model_name(LINEAR, "bf16"), layout)
        files.append(ModelFile(name=name, precision="bf16", runtime=ONNXRUNTIME, form=LINEAR, source=portable))
    if options.inline:
        free = [file for file in files if not (file.form or file.runtime)]
        files += [
            replace(f, name=layout_path(model_name(INLINE, f.precision), layout), form=INLINE, source=f) for f in free
        ]
    if request.recipes and request.static_sizes:
        notes.append("files of fixed sizes are not quantized: --static-tokens makes those in fp32, fp16 and bf16")
    files += [_quantized(portable, recipe, request.points, layout) for recipe in request.recipes]
    more, told = _for_cuda(files, request, can, layout)
    return files + more, notes + told


def _for_cuda(
    files: Sequence[ModelFile], request: Request, can: Capabilities, layout: str
) -> tuple[list[ModelFile], list[str]]:
    """Files for ONNX Runtime's CUDA provider, and for our own CUDA kernels, as far as they are asked for."""
    found: list[ModelFile] = []
    notes: list[str] = []
    if request.options.ort_cuda:
        able, lacks = can.packed_attention()
        if able:
            found, told = _of_packed_attention(files, request.precisions, layout)
            notes += [*told, *filter(None, [lacks])]
        else:
            notes.append(f"no file for ONNX Runtime's CUDA provider: {lacks}")
    if request.options.cuda:
        more, told = _of_own_kernels(files, request.precisions, can, layout)
        found, notes = found + more, notes + told
    return found, notes


def _of_sizes(
    request: Request, student: PrunedEncoder, profile: Mapping[str, ShapeRange], layout: str
) -> list[ModelFile]:
    """Files of fixed sizes, the largest first."""
    found: list[ModelFile] = []
    for tokens, *bounds in request.static_sizes:
        size = static_size(student, tokens, profile["batch"].max, bounds)
        name, wider = layout_path(model_name(static_form(size)), layout), found[0] if found else None
        found.append(ModelFile(name=name, form=static_form(size), size=size, wider=wider))
    return found


def _typed(sources: Sequence[ModelFile], precision: str, layout: str) -> list[ModelFile]:
    """The same files in another precision."""
    found: list[ModelFile] = []
    for source in sources:
        name = layout_path(model_name(source.form, precision), layout)
        wider = next((file for file in found if source.wider and file.form == source.wider.form), None)
        found.append(replace(source, name=name, precision=precision, source=source, wider=wider))
    return found


def _quantized(portable: ModelFile, recipe: Recipe, points: float, layout: str) -> ModelFile:
    return ModelFile(
        name=layout_path(model_name(precision=recipe.format, made_for=recipe.target), layout),
        precision=recipe.format,
        runtime=ONNXRUNTIME if recipe.target in (ORT_CPU, LINEAR) else recipe.target,
        form=LINEAR if recipe.target == LINEAR else "",
        source=portable,
        recipe=recipe,
        points=points,
    )


def _of_packed_attention(
    files: Sequence[ModelFile], precisions: Sequence[str], layout: str
) -> tuple[list[ModelFile], list[str]]:
    """Files for ONNX Runtime's CUDA provider. It has no bf16 for this."""
    portable = {file.precision: file for file in files if not (file.form or file.runtime)}
    found, notes = [], []
    for precision in precisions:
        if precision not in ("fp32", "fp16"):
            notes.append(
                f"no file for ONNX Runtime's CUDA provider in {precision}: its packed attention takes fp32 and fp16"
            )
            continue
        name = layout_path(model_name(precision=precision, made_for=ORT_CUDA), layout)
        source = portable[precision]
        found.append(replace(source, name=name, runtime=ONNXRUNTIME, attention=ORT_PACKED, source=source))
    return found, notes


def _of_own_kernels(
    files: Sequence[ModelFile], precisions: Sequence[str], can: Capabilities, layout: str
) -> tuple[list[ModelFile], list[str]]:
    """Files for our own CUDA kernels, where there are kernels for all of the model."""
    portable = {file.precision: file for file in files if not (file.form or file.runtime)}
    found, notes = [], []
    for precision in precisions:
        if precision not in ENCODER_PRECISIONS:
            notes.append(f"no file for our own CUDA kernels in {precision}: they take {', '.join(ENCODER_PRECISIONS)}")
        elif lacks := can.encoder(precision):
            notes.append(
                f"no file for our own CUDA kernels in {precision}: {lacks}. The portable files hold the model as it is"
            )
        else:
            name = layout_path(model_name(precision=precision, made_for=OWN_CUDA), layout)
            source = portable[precision]
            found.append(replace(source, name=name, runtime=ADTP, source=source))
    return found, notes


def plan_targets(files: Sequence[ModelFile], request: Request, can: Capabilities) -> list[TargetPlan]:
    """Return the targets of files in ONNX Runtime and OpenVINO.

    Those are ONNX Runtime on the CPU, on request with the attention operators as well; OpenVINO on request, where it is the only one
    installed, and where ONNX Runtime's CPU provider has no arithmetic for a file (bf16); ONNX Runtime's CUDA provider; and our own runner.
    Files whose products are operators always run with these as well, where a library is here.
    """
    on_cpu = [file for file in files if file.form != STRINGS and file.attention != ORT_PACKED]
    found: list[TargetPlan] = []
    for file in on_cpu:
        able = [spec for name in _runtimes(file) if can.run(spec := file.target(name))]
        judged = able if request.options.openvino else able[:1]
        found += [TargetPlan(file=file, spec=spec) for spec in judged] or [_unverified(file)]
    if request.operators:
        chosen = [f for f in on_cpu if f.runtime in (None, ONNXRUNTIME) and f.form in ("", PRECOMPUTED, PACKED)]
        plugin = [TargetPlan(file=file, spec=file.target(attention=PLUGIN)) for file in chosen]
        found += [target for target in plugin if can.run(target.spec)]
    linear = [TargetPlan(file=f, spec=f.target(attention=PLUGIN)) for f in on_cpu if f.form == LINEAR]
    found += [target for target in linear if can.run(target.spec)]
    for file in files:
        if file.attention == ORT_PACKED:
            status = None if can.run(file.target()) else BUILT_NOT_RUN
            found.append(TargetPlan(file=file, spec=file.target(), status=status))
        if file.runtime == ADTP:
            for runtime in (ADTP, ONNXRUNTIME):
                spec = TargetSpec(runtime=runtime, device=CUDA, precision=file.precision, attention=PLUGIN)
                found.append(TargetPlan(file=file, spec=spec, status=None if can.run(spec) else BUILT_NOT_RUN))
    return found


def _runtimes(file: ModelFile) -> tuple[str, ...]:
    """Return the runtimes on the CPU that a file is judged in; what is made for engines is run in ONNX Runtime, node by node."""
    return (ONNXRUNTIME, OPENVINO) if file.runtime in (None, ADTP) else (ONNXRUNTIME,)


def _unverified(file: ModelFile) -> TargetPlan:
    """Say why a file cannot be judged on this machine."""
    for_all = file.runtime in (None, ADTP)
    spec = file.target(OPENVINO if file.precision == "bf16" and for_all else ONNXRUNTIME)
    if not for_all:
        why = f"that takes ONNX Runtime; {_install('cpu')}"
    elif file.precision == "bf16":
        why = f"ONNX Runtime's CPU provider has no bf16; {_install('openvino')}"
    else:
        why = f"no runtime is installed; {_install('cpu')}"
    return TargetPlan(file=file, spec=spec, status=UNVERIFIED, why=why)


def _install(extra: str) -> str:
    return f"type: pip install 'adtp-export[{extra}]'"


def plan_engines(files: Sequence[ModelFile], request: Request, can: Capabilities) -> tuple[list[EnginePlan], list[str]]:
    """Return the engines of each precision, for each group of GPUs, with the attention that was asked for; and what is left out."""
    found: list[EnginePlan] = []
    notes: list[str] = []
    if request.engines is None:
        return found, notes
    flavor, attention = request.engines.flavor, request.options.attention or "auto"
    for precision, groups in request.engines.groups.items():
        chosen = [gpu for group in groups for gpu in group]
        if left := [gpu for gpu in request.engines.gpus if gpu not in chosen]:
            notes.append(f"no {precision} engine for {', '.join(left)}: e4m3 products need sm_89 or newer")
        own = [file for file in files if file.precision == precision and _is_built(file, flavor)]
        for gpus in groups:
            obstacle = can.engine_kernels(gpus, precision)
            if obstacle and attention == "auto":
                notes.append(f"no engine with the attention plugin for {', '.join(gpus)}: {obstacle}")
            wanted = (PLUGIN, DECOMPOSED) if attention == "auto" else (attention,)
            left_out = {PLUGIN} if obstacle else set()
            for file in own:
                specs = tuple(_engine(file, flavor, gpus, each) for each in wanted if each not in left_out)
                found.append(EnginePlan(file=file, flavor=flavor, specs=specs, runs_here=can.run(specs[0])))
    return found, notes


def _is_built(file: ModelFile, flavor: Flavor) -> bool:
    """Say whether a file becomes an engine. Packed ones do for servers, which load no engines of RTX."""
    if file.attention == ORT_PACKED or file.runtime not in (None, flavor.short):
        return False
    return not file.form or file.size is not None or (file.form == PACKED and flavor is TENSORRT)


def _engine(file: ModelFile, flavor: Flavor, gpus: tuple[str, ...], attention: str) -> TargetSpec:
    return TargetSpec(
        runtime=flavor.short,
        device=CUDA,
        precision=file.precision,
        gpus=gpus,
        attention=attention,
        form=file.form,
    )
