"""Verdicts: each file opened in its runtimes and compared with the oracle, and the file that takes texts with its tokenizer."""

from __future__ import annotations

import dataclasses
import functools
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import onnx

from ...artifacts.records import INCONCLUSIVE, UNVERIFIED, VERIFIED, Note, Target
from ...contract import INPUT_IDS, KEPT_SITE, TEXT
from ...data.rows import TextSource, read
from ...data.tokenize import encode, pad
from ...errors import VerificationError, quoted
from ...graph import strings
from ...graph.debug import debug_form
from ...io import writing_scratch
from ...runtimes import Engine
from ...runtimes.onnxruntime import OnnxRuntimeEngine
from ...runtimes.packed import Judged, StaticEngines
from ...targets.sizes import together
from ...targets.specs import CPU, RUNTIMES, TargetSpec
from ...verify import samples
from ...verify.flips import excused
from ...verify.loss import Loss, lost
from ...verify.oracle import OracleRun
from ...verify.parity import judged, rows_wanted
from .context import ExportContext, StepResult, WrittenFile
from .file_plan import STRINGS, TargetPlan

STRINGS_ROWS = 256
"""Of verification texts that the file that takes texts is compared on."""
_LARGEST = 8
"""Texts of a batch, where they are not alone."""


def verify_targets(run: ExportContext, targets: Iterable[TargetPlan], written: Mapping[str, WrittenFile]) -> StepResult:
    """Judge each target that runs here, and say of the others why they are not.

    Raises:
        VerificationError: one does not equal the oracle, or loses more accuracy than it may.
    """
    targets, found = list(targets), StepResult()
    # Embeddings are compared once a file, under the name of its first target.
    for target in {target.file.name: target for target in reversed(targets) if target.status is None}.values():
        _check_embeddings(run, target.spec, written[target.file.name])
    of_files: dict[str, list[TargetPlan]] = {}
    for target in targets:
        of_files.setdefault(target.file.name, []).append(target)
    results: dict[TargetSpec, StepResult] = {}
    for of_file in of_files.values():
        with _debug_forms() as debug_of:
            results |= {target.spec: _verify(run, target, written, debug_of) for target in of_file}
    for target in targets:
        found += results[target.spec]
    return found


@contextmanager
def _debug_forms() -> Iterator[Callable[[Path], Path]]:
    """Yield what writes the debug form of a file where nobody has yet: the targets of a file share it."""
    with ExitStack() as scratch:
        yield functools.cache(lambda path: scratch.enter_context(debug_form(path)))


def _verify(
    run: ExportContext, target: TargetPlan, written: Mapping[str, WrittenFile], debug_of: Callable[[Path], Path]
) -> StepResult:
    file, name = written[target.file.name], str(target.spec)
    if target.status is None:
        wider = written[target.file.wider.name] if target.file.wider else None
        return _judge(run, target.spec, file, wider, debug_of)
    record = Target(file=target.file.name, status=target.status, attention=target.spec.attention, details=file.details)
    notes = (Note(f"{target.file.name} has not been verified: {target.why}", name),) if target.why else ()
    return StepResult({name: record}, notes)


def _judge(
    run: ExportContext,
    spec: TargetSpec,
    written: WrittenFile,
    wider: WrittenFile | None,
    debug_of: Callable[[Path], Path],
) -> StepResult:
    """Compare a file, run as a target, with the oracle.

    Args:
        debug_of: where the debug form of a file is.

    Raises:
        VerificationError: it does not equal the oracle, or loses more accuracy than it may.
    """
    runtime = RUNTIMES[spec.runtime]

    def open_one(path: Path, spec: TargetSpec) -> Engine:
        return runtime.open(
            path, spec, stop_spinning=True, keep_plugin_unloaded=True
        )  # it takes turns with its debug form

    def open_here(path: Path, wider_path: Path | None) -> Engine:
        engine = open_one(path, spec)
        if wider is None or wider_path is None:
            return engine
        larger = open_one(wider_path, dataclasses.replace(spec, form=wider.file.form))
        return Judged(together(engine, larger).engines)

    def open_both() -> tuple[Engine, Engine | None]:
        engine = open_here(written.path, wider.path if wider else None)
        if spec.is_timed and not written.is_large:
            run.engines[str(spec)] = engine
        if KEPT_SITE in engine.outputs:
            return engine, None
        return engine, open_here(debug_of(written.path), debug_of(wider.path) if wider else None)

    return judge_engine(run, spec, written, open_both)


