"""Which rows of a table `make test` runs: one of each group. `make test-all` runs all."""

from collections.abc import Callable, Hashable, Iterable
from typing import Any

import pytest


def first_of_each(rows: Iterable[Any], group: Callable[[Any], Hashable]) -> list[Any]:
    """Return rows for `parametrize`, of which all but the first of each group are slow."""
    seen, marked = set(), []
    for row in rows:
        marked.append(pytest.param(row, marks=[pytest.mark.slow] if group(row) in seen else []))
        seen.add(group(row))
    return marked


def only(rows: Iterable[Any], quick: Iterable[Any]) -> list[Any]:
    """Return rows for `parametrize`, of which all but the quick ones are slow."""
    quick = set(quick)
    return [pytest.param(row, marks=[] if row in quick else [pytest.mark.slow]) for row in rows]


def only_rows(rows: Iterable[tuple[Any, ...]], quick: Iterable[tuple[Any, ...]]) -> list[Any]:
    """Return what `only` does for rows of several arguments each."""
    quick = set(quick)
    return [pytest.param(*row, marks=[] if row in quick else [pytest.mark.slow]) for row in rows]
