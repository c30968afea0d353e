"""How a late-interaction directory says that its queries and documents are read: markers, lengths, expansion, tokens to skip."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from ..data.sides import DOCUMENT, QUERY, Side, Sides
from ..errors import InputError, check_int, quoted
from ..model.tokenizer import special_token

_STRATEGIES = ("fixed", "min")


class SidesReader:
    """Reads the fields of one directory.

    Args:
        home: where the tokenizer's files are. directory: for messages.
    """

    def __init__(self, tokenizer: Tokenizer, home: Path, directory: Path) -> None:
        self._tokenizer, self._home, self._directory = tokenizer, home, directory
        self.notes: tuple[str, ...] = ()

    def read(self, said: Mapping[str, Any], usual: int | None) -> Sides:
        """Return how texts are read.

        Args:
            said: fields by their names in PyLate, and `query_expansion` and `skiplist_tasks` of sentence-transformers.
            usual: tokens of a text where nothing is said; None: as many as the model reads.

        Raises:
            InputError: a marker or a token that the tokenizer lacks, or a field that is malformed.
        """
        query_length, document_length = (self._length(said, f"{side}_length") for side in ("query", "document"))
        expand_to, attends, token, fixed = self._expansion(said, query_length)
        skip = self._skip(said.get("skiplist_words") or [])
        tasks = self._tasks(said.get("skiplist_tasks", DOCUMENT))
        return Sides(
            query=Side(
                marker=self._marker(said, "query_prefix"),
                max_tokens=expand_to if fixed else query_length or usual,
                expand_to=expand_to,
            ),
            document=Side(marker=self._marker(said, "document_prefix"), max_tokens=document_length or usual),
            expansion=self._expanding(token) if expand_to else None,
            attends=attends,
            skip=skip,
            skips_queries=QUERY in tasks,
            skips_documents=DOCUMENT in tasks,
        )

    def _tasks(self, given: object) -> list[str]:
        """Return which texts `skiplist_words` are for."""
        tasks = [given] if isinstance(given, str) else given
        if not isinstance(tasks, list) or not set(map(str, tasks)) <= {QUERY, DOCUMENT}:
            raise InputError(
                f"{self._directory}: skiplist_tasks is {quoted(given)}; accepted is a list of {QUERY} and {DOCUMENT}"
            )
        return tasks

    def _length(self, said: Mapping[str, Any], name: str) -> int | None:
        if (value := said.get(name)) is not None:
            check_int(f"{self._directory}: {name}", value, 4)
        return value

    def _marker(self, said: Mapping[str, Any], name: str) -> int | None:
        prefix = said.get(name)
        if not prefix:
            return None
        number = self._tokenizer.token_to_id(prefix) if isinstance(prefix, str) else None
        if number is None:
            raise InputError(
                f"{self._directory}: {name} is {quoted(prefix)}, which is no token of the tokenizer; accepted is a token that the model "
                "was trained with. Add it to tokenizer.json, or name another one"
            )
        return number

    def _expansion(self, said: Mapping[str, Any], length: int | None) -> tuple[int, bool, str | None, bool]:
        """Return how far queries are filled up, whether that is attended to, its token's name, and whether longer queries are cut there."""
        where = f"{self._directory}: query_expansion"
        if "query_expansion" in said:
            fields = said["query_expansion"]
            if fields is None:
                return 0, False, None, False
            known = isinstance(fields, dict) and fields.get("strategy") in _STRATEGIES
            if not known or not isinstance(fields.get("attend", False), bool):
                raise InputError(
                    f"{where} is {quoted(fields)}; accepted is an object with a strategy, {' or '.join(_STRATEGIES)}, a length, and attend"
                )
            check_int(f"{where}.length", fields.get("length"), 4)
            return fields["length"], fields.get("attend", False), fields.get("token"), fields["strategy"] == "fixed"
        if not said.get("do_query_expansion"):
            return 0, False, None, False
        return length or 32, bool(said.get("attend_to_expansion_tokens")), None, True

    def _expanding(self, token: str | None) -> int:
        """Return the id of the token that queries are filled with: as it is named, else the mask, else the end of a text."""
        named = (
            token
            or special_token(self._tokenizer, self._home, "mask_token")
            or special_token(self._tokenizer, self._home, "eos_token")
        )
        number = self._tokenizer.token_to_id(named) if isinstance(named, str) else None
        if number is None:
            raise InputError(
                f"{self._directory}: queries are filled up with {quoted(named or '[MASK]')}, which is no token of the tokenizer; "
                "accepted is a tokenizer with a mask_token, or do_query_expansion false"
            )
        return number

    def _skip(self, words: Sequence[str]) -> list[int]:
        """Return the ids of tokens without vectors. Words that are no token are left out: unknown words have vectors."""
        if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
            raise InputError(f"{self._directory}: skiplist_words is {quoted(words)}; accepted is a list of words")
        unknown = special_token(self._tokenizer, self._home, "unk_token")
        numbers = {word: self._tokenizer.token_to_id(word) for word in words}
        wanting = [word for word, number in numbers.items() if number is None]
        if wanting and unknown:
            self.notes = (
                f"skiplist_words that are no tokens are left out: {' '.join(wanting[:8])}{' ...' if len(wanting) > 8 else ''}",
            )
        return sorted({number for number in numbers.values() if number is not None})
