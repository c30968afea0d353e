"""Tables of texts in, tables with answers out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow

from ...contract import (
    HEAD_EMBEDDING,
    HEAD_HYBRID,
    HEAD_MASKED,
    HEAD_SEQUENCE,
    HEAD_SPANS,
    HEAD_SPARSE,
    HEAD_TOKENS,
    HEAD_VECTORS,
    VECTORS,
)
from ...data.readers import Text
from ...errors import InputError, quoted
from ...inference.multi_vector import Hybrid
from ...inference.predictor import Predictor
from .config import ScoringConfig

MAX_ROWS, MAX_CHARACTERS = 8192, 1 << 22
"""Of a block, which `load` sorts by length and divides into batches. It is tokenized at once, and a token takes some 100 bytes."""

_PART = {"text": pyarrow.string(), "start": pyarrow.int64(), "end": pyarrow.int64(), "score": pyarrow.float64()}
_PARTS = pyarrow.list_(pyarrow.struct(list(_PART.items())))
_ENTITIES = pyarrow.list_(pyarrow.struct([("label", pyarrow.string()), *_PART.items()]))
_FOR_HEADS = {
    "prompt_name": (*VECTORS, HEAD_VECTORS),
    "prompt": (*VECTORS, HEAD_VECTORS),
    "truncate_dim": (HEAD_EMBEDDING, HEAD_HYBRID),
    "max_active_dims": (HEAD_SPARSE,),
    "aggregation": (HEAD_TOKENS,),
    "top_k": (HEAD_SPANS,),
    "may_be_none": (HEAD_SPANS,),
    "windows": (HEAD_SPANS,),
}
"""What is asked for beyond the defaults of `ScoringConfig`, and the heads that have such."""


class Answering:
    """A deployment that answers tables.

    Args:
        pairs: texts are pairs, of two columns.

    Attributes:
        fields: of the answer, before any prefix. target: what answers.

    Raises:
        InputError: what is asked for is about another head.
    """

    def __init__(self, deployment: Predictor, asked: ScoringConfig, batch_size: int, pairs: bool) -> None:
        self._of, self._asked, self._size = deployment, asked, batch_size
        self.target = deployment.target
        # This answer is as wide as all others, and refused where these would be.
        answered = self._answers([("a", "a")] if pairs else ["a"])
        self.fields: list[pyarrow.Field] = [pyarrow.field(name, type_) for name, type_ in self._types(answered).items()]

    def names(self) -> list[str]:
        """Return the names of the answer's columns."""
        return [self._asked.prefix + field.name for field in self.fields]

    def table(self, table: pyarrow.Table, columns: Sequence[str], where: str, first: int = 0) -> pyarrow.Table:
        """Answer a table's rows; return the columns to keep, and those of the answer.

        Args:
            columns: one that holds texts, or two that hold pairs.
            where: for messages, a file's name. first: number of the table's first row in it.

        Raises:
            InputError: a row without a text, or one that cannot be read; its file and row are named.
        """
        texts = _texts(table, columns, where, first)
        parts: list[list[pyarrow.Array]] = [[] for _ in self.fields]
        for begin, end in _blocks(texts):
            try:
                answers = self._answers(texts[begin:end])
            except InputError as error:
                raise InputError(f"{where}: rows {first + begin + 1} to {first + end}: {error}") from error
            for part, field in zip(parts, self.fields):
                part.append(_array(answers, field))
        kept = table if self._asked.keep is None else table.select(list(dict.fromkeys(self._asked.keep)))
        named = [field.with_name(name) for name, field in zip(self.names(), self.fields)]
        schema = pyarrow.schema([*kept.schema, *named])  # without pandas' metadata, which would leave the answers out
        answered = [pyarrow.chunked_array(part, field.type) for part, field in zip(parts, self.fields)]
        return pyarrow.Table.from_arrays([*kept.columns, *answered], schema=schema)

    def _answers(self, texts: Sequence[Text]) -> Any:
        asked = self._asked
        if asked.labels is not None:
            said = {} if asked.hypothesis_template is None else {"hypothesis_template": asked.hypothesis_template}
            return self._of.zero_shot(
                texts,  # type: ignore[arg-type]
                asked.labels,
                **said,
                multi_label=asked.multi_label,
                batch_size=self._size,
            )
        if self._of.head == HEAD_MASKED:
            raise InputError(
                f"{self._of.directory.name} fills in masked tokens, and there is no column for that; type: adtp-run OUT --file FILE"
            )
        self._check_asked()
        shared: dict[str, Any] = {"prompt_name": asked.prompt_name, "prompt": asked.prompt, "batch_size": self._size}
        if self._of.head == HEAD_EMBEDDING:
            return self._of.encode(texts, **shared, truncate_dim=asked.truncate_dim)  # type: ignore[arg-type]
        if self._of.head == HEAD_SPARSE:
            return self._of.encode_sparse(texts, **shared, max_active_dims=asked.max_active_dims)  # type: ignore[arg-type]
        if self._of.head == HEAD_VECTORS:
            return self._of.encode_document(texts, **shared)  # type: ignore[arg-type]
        if self._of.head == HEAD_HYBRID:
            return self._of.encode_hybrid(texts, **shared, truncate_dim=asked.truncate_dim)  # type: ignore[arg-type]
        return self._of(
            texts,
            batch_size=self._size,
            aggregation=asked.aggregation,
            top_k=asked.top_k,
            may_be_none=asked.may_be_none,
            windows=asked.windows,
        )

    def _check_asked(self) -> None:
        """Raises InputError for what is asked of another head."""
        for name, heads in _FOR_HEADS.items():
            if getattr(self._asked, name) != getattr(ScoringConfig, name) and self._of.head not in heads:
                raise InputError(
                    f"{name}: is for models with the head {' or '.join(heads)}, and this one has {self._of.head}; leave it out"
                )

    def _types(self, answered: Any) -> dict[str, pyarrow.DataType]:
        head, number = self._of.head, pyarrow.float64()
        if head == HEAD_EMBEDDING:
            return {"vector": pyarrow.list_(pyarrow.float32(), answered.shape[1])}
        weights = {"indices": pyarrow.list_(pyarrow.int32()), "values": pyarrow.list_(pyarrow.float32())}
        if head == HEAD_SPARSE:
            return weights
        if head == HEAD_VECTORS:
            return {"vectors": _vectors_type(answered)}
        if head == HEAD_HYBRID:
            dense = pyarrow.list_(pyarrow.float32(), answered.dense.shape[1])
            return {"vector": dense, **weights, "vectors": _vectors_type(answered.vectors)}
        if self._asked.labels is not None:
            return {
                "labels": pyarrow.list_(pyarrow.string()),
                "scores": pyarrow.list_(number),
                "truncated": pyarrow.bool_(),
            }
        own: dict[str, dict[str, pyarrow.DataType]] = {
            HEAD_SEQUENCE: {
                "label": pyarrow.string(),
                "score": number,
                "scores": pyarrow.struct([(label, number) for label in dict.fromkeys(self._of.labels)]),
            },
            HEAD_TOKENS: {"entities": _ENTITIES},
            HEAD_SPANS: {
                "answer": pyarrow.string(),
                "start": pyarrow.int64(),
                "end": pyarrow.int64(),
                "score": number,
                "no_answer": number,
                "answers": _PARTS,
            },
        }
        return {**own[head], "truncated": pyarrow.bool_()}


