"""What a caller asks for, checked: texts, prompts, and whether the model's head answers that at all."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Set
from typing import Any

import numpy as np

from ..contract import (
    HEAD_EMBEDDING,
    HEAD_HYBRID,
    HEAD_MASKED,
    HEAD_SEQUENCE,
    HEAD_SPANS,
    HEAD_SPARSE,
    HEAD_TOKENS,
    HEAD_VECTORS,
)
from ..data.readers import Text
from ..errors import InputError, check_int, did_you_mean, quoted
from .session import Session

_METHODS = {
    HEAD_SEQUENCE: 'load(OUT)(["a text"])',
    HEAD_TOKENS: 'load(OUT)(["a text"])',
    HEAD_SPANS: 'load(OUT)([("a question", "its context")])',
    HEAD_EMBEDDING: 'load(OUT).encode(["a text"])',
    HEAD_SPARSE: 'load(OUT).encode_sparse(["a text"])',
    HEAD_VECTORS: 'load(OUT).encode_query(["a query"]) or encode_document(["a text"]), which give several vectors of each text',
    HEAD_MASKED: 'load(OUT).fill_mask(["a text with its mask token"])',
    HEAD_HYBRID: 'load(OUT).encode_hybrid(["a text"])',
}


class Asked(Session):
    """A session that knows prompts, and which method is for its head."""

    def _usual(self, name: str, prompt_name: str | None, prompt: str | None) -> tuple[str | None, str | None]:
        """Return the name and the text that the caller gives. Where nothing is given, `name`; and no prompt, not even the model's default,
        where the model has none of that name.
        """
        if prompt_name is not None or prompt is not None:
            return prompt_name, prompt
        return (name, None) if name in self.prompts else (None, "")

    def _prompt(self, name: str | None, prompt: str | None) -> str:
        """Return what is put before texts; raises InputError for a name that is not known, and where both are given."""
        if prompt is not None:
            if not isinstance(prompt, str):
                raise InputError(f"prompt: got {type(prompt).__name__}; accepted is a string")
            if name is not None:
                raise InputError(
                    f"prompt, prompt_name: got {quoted(prompt)} and {quoted(name)}; give a text or a name, not both"
                )
            return prompt
        name = name if name is not None else self._config.adtp.prompt
        if name is None:
            return ""
        if not isinstance(name, str) or name not in self.prompts:
            known = ", ".join(self.prompts) or "none: this model has no prompts"
            raise InputError(
                f"prompt_name: got {quoted(name)}; accepted are {known}{did_you_mean(str(name), self.prompts)}; "
                "a text of your own goes into prompt"
            )
        return self.prompts[name]

    def _dimensions(self, truncate_dim: int | None) -> tuple[int, int]:
        """Return the length of the model's vectors, and how many numbers of each are asked for; raises InputError for more than it has."""
        whole = self._config.adtp.dimension
        if truncate_dim is not None:
            check_int("truncate_dim", truncate_dim, 1, whole)
        return whole, truncate_dim or self._config.dimension

    def _expect(self, *heads: str, what: str = "a call is") -> None:
        """Raises InputError where the model has another head, and names the method for that."""
        if self.head not in heads:
            raise InputError(
                f"{what} for models with the head {' or '.join(heads)}, and {self.directory.name} has {self.head}; type: "
                f"{_METHODS[self.head]}"
            )


def as_texts(texts: object) -> list[Text]:
    """Return one text or pair, or what gives several in an order, as a list."""
    if isinstance(texts, str) or _is_pair(texts):
        return [texts]  # type: ignore[list-item]
    listed = listed_in_order(texts)
    if listed is None:
        raise InputError(
            f"texts: got {type(texts).__name__}; accepted are a string, a pair of strings as a tuple, or a list of these"
        )
    for i, text in enumerate(listed):
        if not isinstance(text, str) and not _is_pair(text):
            raise InputError(
                f"texts: got {type(text).__name__} at index {i}; accepted are strings, or pairs of strings as tuples"
            )
    return listed


def as_strings(texts: object, name: str) -> list[str]:
    """Return one text, or what gives several in an order, as a list; a tuple is no pair here.

    Raises:
        InputError: something else; `name` is the argument's.
    """
    listed = [texts] if isinstance(texts, str) else listed_in_order(texts)
    if listed is None:
        raise InputError(f"{name}: got {type(texts).__name__}; accepted are a string, or a list of strings")
    for i, text in enumerate(listed):
        if not isinstance(text, str):
            got = "a pair" if _is_pair(text) else type(text).__name__
            raise InputError(f"{name}: got {got} at index {i}; accepted are strings")
    return listed


def as_token_ids(prompts: object, vocabulary: int) -> list[np.ndarray]:
    """Return the token ids of each prompt, ``(n,) int64``.

    Raises:
        InputError: no list of prompts, or an empty one; a prompt without tokens, or with what is no id below `vocabulary`.
    """
    listed = listed_in_order(prompts)
    if not listed:
        got = type(prompts).__name__ if listed is None else "no prompts"
        raise InputError(f"prompts: got {got}; accepted is a list of at least one, each a list of token ids")
    found = []
    for number, prompt in enumerate(listed):
        try:
            ids = np.asarray(prompt)
        except (TypeError, ValueError):  # lists in lists, of unequal lengths
            ids = np.asarray("")
        if ids.ndim == 1 and not len(ids):
            raise InputError(f"prompt {number} has no tokens; accepted is at least one")
        mixed = ids.ndim == 1 and any(isinstance(each, (bool, np.bool_)) for each in prompt)
        # Integers that are too large for any type of numpy are objects or floats there.
        if ids.ndim != 1 or mixed or not np.issubdtype(ids.dtype, np.integer):
            raise InputError(f"prompt {number} is {quoted(prompt)}; accepted are token ids, 0 to {vocabulary - 1}")
        if (unknown := ids[(ids < 0) | (ids >= vocabulary)]).size:
            raise InputError(f"prompt {number} has the token {unknown[0]}; the model knows 0 to {vocabulary - 1}")
        found.append(ids.astype(np.int64))
    return found


def listed_in_order(values: object) -> list[Any] | None:
    """Return what gives several values in an order as a list; None for strings, bytes, sets, dicts, tables and what gives none."""
    if isinstance(values, (str, bytes, bytearray, os.PathLike, Set, Mapping)) or not isinstance(values, Iterable):
        return None
    if hasattr(values, "columns"):  # a table of pandas would give their names
        return None
    try:
        found = iter(values)
    except TypeError:  # an array without axes
        return None
    return list(found)


def _is_pair(text: object) -> bool:
    return isinstance(text, tuple) and len(text) == 2 and all(isinstance(part, str) for part in text)
