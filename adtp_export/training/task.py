"""What is to be learned, and from which model: settings and data of a run, read and checked before any work starts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from transformers import PretrainedConfig, PreTrainedTokenizerFast

from ..errors import InputError
from .data import Examples, Labels, Table, load_tables
from .models import labels_of_teacher, load_config, load_tokenizer, student_config
from .settings import Settings

MAX_TOKENS = 128


@dataclass(frozen=True, kw_only=True)
class Task:
    """Settings with `max_tokens` resolved; the teacher, or the base that becomes one; and the rows of each split.

    source: where the encoder comes from. tables and parts: by split, the texts as they were given, and tokenized.
    """

    settings: Settings
    source: str
    encoder: PretrainedConfig
    tokenizer: PreTrainedTokenizerFast
    labels: Labels
    tables: Mapping[str, Table]
    parts: Mapping[str, Examples]

    @property
    def kind(self) -> str:
        return "regression" if self.labels.regression else "classification"

    def __str__(self) -> str:
        sizes = ", ".join(f"{len(table)} {split}" for split, table in self.tables.items())
        return f"{sizes} rows; {self.kind if self.labels.regression else f'{len(self.labels.names)} classes'}"


def read_task(settings: Settings, progress: Callable[[int, int], None] = lambda done, total: None) -> Task:
    """Read data, tokenizer and configuration, and see that they fit each other and the settings.

    Args:
        settings: with a base or a teacher.
        progress: takes (done, total) splits.

    Raises:
        InputError: bad data, a model that cannot be loaded or does not fit, settings that the student cannot have.
        MissingDependencyError: `datasets` is not installed and a data set was named.
    """
    tables = load_tables(settings)
    labels = Labels.of(tables["train"], settings.task)
    tables["train"] = tables["train"].sample(settings.train_rows)
    source = settings.teacher or settings.base
    assert source is not None
    encoder, tokenizer = load_config(source), load_tokenizer(source)
    if settings.teacher is not None:
        labels = labels_of_teacher(source, encoder, labels)
    longest = encoder.max_position_embeddings
    max_tokens = settings.max_tokens or min(MAX_TOKENS, longest)
    if max_tokens > longest:
        raise InputError(f"--max-tokens: got {max_tokens}; the model takes up to {longest}")
    settings = dataclasses.replace(settings, max_tokens=max_tokens)
    student_config(encoder, settings)
    parts = {}
    for split, table in tables.items():
        parts[split] = Examples.make(table, labels, tokenizer, encoder, max_tokens)
        progress(len(parts), len(tables))
    return Task(
        settings=settings,
        source=source,
        encoder=encoder,
        tokenizer=tokenizer,
        labels=labels,
        tables=tables,
        parts=parts,
    )
