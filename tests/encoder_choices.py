"""What the choices of a cut have to say: the same rows as the portable rules, to the bit. Checks as in `encoder_checks`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import encoder_checks as checks
import torch
from encoder_launch import Launch, is_unwritten, unwritten

from adtp_export.model.pruners.top import TopPruner, TopSettings
from adtp_export.model.selection import KeepAbove, KeepBest, KeepRanks, kept_count
from adtp_export.plugins.encoder.cuts import share_of
from adtp_export.plugins.encoder.variants import Variant


def selected(
    launch: Launch, variant: Variant, lengths: Sequence[int], num_texts: int, programs: int, **given: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch a choice; return the rows that stay and their bounds, with all that was left unwritten."""
    capacity = len(given["order"])
    rows, new = unwritten(capacity, dtype=torch.int32), unwritten(num_texts + 1, dtype=torch.int32)
    if "before" in variant.arguments:
        given["before"] = unwritten(capacity + 1, dtype=torch.int32)
    launch(
        variant, programs, cu_seqlens=checks.bounds(lengths, num_texts), texts=checks.int32(len(lengths)), rows=rows, new_cu_seqlens=new,
        num_rows=capacity, num_texts=num_texts, **given,
    )  # fmt: skip
    return rows, new


def same(found: tuple[torch.Tensor, torch.Tensor], wanted: tuple[torch.Tensor, torch.Tensor]) -> float:
    """Compare with what the portable body says: to the bit, and nothing is written behind it."""
    (rows, new), (right, cu_seqlens) = found, wanted
    end = cu_seqlens[-1:].expand(len(new) - len(cu_seqlens))
    equal = torch.equal(rows[: len(right)].long(), right) and torch.equal(new.long(), torch.cat([cu_seqlens, end]))
    return 0.0 if equal and is_unwritten(rows[len(right) :]) else checks.WRONG


FP32 = torch.finfo(torch.float32)
EXTREME = torch.tensor(
    [
        *(FP32.max, FP32.smallest_normal, FP32.smallest_normal * FP32.eps, 3 * FP32.smallest_normal * FP32.eps),
        *(0.5, 0.5 + FP32.eps / 2, 0.5 - FP32.eps / 4, 1.0, 1.0 + FP32.eps, 1.0 - FP32.eps / 2),
    ]
)
EXTREME = torch.cat([EXTREME, -EXTREME])
"""The ends of fp32, its subnormals, and neighbours, between which no float is."""


