"""Which variant of a kernel to launch: one rule, in `cpp/choice.h` too, of what is known at launch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

FEW = 2
"""Programs of a processor up to which it waits for the steps of one more than for others' instructions.

The record of an H100 decided: with 1.5 programs a processor the variant of fewer steps was faster by an eighth, with 6 it was slower
by a twentieth.
"""


class Shape(Protocol):
    """block_m, block_n, mean_length_up_to: those of `variants.Variant`."""

    @property
    def block_m(self) -> int: ...
    @property
    def block_n(self) -> int: ...
    @property
    def mean_length_up_to(self) -> int | None: ...


def choose(shapes: Sequence[Shape], tokens: int, sequences: int, num_heads: int, processors: int) -> int:
    """Return the place of the variant to launch for T tokens of B sequences on a GPU of so many processors (SMs).

    The mean length T / B decides, by the limits of the variants. Where that gives a processor no more than `FEW` programs, a call
    lasts as long as a program's steps along the keys, one after another. Then the one of fewest steps is taken, of those whose tile
    a sequence of mean length fills. Lengths that vary are what nobody knows at launch.

    Args:
        shapes: variants of one kernel, dtype and head size, short sequences first; the last one has no limit.
    """
    usual = next(
        i for i, s in enumerate(shapes) if s.mean_length_up_to is None or tokens <= s.mean_length_up_to * sequences
    )
    mean = -(-tokens // max(sequences, 1))
    programs = -(-mean // shapes[usual].block_m) * sequences * num_heads
    if programs > FEW * processors:
        return usual
    filled = [i for i, shape in enumerate(shapes) if i == usual or shape.block_m <= mean]
    return min(filled, key=lambda i: (-(-mean // shapes[i].block_n), i != usual, i))
