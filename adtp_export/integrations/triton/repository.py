"""Model repositories of Triton Inference Server, made from an output directory.

Model NAME is for the Python backend: texts in, answers out. Its version folder holds the whole output directory. Files for packed inputs
become models of the ONNX Runtime backend, and packed engines of the TensorRT backend: tokens in, what the graph gives out. Triton joins
requests of any lengths and says where each begins (its "ragged batching").
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ...artifacts.checks import checked_file, checked_model
from ...artifacts.directory import writing
from ...artifacts.manifest import read_manifest
from ...artifacts.records import DECOMPOSED, MANIFEST_NAME, VERIFIED, FileEntry, Manifest, file_entry
from ...contract import (
    BATCH,
    CU_SEQLENS,
    HEAD_EMBEDDING,
    HEAD_SEQUENCE,
    HEAD_SPANS,
    HEAD_SPARSE,
    HEAD_TOKENS,
    HIDDEN,
    INPUT_IDS,
    LABELS,
    OUTPUTS,
    SENTENCE_EMBEDDING,
    SEQUENCE,
    SPARSE_EMBEDDING,
    TOKEN_TYPE_IDS,
    VOCABULARY,
)
from ...errors import InputError, quoted
from ...inference.config import Config
from ...io import read_json, with_weights
from ...runtimes.tensorrt import TENSORRT
from ...targets.specs import PACKED, TargetSpec, profile_of
from .directory import NAME_OPTION, OPTION, WEIGHTS, ModelDirectory, settle, write_record, written_before

VERSION, CONFIG, LABEL_FILE = "1", "config.pbtxt", "labels.txt"
MODEL_FILE, EXPORT = "model.py", "export"
TOKENS, ENGINE = "ids", "trt"
QUEUE_DELAY_US = 500
"""How long a request on a GPU may wait for others. On CPUs they gather while the model runs."""
INSTANCES = 2
"""Processes of a model that takes texts: one tokenizes and answers while another's model runs. They share the cores."""
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")
_VERIFY = "export without --skip-parity-check, on a machine that runs it, and with enough texts by --verify-data"


@dataclass(frozen=True, kw_only=True)
class Tensor:
    """An input or an output of a model in `config.pbtxt`; dims without the batch."""

    name: str
    kind: str
    dims: tuple[int, ...] = (1,)
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        fields = [f'name: "{self.name}"', f"data_type: TYPE_{self.kind}", f"dims: [ {', '.join(map(str, self.dims))} ]"]
        return "{ " + ", ".join([*fields, *self.notes]) + " }"


@dataclass(frozen=True, kw_only=True)
class Model:
    """One folder of a repository.

    further: lines of `config.pbtxt`. files: what its version folder holds, by place there. labels: names of classes, for a file of
    their own.
    """

    name: str
    backend: str
    most: int
    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor]
    further: Sequence[str] = ()
    files: dict[str, Path] = field(default_factory=dict)
    labels: Sequence[str] = ()

    def config(self, family: str) -> str:
        """Return its `config.pbtxt`."""
        return "\n".join([
            f"# adtp-export wrote this for the model {family}. docs/serving.md of adtp-export explains it.",
            f'name: "{self.name}"',
            f'backend: "{self.backend}"',
            f"max_batch_size: {self.most}",
            *(f"input {tensor}" for tensor in self.inputs),
            *(f"output {tensor}" for tensor in self.outputs),
            *self.further,
            "",
        ])  # fmt: skip