def _vectors_type(answered: Sequence[np.ndarray]) -> pyarrow.DataType:
    return pyarrow.list_(pyarrow.list_(pyarrow.float32(), answered[0].shape[1]))


def _array(answers: Any, field: pyarrow.Field) -> pyarrow.Array:
    """Return one field of all answers."""
    if isinstance(answers, Hybrid):
        answers = {"vector": answers.dense, "vectors": answers.vectors}.get(field.name, answers.sparse)
    if field.name == "vectors":
        bounds = pyarrow.array(np.cumsum([0, *map(len, answers)]), pyarrow.int32())
        flat = pyarrow.array(np.concatenate(answers).reshape(-1), pyarrow.float32())
        size = field.type.value_type.list_size
        return pyarrow.ListArray.from_arrays(bounds, pyarrow.FixedSizeListArray.from_arrays(flat, size))
    if pyarrow.types.is_fixed_size_list(field.type):
        return pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(answers.reshape(-1)), field.type.list_size)
    values = [getattr(answer, field.name) for answer in answers]
    if pyarrow.types.is_list(field.type) and pyarrow.types.is_struct(field.type.value_type):
        values = [[vars(part) for part in parts] for parts in values]
    return pyarrow.array(values, field.type)


def _texts(table: pyarrow.Table, columns: Sequence[str], where: str, first: int) -> list[Any]:
    listed = []
    for name in columns:
        try:
            values = table.column(name).to_pylist()
        except UnicodeDecodeError as error:
            raise InputError(f"{where}: column {quoted(name)} is not UTF-8 text ({error.reason})") from error
        if None in values:
            raise InputError(f"{where}: row {first + values.index(None) + 1} has no text in {quoted(name)}")
        listed.append(values)
    return listed[0] if len(listed) == 1 else list(zip(*listed))


def _blocks(texts: Sequence[Text]) -> Iterator[tuple[int, int]]:
    """Yield where blocks begin and end."""
    begin, characters = 0, 0
    for i, text in enumerate(texts):
        length = len(text) if isinstance(text, str) else len(text[0]) + len(text[1])
        if i > begin and (i - begin == MAX_ROWS or characters + length > MAX_CHARACTERS):
            yield begin, i
            begin, characters = i, 0
        characters += length
    if begin < len(texts):
        yield begin, len(texts)