def _check_embeddings(run: ExportContext, spec: TargetSpec, written: WrittenFile) -> None:
    """Raises VerificationError where a file has other token embeddings than the checkpoint, be they of tokens in no row."""
    from ...verify.tables import wrong_embeddings

    if written.oracle is None:
        return
    embeddings = run.checkpoint.student.get_input_embeddings().get_parameter("weight")
    if wrong := wrong_embeddings(written.path, embeddings):
        raise VerificationError(
            f"{spec} does not equal the PyTorch model: {written.file.name} {wrong}. Nothing was published"
        )


def judge_engine(
    run: ExportContext,
    spec: TargetSpec,
    written: WrittenFile,
    open_both: Callable[[], tuple[Engine, Engine | None]],
    details: Mapping[str, object] | None = None,
) -> StepResult:
    """Compare what `open_both` opens, an engine and its debug form, with the oracle.

    Args:
        details: of the target in the manifest, beside those of the file.
    """
    name, details = str(spec), {**(details or {}), **written.details}
    file = str(details.pop("file", written.file.name))
    oracle, attention = written.oracle, spec.attention
    if oracle is None:
        return StepResult({name: Target(file=file, status=UNVERIFIED, attention=attention, details=details)})
    with run.steps.step(f"verify_{name}_s", f"verifying {name} on {oracle.rows} rows") as progress:
        engine, debug = open_both()
        own = (lambda: engine.own) if isinstance(engine, Judged) else None
        parity, answers = judged(oracle, engine, debug, exact_debug=False, progress=progress, own=own)
    own_rows = oracle.rows
    if isinstance(engine, StaticEngines):
        details["rows_in_this_size"] = own_rows = engine.engines[0].rows_run
        if not own_rows:
            raise VerificationError(
                f"{name}: no text of the verification fits it, so nothing is known. Nothing was published"
            )
    if parity.failure:
        raise VerificationError(f"{name} does not equal the PyTorch model: {parity.failure}. Nothing was published")
    notes = [f"{name}: {excused(parity)}"] if parity.excused_flips else []
    if written.file.points is not None:
        loss = lost(oracle.metric, oracle.answers, answers)
        notes += _check_loss(name, loss, oracle, written.file.points)
        details["points_lost"] = {name: getattr(loss, name) for name in ("points", "margin", "texts")}
    enough = rows_wanted(oracle.rows, own_rows)
    status = VERIFIED if parity.rows_compared >= enough else INCONCLUSIVE
    if status == INCONCLUSIVE:
        notes.insert(
            0, f"{name}: {parity.rows_compared} of {parity.rows} rows could be compared, and a verdict takes {enough}"
        )
    same_bits = (spec.runtime, spec.device, spec.precision) == ("onnxruntime", CPU, "fp32")  # mostly
    if parity.debug_diff and same_bits:
        notes.append(
            f"{name}: on this processor the graph answers otherwise where it also says which tokens it keeps, by up to "
            f"{parity.debug_diff:.1e}; both are within {parity.tolerance:.1e} of PyTorch"
        )
    target = Target(file=file, status=status, attention=attention, parity=parity, details=details)
    return StepResult({name: target}, tuple(Note(note, name) for note in notes))


def _check_loss(name: str, loss: Loss, oracle: OracleRun, limit: float) -> tuple[str, ...]:
    """Return a note where the texts are too few to show that a target loses no more than `limit` points.

    Raises:
        VerificationError: they show that it loses more.
    """
    measure = oracle.metric.main if oracle.metric.main in oracle.quality else "agreement with the PyTorch model"
    said = f"{name} loses {loss.points:.2f} +/- {loss.margin:.2f} points of {measure} on {loss.texts} texts"
    if loss.exceeds(limit):
        raise VerificationError(
            f"{said}; at most {limit:g} are allowed. PyTorch that rounds alike loses {oracle.loss.points:.2f}. To accept this, type: "
            f"--max-accuracy-drop {loss.points - loss.margin + 0.005:.2f}. Nothing was published"
        )
    if loss.holds(limit):
        return ()
    if not limit:
        return (f"{said}. No number of texts can show that it loses nothing",)
    more = f"that takes some {least:,}" if (least := loss.texts_for(limit)) else "more of them may show it"
    return (f"{said}. These cannot show that it loses at most {limit:g}; {more}, by --verify-data FILE",)


