"""Labelled rows from a data set by name or from local files: read, checked, tokenized, batched."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PretrainedConfig
from transformers.trainer_pt_utils import get_length_grouped_indices

from ..contract import INPUT_IDS, INPUTS, TOKEN_TYPE_IDS
from ..data.labelled import Question
from ..data.readers import Label, Text, check_label_column, choose_columns, class_name, is_label, no_label, read_rows
from ..data.tokenize import TokenizedText, pad
from ..errors import InputError, needs_extras, quoted
from ..model.registry import input_names
from .settings import TrainOptions

SPLITS = ("train", "dev", "test")
EVAL_BATCH, EVAL_TOKENS = 64, 4096
"""The most rows and tokens of a batch in evaluation. Of 512 tokens, 8 rows at a time took two thirds of the time of 64."""


@dataclass(frozen=True)
class Table:
    """Texts with their labels as the source gives them.

    source: names it in messages and in the record. texts, labels: what a row is depends on the task; here texts or pairs, each with
    a class or a number. classes: their order, where the source has one.
    """

    source: str
    texts: list[Any]
    labels: list[Any]
    classes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.texts)

    def rows(self, numbers: Sequence[int], source: str) -> Table:
        texts, labels = [self.texts[i] for i in numbers], [self.labels[i] for i in numbers]
        return Part(source, texts, labels, self.classes, whole=self.all_rows())

    def all_rows(self) -> Table:
        """Return the table as it was before rows were taken from it."""
        return self

    def sample(self, count: int | None) -> Table:
        """Draw `count` rows by seed 0; all where there are no more, or no count."""
        if count is None or count >= len(self):
            return self
        numbers = sorted(random.Random(0).sample(range(len(self)), count))
        return self.rows(numbers, f"{count} of {len(self)} rows of {self.source}")


@dataclass(frozen=True)
class Part(Table):
    """Some rows of a table, `whole`."""

    whole: Table = dataclasses.field(kw_only=True, repr=False, compare=False)

    def all_rows(self) -> Table:
        return self.whole


def load_tables(settings: TrainOptions, read: Callable[[Path, TrainOptions], Table] | None = None) -> dict[str, Table]:
    """Load the splits "train", "dev" and "test".

    Without a dev split, a share of the training rows is drawn for it by seed 0. Without a test split, dev stands in.

    Args:
        read: reads a file; by default texts with their labels.

    Raises:
        InputError: neither or both of a name and files, an unknown data set or column, an empty split.
        MissingDependencyError: `datasets` is not installed and a name was given.
    """
    files = {split: path for split in SPLITS if (path := getattr(settings, split)) is not None}
    if (settings.data is None) == ("train" not in files) or (settings.data is not None and files):
        raise InputError(
            "data: give either --data NAME or --train FILE (with --dev FILE and --test FILE where you have them)"
        )
    read = read or read_labelled
    tables = _named(settings) if files == {} else {s: read(Path(path), settings) for s, path in files.items()}
    train = tables["train"]
    if "dev" not in tables:
        dev, rest = _hold_out(train, max(1, round(settings.dev_share * len(train))))
        tables["dev"] = train.rows(dev, f"{len(dev)} rows held out of {train.source}")
        tables["train"] = train.rows(rest, train.source)
    tables.setdefault("test", tables["dev"])
    return tables


def told(row: Any) -> str:
    """Return a row as one text: of pairs both, of words the text that they make, of questions the context."""
    if isinstance(row, Question):
        return row.context
    return row if isinstance(row, str) else " ".join(row)


def _hold_out(train: Table, count: int) -> tuple[list[int], list[int]]:
    """Draw rows for dev by seed 0, and return their numbers and those of the others.

    Rows of one text, or of questions about it, stay on one side. So there may be up to twice `count`, or half of it; where that does not
    do, as with few texts, rows are drawn one by one.
    """
    numbers = list(range(len(train)))
    random.Random(0).shuffle(numbers)
    if count >= len(numbers):
        raise InputError(
            f"{train.source}: {len(numbers)} rows are too few to hold out {count} of them; give more rows, a smaller --dev-share, or "
            "--train FILE with --dev FILE"
        )
    alike: dict[str, list[int]] = {}
    for i in numbers:
        alike.setdefault(told(train.texts[i]), []).append(i)
    held: set[int] = set()
    for rows in alike.values():
        if len(held) < count and len(held) + len(rows) <= 2 * count:
            held.update(rows)
    if 2 * len(held) < count or len(held) == len(numbers):
        held = set(numbers[:count])
    return [i for i in numbers if i in held], [i for i in range(len(train)) if i not in held]


def read_labelled(path: Path, settings: TrainOptions) -> Table:
    """Read texts, or pairs, each with a class or a number; raises InputError as `data.readers.read_rows` does."""
    rows = list(read_rows(path, settings.text_column, settings.label_column))
    return Table(path.name, [text for text, _ in rows], [label for _, label in rows])


def _named(settings: TrainOptions) -> dict[str, Table]:
    with needs_extras("--data"):
        import datasets
    assert settings.data is not None
    name, config = settings.data, None
    if not Path(name).exists() and (name.startswith("glue/") or name.count("/") == 2):
        name, config = name.rsplit("/", 1)
    try:
        loaded = datasets.load_dataset("nyu-mll/glue" if name == "glue" else name, config)
    except Exception as error:  # unknown names, configurations and networks that are not there: many types
        raise InputError(f"--data: got {quoted(settings.data)}, which `datasets` cannot load: {error}") from error
    if "train" not in loaded:
        there = ", ".join(loaded)
        raise InputError(f"--data: {quoted(settings.data)} has the splits {there}; accepted is one with 'train'")
    found = {"train": _from_dataset(loaded["train"], f"{settings.data}, train", settings)}
    dev = next((split for split in ("validation", "validation_matched", "dev") if split in loaded), None)
    labels = loaded["test"][:100].get(settings.label_column, [-1]) if "test" in loaded else []
    hidden = bool(labels) and all(label == -1 for label in labels)  # as GLUE's are
    if "test" in loaded and not hidden:
        found["test"] = _from_dataset(loaded["test"], f"{settings.data}, test", settings)
    if dev is not None:  # the only split to judge on is kept for that
        found["dev" if "test" in found else "test"] = _from_dataset(loaded[dev], f"{settings.data}, {dev}", settings)
    return found


def _from_dataset(split: Any, source: str, settings: TrainOptions) -> Table:
    columns, column = choose_columns(split.column_names, source, settings.text_column), settings.label_column
    check_label_column(split.column_names, source, column, columns)
    if not len(split):
        raise InputError(f"{source}: the split is empty")
    names = getattr(split.features[column], "names", None)
    texts: list[Text] = []
    labels: list[Label] = []
    for number, row in enumerate(split, start=1):
        parts, label = [row[name] for name in columns], row[column]
        if not all(isinstance(part, str) for part in parts):
            raise InputError(f"{source}: row {number} has no text in {' and '.join(map(repr, columns))}")
        if not is_label(label) or (names and not 0 <= label < len(names)):
            raise no_label(label, column, f"{source}: row {number}")
        texts.append(parts[0] if len(parts) == 1 else (parts[0], parts[1]))
        labels.append(names[label] if names else label)
    return Table(source, texts, labels, tuple(names or ()))


@dataclass(frozen=True)
class Labels:
    """What the labels of a task are: class names in the order of their indices, none for regression."""

    names: tuple[str, ...]

    @property
    def regression(self) -> bool:
        return not self.names

    @classmethod
    def of(cls, table: Table, task: str) -> Labels:
        """Read them off the training rows.

        Raises:
            InputError: fewer than two classes, or regression with labels that are no numbers.
        """
        numbers = [_number(label) for label in table.labels]
        numeric = all(number is not None for number in numbers)
        fractional = any(number != int(number) for number in numbers if number is not None)
        if task == "regression" and not numeric:
            wrong = next(label for label, number in zip(table.labels, numbers) if number is None)
            raise InputError(f"{table.source}: got the label {quoted(wrong)}; --task regression takes numbers")
        by_default = task == "auto" and fractional and not table.classes
        if by_default and not numeric:
            _check_finite(table, numbers)
        if task == "regression" or (by_default and numeric):
            return cls(())
        if table.classes:
            return cls(table.classes)
        found = {class_name(label) for label in table.labels}
        if len(found) < 2:
            raise InputError(
                f"{table.source}: all rows have the label {quoted(found.pop())}; accepted are at least two classes"
            )
        return cls(tuple(sorted(found, key=by_number)))

    def encode(self, table: Table) -> list[int] | list[float]:
        """Turn labels into class indices, or into numbers for regression.

        Raises:
            InputError: a label that the task does not have.
        """
        if self.regression:
            numbers = [_number(label) for label in table.labels]
            for row, number in enumerate(numbers, start=1):
                if number is None:
                    raise InputError(
                        f"{table.source}: row {row} has the label {quoted(table.labels[row - 1])}; accepted are numbers"
                    )
            return [number for number in numbers if number is not None]
        index = {name: i for i, name in enumerate(self.names)}
        indices = []
        for row, label in enumerate(table.labels, start=1):
            if (name := class_name(label)) not in index:
                known = ", ".join(self.names[:10]) + (", ..." if len(self.names) > 10 else "")
                raise InputError(f"{table.source}: row {row} has the label {quoted(name)}; the classes are {known}")
            indices.append(index[name])
        return indices


def _number(label: Label) -> float | None:
    try:
        number = float(label)
    except ValueError:
        return None
    return number if np.isfinite(number) else None


_NOT_FINITE = ("nan", "inf", "infinity")


def _check_finite(table: Table, numbers: Sequence[float | None]) -> None:
    """Raises InputError where all labels that are no finite numbers are infinite, or not a number."""
    others = [str(label).strip().lower() for label, number in zip(table.labels, numbers) if number is None]
    if all(other.lstrip("+-") in _NOT_FINITE for other in others):
        row = numbers.index(None)
        raise InputError(
            f"{table.source}: row {row + 1} has the label {quoted(table.labels[row])}, and others are numbers; mend it, or say "
            "--task classification"
        )


def by_number(name: str) -> tuple[float, str]:
    """Sort names of classes by their number, where they are numbers; so ``LABEL_2`` of a teacher is 2, and not 10."""
    return _number(name) or 0.0, name


@dataclass(kw_only=True)
class Examples(torch.utils.data.Dataset):
    """Tokenized rows, with the teacher's view of each once it is known. Other tasks have subclasses beside their objective.

    labels: ``(rows,)`` class indices or numbers. inputs: that the model takes. teacher_logits: the teacher's answer to each row.
    attribution: what it says of each token, ``(n,)`` per row; that is its attribution, or the attention received in its last layer.
    """

    encoded: list[TokenizedText]
    labels: Sequence[Any]
    pad_id: int
    inputs: Sequence[str] = tuple(INPUTS)
    teacher_logits: Sequence[Tensor] | Tensor | None = None
    attribution: list[Tensor] | None = None

    def __len__(self) -> int:
        return len(self.encoded)

    def __getitem__(self, number: int) -> int:
        return number  # the collator looks rows up: only numbers travel through the sampler

    @property
    def lengths(self) -> list[int]:
        return [len(row.input_ids) for row in self.encoded]

    def collate_labels(self, numbers: Sequence[int]) -> dict[str, Tensor]:
        """Labels of rows by the names that transformers has for them; here ``labels (B,)``."""
        return {"labels": torch.tensor([self.labels[i] for i in numbers])}

    def collate(self, numbers: Sequence[int]) -> dict[str, Tensor]:
        """Right-pad rows to int64 ``(B, S)`` inputs, with their labels and, where known, the teacher's view."""
        rows = pad([self.encoded[i] for i in numbers], self.pad_id, self.inputs)
        batch = {name: torch.from_numpy(values) for name, values in rows.items()} | self.collate_labels(numbers)
        if self.attribution is not None:
            batch["attribution"] = joined([self.attribution[i] for i in numbers], ragged=True)
        if self.teacher_logits is not None:
            batch["teacher_logits"] = joined([self.teacher_logits[i] for i in numbers])
        return batch

    def batches(
        self, size: int = EVAL_BATCH, tokens: int = EVAL_TOKENS
    ) -> Iterator[tuple[list[int], dict[str, Tensor]]]:
        """Yield row numbers and batches of rows of similar length, longest first, so that memory runs out at once or never.

        Args:
            size: most rows of a batch. tokens: most tokens of a batch with its padding, where more than one row is in it.
        """
        order = sorted(range(len(self)), key=lambda i: -len(self.encoded[i].input_ids))
        begin = 0
        while begin < len(order):
            longest = len(self.encoded[order[begin]].input_ids)
            numbers = order[begin : begin + min(size, max(1, tokens // longest))]
            begin += len(numbers)
            yield numbers, self.collate(numbers)

    def some(self, numbers: Sequence[int]) -> Examples:
        """Return the rows of these numbers, in their order."""

        def of(values: Any) -> Any:
            return None if values is None else [values[i] for i in numbers]

        return dataclasses.replace(
            self,
            encoded=of(self.encoded),
            labels=of(self.labels),
            teacher_logits=of(self.teacher_logits),
            attribution=of(self.attribution),
        )

    def with_teacher(self, logits: Sequence[Tensor] | Tensor, attribution: list[Tensor] | None) -> Examples:
        return dataclasses.replace(self, teacher_logits=logits, attribution=attribution)


def known_inputs(encoded: Sequence[TokenizedText], config: PretrainedConfig, source: str) -> tuple[str, ...]:
    """Return the inputs of the model of a configuration.

    Raises:
        InputError: the tokenizer gives ids that the model does not know; `source` begins the message.
    """
    names = input_names(config)
    for name, size in ((INPUT_IDS, "vocab_size"), (TOKEN_TYPE_IDS, "type_vocab_size")):
        if name in names and (largest := max(max(getattr(row, name)) for row in encoded)) >= getattr(config, size):
            raise InputError(
                f"{source}: the tokenizer gives {name} of {largest}; the model knows {getattr(config, size)} of them"
            )
    return names


def joined(rows: Sequence[Tensor], ragged: bool = False) -> Tensor:
    """Make a batch of answers ``(C,)``; those of single tokens, ``(n, C)`` or with `ragged` ``(n,)``, are padded with zeros."""
    if ragged or rows[0].dim() > 1:
        return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)
    return torch.stack(list(rows))


def split(answers: Tensor, lengths: Tensor) -> list[Tensor]:
    """Split a batch of answers into rows; those of single tokens, ``(B, S, C)``, are cut to ``lengths (B,)``."""
    if answers.dim() == 2:
        return list(answers)
    return [row[:length].clone() for row, length in zip(answers, lengths.tolist())]


class LengthGrouped(torch.utils.data.Sampler[int]):
    """Batches of similar length in random order, the same for a seed and an epoch whether or not a run was interrupted."""

    def __init__(self, lengths: Sequence[int], batch_size: int, seed: int) -> None:
        self.lengths, self.batch_size, self.seed, self.epoch = list(lengths), batch_size, seed, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed * 10_007 + self.epoch)
        grouped = get_length_grouped_indices(self.lengths, self.batch_size, generator=generator)
        whole = len(grouped) - len(grouped) % self.batch_size
        for number in torch.randperm(whole // self.batch_size, generator=generator).tolist():
            yield from grouped[number * self.batch_size : (number + 1) * self.batch_size]
        yield from grouped[whole:]


def to_device(batch: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Return the model's inputs of a batch on `device`."""
    return {name: batch[name].to(device) for name in INPUTS if name in batch}
