"""Each rule against its written definition, padded and packed, and its margins."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from adtp_export.model.selection import KeepAbove, KeepAboveShare, KeepBest, KeepRanks, Rows, compact, kept_count
from adtp_export.model.sequences import pack, restore

MOST = 24

# Few distinct values, so that ties are common.
scores = st.lists(st.integers(-3, 3).map(float), min_size=1, max_size=MOST)
rows_of_scores = st.lists(scores, min_size=1, max_size=6)
anchoring = st.one_of(st.none(), st.integers(0, 2**16))
"""Which token of each text stays beside the first: none, or one that depends on a number, at times the first itself."""


def anchors_of(rows, number, first=True):
    """The tokens of each text that always stay, ascending."""
    picked = [
        [0] * first if number is None else [0] * first + [(number * 7 + i) % len(row)] for i, row in enumerate(rows)
    ]
    return [sorted({*each}) for each in picked]


def by_rank(saliency, anchors):
    """The others, the best first; ties go to the lower position."""
    return sorted({*range(len(saliency))} - {*anchors}, key=lambda i: (-saliency[i], i))


def best(saliency, count, anchors):
    return sorted([*anchors, *by_rank(saliency, anchors)[: max(0, count - len(anchors))]])


def above(saliency, threshold, anchors):
    return [i for i in range(len(saliency)) if i in anchors or saliency[i] >= threshold]


def ranks(saliency, table, anchors):
    others = by_rank(saliency, anchors)
    return sorted([*anchors, *(i for rank, i in enumerate(others) if table[len(others), rank])])


def keep_ranks(order, table):
    """Row n, column r of the table says whether rank r stays among n tokens besides the first."""
    return KeepRanks(order, lambda n, rank: table[n, rank])


def rectangle(rows):
    lengths = torch.tensor([len(row) for row in rows])
    padded = torch.full((len(rows), int(lengths.max())), 99.0)  # what lies in the padding must not matter
    for i, row in enumerate(rows):
        padded[i, : len(row)] = torch.tensor(row)
    return padded, torch.arange(padded.shape[1]) < lengths[:, None]


def keeping(rule, rows, number, start):
    """The rule that keeps a second token of each text; texts begin at `start`."""
    if number is None:
        return rule.keeping(None, start)
    return rule.keeping(start + torch.tensor([(number * 7 + i) % len(row) for i, row in enumerate(rows)]), start)


def check(rows, expected, rule, number=None):
    """`rule` makes a rule of scores in each form; all forms must keep what is expected. That of fixed sizes has an empty text and dead
    rows, too.
    """
    padded, live = rectangle(rows)
    columns = torch.zeros(len(rows), dtype=torch.int64)
    told = keeping(rule(padded), rows, number, columns)
    assert [np.flatnonzero(row).tolist() for row in told.padded(live).numpy()] == expected
    cu_seqlens = torch.nn.functional.pad(live.sum(1).cumsum(0), (1, 0))
    packed = keeping(rule(padded[live]), rows, number, cu_seqlens[:-1])
    kept, bounds = packed.packed(cu_seqlens)
    assert bounds.tolist() == [0, *np.cumsum([len(e) for e in expected])]
    assert kept.tolist() == [int(start) + i for start, e in zip(cu_seqlens, expected) for i in e]
    tokens = int(cu_seqlens[-1])
    dead = keeping(rule(torch.cat([padded[live], torch.full((2,), 99.0)])), rows, number, cu_seqlens[:-1])
    stays = dead.fixed(Rows.of(cu_seqlens, tokens + 2))[:tokens]
    assert np.flatnonzero(stays.numpy()).tolist() == kept.tolist()


@given(st.lists(st.tuples(scores, st.integers(1, 1000), st.integers(1, 4)), min_size=1, max_size=6), anchoring)
@settings(max_examples=150, deadline=None)
def test_keep_best(rows, number):
    """Steps 1 to 4 of checkpoint format 1."""
    counts = [min(len(s), max(least, (len(s) * permille + 999) // 1000)) for s, permille, least in rows]
    only = [s for s, _, _ in rows]
    count = torch.tensor(counts)
    for first in (True, False):
        kept = [best(s, k, anchors) for s, k, anchors in zip(only, counts, anchors_of(only, number, first))]
        check(only, kept, lambda order, first=first: KeepBest(order, count, keep_first=first), number)


@given(rows_of_scores, st.integers(-4, 4).map(float), anchoring)
@settings(max_examples=150, deadline=None)
def test_keep_above(rows, threshold, number):
    kept = [above(s, threshold, anchors) for s, anchors in zip(rows, anchors_of(rows, number))]
    check(rows, kept, lambda order: KeepAbove(order, torch.tensor(threshold)), number)


@given(
    st.lists(st.lists(st.integers(1, 64).map(float), min_size=1, max_size=9), min_size=1, max_size=6),
    st.integers(0, 8),
    anchoring,
)
@settings(max_examples=150, deadline=None)
def test_keep_above_a_share(rows, eighths, number):
    """Shares of eight and whole scores are exact in fp32, so ties are ties."""
    share = eighths / 8
    kept = [above(s, share * max(s), anchors) for s, anchors in zip(rows, anchors_of(rows, number))]
    check(rows, kept, lambda order: KeepAboveShare(order, torch.tensor(share)), number)


@given(rows_of_scores, st.integers(0, 2**32 - 1), anchoring)
@settings(max_examples=150, deadline=None)
def test_keep_ranks(rows, seed, number):
    table = torch.rand(MOST, MOST, generator=torch.Generator().manual_seed(seed)) < 0.5
    kept = [ranks(s, table, anchors) for s, anchors in zip(rows, anchors_of(rows, number))]
    check(rows, kept, lambda order: keep_ranks(order, table), number)


@given(st.lists(st.lists(st.booleans(), min_size=1, max_size=9), min_size=1, max_size=6))
def test_compact_lists_survivors_in_order(rows):
    lengths = [len(row) for row in rows]
    cu_seqlens = torch.tensor([0, *np.cumsum(lengths)])
    kept, bounds = compact(torch.tensor([x for row in rows for x in row]), cu_seqlens)
    expected = [[i for i, x in enumerate(row) if x or i == 0] for row in rows]
    assert kept.tolist() == [int(start) + i for start, e in zip(cu_seqlens, expected) for i in e]
    assert bounds.tolist() == [0, *np.cumsum([len(e) for e in expected])]


@given(st.lists(st.integers(1, 30), min_size=1, max_size=10), st.integers(0, 7))
def test_pack_indexes_the_live_elements(lengths, slack):
    size = max(lengths) + slack
    cu_seqlens, cells = pack(torch.tensor(lengths), size)
    assert cu_seqlens.tolist() == [0, *np.cumsum(lengths)]
    assert cells.tolist() == [b * size + j for b, n in enumerate(lengths) for j in range(n)]
    restored = restore(torch.arange(len(cells)) + 1, cells, torch.Size((len(lengths), size)))
    assert restored.flatten()[cells].tolist() == list(range(1, len(cells) + 1))
    assert (restored == 0).sum() == len(lengths) * size - len(cells)


@given(st.integers(1, 5000), st.integers(1, 1000), st.integers(1, 8))
def test_count_is_the_integer_ceiling(n, permille, least):
    expected = min(n, max(least, math.ceil(n * permille / 1000 - 1e-9)))
    assert kept_count(torch.tensor([n]), permille, least).item() == expected


@pytest.mark.parametrize("kind", ["best", "best of all", "above", "ranks"])
@given(
    rows=st.lists(st.lists(st.integers(-50, 50).map(float), min_size=1, max_size=12), min_size=1, max_size=4),
    number=anchoring,
)
@settings(max_examples=60, deadline=None)
def test_scores_moved_by_less_than_half_the_margin_keep_the_same_tokens(kind, rows, number):
    """And a margin that is finite is tight: scores moved by a little more than half of it can keep others."""
    order, live = rectangle(rows)
    count = torch.clamp(live.sum(1) // 2, min=1)
    table = torch.arange(12)[:, None] > 2 * torch.arange(12)[None]
    plain = {
        "best": lambda s: KeepBest(s, count),
        "best of all": lambda s: KeepBest(s, count, keep_first=False),
        "above": lambda s: KeepAbove(s, torch.tensor(0.25)),
        "ranks": lambda s: keep_ranks(s, table),
    }[kind]

    def make(scores):
        return keeping(plain(scores), rows, number, torch.zeros(len(rows), dtype=torch.int64))

    rule = make(order)
    kept, margin = rule.padded(live), rule.margins(live)[1]
    generator = torch.Generator().manual_seed(0)
    noise = torch.rand(order.shape, generator=generator) * 2 - 1
    reach = torch.where(torch.isfinite(margin), margin, 1.0)[:, None]
    # A threshold stands still; of two scores that are compared, both move.
    moved = make(order + noise * reach * (0.99 if kind == "above" else 0.49))
    assert torch.equal(moved.padded(live), kept)
    # The tokens that stay fall, the others rise: that is the worst that can happen.
    against = torch.where(kept, -1.0, 1.0) * reach * (1.01 if kind == "above" else 0.51)
    changed = (make(order + against).padded(live) != kept).any(1)
    assert changed[torch.isfinite(margin) & (margin > 0)].all()


def test_margins_of_a_choice():
    choice = torch.tensor([[1.0, 3.0, 2.5], [0.0, 0.0, -1.0]])
    live = torch.ones(2, 4, dtype=torch.bool)
    rule = KeepBest(torch.zeros(2, 4), torch.tensor([2, 2]), choice)
    assert rule.margins(live)[0].tolist() == [0.5, 0.0]
    assert KeepBest(torch.zeros(2, 4), torch.tensor([2, 2])).margins(live)[0].tolist() == [math.inf] * 2


def test_errors_are_those_of_live_scores():
    live = torch.tensor([[True, True, True], [True, True, False]])
    exact = torch.tensor([[0.0, 1.0, 2.0], [0.0, 1.0, 2.0]])
    off = exact + torch.tensor([[0.0, 0.5, -0.25], [0.0, 0.0, 7.0]])
    count = torch.tensor([2, 2])
    low, high = (KeepBest(s, count, s[:, :2] * 2) for s in (off, exact))
    assert low.errors(high, live).tolist() == [[1.0, 0.0], [0.5, 0.0]]
    assert high.sizes(live).tolist() == [2.0, 2.0]
    threshold = torch.tensor(0.5)
    assert KeepAbove(off, threshold).errors(KeepAbove(exact, threshold), live).tolist() == [[0.5, 0.0]] * 2
    table = torch.ones(3, 3, dtype=torch.bool)
    assert keep_ranks(off, table).errors(keep_ranks(exact, table), live).tolist() == [[0.0, 0.0], [0.5, 0.0]]


def test_a_first_token_below_the_threshold_stays_and_is_told():
    order, live = torch.tensor([[0.1, 0.9], [0.9, 0.1]]), torch.ones(2, 2, dtype=torch.bool)
    rule = KeepAbove(order, torch.tensor(0.5), first_may_fall=True)
    assert rule.padded(live).tolist() == [[True, True], [True, False]]
    assert rule.first_falls().tolist() == [True, False]
    of_the_largest = KeepAboveShare(order, torch.tensor(0.5), first_may_fall=True)
    assert of_the_largest.padded(live).tolist() == [[True, True], [True, False]]
    assert of_the_largest.first_falls().tolist() == [True, False]
    assert not KeepAbove(order, torch.tensor(0.5)).first_falls().any()
    assert not KeepBest(order, torch.tensor([1, 1])).first_falls().any()


def test_ranks_that_are_asked_for_are_those_of_the_text():
    """Padding has none, and a text of one token asks for nothing that matters."""
    asked = []

    def keeps(n, rank):
        asked.append((n, rank))
        return rank < 1

    live = torch.tensor([[True, True, True, False, False], [True, False, False, False, False]])
    rule = KeepRanks(torch.tensor([[0.0, 1.0, 2.0, 9.0, 9.0], [5.0, 9.0, 9.0, 9.0, 9.0]]), keeps)
    assert rule.padded(live).tolist() == [[True, False, True, False, False], [True, False, False, False, False]]
    assert rule.margins(live)[1].tolist() == [1.0, math.inf]
    assert KeepRanks(rule.order[live], keeps).packed(torch.tensor([0, 3, 4]))[0].tolist() == [0, 2, 3]
    assert all(((rank >= 0) & (rank < n)).all() and (n >= 1).all() for n, rank in asked)
