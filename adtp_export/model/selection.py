"""Which tokens of a sequence stay: four rules, each for padded states, for packed ones, and with its margins.

A pruner answers with a rule; the loops apply it. All rules keep the first token of a sequence, unless `KeepBest` is told not to, and
one more where the model names it: the one that causal models end with, or that their heads read. These tokens are the anchors; the
others compete. Each sequence keeps at least one token. Ties go to the lower position. Survivors keep their order.

Verification asks each rule two questions, always in this order: how clear is *how many* tokens stay, and how clear is
*which* ones. Where a rule has no scores behind one of them, its margin is infinite and its error is zero.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .sequences import data_size, pack, top_k

PERMILLE = 1000


@dataclass(frozen=True)
class Rule(ABC):
    """What a pruner decided.

    order: scores of the tokens, ``(B, S)`` padded, ``(T,)`` packed. also: ``(B,) int64``, the column or the row of a token of each text
    that stays beside the first, and may be that one; None: no other does. Pruners leave it out, and the loops set it (`keeping`).
    """

    order: Tensor
    also: Tensor | None = dataclasses.field(default=None, kw_only=True)

    def keeping(self, also: Tensor | None, first: Tensor) -> Rule:
        """Return the rule that keeps `also`, too: ``(B,) int64``, columns or rows, as `first` has those of first tokens."""
        return self if also is None else dataclasses.replace(self, also=also)

    @abstractmethod
    def padded(self, live: Tensor) -> Tensor:
        """Return the survivors of ``live (B, S) bool``, ``(B, S) bool``."""

    @abstractmethod
    def packed(self, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
        """Return the ``(T',) int64`` surviving rows in ascending order, and their ``(B+1,) int64`` cu_seqlens."""

    @abstractmethod
    def fixed(self, rows: Rows) -> Tensor:
        """Return which of T packed rows stay where no size may depend on data, ``(T,) bool``; rows beyond the texts get some answer."""

    @abstractmethod
    def margins(self, live: Tensor) -> Tensor:
        """Return how clear each padded decision is, ``(2, B)``: infinite where there was nothing to choose."""

    def competing(self, live: Tensor) -> Tensor:
        """Say which padded tokens are alive and no anchors, ``(B, S) bool``."""
        return competing(live, self.also)

    def first_falls(self) -> Tensor:
        """Say of each padded row whether the first token stays only because it always does, ``(B,) bool``."""
        return torch.zeros(len(self.order), dtype=torch.bool)

    def behind(self, live: Tensor) -> tuple[Tensor | None, Tensor]:
        """Return the scores behind both decisions: ``(B, C)`` or None for how many, ``(B, S)`` for which (0 where dead)."""
        return None, self.order.masked_fill(~live, 0)

    def errors(self, exact: Rule, live: Tensor) -> Tensor:
        """Return by how much the scores behind a padded decision differ from exact ones at most, ``(2, B)``."""
        pairs, none = zip(self.behind(live), exact.behind(live)), live.new_zeros(len(live), dtype=torch.float64)
        return torch.stack([none if a is None or b is None else (a - b).abs().amax(1).double() for a, b in pairs])

    def sizes(self, live: Tensor) -> Tensor:
        """Return the largest magnitude of the scores behind both decisions, ``(2,)``."""
        return torch.stack([live.new_zeros((), dtype=torch.float64) if a is None else a.abs().max().double()
                            for a in self.behind(live)])  # fmt: skip


class Rows(NamedTuple):
    """Whose rows are whose, in fixed sizes. text: ``(T,) int64``, the number of each row's text, from 0; B for rows beyond the texts.
    first: ``(T,) bool``, first rows of texts. lengths: ``(B,) int64``, 0 for texts that are not there.
    """

    text: Tensor
    first: Tensor
    lengths: Tensor

    @classmethod
    def of(cls, cu_seqlens: Tensor, tokens: int) -> Rows:
        """Tell them of ``cu_seqlens (B+1,) int64`` for T rows: T * B comparisons, and neither scatter nor search."""
        row = torch.arange(tokens, device=cu_seqlens.device)[:, None]
        text = (row >= cu_seqlens[1:]).sum(1)
        starts_here = (row == cu_seqlens[:-1]).any(1)
        return cls(text, starts_here & (row[:, 0] < cu_seqlens[-1:]), cu_seqlens[1:] - cu_seqlens[:-1])

    def of_text(self, values: Tensor) -> Tensor:
        """Give each row what its text has: ``(B,)`` to ``(T,)``."""
        return values.index_select(0, self.text.clamp(max=values.shape[0] - 1))

    def anchors(self, also: Tensor | None, keep_first: bool = True) -> Tensor:
        """Say which rows always stay, ``(T,) bool``: the first of each text, if these do, and the rows ``also (B,)``."""
        stays = self.first if keep_first else torch.zeros_like(self.first)
        if also is None:
            return stays
        row = torch.arange(self.first.shape[0], device=also.device)[:, None]
        return stays | ((row == also) & (self.lengths > 0)).any(1)

    def ranks(self, order: Tensor, anchors: Tensor) -> Tensor:
        """Rank rows in their text by descending ``order (T,)``, as `ranks` does: ``(T,) int64``, by T * T comparisons."""
        score = order.masked_fill(anchors, torch.finfo(order.dtype).max)
        row = torch.arange(order.shape[0], device=order.device)
        ahead = (score > score[:, None]) | ((score == score[:, None]) & (row < row[:, None]))
        return (ahead & (self.text == self.text[:, None])).sum(1)


@dataclass(frozen=True)
class KeepBest(Rule):
    """The first token stays, and the ``count - 1`` others of highest `order`.

    order: ``(B, S)`` or ``(T,)``. count: ``(B,) int64``, from 1 to the live tokens. choice: ``(B, C)`` scores of candidates,
    the largest of which gave `count`, and counts: ``(B, C) int64``, what each of them gives; None where lengths alone gave it.
    keep_first: where it is false, the first token competes like all others, and the `count` of highest `order` stay.

    Source: checkpoint format 1, "exact semantics of a cut".
    """

    count: Tensor
    choice: Tensor | None = None
    counts: Tensor | None = None
    keep_first: bool = True

    def keeping(self, also: Tensor | None, first: Tensor) -> Rule:
        """At least as many stay as there are anchors."""
        if also is None:
            return self
        anchors = 1 + ((also != first) & self.keep_first).to(self.count.dtype)
        counts = None if self.counts is None else torch.maximum(self.counts, anchors[:, None])
        return dataclasses.replace(self, also=also, count=torch.maximum(self.count, anchors), counts=counts)

    def competing(self, live: Tensor) -> Tensor:
        return competing(live, self.also, self.keep_first)

    def padded(self, live: Tensor) -> Tensor:
        return live & (ranks(self.order, live, ~self.competing(live)) < self.count[:, None])

    def packed(self, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
        start = cu_seqlens[:-1]
        lengths = cu_seqlens[1:] - start
        longest, kept_longest = data_size(lengths.max()), data_size(self.count.max())
        torch._check(kept_longest <= longest)
        scores = _rectangle(self.order, start, lengths, longest, self.keep_first, self.also)
        best = top_k(scores, kept_longest, largest=True)[1]
        surplus = torch.arange(kept_longest, device=start.device) >= self.count[:, None]
        ascending = top_k(best.masked_fill(surplus, longest), kept_longest, largest=False)[0]
        cu_seqlens, cells = pack(self.count, kept_longest)
        return (start[:, None] + ascending).flatten().index_select(0, cells), cu_seqlens

    def fixed(self, rows: Rows) -> Tensor:
        return rows.ranks(self.order, rows.anchors(self.also, self.keep_first)) < rows.of_text(self.count)

    def margins(self, live: Tensor) -> Tensor:
        """Of the best candidate over the next, and of the last kept over the first dropped token."""
        score = self.order.masked_fill(~live, -torch.inf).masked_fill(live & ~self.competing(live), torch.inf)
        ranked = score.sort(dim=1, descending=True).values  # column j: rank j; anchors come first
        ranked = torch.nn.functional.pad(ranked, (0, 1), value=-torch.inf)
        last_kept, first_dropped = (ranked.gather(1, self.count[:, None] - i)[:, 0] for i in (1, 0))
        unlike = torch.isinf(last_kept) | torch.isinf(first_dropped)
        which = torch.where(unlike, torch.inf, last_kept - first_dropped)
        if self.choice is None or self.choice.shape[1] < 2:
            return torch.stack([torch.full_like(which, torch.inf), which])
        top = self.choice.topk(2, dim=1).values
        return torch.stack([top[:, 0] - top[:, 1], which])

    def behind(self, live: Tensor) -> tuple[Tensor | None, Tensor]:
        return self.choice, super().behind(live)[1]


@dataclass(frozen=True)
class KeepAbove(Rule):
    """The first token stays, and all others whose `order` is at least the threshold.

    order: ``(B, S)`` or ``(T,)``. threshold: a scalar tensor. first_may_fall: in the original the first token has to reach it, too.

    Source: Kim et al., Learned Token Pruning for Transformers (KDD 2022), section 3.2.
    """

    threshold: Tensor
    first_may_fall: bool = False

    def first_falls(self) -> Tensor:
        return (self.order[:, 0] < self.threshold) & self.first_may_fall

    def padded(self, live: Tensor) -> Tensor:
        return live & ((self.order >= self.threshold) | ~self.competing(live))

    def packed(self, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
        return compact(self.order >= self.threshold, cu_seqlens, self.also)

    def fixed(self, rows: Rows) -> Tensor:
        return (self.order >= self.threshold) | rows.anchors(self.also)

    def margins(self, live: Tensor) -> Tensor:
        """Of the token that is closest to the threshold; it decides how many stay as well as which."""
        which = self.order.masked_fill(~self.competing(live), torch.inf).sub(self.threshold).abs().amin(1)
        return torch.stack([which, which])

    def behind(self, live: Tensor) -> tuple[Tensor | None, Tensor]:
        gaps = (self.order - self.threshold).masked_fill(~live, 0)
        return gaps, gaps


@dataclass(frozen=True)
class KeepAboveShare(Rule):
    """The first token stays, and all others whose `order` is at least a share of the largest in their text.

    order: ``(B, S)`` or ``(T,)``, above 0 where a token is live, and 0 elsewhere. share: a scalar tensor in [0, 1]. first_may_fall: as
    in `KeepAbove`.

    Source: Kim et al.'s code for Learned Token Pruning, `prune_mode` "threshold".
    """

    share: Tensor
    first_may_fall: bool = False

    def _above(self, largest: Tensor) -> KeepAbove:
        return KeepAbove(self.order / largest, self.share, self.first_may_fall, also=self.also)

    def of_threshold(self, live: Tensor) -> KeepAbove:
        return self._above(self.order.masked_fill(~live, 0).amax(1, keepdim=True))

    def first_falls(self) -> Tensor:
        return self._above(self.order.amax(1, keepdim=True)).first_falls()

    def padded(self, live: Tensor) -> Tensor:
        return self.of_threshold(live).padded(live)

    def packed(self, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
        start = cu_seqlens[:-1]
        lengths = cu_seqlens[1:] - start
        longest = data_size(lengths.max())
        scores = _rectangle(self.order, start, lengths, longest, keep_first=False)
        cells = pack(lengths, longest)[1]
        shares = (scores / scores.amax(1, keepdim=True)).flatten().index_select(0, cells)
        return compact(shares >= self.share, cu_seqlens, self.also)

    def fixed(self, rows: Rows) -> Tensor:
        text = torch.arange(rows.lengths.shape[0], device=rows.text.device)[:, None]
        largest = torch.where(rows.text == text, self.order, 0).amax(1)
        return self._above(rows.of_text(largest)).fixed(rows)

    def margins(self, live: Tensor) -> Tensor:
        return self.of_threshold(live).margins(live)

    def behind(self, live: Tensor) -> tuple[Tensor | None, Tensor]:
        return self.of_threshold(live).behind(live)


@dataclass(frozen=True)
class KeepRanks(Rule):
    """The first token stays, and of the others those whose rank by `order` the pruner keeps.

    order: ``(B, S)`` or ``(T,)``. keeps: says whether ranks stay, ``(B, R) bool``. It takes how many tokens there are besides the
    anchors, ``(B, 1) int64`` and at least 1, and their ranks ``(B, R) int64``, from 0 (the highest score) to one less than that.

    Source: Li et al., Constraint-aware and Ranking-distilled Token Pruning (ToP, KDD 2023), section 4.
    """

    keeps: Callable[[Tensor, Tensor], Tensor]

    def padded(self, live: Tensor) -> Tensor:
        others = self.competing(live)
        anchors = (live & ~others).sum(1)
        rank = ranks(self.order, live, ~others) - anchors[:, None]
        return live & (self._stays(live.sum(1) - anchors, rank) | ~others)

    def packed(self, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
        start = cu_seqlens[:-1]
        lengths = cu_seqlens[1:] - start
        longest, tokens = data_size(lengths.max()), data_size(cu_seqlens[-1])
        best = top_k(_rectangle(self.order, start, lengths, longest, also=self.also), longest, largest=True)[1]
        cells = pack(lengths, longest)[1]  # of the rectangle, its padding left out: rank in order, row by row
        rank, others = torch.arange(longest, device=start.device) - 1, lengths - 1
        if self.also is not None:
            second = (self.also != start).to(start.dtype)
            rank, others = rank - second[:, None], others - second
        stays = self._stays(others, rank).flatten()
        rows = (start[:, None] + best).flatten().index_select(0, cells)
        kept = torch.zeros(tokens, dtype=torch.int64, device=start.device)
        kept = kept.scatter(0, rows, stays.index_select(0, cells).to(torch.int64)) > 0
        return compact(kept, cu_seqlens, self.also)

    def fixed(self, rows: Rows) -> Tensor:
        stay = rows.anchors(self.also)
        rank, others = rows.ranks(self.order, stay) - 1, rows.of_text(rows.lengths) - 1
        if self.also is not None:
            text = torch.arange(rows.lengths.shape[0], device=stay.device)[:, None]
            second = rows.of_text((stay & ~rows.first & (rows.text == text)).sum(1))
            rank, others = rank - second, others - second
        return self._stays(others, rank[:, None])[:, 0] | stay

    def margins(self, live: Tensor) -> Tensor:
        """Of the closest two neighbours by rank of which one is kept."""
        others = self.competing(live)
        ranked = self.order.masked_fill(~others, -torch.inf).sort(dim=1, descending=True).values
        gaps = ranked[:, :-1] - ranked[:, 1:]
        stays = self._stays(others.sum(1), torch.arange(ranked.shape[1], device=live.device))
        apart = (stays[:, :-1] != stays[:, 1:]) & torch.isfinite(ranked[:, 1:])
        which = torch.nn.functional.pad(gaps, (0, 1), value=torch.inf)
        which = which.masked_fill(~torch.nn.functional.pad(apart, (0, 1)), torch.inf).amin(1)
        return torch.stack([torch.full_like(which, torch.inf), which])

    def _stays(self, others: Tensor, rank: Tensor) -> Tensor:
        """Ask for ranks ``(R,)`` or ``(B, R)`` of ``others (B,)`` tokens that compete; those beyond them get some answer."""
        others = others.clamp(min=1)[:, None]
        return self.keeps(others, torch.minimum(rank.clamp(min=0), others - 1))


def kept_count(lengths: Tensor, permille: Tensor | int, min_tokens: int) -> Tensor:
    """``min(n, max(min_tokens, ceil(n * q / 1000)))`` in integers, for ``lengths (B,) int64`` and ratios q in permille.

    Source: checkpoint format 1, "exact semantics of a cut".
    """
    rounded_up = (lengths * permille + (PERMILLE - 1)) // PERMILLE
    return torch.minimum(lengths, rounded_up.clamp(min=min_tokens))


def compact(kept: Tensor, cu_seqlens: Tensor, also: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Turn ``kept (T,) bool`` into surviving rows and their cu_seqlens; a sequence's first row survives, and its row of ``also (B,)``."""
    stays = kept.to(torch.int64)
    for anchors in (cu_seqlens[:-1],) if also is None else (cu_seqlens[:-1], also):
        stays = stays.scatter(0, anchors, torch.ones_like(anchors))
    return compacted(stays, cu_seqlens)


def compacted(stays: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows of the ones in ``stays (T,) int64``, of which each sequence has some, and their cu_seqlens.

    Row numbers are scattered to their places, survivors first, and cut off after the last one: neither NonZero nor TopK is needed.
    """
    survivors = stays.cumsum(0)
    before = torch.nn.functional.pad(survivors, (1, 0))
    total = survivors[-1:]
    place = torch.where(stays > 0, survivors, total + (1 - stays).cumsum(0)) - 1
    order = torch.zeros_like(place).scatter(0, place, torch.arange(place.shape[0], device=place.device))
    count = data_size(survivors[-1])
    torch._check(count <= order.shape[0])
    return order[:count], before.index_select(0, cu_seqlens)


def compact_fixed(kept: Tensor, cu_seqlens: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
    """Turn ``kept (T,) bool`` into ``(capacity,) int64`` rows, the survivors first and in order, and their ``(B+1,) int64`` cu_seqlens.

    Places that are left over repeat the last survivor. Where there are more survivors than places, the last of cu_seqlens says so.
    """
    beyond = torch.arange(kept.shape[0], device=kept.device) >= cu_seqlens[-1:]
    survivors = (kept & ~beyond).to(torch.int64).cumsum(0)
    place = torch.minimum(torch.arange(capacity, device=kept.device), survivors[-1:] - 1)
    rows = (survivors <= place[:, None]).sum(1)
    return rows, torch.nn.functional.pad(survivors, (1, 0)).index_select(0, cu_seqlens.clamp(max=kept.shape[0]))


def ranks(order: Tensor, live: Tensor, anchors: Tensor | None = None) -> Tensor:
    """Rank tokens ``(B, S)`` by descending score, 0 the highest, ties to the lower position.

    Dead ones come last, and ``anchors (B, S) bool`` that are alive before all.
    """
    score = order if anchors is None else order.masked_fill(anchors, torch.inf)
    return score.masked_fill(~live, -torch.inf).sort(dim=1, descending=True, stable=True).indices.argsort(dim=1)


def competing(live: Tensor, also: Tensor | None = None, keep_first: bool = True) -> Tensor:
    """Return the tokens of ``live (B, S) bool`` that are no anchors: not the first, unless that competes, nor the columns ``also (B,)``."""
    others = live.clone()
    if keep_first:
        others[:, 0] = False
    return others if also is None else others.scatter(1, also[:, None], False)


def _rectangle(
    order: Tensor,
    start: Tensor,
    lengths: Tensor,
    longest: int,
    keep_first: bool = True,
    also: Tensor | None = None,
) -> Tensor:
    """Spread packed scores over ``(B, longest)``: padding gets the lowest number there is, anchors the highest."""
    column = torch.arange(longest, device=start.device)
    token = start[:, None] + torch.minimum(column, lengths[:, None] - 1)
    score = order.index_select(0, token.flatten()).view(token.shape)
    limits = torch.finfo(score.dtype)
    score = score.masked_fill(column >= lengths[:, None], limits.min)
    score = score.masked_fill(column == 0, limits.max) if keep_first else score
    return score if also is None else score.masked_fill(column == (also - start)[:, None], limits.max)
