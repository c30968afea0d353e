"""The packed network in fixed sizes: T tokens and B texts, whatever is in them. So engines have static shapes, and replay.

Rows from ``cu_seqlens[-1]`` on are dead weight: they are computed on, and no live row ever sees them. A kernel may leave anything in
them, NaN too. Texts that are not there are empty ones, at the end or elsewhere. A cut keeps a fixed number of rows, survivors first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from .encoder import PrunedEncoder
from .packed import Cut, PackedInputs
from .pruners import Pruner
from .selection import Rows, Rule, compact_fixed
from .sequences import Packed, rising


@dataclass(frozen=True)
class StaticSize:
    """tokens: T. texts: B. kept: rows after each cut, each at most those before it."""

    tokens: int
    texts: int
    kept: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.tokens}x{self.texts}"


def static_size(student: PrunedEncoder, tokens: int, texts: int, kept: Sequence[int] = ()) -> StaticSize:
    """Return what holds any `texts` of `tokens` in all; with bounds `kept`, what holds them where no more tokens stay at each cut."""
    rows, held = [], tokens
    for i, pruner in enumerate(student.pruners.values()):
        most = cast(Pruner, pruner).most_kept(held, texts, tokens)
        held = min(held, most + texts if student.keeps_last else most)  # pruners do not count that token
        if kept:
            held = min(held, kept[i])
        rows.append(held)
    return StaticSize(tokens, texts, tuple(rows))


class Fixed(Packed):
    """`Packed` with T rows of which the last ones may be dead."""

    @property
    def start(self) -> Tensor:
        """First row of each sequence, ``(B,) int64``; some row for those that are not there."""
        return self.cu_seqlens[:-1].clamp(max=self.states.shape[0] - 1)

    def gather(self, rows: Tensor, cu_seqlens: Tensor) -> Fixed:
        return Fixed(*super().gather(rows, cu_seqlens))

    def maxima(self) -> Callable[[Tensor], Tensor]:
        inside = self.inside()[:, :, None]
        return lambda values: torch.where(inside, values, -torch.inf).amax(
            1
        )  # fp16 has it, and not the lowest number of fp32

    def mean(self) -> Tensor:
        inside = self.inside()
        live = torch.where(inside.any(0)[:, None], self.states, 0)  # 0 times NaN would be NaN
        return (inside.to(live.dtype) / self.lengths.clamp(min=1)[:, None].to(live.dtype)) @ live

    def sum(self, values: Tensor) -> Tensor:
        inside = self.inside()
        return inside.to(values.dtype) @ torch.where(inside.any(0)[:, None], values, 0)


class FixedCut(Cut):
    """A cut that keeps a fixed number of rows."""

    def __init__(self, pruner: Pruner, capacity: int) -> None:
        super().__init__(pruner)
        self.capacity = capacity

    def select(self, rule: Rule, tokens: Packed) -> tuple[Tensor, Tensor]:
        rows = Rows.of(tokens.cu_seqlens, tokens.states.shape[0])
        return compact_fixed(rule.fixed(rows), tokens.cu_seqlens, self.capacity)


class FixedInputs(PackedInputs):
    """The network of one size."""

    held: Tensor

    def __init__(self, student: PrunedEncoder, size: StaticSize) -> None:
        rows = iter(size.kept)
        super().__init__(student, cut=lambda pruner: FixedCut(pruner, next(rows)))
        self.max_tokens = student.max_tokens
        self.register_buffer("held", torch.tensor(size.kept, dtype=torch.int64), persistent=False)

    def forward(  # type: ignore[override] # one result more
        self, input_ids: Tensor, cu_seqlens: Tensor, token_type_ids: Tensor | None = None
    ) -> tuple[tuple[Tensor, ...], list[Tensor], tuple[Tensor, ...]]:
        """Answer ids and types ``(T,) int64`` and bounds ``(B+1,) int32`` as `PackedInputs` does.

        Returns:
            As there, but outputs of tokens have anything where there is no text, and dead rows repeat the last live one. Also, where
            there are sites, how many tokens that stay found no room at each, ``(sites,) int64``. Where there are any, the answer is
            none.
        """
        tokens = input_ids.shape[0]
        bounds = rising(cu_seqlens, tokens)
        rows = Rows.of(bounds, tokens)
        row = torch.arange(tokens, device=bounds.device)
        positions = (row - rows.of_text(bounds[:-1])).clamp(0, self.max_tokens - 1)
        types = torch.zeros_like(input_ids) if token_type_ids is None else token_type_ids
        states, ends = self.unpad.embeddings(input_ids, types, positions), list[Tensor]()
        origin = torch.minimum(row, bounds[-1:] - 1)
        answers, kept = self.run(self.find_read(Fixed(states, bounds, positions, origin), input_ids), None, ends)
        answers = self.blank(answers, rows.lengths)
        return answers, kept, ((torch.cat(ends).sub(self.held).clamp(min=0),) if ends else ())

    def put_back(self, before: Tensor, rows: Tensor, states: Tensor) -> Tensor:
        """A Gather: a scatter would write what is in dead rows, too."""
        row = torch.arange(before.shape[0], device=rows.device)[:, None]
        place = (rows < row).sum(1).clamp(max=rows.shape[0] - 1)
        stayed = rows.index_select(0, place)[:, None] == row
        return torch.where(stayed, states.index_select(0, place), before)
