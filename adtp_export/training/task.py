"""What is to be learned, and from which model: settings and data of a run, read and checked before any work starts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

from ..contract import HEAD_EMBEDDING, HEAD_SEQUENCE
from ..data.labelled import ANSWERS, CONTEXT, QUESTION, TAGS, TOKENS, is_squad
from ..data.readers import ending, json_rows, opened
from ..data.windows import Windows
from ..errors import InputError, flag_name, quoted
from ..imports.sentence_transformers import put_in_lower_case, reading
from ..model import registry
from ..model.flops import Shape
from .budget import with_budget
from .data import Examples, Labels, Table, load_tables
from .method_table import METHODS
from .models import labels_of_teacher, load_config, load_teacher, load_tokenizer, student_config
from .objectives import Objective, Reader, for_head
from .settings import AUTO, HEAD_OF_TASK, MASK_NONE, TrainOptions

MAX_TOKENS = 128


@dataclass(frozen=True, kw_only=True)
class Task:
    """Objective; settings with lengths, sites and budget resolved; the teacher, or its base; and the rows of each split.

    source: where the encoder comes from. tables and parts: by split, the texts as they were given, and tokenized.
    """

    objective: Objective
    settings: TrainOptions
    source: str
    encoder: PretrainedConfig
    tokenizer: PreTrainedTokenizerFast
    labels: Labels
    tables: Mapping[str, Table]
    parts: Mapping[str, Examples]

    @property
    def kind(self) -> str:
        return self.objective.kind(self.labels)

    @property
    def dev_is_test(self) -> bool:
        """Whether the student is judged on the rows that its checkpoint was chosen by, for want of others."""
        dev, test = self.tables["dev"], self.tables["test"]
        return dev is test or (dev.texts, dev.labels) == (test.texts, test.labels)

    def load_teacher(self, source: str, tuned: bool) -> PreTrainedModel:
        """Load an encoder with the head of this task; see `models.load_teacher`."""
        return load_teacher(source, self.objective, self.labels, self.tokenizer, tuned)

    def __str__(self) -> str:
        told = [split for split in self.tables if split != "test" or not self.dev_is_test]
        sizes = ", ".join(f"{len(self.tables[split])} {split}" for split in told)
        rows = ", ".join(f"{len(self.parts[split])} {split}" for split in told)
        kind = (
            f"{len(self.labels.names)} {'tags' if self.kind == 'tags' else 'classes'}"
            if self.labels.names
            else self.kind
        )
        return f"{sizes} rows; {kind}" + ("" if rows == sizes else f"; as {rows} texts or windows")


def choose_head(settings: TrainOptions) -> str:
    """Return the head that a run trains: that of ``--task``, or the one that the columns of the training rows are for."""
    if settings.task != AUTO:
        return HEAD_OF_TASK[settings.task]
    path = Path(settings.train) if settings.train else Path()
    if is_squad(path):
        return HEAD_OF_TASK["spans"]
    if ending(path) == ".jsonl":
        with opened(path, ".jsonl") as stream:
            columns = set(next(iter(json_rows(stream, path)), ()))
        if {TOKENS, TAGS} <= columns:
            return HEAD_OF_TASK["tags"]
        if {QUESTION, CONTEXT, ANSWERS} <= columns:
            return HEAD_OF_TASK["spans"]
    return HEAD_OF_TASK["classification"]


def check_head(head: str, settings: TrainOptions) -> None:
    """Raises InputError for settings that make no sense for a head."""
    named = next(task for task, own in HEAD_OF_TASK.items() if own == head)
    if settings.data is not None and named != "classification":
        raise InputError(
            f"--data: got {quoted(settings.data)} for --task {named}; accepted is --train FILE, see docs/training.md"
        )
    for name in ("stride", "max_answer_tokens") if named != "spans" else ():
        value, resolved = getattr(settings, name), (settings.max_tokens or 0) // 4  # which a run that goes on was given
        if value != getattr(TrainOptions, name) and (name, value) != ("stride", resolved):
            raise InputError(f"{flag_name(name)}: got {value} for --task {named}; only spans have that. Leave it out")
    if head != HEAD_SEQUENCE:
        check_mask(named, settings)
    if head == HEAD_EMBEDDING:
        if settings.temperature != TrainOptions.temperature:
            raise InputError(
                f"--temperature: got {settings.temperature:g} for --task embedding, which compares vectors by their cosine; leave it out"
            )
        if settings.base is not None:
            raise InputError(
                "--task embedding: a student learns the vectors of its teacher; give the model as --teacher, not as --base"
            )
        if "teacher" in settings.left_out:
            raise InputError("--ablate: got teacher; --task embedding has no other loss. Leave it out")
        if "logit" in settings.left_out and (
            settings.method == "top" or not any(settings.weights[term] for term in ("ig", "arp", "tsp"))
        ):
            raise InputError("--ablate: got logit; --task embedding has no other loss with this method. Leave it out")


def check_mask(kind: str, settings: TrainOptions) -> None:
    """Raises InputError for a mask with a task, `kind`, whose answers are not right or wrong."""
    if settings.mask != MASK_NONE:
        raise InputError(
            f"--mask: got {quoted(settings.mask)} for --task {kind}; accepted is classification, where an answer is right or wrong. "
            "Leave --mask out"
        )


def read_task(settings: TrainOptions, progress: Callable[[int, int], None] = lambda done, total: None) -> Task:
    """Read data, tokenizer and configuration, and see that they fit each other and the settings.

    Args:
        settings: with a base or a teacher.
        progress: takes (done, total) splits.

    Raises:
        InputError: bad data, a model that cannot be loaded or does not fit, settings that the student cannot have.
        MissingDependencyError: `datasets` is not installed and a data set was named.
    """
    objective = for_head(choose_head(settings))
    check_head(objective.head, settings)
    return make_task(settings, objective, load_tables(settings, objective.read), progress)


def make_task(
    settings: TrainOptions,
    objective: Objective,
    tables: dict[str, Table],
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Task:
    """Make a task of tables that are read already; see `read_task`."""
    # Rows that were held out of the training rows count: a rare class may be among these alone.
    labels = objective.labels(tables["train"].all_rows(), settings)
    if labels.regression:
        check_mask("regression", settings)
        if settings.temperature != TrainOptions.temperature:
            raise InputError(
                f"--temperature: got {settings.temperature:g} for regression, which takes the squared error of numbers; leave it out"
            )
    tables = {**tables, "train": tables["train"].sample(settings.train_rows)}
    source = settings.teacher or settings.base
    assert source is not None
    how = reading(Path(source)) if objective.head == HEAD_EMBEDDING else None
    home = str(how.home) if how else source
    encoder, tokenizer = load_config(home), load_tokenizer(home)
    if how and how.lower:
        put_in_lower_case(tokenizer.backend_tokenizer)
    if settings.teacher is not None:
        labels = labels_of_teacher(source, encoder, labels, objective.head)
    longest = registry.backbone(encoder.model_type).max_tokens(encoder)
    max_tokens = settings.max_tokens or min(MAX_TOKENS, longest)
    if max_tokens > longest:
        raise InputError(f"--max-tokens: got {max_tokens}; the model takes up to {longest}")
    sites = settings.prune_sites
    if sites is None:
        sites = ",".join(METHODS[settings.method].sites(settings.layers or encoder.num_hidden_layers))
    stride = max_tokens // 4 if settings.stride is None else settings.stride
    settings = dataclasses.replace(settings, max_tokens=max_tokens, stride=stride, prune_sites=sites)
    shape = Shape.of(registry.fields(student_config(encoder, settings, objective.head).encoder_config))
    windows = Windows(max_tokens, stride, settings.max_answer_tokens)
    reader = Reader(tokenizer, encoder, windows, how.prompt if how else "")
    parts: dict[str, Examples] = {}
    for split, table in tables.items():
        again = split == "test" and table is tables["dev"]
        parts[split] = parts["dev"] if again else objective.examples(table, labels, reader)
        progress(len(parts), len(tables))
    settings = with_budget(settings, shape, parts["dev"].lengths)
    return Task(
        objective=objective,
        settings=settings,
        source=source,
        encoder=encoder,
        tokenizer=tokenizer,
        labels=labels,
        tables=tables,
        parts=parts,
    )
