"""One answer per word: tags. A word is answered for by its first piece; the other pieces have no label."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence

from ...contract import HEAD_TOKENS
from ...data.labelled import TAGS, TOKENS, encode_words, read_tagged
from ...errors import InputError, quoted
from ...explain.gradients import answer_score
from ...inference.answers.tokens import quality
from ..data import Examples, Labels, Table, by_number, known_inputs
from ..losses import logit_loss
from ..settings import TrainOptions
from . import Batch, Objective, Reader
from .sequence import another_order

NO_LABEL = -100
"""transformers and torch leave such tokens out."""


@dataclass(kw_only=True)
class TaggedExamples(Examples):
    """Texts of tagged words.

    labels: per text ``(n,)`` indices of tags, `NO_LABEL` for all but the first piece of each word. names: of the tags.
    """

    names: Sequence[str]

    def collate_labels(self, numbers: Sequence[int]) -> dict[str, Tensor]:
        """``labels (B, S) int64``, `NO_LABEL` for padding, too."""
        rows = [torch.tensor(self.labels[i]) for i in numbers]
        return {"labels": pad_sequence(rows, batch_first=True, padding_value=NO_LABEL)}


class TokensObjective(Objective):
    """Tagging. Tokens that are dropped answer with the state that reached their cut."""

    head = HEAD_TOKENS

    def read(self, path: Path, settings: TrainOptions) -> Table:
        tags = TAGS if settings.label_column == TrainOptions.label_column else settings.label_column
        rows = list(read_tagged(path, settings.text_column or TOKENS, tags))
        return Table(path.name, [words for words, _ in rows], [tags for _, tags in rows])

    def labels(self, table: Table, settings: TrainOptions) -> Labels:
        found = sorted({tag for tags in table.labels for tag in tags}, key=by_number)
        if len(found) < 2:
            raise InputError(
                f"{table.source}: all words have the tag {quoted(found[0])}; accepted are at least two tags"
            )
        return Labels(tuple(found))

    def examples(self, table: Table, labels: Labels, reader: Reader) -> Examples:
        """Tokenize the words, and give each tag to its word's first piece; words after the cut are left out."""
        placed = encode_words(reader.tokenizer.backend_tokenizer, table.texts, reader.max_tokens)
        index = {name: i for i, name in enumerate(labels.names)}
        rows = []
        for number, (words, tags, (_, owners)) in enumerate(zip(table.texts, table.labels, placed), start=1):
            if (unknown := next((tag for tag in tags if tag not in index), None)) is not None:
                known = ", ".join(labels.names[:10]) + (", ..." if len(labels.names) > 10 else "")
                raise InputError(f"{table.source}: row {number} has the tag {quoted(unknown)}; the tags are {known}")
            firsts = [owner not in (None, before) for before, owner in zip([None, *owners], owners)]
            row = [index[tags[owner]] if first else NO_LABEL for owner, first in zip(owners, firsts)]
            if max(row, default=NO_LABEL) == NO_LABEL:
                raise InputError(
                    f"{table.source}: row {number}: its {len(tags)} tags do not align with tokens: the tokenizer leaves nothing of "
                    f"{quoted(' '.join(words))}; take the row out"
                )
            rows.append(row)
        encoded_rows = [encoded for encoded, _ in placed]
        inputs = known_inputs(encoded_rows, reader.config, table.source)
        pad_id = int(reader.tokenizer.pad_token_id or 0)
        return TaggedExamples(encoded=encoded_rows, labels=rows, pad_id=pad_id, inputs=inputs, names=labels.names)

    def kind(self, labels: Labels) -> str:
        return "tags"

    def label_loss(self, answer: Tensor, batch: Batch) -> Tensor:
        return cross_entropy(answer.transpose(1, 2), batch["labels"], ignore_index=NO_LABEL)

    def logit_loss(self, answer: Tensor, teacher: Tensor, batch: Batch, temperature: float) -> Tensor:
        """Over the tokens that have labels: what the others answer is read by nobody, and no teacher has learned it."""
        asked = batch["labels"] != NO_LABEL
        return logit_loss(answer[asked], teacher[asked], temperature)

    def score(self, answer: Tensor, whole: Tensor, batch: Batch) -> Tensor:
        """Return the sum, over the words of a text, of the log odds of the tag that is answered."""
        asked = batch["labels"] != NO_LABEL
        odds = answer_score(answer[asked], whole[asked].argmax(1))
        return odds.new_zeros(len(answer)).index_add(0, asked.nonzero()[:, 0], odds)

    def explained_labels(self, examples: Examples) -> bytes:
        return str([[label != NO_LABEL for label in row] for row in examples.labels]).encode()

    def quality(self, answers: Sequence[Tensor], examples: Examples) -> dict[str, float]:
        assert isinstance(examples, TaggedExamples)
        answered, true = [], []
        for answer, labels in zip(answers, examples.labels):
            pairs = [(a, t) for a, t in zip(answer.argmax(1).tolist(), labels) if t != NO_LABEL]
            answered.append([examples.names[a] for a, _ in pairs])
            true.append([examples.names[t] for _, t in pairs])
        return quality(answered, true, examples.names)

    def row_scores(self, answers: Sequence[Tensor], examples: Examples) -> np.ndarray:
        """The share of a text's words whose tag is right."""
        shares = []
        for answer, row in zip(answers, examples.labels):
            tags = torch.tensor(row)
            asked = tags != NO_LABEL
            shares.append((answer.argmax(1)[asked] == tags[asked]).double().mean().item())
        return np.array(shares)

    def classes_in_another_order(
        self, answers: Sequence[Tensor], examples: Examples, names: Sequence[str]
    ) -> dict[str, str] | None:
        answered, true = (
            torch.cat(parts)
            for parts in zip(*((answer.argmax(1), torch.tensor(row)) for answer, row in zip(answers, examples.labels)))
        )
        asked = true != NO_LABEL
        return another_order(answered[asked].numpy(), true[asked].numpy(), names)

    def main_score(self, figures: Mapping[str, float]) -> float:
        """F1 of entities where tags mark them, else the share of right tags."""
        return figures.get("f1", figures["accuracy"])
