"""From padded ids to packed, embedded rows: where each text begins, and its tokens' rows of the tables, normalized."""

from __future__ import annotations

import triton
import triton.language as tl

from .norm import normalized


@triton.jit
def unpad(attention_mask, ends, cu_seqlens, texts, batch, padded, num_rows, num_texts, BLOCK: tl.constexpr):
    """Write where texts begin, from a right-padded mask.

    Args:
        attention_mask: ``(B, S) int64``, ones, then zeros. A row without ones counts as one token.
        ends: ``(num_texts,) int32``, workspace.
        cu_seqlens: ``(num_texts + 1,) int32``: from 0 to T'; from B on it repeats T'. It never exceeds `num_rows`.
        texts: ``(1,) int32``: B.
        batch, padded: B, from 1 to num_texts, and S, from 1 on.
        num_rows, num_texts: most tokens and most texts, the bucket's.

    Grid: 1 program. It looks at B * S numbers, BLOCK at a time, however these are shared out among texts.
    """
    place = tl.arange(0, BLOCK)
    ones = 0
    for first in range(0, batch * padded, BLOCK):  # ends[b]: ones up to the end of row b
        cell = first + place
        is_cell = cell < batch * padded
        is_one = (tl.load(attention_mask + cell, mask=is_cell, other=0) != 0).to(tl.int32)
        before = ones + tl.cumsum(is_one, 0)
        text = cell // padded
        tl.store(ends + text, before, mask=is_cell & (cell - text * padded == padded - 1))
        ones += tl.sum(is_one, 0)
    tl.debug_barrier()
    begin = 0
    for first in range(0, num_texts, BLOCK):
        text = first + place
        is_text = text < batch
        end = tl.load(ends + text, mask=is_text, other=0)
        last = tl.load(ends + text - 1, mask=is_text & (text > 0), other=0)
        length = tl.where(is_text, tl.maximum(end - last, 1), 0)
        after = tl.minimum(begin + tl.cumsum(length, 0), num_rows)
        tl.store(cu_seqlens + 1 + text, after, mask=text < num_texts)
        begin += tl.sum(length, 0)
    tl.store(cu_seqlens + place, place, mask=place < 1)
    tl.store(texts + place, batch + place, mask=place < 1)


@triton.jit
def embed(
    input_ids,
    token_type_ids,
    cu_seqlens,
    words,
    types,
    places,
    weight,
    norm_bias,
    out,
    origin,
    batch,
    padded,
    num_rows,
    hidden,
    num_words,
    num_types,
    num_places,
    first_place,
    typed,
    eps,
    BLOCK_H: tl.constexpr,
):
    """Write ``LayerNorm(word + type + place)`` of each live token to its packed row.

    Args:
        input_ids: ``(B, S) int64``. token_type_ids: the same, read only where `typed` is 1; otherwise types are 0.
        cu_seqlens: what `unpad` wrote.
        words, types, places: ``(num_words, H)``, ``(num_types, H)``, ``(num_places, H)``, T. A model that has none of one kind gets a
            table of one row of zeros.
        weight, norm_bias: ``(H,)``, T, of the norm. eps: fp32.
        out: ``(num_rows, H)``, T.
        origin: ``(num_rows,) int32``, the place of each packed row in the ``(B * S,)`` input.
        first_place: row of `places` that the first token of a text has; RoBERTa begins after its padding id.
        hidden: H, a multiple of 8, at most BLOCK_H. Addresses are multiples of 16 bytes.

    Ids, types and places outside their tables take the nearest row, so that nothing else is read. Grid: up to ``B * S``
    programs; any number from 1 on computes the same, so the bucket's rows will do. Order of additions: as above.
    """
    column = tl.arange(0, BLOCK_H)
    is_column = column < hidden
    for cell in range(tl.program_id(0), batch * padded, tl.num_programs(0)):
        text = cell // padded
        place = cell - text * padded
        begin = tl.load(cu_seqlens + text)
        row = begin + place
        if (row >= 0) & (row < tl.minimum(tl.load(cu_seqlens + text + 1), num_rows)):
            word = tl.minimum(tl.maximum(tl.load(input_ids + cell), 0), num_words - 1)
            kind = tl.load(token_type_ids + cell, mask=typed != 0, other=0)
            kind = tl.minimum(tl.maximum(kind, 0), num_types - 1)
            at = tl.minimum(tl.maximum(place + first_place, 0), num_places - 1).to(tl.int64)
            x = tl.load(words + word * hidden + column, mask=is_column, other=0.0).to(tl.float32)
            x += tl.load(types + kind * hidden + column, mask=is_column, other=0.0).to(tl.float32)
            x += tl.load(places + at * hidden + column, mask=is_column, other=0.0).to(tl.float32)
            result = normalized(x, weight, norm_bias, column, hidden, eps)
            to = out + tl.cast(row, tl.int64) * hidden + column
            tl.store(to, result.to(out.dtype.element_ty), mask=is_column)
            tl.store(origin + row, cell)
