"""The PyTorch student on the verification rows."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ...artifacts.records import RANDOM_IDS, VERIFICATION, Note
from ...contract import (
    ATTENTION_MASK,
    HEAD_MASKED,
    HEAD_SEQUENCE,
    HEAD_SPANS,
    HEAD_SPARSE,
    HEAD_TOKENS,
    VECTORS,
)
from ...data.readers import Label, class_name
from ...data.rows import TextSource, TokenizedRows, read, tokenize
from ...errors import InputError, did_you_mean, ellipsize, printable, quoted
from ...explain.student import explain, means
from ...inference.config import Config
from ...io import read_json
from ...model.encoder import PrunedEncoder
from ...model.heads.masked import PrunedEncoderForMasked
from ...verify import metrics, random_ids, samples
from ...verify.metrics import TaskMetric
from ...verify.oracle import OracleRun, for_precision, run_oracle, typed
from ...verify.views import Labels, make_views
from .context import ExportContext

if TYPE_CHECKING:
    from ...explain.records import Views


LARGE = {HEAD_SPARSE: "sparse vectors", HEAD_MASKED: "logits"}
"""What is as large as the vocabulary for a text, or a token of it."""


@dataclasses.dataclass(frozen=True)
class Verification:
    """The oracle's answers; record: what the manifest says of the rows; notes: for the user; views: of single rows, for reports."""

    oracle: OracleRun
    record: Mapping[str, Any]
    notes: tuple[Note, ...]
    views: Views


def verify_with(run: ExportContext, text: TextSource | None, random: int | None) -> Verification:
    """Run the PyTorch student on a file's texts, or on the built-in ones.

    Args:
        random: run it on rows of random token ids as well, of up to so many tokens; None for no such rows.

    Raises:
        InputError: no texts, or labels that the student does not know.
    """
    student = run.checkpoint.student
    others: dict[str, Any] = {}
    if text is None:
        labelled, source, others = _built_in(run)
        total, rows = None, None
    else:
        rows = text.rows
        labelled, total = samples.sample(read(student.config.head, text), rows or samples.MAX_ROWS)
        source = printable(text.file.name)
    texts, labels = zip(*samples.shuffled(labelled), *((row, None) for row in others.values()))
    known = _known(labels, student.config, text) if text and text.label_column else None
    tokenized = _tokenized(run, texts)
    notes: tuple[str, ...] = ()
    if not rows:
        tokenized, notes = _affordable(student, tokenized.first(samples.MAX_TOKENS), source, text is not None)
    rows_at_once, count = run.profile["batch"].max, len(tokenized.rows)
    mixed = sum(owner < len(labelled) for owner in tokenized.owners)
    batches = [
        batch
        for rows_alike in (tokenized.rows[:mixed], tokenized.rows[mixed:])  # those of other languages are all short
        if rows_alike
        for batch in samples.make_batches(rows_alike, student.input_names, student.pad_id, rows_at_once)
    ]
    further = random_ids.draw(student, random, rows_at_once) if random else []
    lengths = sorted(int(n) for batch in further for n in batch[ATTENTION_MASK].sum(1))
    metric = _metric(run, texts, known and known[: tokenized.texts], tokenized)
    if total is not None and tokenized.texts < total:
        source += f" ({tokenized.texts} of {total} rows, seed 0)"
    what = "PyTorch student" if student.site_names else "model in transformers"
    too = f", and {len(lengths)} rows of random token ids" if lengths else ""
    told = f"running the {what} on {source}: {count} rows in {len(batches)} batches{too}, fp32 and fp64"
    with run.steps.step("oracle_s", told) as progress:
        oracle = run_oracle(student, batches, progress, metric, further)
    quality = oracle.quality
    record: dict[str, Any] = {
        "text": source,
        "sha256": hashlib.sha256("\n".join(map(str, zip(texts[: tokenized.texts], labels))).encode()).hexdigest(),
        "rows": count,
        "batches": len(batches),
        **({"languages": ["English", *[*others][: max(0, tokenized.texts - len(labelled))]]} if text is None else {}),
        **({RANDOM_IDS: {"rows": len(lengths), "lengths": lengths}} if lengths else {}),
        "accuracy": quality.get("accuracy"),
        "quality": quality,
        **({"windows": dataclasses.asdict(run.windows)} if student.config.head == HEAD_SPANS else {}),
    }
    shown = _views(run, oracle)
    if found := means([view.explained for view in shown.texts if view.explained]):
        record["explanation"] = found
    return Verification(oracle, record, tuple(Note(note, VERIFICATION) for note in (*notes, *_fallen(oracle))), shown)


