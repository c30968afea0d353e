"""A cut in two launches: scores of tokens, and from these which rows stay. The next product reads rows by their index.

What stays is exactly what the rules of `model.selection` say of the same scores: ties go to the lower position, survivors
keep their order, and each text keeps a token. No two scores are compared with each other: the k-th largest is found bit by
bit in an image of scores that sorts like unsigned integers, by 32 counts over a text that lies in registers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .norm import normalized
from .product import alive, erf

SCAN = tl.constexpr(512)
"""Texts that a program looks at in one go."""

FEW = tl.constexpr(32)
"""As in `model.pruners.top`: tokens from which on tables of bins have one row for all."""


@triton.jit
def scores(
    x,
    cu_seqlens,
    texts,
    first_weight,
    first_bias,
    last_weight,
    last_bias,
    ratio_weight,
    ratio_bias,
    permille,
    order,
    count,
    num_rows,
    num_texts,
    hidden,
    width,
    candidates,
    min_tokens,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Score tokens by a predictor of two layers with ReLU, and choose from first rows how many tokens of each text stay. All in fp32.

    Args:
        x: ``(num_rows, H)``, T.
        cu_seqlens: ``(num_texts + 1,) int32``. texts: ``(1,) int32``, B.
        first_weight: ``(W, H)`` fp32. first_bias, last_weight: ``(W,)`` fp32. last_bias: ``(1,)`` fp32.
        ratio_weight: ``(C, H)`` fp32. ratio_bias: ``(C,)`` fp32. permille: ``(C,) int32``, the candidates' ratios.
        order: ``(num_rows,)`` fp32, the scores.
        count: ``(num_texts,) int32``: ``min(n, max(min_tokens, ceil(n * permille / 1000)))`` for the candidate of the highest score, the
            lowest on ties.
        hidden: H, a multiple of 8. width: W. candidates: C, at most BLOCK_C. Addresses are multiples of 16 bytes.

    Grid: ``ceil(num_rows / BLOCK_M) + num_texts`` programs; without the second term only tokens are scored, and then what is about
    ratios may be any address.

    Order of additions: hidden units in blocks of BLOCK_N, each summed over H in blocks of BLOCK_K as three products of tf32, then
    the bias; the units of a block in a fixed tree, blocks ascending, then the last bias.
    """
    program = tl.program_id(0)
    tiles = tl.cdiv(num_rows, BLOCK_M)
    if program < tiles:
        rows = alive(cu_seqlens + num_texts, num_rows)
        row = program * BLOCK_M + tl.arange(0, BLOCK_M)
        is_row = row < rows
        if program * BLOCK_M < rows:
            from_x = x + row.to(tl.int64)[:, None] * hidden
            found = tl.zeros([BLOCK_M], tl.float32)
            for first_unit in range(0, width, BLOCK_N):
                unit = first_unit + tl.arange(0, BLOCK_N)
                is_unit = unit < width
                total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
                for first in range(0, hidden, BLOCK_K):
                    inner = first + tl.arange(0, BLOCK_K)[None, :]
                    left = tl.load(from_x + inner, mask=is_row[:, None] & (inner < hidden), other=0.0).to(tl.float32)
                    at = first_weight + unit[:, None] * hidden + inner
                    right = tl.load(at, mask=is_unit[:, None] & (inner < hidden), other=0.0)
                    total = tl.dot(left, tl.trans(right), total, input_precision="tf32x3")
                total += tl.load(first_bias + unit, mask=is_unit, other=0.0)[None, :]
                gain = tl.load(last_weight + unit, mask=is_unit, other=0.0)
                found += tl.sum(tl.maximum(total, 0.0) * gain[None, :], 1)
            tl.store(order + row, found + tl.load(last_bias), mask=is_row)
    else:
        text = program - tiles
        if text < alive(texts, num_texts):
            begin = tl.minimum(tl.maximum(tl.load(cu_seqlens + text), 0), num_rows - 1)
            length = tl.minimum(tl.maximum(tl.load(cu_seqlens + text + 1) - begin, 1), num_rows)
            candidate = tl.arange(0, BLOCK_C)
            is_candidate = candidate < candidates
            total = tl.zeros([BLOCK_C], tl.float32)
            for first in range(0, hidden, BLOCK_N):
                inner = first + tl.arange(0, BLOCK_N)
                left = tl.load(x + begin.to(tl.int64) * hidden + inner, mask=inner < hidden, other=0.0).to(tl.float32)
                at = ratio_weight + candidate[:, None] * hidden + inner[None, :]
                right = tl.load(at, mask=is_candidate[:, None] & (inner < hidden)[None, :], other=0.0)
                total += tl.sum(left[None, :] * right, 1)
            total += tl.load(ratio_bias + candidate, mask=is_candidate, other=0.0)
            total = tl.where(is_candidate, total, float("-inf"))
            best = tl.min(tl.where(total == tl.max(total, 0), candidate, candidates - 1), 0)
            ratio = tl.load(permille + best)
            kept = tl.maximum((length * ratio + 999) // 1000, min_tokens)
            tl.store(count + text, tl.minimum(length, kept))


@triton.jit
def _image(score):
    """Map fp32 to unsigned integers that sort alike; both zeros are one."""
    bits = tl.where(score == 0, 0.0, score).to(tl.uint32, bitcast=True)
    return tl.where(bits >> 31 != 0, ~bits, bits | 0x80000000)


@triton.jit
def _highest(image, is_there, wanted):
    """Mark the `wanted` largest of what is there, of equal ones the first."""
    least = tl.zeros([1], tl.uint32)
    bit = tl.full([1], 0x80000000, tl.uint32)
    for _ in range(32):
        enough = tl.sum((is_there & (image >= (least | bit))).to(tl.int32), 0) >= wanted
        least = tl.where(enough, least | bit, least)
        bit = bit >> 1
    larger = is_there & (image > least)
    equal = is_there & (image == least)
    room = wanted - tl.sum(larger.to(tl.int32), 0)
    return larger | (equal & (tl.cumsum(equal.to(tl.int32), 0) <= room))


@triton.jit
def _kept(text, is_text, cu_seqlens, count, lengths_from, table, table_size):
    """Return how many tokens of texts stay: what `count` says, or, where it is None, the table for the lengths in `lengths_from`."""
    length = tl.load(cu_seqlens + text + 1, mask=is_text, other=0) - tl.load(cu_seqlens + text, mask=is_text, other=0)
    if count is not None:
        found = tl.load(count + text, mask=is_text, other=0)
    else:
        first = tl.load(lengths_from + text, mask=is_text, other=0)
        at = tl.load(lengths_from + text + 1, mask=is_text, other=0) - first
        found = tl.load(table + tl.minimum(tl.maximum(at, 0), table_size - 1), mask=is_text, other=0)
    return tl.maximum(tl.minimum(tl.maximum(found, 1), length), 0)


@triton.jit
def _stays(keeps, bins, others, rank, is_there):
    """Look ranks up, of which `others` tokens have one each; as `model.pruners.top` does."""
    scaled = rank * bins
    place = scaled // others
    divides = (scaled == place * others).to(tl.int32)
    at = (tl.minimum(others, FEW) * bins + place) * 2 + divides
    return tl.load(keeps + at, mask=is_there, other=0) != 0


@triton.jit
def _next_turn(keeps, bins, others, first, none):
    """Return the first rank from `first` on that stays while the one before it goes, or the other way round; `none` where there is none."""
    found = others * 0 + none  # tensors, as a loop carries them
    start = others * 0 + first
    few = tl.maximum(others, 1)
    while (start < others) & (found == none):
        rank = start + tl.arange(0, SCAN)
        now = _stays(keeps, bins, few, rank, rank < others)
        before = _stays(keeps, bins, few, tl.maximum(rank - 1, 0), (rank < others) & (rank > 0))
        found = tl.min(tl.where((rank < others) & (now != before), rank, none), 0)
        start += SCAN
    return found


@triton.jit
def choice(
    order,
    cu_seqlens,
    texts,
    count,
    lengths_from,
    table,
    keeps,
    rows,
    new_cu_seqlens,
    num_rows,
    num_texts,
    table_size,
    bins,
    keep_first,
    BLOCK: tl.constexpr,
):
    """Write which rows of one text stay, and where texts begin then.

    Args:
        order: ``(num_rows,)`` fp32, finite scores.
        cu_seqlens: ``(num_texts + 1,) int32``. texts: ``(1,) int32``, B.
        count: ``(num_texts,) int32``, how many stay; None in variants that look it up.
        lengths_from: ``(num_texts + 1,) int32``, like `cu_seqlens`: those by whose lengths the table goes, `cu_seqlens` itself or the
            input's. None where `count` is given.
        table: ``(table_size,) int32``, how many of n tokens stay; longer texts take the last. None where `count` is given.
        keeps: ``((FEW + 1) * bins * 2,) int8``, `TopPruner.table`: the ranks that stay; the table has to have as many of each length, and
            one for the first token. None in variants in which the highest scores stay.
        rows: ``(num_rows,) int32``, those that stay, ascending.
        new_cu_seqlens: ``(num_texts + 1,) int32``, their bounds; from B on it repeats T'.
        keep_first: 1: the first token of a text stays, and does not count among the others; 0: it competes. Ranks want 1.

    Grid: `num_texts` programs. A text has up to BLOCK tokens. It is one program's, which adds up what texts before it keep.
    """
    text = tl.program_id(0)
    num_live = alive(texts, num_texts)
    if text >= num_live:
        return
    begin = 0
    for first in range(0, text, SCAN):
        other = first + tl.arange(0, SCAN)
        begin += tl.sum(_kept(other, other < text, cu_seqlens, count, lengths_from, table, table_size), 0)
    start = tl.minimum(tl.maximum(tl.load(cu_seqlens + text), 0), num_rows)
    length = tl.minimum(tl.maximum(tl.load(cu_seqlens + text + 1) - start, 0), tl.minimum(num_rows - start, BLOCK))
    wanted = _kept(text, text < num_live, cu_seqlens, count, lengths_from, table, table_size)

    place = tl.arange(0, BLOCK)
    is_there = place < length
    image = _image(tl.load(order + start + place, mask=is_there, other=0.0))
    is_free = is_there & (place >= keep_first)
    if keeps is not None:
        kept = tl.zeros([BLOCK], tl.int32)
        rank = _next_turn(keeps, bins, length - 1, 0, BLOCK)
        while rank < BLOCK:  # tokens from this rank on change sides
            kept ^= (is_free & (_highest(image, is_free, rank) == 0)).to(tl.int32)
            rank = _next_turn(keeps, bins, length - 1, rank + 1, BLOCK)
        stays = kept != 0
    else:
        stays = _highest(image, is_free, wanted - keep_first)
    stays = stays | (is_there & (place < keep_first))
    to = begin + tl.cumsum(stays.to(tl.int32), 0) - 1
    tl.store(rows + to, start + place, mask=stays & (to >= 0) & (to < num_rows))
    tl.store(new_cu_seqlens + text + place, begin, mask=place < 1)
    if text == num_live - 1:
        end = begin + wanted + tl.zeros([BLOCK], tl.int32)
        for first in range(num_live, num_texts + 1, BLOCK):
            tl.store(new_cu_seqlens + first + place, end, mask=first + place <= num_texts)


@triton.jit
def above(order, cu_seqlens, texts, rows, new_cu_seqlens, before, threshold, num_rows, num_texts, BLOCK: tl.constexpr):
    """Write which rows reach a threshold, and where texts begin then; the first row of each text stays.

    Args:
        order, cu_seqlens, texts, rows, new_cu_seqlens: as in `choice`.
        before: ``(num_rows + 1,) int32``, workspace: how many rows before each stay.
        threshold: fp32. Scores that are divided before they are compared need no division here: the least fp32 x whose
            quotient reaches the threshold says the same.

    Grid: 1 program. It looks at T' rows and B texts, BLOCK at a time, however rows are shared out among texts.
    """
    place = tl.arange(0, BLOCK)
    num_live = alive(cu_seqlens + num_texts, num_rows)
    num_live_texts = alive(texts, num_texts)
    for first in range(0, num_live, BLOCK):
        row = first + place
        is_row = row < num_live
        score = tl.load(order + row, mask=is_row, other=0.0)
        tl.store(before + row, (score >= threshold).to(tl.int32), mask=is_row)
    tl.debug_barrier()
    for first in range(0, num_live_texts, BLOCK):
        text = first + place
        is_text = text < num_live_texts
        start = tl.load(cu_seqlens + text, mask=is_text, other=0)
        tl.store(before + start, 1 + tl.zeros([BLOCK], tl.int32), mask=is_text & (start >= 0) & (start < num_live))
    tl.debug_barrier()
    kept = 0
    for first in range(0, num_live, BLOCK):
        row = first + place
        stays = tl.load(before + row, mask=row < num_live, other=0)
        to = kept + tl.cumsum(stays, 0)
        tl.store(rows + to - 1, row, mask=stays != 0)
        tl.store(before + row, to - stays, mask=row < num_live)
        kept += tl.sum(stays, 0)
    tl.store(before + num_live + place, kept + place, mask=place < 1)
    tl.debug_barrier()
    for first in range(0, num_texts + 1, BLOCK):
        text = first + place
        is_text = text <= num_texts
        start = tl.load(cu_seqlens + text, mask=is_text, other=0)
        found = tl.load(before + tl.minimum(tl.maximum(start, 0), num_live), mask=is_text, other=0)
        tl.store(new_cu_seqlens + text, found, mask=is_text)


@triton.jit
def share(order, cu_seqlens, texts, reaches, num_rows, num_texts, wanted, slack, ties, BLOCK: tl.constexpr):
    """Say which scores are at least a share of the largest of their text: 1 where the quotient in fp32 is, else 0.

    Nothing is divided. The quotient x / L is rounded to at least `wanted` where it is at least the middle between that and the number
    of fp32 below, which is `wanted` less `slack`. The difference of x and ``wanted * L`` is exact where it is near that.

    Args:
        order: ``(num_rows,)`` fp32, scores from 0 on. cu_seqlens: ``(num_texts + 1,) int32``. texts: ``(1,) int32``, B.
        reaches: ``(num_rows,)`` fp32, for `above` to compare with a half.
        wanted, slack: fp32. ties: 1 where the middle itself is rounded to `wanted`, else 0.

    Grid: up to `num_texts` programs; any number from 1 on computes the same.
    """
    place = tl.arange(0, BLOCK)
    for text in range(tl.program_id(0), alive(texts, num_texts), tl.num_programs(0)):
        begin = tl.minimum(tl.maximum(tl.load(cu_seqlens + text), 0), num_rows)
        end = tl.minimum(tl.load(cu_seqlens + text + 1), num_rows)
        most = tl.zeros([BLOCK], tl.float32)
        for first in range(begin, end, BLOCK):
            most = tl.maximum(most, tl.load(order + first + place, mask=first + place < end, other=0.0))
        largest = tl.max(most, 0)
        for first in range(begin, end, BLOCK):
            x = tl.load(order + first + place, mask=first + place < end, other=0.0)
            room = (
                tl.fma(tl.zeros([BLOCK], tl.float32) - wanted, largest + tl.zeros([BLOCK], tl.float32), x)
                + slack * largest
            )
            is_enough = (room > 0) | ((room == 0) & (ties != 0))
            tl.store(reaches + first + place, is_enough.to(tl.float32), mask=first + place < end)


@triton.jit
def normalize(x, weight, bias, out, live, num_rows, hidden, eps, BLOCK_H: tl.constexpr):
    """Compute ``out = LayerNorm(x)`` in fp32: what a predictor of Transkimmer begins with.

    Args:
        x: ``(num_rows, H)``, T. weight, bias: ``(H,)`` fp32, of the norm. out: ``(num_rows, H)`` fp32.
        live: ``(1,) int32``, how many rows are computed. hidden: H, at most BLOCK_H.

    Grid: up to `num_rows` programs; any number from 1 on computes the same.
    """
    column = tl.arange(0, BLOCK_H)
    is_column = column < hidden
    for row in range(tl.program_id(0), alive(live, num_rows), tl.num_programs(0)):
        at = tl.cast(row, tl.int64) * hidden + column
        value = tl.load(x + at, mask=is_column, other=0.0).to(tl.float32)
        tl.store(out + at, normalized(value, weight, bias, column, hidden, eps), mask=is_column)


@triton.jit
def skim(x, weight, bias, gains, gain_biases, order, live, num_rows, hidden, eps, BLOCK_H: tl.constexpr):
    """Score tokens as a predictor of Transkimmer ends: LayerNorm, GELU, and by how much the second of two products is the larger.

    Args:
        x: ``(num_rows, H)`` fp32, what came out of its hidden layer. weight, bias: ``(H,)`` fp32, of the norm.
        gains: ``(2, H)`` fp32: of leaving, of staying. gain_biases: ``(2,)`` fp32.
        order: ``(num_rows,)`` fp32.
        live: ``(1,) int32``, how many rows are computed. hidden: H, at most BLOCK_H.

    Grid: up to `num_rows` programs; any number from 1 on computes the same.
    """
    column = tl.arange(0, BLOCK_H)
    is_column = column < hidden
    for row in range(tl.program_id(0), alive(live, num_rows), tl.num_programs(0)):
        value = tl.load(x + tl.cast(row, tl.int64) * hidden + column, mask=is_column, other=0.0)
        value = normalized(value, weight, bias, column, hidden, eps)
        value = 0.5 * value * (1.0 + erf(value * 0.7071067811865476))
        goes = tl.sum(value * tl.load(gains + column, mask=is_column, other=0.0), 0) + tl.load(gain_biases)
        stays = tl.sum(value * tl.load(gains + hidden + column, mask=is_column, other=0.0), 0)
        tl.store(order + row, stays + tl.load(gain_biases + 1) - goes)
