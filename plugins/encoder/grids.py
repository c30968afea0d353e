"""Which tile of a product to launch, into how many parts to split its sum, and how many programs to start.

What a GPU measured, `tiles` has. Elsewhere rules decide. They follow from what is known: a call lasts as long as its busiest processor,
and a program's steps along K follow each other. So each processor should have a program, and larger tiles, which read their operands less
often, come next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from . import tiles
from .variants import BY_NAME, Variant

PER_PROCESSOR = 4
"""Programs of a product for each processor, at most; where a bucket has more tiles, a program takes several, and dead ones cost nothing."""

ROWS_PER_PROCESSOR = 16
"""The same of kernels whose programs take a row each."""

MOST_PARTS = 8
"""Of a sum. The norm that adds the parts reads each of them in fp32."""

LEAST_STEPS = 4
"""Along K, in each part: fewer would spend their time on beginning and ending."""


@dataclass(frozen=True)
class Grid:
    """A launch of a product. parts: of the sum over K."""

    variant: Variant
    parts: int
    programs: int


def of_product(
    dtype: str, kind: str, shape: tuple[int, int, int], most: int, processors: int, kernel: str = "product"
) -> Grid:
    """Return how to launch a product.

    Args:
        dtype: of the factors, such as "fp16" or "int8". kind: the end of its variant's name. Sums are split where it is ``"parts"``.
        shape: (M, N, K); M is as many rows as are usual.
        most: rows that may be. kernel: the beginning of its variant's name.
    """
    m, n, k = shape
    if fastest := _fastest(dtype, kind, shape, processors):
        return Grid(*fastest, min(_tiles(fastest[0], most, n) * fastest[1], PER_PROCESSOR * processors))
    first, last = f"{kernel}-{dtype}-", f"-{kind}"
    variants = [v for name, v in BY_NAME.items() if name.startswith(first) and name.endswith(last)]
    variant = _largest_that_fills(variants, m, n, processors)
    parts = 1
    if kind == "parts":
        steps = -(-k // variant.constants["BLOCK_K"])
        wanted = -(-processors // _tiles(variant, m, n))
        in_part = -(-steps // max(1, min(wanted, steps // LEAST_STEPS, MOST_PARTS)))
        parts = -(-steps // in_part)
    return Grid(variant, parts, min(_tiles(variant, most, n) * parts, PER_PROCESSOR * processors))


def of_rows(most: int, processors: int) -> int:
    """Return programs of a kernel that takes row after row."""
    return min(most, ROWS_PER_PROCESSOR * processors)


def _fastest(dtype: str, kind: str, shape: tuple[int, int, int], processors: int) -> tuple[Variant, int] | None:
    """Return what was the fastest for as many rows or the next number above that was timed; on a GPU of half to twice the processors."""
    m, n, k = shape
    found = tiles.FASTEST.get((dtype, kind, n, k))
    if not found or not tiles.PROCESSORS <= 2 * processors <= 4 * tiles.PROCESSORS:
        return None
    name, parts = found[min((rows for rows in found if rows >= m), default=max(found))]
    return BY_NAME[name], parts


def _largest_that_fills(variants: Sequence[Variant], m: int, n: int, processors: int) -> Variant:
    """Return the variant of the largest tile that gives each processor a program; where none does, that of the smallest."""
    ordered = sorted(variants, key=lambda v: v.constants["BLOCK_M"] * v.constants["BLOCK_N"])
    return next((v for v in reversed(ordered) if _tiles(v, m, n) >= processors), ordered[0])


def _tiles(variant: Variant, m: int, n: int) -> int:
    return -(-m // variant.constants["BLOCK_M"]) * -(-n // variant.constants["BLOCK_N"])
