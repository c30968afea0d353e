"""The PyTorch student on the verification rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..contract import TOKEN_TYPE_IDS
from ..errors import InputError, did_you_mean, shown
from ..text import Label, read_rows
from ..verify import samples
from ..verify.oracle import OracleRun, run_oracle
from .plan import Text
from .run import Run

if TYPE_CHECKING:
    from ..records import Views


@dataclasses.dataclass(frozen=True)
class Verification:
    """The oracle's answers; record: what the manifest says of the rows; notes: for the user."""

    oracle: OracleRun
    record: Mapping[str, Any]
    notes: tuple[str, ...]


def verify_with(run: Run, text: Text | None) -> Verification:
    """Run the PyTorch student on a file's texts, or on the built-in ones.

    Raises:
        InputError: no texts, or labels that the student does not know.
    """
    student = run.checkpoint.student
    if text is None:
        pairs = TOKEN_TYPE_IDS in student.input_names
        labelled = [(row, None) for row in samples.built_in_texts(pairs)]
        source, total, rows = "the built-in sentences", None, None
    else:
        rows = text.rows
        found = read_rows(text.file, text.column, text.label_column)
        labelled, total = samples.sample(found, rows or samples.MAX_ROWS)
        source = text.file.name
    texts, labels = zip(*samples.shuffled(labelled))
    known = _truths(labels, student.config, text) if text and text.label_column else None
    batches = run.batches(texts, None if rows else samples.MAX_TOKENS)
    count = sum(len(batch["input_ids"]) for batch in batches)
    if total is not None and count < total:
        source += f" ({count} of {total} rows, seed 0)"
    what = "PyTorch student" if student.site_names else "model in transformers"
    told = f"running the {what} on {source}: {count} rows in {len(batches)} batches, fp32 and fp64"
    with run.steps.step("oracle_s", told) as progress:
        oracle = run_oracle(student, batches, progress)
    if known is not None:
        oracle = dataclasses.replace(oracle, labels=np.array(known[:count]))
    record = {
        "text": source,
        "rows": count,
        "batches": len(batches),
        "accuracy": oracle.accuracy,
        "quality": oracle.quality,
    }
    return Verification(oracle, record, _fallen(oracle))


def views(run: Run, oracle: OracleRun | None) -> Views | None:
    """What reports show of single texts; None where the oracle did not run."""
    from ..verify.views import make_views

    if oracle is None:
        return None
    config = run.checkpoint.student.config
    names = {} if config.num_labels == 1 else {int(i): name for i, name in (config.id2label or {}).items()}
    return make_views(oracle, run.checkpoint.tokenizer, names)


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
        f"in {count} of {oracle.rows} rows the first token is below a threshold; it stays here, and would not in the original",
    )


def _truths(labels: Sequence[Label], config: Any, text: Text) -> list[int] | list[float]:
    """Turn labels into what the student is to answer: class numbers, or numbers in regression.

    Raises:
        InputError: a label that it cannot answer.
    """
    if config.num_labels > 1:
        return _class_indices(labels, config.id2label or {}, text)
    try:
        numbers = [float(label) for label in labels]
        if not np.isfinite(numbers).all():
            raise ValueError("a label is not finite")
        return numbers
    except ValueError as error:
        raise InputError(f"{text.file}: the student answers with a number, so labels are numbers: {error}") from None


def _class_indices(labels: Sequence[Label], id2label: Mapping[Any, str], text: Text) -> list[int]:
    """Turn labels, which are class names or class numbers, into class numbers.

    Raises:
        InputError: a label that the student does not know.
    """
    index = {str(number): number for number in id2label} | {name: number for number, name in id2label.items()}
    for label in map(str, labels):
        if label not in index:
            known = ", ".join(map(str, id2label.values()))
            raise InputError(
                f"{text.file}: got the label {shown(label)}; the student knows {known}{did_you_mean(label, index)}"
            )
    return [index[str(label)] for label in labels]