def _tokenized(run: ExportContext, texts: Sequence[Any]) -> TokenizedRows:
    """Tokenize texts as the student reads them; with some tokens masked where it answers for such."""
    checkpoint, longest = run.checkpoint, run.profile["seq"].max
    student, around = checkpoint.student, checkpoint.template or checkpoint.sides
    found = tokenize(student.config.head, checkpoint.tokenizer, texts, longest, run.windows, around)
    if not isinstance(student, PrunedEncoderForMasked):
        return found
    return dataclasses.replace(found, rows=[samples.masked(row, student.asked_id) for row in found.rows])


def _affordable(
    student: PrunedEncoder, tokenized: TokenizedRows, source: str, of_file: bool
) -> tuple[TokenizedRows, tuple[str, ...]]:
    """Return the first texts, as many as are not too many FLOPs, and a note where that leaves any out; of sparse vectors no more than fit
    into memory.
    """
    fitting, why, bound = tokenized, "the model is large", f"{samples.MAX_FLOPS:.0e} FLOPs"
    if student.config.head in LARGE:
        width, masks = student.dense.config.vocab_size, student.config.head == HEAD_MASKED
        fitting = tokenized.first(
            samples.MAX_WEIGHTS, lambda tokens: width * (samples.masks(tokens) if masks else np.ones(len(tokens)))
        )
    found = fitting.first(samples.MAX_FLOPS, student.flops)
    if found.texts == tokenized.texts:
        return found, ()
    if found.texts == fitting.texts:
        why, bound = f"the model's {LARGE[student.config.head]} are large", f"{samples.MAX_WEIGHTS:,} weights"
    more = "; to take more of them, type: --verify-data FILE --verify-rows N" if of_file else ""
    return found, (f"{why}, so it is verified on the first {found.texts} texts of {source}, {bound} in all{more}",)


def type_oracles(run: ExportContext, oracle: OracleRun, precisions: Sequence[str]) -> dict[str, OracleRun]:
    """Return the oracle of each precision, fp32 and lower ones: find out what PyTorch is off in these."""
    found = {"fp32": oracle}
    for precision in precisions:
        with run.steps.step(f"oracle_{precision}_s", f"running the PyTorch model in {precision}") as progress:
            found[precision] = for_precision(oracle, typed(run.checkpoint.student, precision), precision, progress)
    return found


def _built_in(run: ExportContext) -> tuple[list[tuple[Any, None]], str, dict[str, Any]]:
    """Return the built-in rows for the student's head, what they are called, and those in other languages."""
    head, tokenizer = run.checkpoint.student.config.head, run.checkpoint.tokenizer
    asks, pairs = head == HEAD_SPANS, head in (HEAD_SPANS, HEAD_SEQUENCE)
    texts = samples.built_in_questions() if asks else samples.built_in_texts(pairs)
    others = samples.in_languages(tokenizer, pairs)
    template = run.checkpoint.template
    if template is not None and not template.text:  # which has places for pairs alone
        texts = [
            text if isinstance(text, tuple) else (text, other)
            for text, other in zip(texts, reversed(samples.BUILT_IN * 2))
        ]
    return [(row, None) for row in texts], f"the built-in {'questions' if asks else 'sentences'}", others


def _views(run: ExportContext, oracle: OracleRun) -> Views:
    """What reports show of single texts; what an answer rests on is shown where tokens are dropped."""
    student = run.checkpoint.student
    config = Config.of(read_json(run.work / "config.json"))  # as `load` reads it
    labels = Labels(config.id2label, config.kind)
    if not oracle.sites:
        return make_views(oracle, run.checkpoint.tokenizer, labels)
    with run.steps.step("explained_s", "explaining answers to single texts"):
        return make_views(oracle, run.checkpoint.tokenizer, labels, functools.partial(explain, student))


