"""How a directory of sentence-transformers says that texts are read: the file beside its encoder, and how long a text may be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..errors import InputError, check_int
from ..io import read_json
from . import chat_template

UNLIMITED = 10**6
"""transformers writes 10^30 for tokenizers without a limit."""


def limit_files(home: Path) -> list[Path]:
    """Return the file that says how texts are read: it is called after the model in older versions."""
    return [path for path in sorted(home.glob("sentence_*_config.json")) if path.is_file()][:1]


def fields_of_limits(home: Path) -> dict[str, Any]:
    """Return its fields; none where there is no such file. Raises InputError where they change the model or its tokenizer."""
    return chat_template.without_arguments(home, next((document(path) for path in limit_files(home)), {}))


def stated_length(home: Path, longest: Any, least: int) -> int | None:
    """Return how many tokens a text may have, as a directory says; None where it says nothing, or that any text may be read.

    Raises:
        InputError: it is no integer, or below `least`.
    """
    if longest is None or (isinstance(longest, (int, float)) and longest > UNLIMITED):
        return None
    check_int(f"{home}: max_seq_length", longest, least)
    return int(longest)


def document(path: Path) -> dict[str, Any]:
    """Return a JSON object; an empty one where there is no file."""
    fields = read_json(path) if path.is_file() else {}
    if not isinstance(fields, dict):
        raise InputError(f"{path} holds {type(fields).__name__}; accepted is a JSON object")
    return fields