def verify_strings(run: ExportContext, written: Mapping[str, WrittenFile], source: TextSource | None) -> StepResult:
    """Compare the file that takes texts, if there is one, with the tokenizer, and with the model that it holds.

    Args:
        source: of the verification's texts; None for the built-in ones.

    Raises:
        VerificationError: it reads other tokens than the tokenizer, or answers otherwise than the model.
    """
    chosen = next((each for each in written.values() if each.file.form == STRINGS), None)
    if chosen is None or chosen.file.source is None:
        return StepResult()
    name, file, model = chosen.file.name, chosen.path, written[chosen.file.source.name].path
    if chosen.oracle is None:
        return StepResult(notes=(Note(f"{name} has not been verified", name),))
    texts = [*samples.HARD, *_texts(run.checkpoint.student.config.head, source)]
    with (
        run.steps.step("verify_strings_s", f"comparing its tokens on {len(texts)} texts"),
        ExitStack() as stack,
    ):
        with writing_scratch("a temporary copy of the tokenizer"):
            alone = Path(stack.enter_context(tempfile.TemporaryDirectory())) / file.name
            onnx.save(strings.tokenizer_of(file), alone)
        check_tokens(run, texts, OnnxRuntimeEngine(alone, extensions=True))
        _check_answers(run, samples.HARD[:_LARGEST], model, file)
    hard = len(samples.HARD)
    note = f"{name} takes texts. Its tokens are those of the tokenizer on {len(texts)} texts, {hard} of them hard ones"
    return StepResult(notes=(Note(note, name),))


def check_tokens(run: ExportContext, texts: Sequence[str], engine: OnnxRuntimeEngine) -> None:
    """Compare the inputs that an engine makes of texts with those of the tokenizer: all texts in batches, the hard ones alone as well.

    Raises:
        VerificationError: one differs; the message says on which text.
    """
    batches = [[text] for text in samples.HARD] + [
        list(texts[i : i + _LARGEST]) for i in range(0, len(texts), _LARGEST)
    ]
    student = run.checkpoint.student
    for batch in batches:
        rows = encode(run.checkpoint.tokenizer, batch, run.checkpoint.max_tokens)
        expected = pad(rows, student.pad_id, student.input_names)
        found = engine.run({TEXT: np.array(batch, dtype=object)})
        for i, text in enumerate(batch):
            for name, array in expected.items():
                if found[name].shape == array.shape and np.array_equal(found[name][i], array[i]):
                    continue
                ids = [row[INPUT_IDS][i][:20].tolist() for row in (expected, found)]
                raise VerificationError(
                    f"--with-tokenizer: the tokenizer reads {quoted(text)} as {ids[0]}, and its form in ONNX as {ids[1]} ({name} differ); "
                    "leave the option out. Nothing was published"
                )


def _check_answers(run: ExportContext, texts: Sequence[str], model: Path, file: Path) -> None:
    """See that the file answers texts as the model answers their tokens, to the bit: it is the same graph."""
    student = run.checkpoint.student
    rows = encode(run.checkpoint.tokenizer, texts, run.checkpoint.max_tokens)
    batch = pad(rows, student.pad_id, student.input_names)
    expected = OnnxRuntimeEngine(model).run(batch)
    found = OnnxRuntimeEngine(file, extensions=True).run({TEXT: np.array(texts, dtype=object)})
    for name, array in expected.items():
        if not np.array_equal(found[name], array):
            raise VerificationError(
                f"--with-tokenizer: {file.name} gives other {name} than {model.name}. Nothing was published"
            )


def _texts(head: str, source: TextSource | None) -> Iterator[str]:
    """Yield the texts of verification rows; of pairs both, of words the text that they make."""
    rows = [(text, None) for text in samples.built_in_texts(pairs=False)]
    if source is not None:
        rows, _ = samples.sample(read(head, source), STRINGS_ROWS)
    for row, _ in rows:
        parts = [" ".join(row)] if isinstance(row, list) else [row] if isinstance(row, str) else row
        yield from (part.replace("\0", "") for part in parts)