def scores_of(seed: int, rows: int, values: int | None = None) -> torch.Tensor:
    """Scores of rows, NaN behind: random, or, so that many are equal, a few values, both zeros among them; and some of `EXTREME`."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randn(rows, generator=generator)
    if values:
        order = torch.randint(-values, values + 1, (rows,), generator=generator) / 2.0
        order[torch.rand(rows, generator=generator) < 0.2] *= -1.0  # -0.0
    extreme = EXTREME[torch.randint(len(EXTREME), (rows,), generator=generator)]
    order = torch.where(torch.rand(rows, generator=generator) < 0.2, extreme, order)
    return torch.cat([order, torch.full((3,), float("nan"))])


def check_best(
    launch: Launch,
    variant: Variant,
    *,
    lengths: Sequence[int],
    permille: int = 300,
    values: int | None = None,
    keep_first: bool = True,
    num_texts: int = 0,
    before: Sequence[int] = (),
    seed: int = 0,
) -> float:
    """Variants that are given counts or look them up. before: lengths by which the table goes, where not those of now."""
    order, num_texts = scores_of(seed, sum(lengths), values), num_texts or len(lengths) + 2
    by = torch.tensor([*(before or lengths)])
    of = torch.tensor([*lengths])
    size = int(by.max()) // 2 + 2 if seed % 2 else int(by.max()) + 1  # longer texts take the table's last
    table = kept_count(torch.arange(size), permille, 1).to(torch.int32)
    count = torch.minimum(table[by.clamp(max=size - 1)].long().clamp(min=1), of)
    if "table" in variant.arguments:
        given: dict[str, Any] = {
            "lengths_from": checks.bounds([*by.tolist()], num_texts),
            "table": table,
            "table_size": size,
        }
    else:
        given = {"count": torch.cat([count, torch.full((num_texts - len(of),), 2**30)]).to(torch.int32)}
    found = selected(launch, variant, lengths, num_texts, num_texts, order=order, keep_first=int(keep_first), **given)
    rule = KeepBest(order[: sum(lengths)], count, keep_first=keep_first)
    return same(found, rule.packed(checks.bounds(lengths).long()))


def check_ranks(
    launch: Launch, variant: Variant, *, lengths: Sequence[int], bins: str, values: int | None = None, seed: int = 0
) -> float:
    order, num_texts = scores_of(seed, sum(lengths), values), len(lengths) + 2
    pruner = TopPruner(TopSettings(bins=[bins]), "1.attention", 0, 8, 1)
    size = max(lengths) + 1
    table = torch.ones(size, dtype=torch.int32)
    for n in range(2, size):
        table[n] = 1 + int(pruner.keeps(torch.tensor([[n - 1]]), torch.arange(n - 1)[None]).sum())
    found = selected(
        launch, variant, lengths, num_texts, num_texts, order=order, keep_first=1, lengths_from=checks.bounds(lengths, num_texts),
        table=table, table_size=size, keeps=pruner.table.to(torch.int8), bins=len(bins),
    )  # fmt: skip
    return same(found, KeepRanks(order[: sum(lengths)], pruner.keeps).packed(checks.bounds(lengths).long()))


def check_above(
    launch: Launch,
    variant: Variant,
    *,
    lengths: Sequence[int],
    threshold: float = 0.5,
    values: int | None = None,
    num_texts: int = 0,
    seed: int = 0,
) -> float:
    order, num_texts = scores_of(seed, sum(lengths), values), num_texts or len(lengths) + 2
    found = selected(launch, variant, lengths, num_texts, 1, order=order, threshold=threshold)
    rule = KeepAbove(order[: sum(lengths)], torch.tensor(threshold))
    return same(found, rule.packed(checks.bounds(lengths).long()))


def check_share(
    launch: Launch,
    variant: Variant,
    *,
    lengths: Sequence[int],
    wanted: float,
    close: bool = False,
    num_texts: int = 0,
    programs: int | None = None,
    seed: int = 0,
) -> float:
    """close: scores are neighbours in fp32 of the share of the largest, where quotients are rounded either way."""
    generator, num_texts = torch.Generator().manual_seed(seed), num_texts or len(lengths) + 2
    rows = sum(lengths)
    order = torch.rand(rows, generator=generator) + 0.01
    if close:
        largest = torch.cat([x.amax().expand(len(x)) for x in order.split([*lengths])])
        steps = torch.randint(-2, 3, (rows,), generator=generator)
        near = (largest * torch.tensor(wanted)).view(torch.int32) + steps
        order = torch.where(order == largest, order, near.to(torch.int32).view(torch.float32))
    reaches, padded = unwritten(rows + 3, dtype=torch.float32), torch.cat([order, torch.full((3,), float("nan"))])
    number = torch.tensor(wanted)
    slack, ties = share_of(float(number))
    launch(
        variant, programs or num_texts, order=padded, cu_seqlens=checks.bounds(lengths, num_texts),
        texts=checks.int32(len(lengths)), reaches=reaches, num_rows=rows + 3, num_texts=num_texts, wanted=float(number), slack=slack,
        ties=int(ties),
    )  # fmt: skip
    exact = torch.cat([x / x.amax() >= number for x in order.split([*lengths])])
    return 0.0 if torch.equal(reaches[:rows], exact.float()) and is_unwritten(reaches[rows:]) else checks.WRONG
