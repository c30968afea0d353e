"""Markdown tables, and how numbers are written in them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any


def table(heads: Iterable[str], rows: Iterable[Iterable[str]], texts: int = 1) -> str:
    """Return a markdown table; its first columns are texts, the others are numbers."""
    heads = list(heads)
    rule = ["---"] * texts + ["---:"] * (len(heads) - texts)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (heads, rule, *rows))


def per_second(value: float) -> str:
    """Return a rate with three digits, or whole."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def quoted(versus: dict[str, Any]) -> str:
    """Return a speedup with its margin, whatever that is."""
    return f"{versus['speedup']:.1f}x ± {math.ceil(100 * versus['margin'] / versus['speedup'])}%"


def place(row: dict[str, Any]) -> str:
    """Name the machine that a record is of, and how many threads each runtime had."""
    device = row["device"]
    threads = device.get("threads")
    return f"{device['model']}, {device['cores']} cores" + (f", {threads} threads" if isinstance(threads, int) else "")