def check(repository: Path, name: str, out: Path, replace: bool) -> None:
    """See that models of a name may be written to a repository, and bring back those that a killed run had moved aside.

    Args:
        out: the output directory that they are made from.
        replace: models that an earlier export wrote under that name.

    Raises:
        InputError: a name that Triton or its clients cannot take, a file in place of a folder, a folder that is not writable, a
            repository in `out` or the other way round, or models that are there.
    """
    if not _NAME.fullmatch(name):
        raise InputError(
            f"{NAME_OPTION}: got {quoted(name)}; accepted are up to 100 letters, digits and any of _ - . after the first: Triton's "
            f"addresses hold it. Type {NAME_OPTION} NAME"
        )
    there = next(place for place in (repository, *repository.parents) if os.path.lexists(place))
    if not there.is_dir():
        raise InputError(f"{OPTION}: {there} is a file; give a model repository, or a new folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise InputError(f"{OPTION}: {there} is not writable; give another place")
    place, written = (Path(os.path.realpath(path)) for path in (repository, out))
    if written in place.parents or place in (written, *written.parents):  # Triton would take `out` for a model
        raise InputError(f"{OPTION}: {repository} and {out} would lie in one another; give another place")
    with writing(place):
        settle(place)
    for model in (name, f"{name}-{TOKENS}", *written_before(place, name)):
        ModelDirectory(place, model, name, replace)


def write(
    out: Path, repository: Path, name: str, replace: bool = False, note: Callable[[str], None] = lambda _: None
) -> list[str]:
    """Write an output directory's models to a repository, beside what it holds; return their names.

    Weights are hard links where the file system has them. Nothing of an output directory is ever changed in place.

    Args:
        note: is told what is left out, and what was never verified.

    Raises:
        InputError: as `check` says; `out` is no output directory, or is damaged; or the file system refuses. Each model is then the
            earlier one or the new one.
    """
    check(repository, name, out, replace)
    manifest = read_manifest(out)
    for file in manifest.files:
        checked_file(out, manifest, file)
    models = list(_models(out, manifest, name, note))
    listed = {out / file: entry for file, entry in manifest.files.items()}
    repository = Path(os.path.realpath(repository))
    with contextlib.ExitStack() as stack, writing(repository):
        made = [stack.enter_context(ModelDirectory(repository, model.name, name, replace)) for model in models]
        for model, directory in zip(models, made, strict=True):
            _fill(directory.work, model, name, listed)
        repository.mkdir(exist_ok=True)
        for directory in made:
            directory.publish()
        for gone in written_before(repository, name) - {model.name for model in models}:
            directory = stack.enter_context(ModelDirectory(repository, gone, name, replace))
            directory.path.rename(directory.work / gone)  # which is removed at the end, or by the next run
    return [model.name for model in models]


def _models(out: Path, manifest: Manifest, name: str, note: Callable[[str], None]) -> Iterator[Model]:
    read = read_json(out / "config.json")
    config, hidden = Config.of(read), int(read["hidden_size"])
    yield _of_texts(out, manifest, config, name)
    if not any(target.status == VERIFIED for target in manifest.targets.values()):
        note(f"the model {name} answers with a target that is not verified; {_VERIFY}")
    for key, target in manifest.targets.items():
        spec = _packed(key)
        if spec is None:
            continue
        on_engine = spec.runtime == TENSORRT.short
        parts = [ENGINE, *spec.gpus, spec.attention] if on_engine else [TOKENS]
        precision = [] if spec.precision == "fp32" else [spec.precision]
        called = "-".join([name, *parts, *precision])
        if target.status != VERIFIED:
            note(f"the model {called} is left out, as {key} is {target.status}; {_VERIFY}")
            continue
        file = checked_model(out, manifest, target.file, check_hashes=False)  # `write` has compared them
        most = (profile_of(target) if on_engine else manifest.profile)["batch"]
        yield _of_tokens(file, config, hidden, called, on_engine, most.max)


def _packed(name: str) -> TargetSpec | None:
    """Return the target of a name whose file takes packed inputs, in TensorRT or in ONNX Runtime without operators of ours; else None."""
    try:
        spec = TargetSpec.parse(name)
    except InputError:  # of a later version
        return None
    taken = spec.runtime == TENSORRT.short or (spec.runtime == "onnxruntime" and spec.attention == DECOMPOSED)
    return spec if spec.form == PACKED and taken else None


def _of_texts(out: Path, manifest: Manifest, config: Config, name: str) -> Model:
    """Describe the model of the Python backend, which has the whole directory."""
    head = config.adtp.head
    pair = {HEAD_SEQUENCE: ("text_pair",), HEAD_SPANS: ("context",)}.get(head, ())
    first = "question" if head == HEAD_SPANS else "text"
    optional = ("optional: true",) if head == HEAD_SEQUENCE else ()
    truncated = Tensor(name="truncated", kind="BOOL")
    score = Tensor(name="score", kind="FP32")
    labels = Tensor(
        name="scores", kind="FP32", dims=(len(config.id2label),), notes=(f'label_filename: "{LABEL_FILE}"',)
    )
    outputs = {
        HEAD_SEQUENCE: (Tensor(name="label", kind="STRING"), score, labels, truncated),
        HEAD_TOKENS: (Tensor(name="entities", kind="STRING"), truncated),
        HEAD_SPANS: (
            Tensor(name="answer", kind="STRING"),
            score,
            Tensor(name="start", kind="INT32"),
            Tensor(name="end", kind="INT32"),
            Tensor(name="no_answer", kind="FP32"),
            truncated,
        ),
        HEAD_SPARSE: (Tensor(name=SPARSE_EMBEDDING, kind="STRING"),),
        HEAD_EMBEDDING: (Tensor(name=SENTENCE_EMBEDDING, kind="FP32", dims=(config.dimension,)),),
    }
    parameters = {"target": "", "threads": "", "prefer": "precision"}
    listed = [MANIFEST_NAME, *manifest.files]
    return Model(
        name=name,
        backend="python",
        most=manifest.profile["batch"].max,
        inputs=[
            Tensor(name=first, kind="STRING"),
            *(Tensor(name=second, kind="STRING", notes=optional) for second in pair),
        ],
        outputs=outputs[head],
        further=(
            "dynamic_batching { }",
            f"instance_group {{ count: {INSTANCES}, kind: KIND_CPU }}",
            *(f'parameters {{ key: "{key}", value {{ string_value: "{text}" }} }}' for key, text in parameters.items()),
        ),
        files={
            MODEL_FILE: Path(__file__).with_name("model.py"),
            **{f"{EXPORT}/{file}": out / file for file in listed},
        },
        labels=config.labels if head == HEAD_SEQUENCE else (),
    )


def _of_tokens(file: Path, config: Config, hidden: int, name: str, on_engine: bool, most: int) -> Model:
    """Describe a model of the ONNX Runtime or the TensorRT backend, for one file that takes packed inputs."""
    ragged = ("allow_ragged_batch: true",)
    names = [INPUT_IDS, *([TOKEN_TYPE_IDS] if config.type_vocab_size > 1 else [])]
    sizes = {SEQUENCE: -1, LABELS: len(config.id2label), HIDDEN: hidden, VOCABULARY: config.vocab_size}
    outputs, scattered = [], []
    for output, axes in OUTPUTS[config.adtp.head].items():
        vector = output == SENTENCE_EMBEDDING
        dims = (config.adtp.dimension,) if vector else tuple(sizes[axis] for axis in axes if axis != BATCH)
        outputs.append(Tensor(name=output, kind="FP32", dims=dims))
        if SEQUENCE in axes:
            scattered.append(
                f'batch_output {{ kind: BATCH_SCATTER_WITH_INPUT_SHAPE, target_name: "{output}", source_input: "{INPUT_IDS}" }}'
            )
    return Model(
        name=name,
        backend="tensorrt" if on_engine else "onnxruntime",
        most=most,
        inputs=[Tensor(name=each, kind="INT64", dims=(-1,), notes=ragged) for each in names],
        outputs=outputs,
        further=[
            f'default_model_filename: "{file.name}"',
            f'batch_input {{ kind: BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO, target_name: "{CU_SEQLENS}", data_type: TYPE_INT32, '
            f'source_input: "{INPUT_IDS}" }}',
            *scattered,
            f"dynamic_batching {{ max_queue_delay_microseconds: {QUEUE_DELAY_US} }}",
        ],
        files={path.name: path for path in with_weights(file)},
    )


def _fill(folder: Path, model: Model, family: str, listed: Mapping[Path, FileEntry]) -> None:
    """Write a model, and the record of its files.

    Args:
        listed: what is known of files of the output directory, so that no weights are read.
    """
    files: dict[str, FileEntry] = {}
    for place, source in model.files.items():
        path = folder / VERSION / place
        path.parent.mkdir(parents=True, exist_ok=True)
        if source.suffix in WEIGHTS:
            _link(source, path)
            files[f"{VERSION}/{place}"] = listed.get(source) or file_entry(path)
        else:  # people edit the others, and the output directory's must not change with them
            shutil.copyfile(source, path)
    (folder / CONFIG).write_text(model.config(family), encoding="utf-8")
    if model.labels:
        lines = [" ".join(label.split()) for label in model.labels]
        (folder / LABEL_FILE).write_text("\n".join([*lines, ""]), encoding="utf-8")
    write_record(folder, model.name, family, files)


def _link(source: Path, path: Path) -> None:
    try:
        os.link(source.resolve(), path)
    except OSError:  # another file system, or one without links
        shutil.copyfile(source, path)