def _fallen(oracle: OracleRun) -> tuple[str, ...]:
    """Say for how many rows the first token stays only because it always does."""
    kept = [
        np.any([d.rule.first_falls().numpy() for d in batch.exact.decisions], axis=0) for batch in oracle.batches
        if batch.exact.decisions
    ]  # fmt: skip
    count = int(sum(rows.sum() for rows in kept))
    if not count:
        return ()
    return (
        f"in {count} of {oracle.of_texts.rows} rows the first token is below a threshold; it stays here, and would not in the original",
    )


def _metric(
    run: ExportContext, texts: Sequence[Any], known: Sequence[Any] | None, tokenized: TokenizedRows
) -> TaskMetric:
    """Return the metric of tokenized rows.

    Args:
        texts: as they were read.
        known: their labels as `_known` returns them, of those that were tokenized; None where there are none.
    """
    config, places = run.checkpoint.student.config, tokenized.places
    if config.head == HEAD_SPANS:
        asked = known and [metrics.AskedRow(context, answers) for (_, context), answers in zip(texts, known)]
        return metrics.SpansMetric(run.windows.max_answer_tokens, places, tokenized.owners, asked)
    metric = metrics.default(config.head, config.problem_type, config.id2label or {})
    if isinstance(metric, metrics.SequenceMetric) and known is not None:
        return dataclasses.replace(metric, labels=np.array(known))
    if isinstance(metric, metrics.EmbeddingMetric) and known is not None:
        return dataclasses.replace(metric, scores=np.array(known))
    if config.head == HEAD_TOKENS and known is not None and places is not None:
        tagged = [_judged_words(row, tags) for row, tags in zip(places, known)]
        return dataclasses.replace(metric, labels=tagged)  # type: ignore[type-var] # a dataclass, as all metrics
    return metric


def _judged_words(places: Sequence[int | None], tags: Sequence[str]) -> metrics.TaggedRow:
    """Judge the first token of each word; words that are cut off are not judged."""
    firsts: dict[int, int] = {}
    for column, word in enumerate(places):
        if word is not None:
            firsts.setdefault(word, column)
    return metrics.TaggedRow(list(firsts.values()), [tags[word] for word in firsts])


def _known(labels: Sequence[Any], config: Any, text: TextSource) -> Sequence[Any]:
    """Turn labels into what the student is to answer: class numbers, or numbers in regression and of pairs; names of tags; texts.

    Raises:
        InputError: a label that it cannot answer.
    """
    if config.head == HEAD_SPANS:
        return labels
    if config.head == HEAD_TOKENS:
        names = {int(number): name for number, name in config.id2label.items()}
        wanted = class_indices([tag for tags in labels for tag in tags], names, text, "tag")
        tags = iter(names[number] for number in wanted)
        return [[next(tags) for _ in row] for row in labels]
    if config.head == HEAD_SEQUENCE and config.num_labels > 1:
        return class_indices(labels, config.id2label or {}, text)
    try:
        numbers = [float(label) for label in labels]
        if not np.isfinite(numbers).all():
            raise ValueError("a label is not finite")
        return numbers
    except ValueError as error:
        if config.head in VECTORS:
            raise InputError(f"{text.file}: labels are numbers that say how alike two texts are: {error}") from None
        raise InputError(f"{text.file}: the student answers with a number, so labels are numbers: {error}") from None


def class_indices(
    labels: Sequence[Label], id2label: Mapping[Any, str], text: TextSource, what: str = "label"
) -> list[int]:
    """Turn labels, which are all class names or all class numbers, into class numbers; `what` they are called in messages.

    Raises:
        InputError: a label that the student does not know.
    """
    numbers = {str(number): number for number in id2label}
    names = {name.strip(): number for number, name in id2label.items()}
    said = [class_name(label) for label in labels]
    index = next((index for index in (names, numbers) if index.keys() >= set(said)), None)
    if index is None:
        unnamed = [label for label in said if label not in names]
        label = min(unnamed, key=numbers.__contains__)  # the first that is no number either, if there is one
        raise InputError(
            f"{text.file}: got the {what} {quoted(label)}; the student knows {ellipsize(', '.join(names))}, or in all rows their numbers, "
            f"0 to {len(names) - 1}{did_you_mean(label, names)}"
        )
    return [index[label] for label in said]
