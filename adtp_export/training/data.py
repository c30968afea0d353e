"""Labelled texts from a data set by name or from local files: read, checked, tokenized, batched."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers.trainer_pt_utils import get_length_grouped_indices

from ..errors import InputError, MissingDependencyError, did_you_mean
from ..text import Encoded, Label, Text, choose_columns, encode, pad, read_labelled
from .settings import Settings

SPLITS = ("train", "dev", "test")
INPUTS = ("input_ids", "attention_mask", "token_type_ids")


@dataclass(frozen=True)
class Table:
    """Texts with their labels as the source gives them. `source` names it in messages and in the record."""

    source: str
    texts: list[Text]
    labels: list[Label]

    def __len__(self) -> int:
        return len(self.texts)

    def rows(self, numbers: Sequence[int], source: str) -> Table:
        return Table(source, [self.texts[i] for i in numbers], [self.labels[i] for i in numbers])


def load_tables(settings: Settings) -> dict[str, Table]:
    """Load the splits "train", "dev" and "test".

    Without a dev split, a share of the training rows is drawn for it by seed 0. Without a test split, dev stands in.

    Raises:
        InputError: neither or both of a name and files, an unknown data set or column, an empty split.
        MissingDependencyError: `datasets` is not installed and a name was given.
    """
    if (settings.data is None) == (settings.train is None):
        raise InputError(
            "data: give either --data NAME or --train FILE (with --dev FILE and --test FILE where you have them)"
        )
    if settings.data is not None:
        tables = _named(settings)
    else:
        files = {split: getattr(settings, split) for split in SPLITS}
        tables = {split: _from_file(Path(path), settings) for split, path in files.items() if path is not None}
    rng = random.Random(0)
    if "dev" not in tables:
        numbers = list(range(len(tables["train"])))
        rng.shuffle(numbers)
        held_out = max(1, round(settings.dev_share * len(numbers)))
        if held_out >= len(numbers):
            raise InputError(
                f"{tables['train'].source}: {len(numbers)} rows are too few to hold out {held_out} of them for dev"
            )
        tables["dev"] = tables["train"].rows(
            numbers[:held_out], f"{held_out} rows held out of {tables['train'].source}"
        )
        tables["train"] = tables["train"].rows(sorted(numbers[held_out:]), tables["train"].source)
    tables.setdefault("test", tables["dev"])
    wanted, available = settings.train_rows, len(tables["train"])
    if wanted is not None and wanted < available:
        numbers = sorted(rng.sample(range(available), wanted))
        tables["train"] = tables["train"].rows(numbers, f"{wanted} of {available} rows of {tables['train'].source}")
    return tables


def _from_file(path: Path, settings: Settings) -> Table:
    rows = list(read_labelled(path, settings.text_column, settings.label_column))
    return Table(path.name, [text for text, _ in rows], [label for _, label in rows])


def _named(settings: Settings) -> dict[str, Table]:
    try:
        import datasets
    except ImportError as error:
        raise MissingDependencyError("--data needs the package datasets: pip install 'adtp-export[train]'") from error
    assert settings.data is not None
    name, config = settings.data, None
    if not Path(name).exists() and name.count("/") in (1, 2) and (name.count("/") == 2 or name.startswith("glue/")):
        name, config = name.rsplit("/", 1)
    name = "nyu-mll/glue" if name == "glue" else name
    try:
        loaded = datasets.load_dataset(name, config)
    except Exception as error:  # unknown names, configurations and networks that are not there: many types
        raise InputError(f"--data: got {settings.data!r}, which `datasets` cannot load: {error}") from error
    tables = {split: _from_dataset(loaded[split], f"{settings.data}, {split}", settings) for split in loaded}
    if "train" not in tables:
        raise InputError(
            f"--data: {settings.data!r} has the splits {', '.join(tables)}; accepted is one with a split 'train'"
        )
    found = {"train": tables["train"]}
    dev = next((split for split in ("validation", "validation_matched", "dev") if split in tables), None)
    judged = tables.get("test")
    if judged is None or set(judged.labels) == {-1}:  # GLUE hides the labels of its tests
        judged = tables[dev] if dev else None
    elif dev:
        found["dev"] = tables[dev]
    return found | ({"test": judged} if judged is not None else {})


def _from_dataset(split: Any, source: str, settings: Settings) -> Table:
    columns = choose_columns(split.column_names, source, settings.text_column)
    if settings.label_column not in split.column_names:
        hint = did_you_mean(settings.label_column, split.column_names)
        raise InputError(
            f"{source}: no label column {settings.label_column!r}; it has {', '.join(split.column_names)}{hint}"
        )
    if not len(split):
        raise InputError(f"{source}: the split is empty")
    texts = list(zip(*(split[name] for name in columns))) if len(columns) == 2 else list(split[columns[0]])
    labels = list(split[settings.label_column])
    names = getattr(split.features[settings.label_column], "names", None)
    if names and -1 not in labels:
        labels = [names[i] for i in labels]
    if wrong := [i for i, label in enumerate(labels) if label is None]:
        raise InputError(f"{source}: row {wrong[0] + 1} has no label in {settings.label_column!r}")
    return Table(source, texts, labels)


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
        fractional = numeric and any(number != int(number) for number in numbers if number is not None)
        if task == "regression" and not numeric:
            wrong = next(label for label, number in zip(table.labels, numbers) if number is None)
            raise InputError(f"{table.source}: got the label {wrong!r}; --task regression takes numbers")
        if task == "regression" or (task == "auto" and fractional):
            return cls(())
        found = {_class_name(label) for label in table.labels}
        if len(found) < 2:
            raise InputError(
                f"{table.source}: all rows have the label {found.pop()!r}; accepted are at least two classes"
            )
        return cls(tuple(sorted(found, key=lambda name: (_number(name) or 0.0, name))))

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
                        f"{table.source}: row {row} has the label {table.labels[row - 1]!r}; accepted are numbers"
                    )
            return [number for number in numbers if number is not None]
        index = {name: i for i, name in enumerate(self.names)}
        indices = []
        for row, label in enumerate(table.labels, start=1):
            if (name := _class_name(label)) not in index:
                shown = ", ".join(self.names[:10]) + (", ..." if len(self.names) > 10 else "")
                raise InputError(f"{table.source}: row {row} has the label {name!r}; the classes are {shown}")
            indices.append(index[name])
        return indices


def _number(label: Label) -> float | None:
    try:
        number = float(label)
    except ValueError:
        return None
    return number if np.isfinite(number) else None


def _class_name(label: Label) -> str:
    return str(int(label)) if isinstance(label, float) and label == int(label) else str(label).strip()


@dataclass
class Examples(torch.utils.data.Dataset):
    """Tokenized rows, with the teacher's view of each once it is known.

    labels: ``(rows,)`` class indices or numbers. teacher_logits ``(rows, C)`` and attribution, a list of ``(n,)`` per row.
    """

    encoded: list[Encoded]
    labels: Sequence[int] | Sequence[float]
    pad_id: int
    teacher_logits: Tensor | None = None
    attribution: list[Tensor] | None = None

    @classmethod
    def make(cls, table: Table, labels: Labels, tokenizer: Tokenizer, pad_id: int, max_tokens: int) -> Examples:
        return cls(encode(tokenizer, table.texts, max_tokens), labels.encode(table), pad_id)

    def __len__(self) -> int:
        return len(self.encoded)

    def __getitem__(self, number: int) -> int:
        return number  # the collator looks rows up: only numbers travel through the sampler

    @property
    def lengths(self) -> list[int]:
        return [len(row.input_ids) for row in self.encoded]

    def collate(self, numbers: Sequence[int]) -> dict[str, Tensor]:
        """Right-pad rows to int64 ``(B, S)`` inputs with labels ``(B,)`` and, where known, the teacher's view."""
        batch = {
            k: torch.from_numpy(v) for k, v in pad([self.encoded[i] for i in numbers], self.pad_id, INPUTS).items()
        }
        batch["labels"] = torch.tensor([self.labels[i] for i in numbers])
        if self.attribution is not None and self.teacher_logits is not None:
            rows = [self.attribution[i] for i in numbers]
            batch["attribution"] = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
            batch["teacher_logits"] = self.teacher_logits[list(numbers)]
        return batch

    def batches(self, size: int) -> Iterator[tuple[list[int], dict[str, Tensor]]]:
        """Yield row numbers and batches of rows of similar length, longest first, so that memory runs out at once or never."""
        order = sorted(range(len(self)), key=lambda i: -len(self.encoded[i].input_ids))
        for begin in range(0, len(order), size):
            numbers = order[begin : begin + size]
            yield numbers, self.collate(numbers)

    def with_teacher(self, logits: Tensor, attribution: list[Tensor]) -> Examples:
        return dataclasses.replace(self, teacher_logits=logits, attribution=attribution)


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


def to_device(batch: Mapping[str, Tensor], device: torch.device, names: Iterable[str] = INPUTS) -> dict[str, Tensor]:
    return {name: batch[name].to(device) for name in names if name in batch}
