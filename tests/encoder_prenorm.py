"""What the kernels of layers with norms before their sublayers have to compute: checks as in `encoder_checks`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from encoder_checks import TYPES, WRONG, Random, W, bounds, int32, linear, rounded, share
from encoder_launch import Launch, is_unwritten, unwritten

from adtp_export.model.selection import kept_count
from adtp_export.model.sequences import pack
from adtp_export.plugins.encoder.variants import ADD_RMS, ANCHOR, GATED, LOOK_UP, TURN, Variant

EPS = 1e-6
FP32 = torch.float32


def rms(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """An RMS norm in fp64 of exact ``x (..., H)``, and what fp32 may be off by: sums of up to H / 1024 + 24 additions, a root, factors."""
    exact = x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()
    return exact, (x.shape[-1] // 1024 + 40) * W * exact.abs()


def check_look_up(
    launch: Launch,
    variant: Variant,
    *,
    lengths: Sequence[int],
    padded: int,
    hidden: int,
    num_rows: int | None = None,
    programs: int | None = None,
    foreign: bool = False,
    seed: int = 0,
) -> float:
    """foreign: ids outside the table, of which the nearest rows are taken. num_rows: fewer than tokens, which must do no harm."""
    batch, dtype = len(lengths), TYPES[variant.dtype or ""]
    random = Random(seed, dtype)
    live = [max(1, min(n, padded)) for n in lengths]
    num_rows = sum(live) + 2 if num_rows is None else num_rows
    low, high = (-(2**40), 2**40) if foreign else (0, 11)
    ids = torch.randint(low, high, (batch, padded), generator=random.generator)
    words, weight = random(11, hidden), random(hidden)
    states, out = (unwritten(num_rows, hidden, dtype=dtype) for _ in range(2))
    positions = unwritten(num_rows, dtype=torch.int32)
    launch(
        variant, programs or num_rows, input_ids=ids, cu_seqlens=bounds(live).clamp(max=num_rows), words=words, weight=weight,
        states=states, out=out, positions=positions, batch=batch, padded=padded, num_rows=num_rows, hidden=hidden,
        num_words=len(words), eps=EPS,
    )  # fmt: skip
    _, rows = pack(torch.tensor(live), padded)
    rows = rows[:num_rows]
    there = len(rows)
    wanted = words[ids.flatten()[rows].clamp(0, 10)]
    if not torch.equal(states[:there], wanted) or not torch.equal(positions[:there].long(), rows % padded):
        return WRONG
    if not all(is_unwritten(t[there:]) for t in (states, out, positions)):
        return WRONG
    exact, allowed = rms(wanted.double(), weight)
    return share(exact, rounded(exact, allowed, dtype), out[:there])


def check_add_rms(
    launch: Launch,
    variant: Variant,
    *,
    rows: int,
    hidden: int,
    parts: int = 1,
    indexed: bool = False,
    programs: int | None = None,
    seed: int = 0,
) -> float:
    capacity, dtype = rows + 3, TYPES[variant.dtype or ""]
    random = Random(seed, dtype)
    sources, residual, index = random.chosen(rows, capacity, hidden, indexed)
    summed = random(max(parts, 1), capacity, hidden, dtype=FP32)
    summed[:, rows:] = float("nan")
    bias, weight = random(hidden), random(hidden)
    states, out = (unwritten(capacity, hidden, dtype=dtype) for _ in range(2))
    launch(
        variant, programs or capacity, residual=residual, index=index, parts=summed, bias=bias, weight=weight, states=states, out=out,
        live=int32(rows), source_rows=sources, num_rows=capacity, num_parts=parts, hidden=hidden, eps=EPS, indexed=int(indexed),
    )  # fmt: skip
    if not is_unwritten(out[rows:]) or not is_unwritten(states[rows:]):
        return WRONG
    terms = [residual[index[:rows].long()] if indexed else residual[:rows]]
    terms += [*summed[:parts, :rows], bias.expand(rows, -1)] if parts else []
    x = torch.stack([t.double() for t in terms])
    of_sum = share(x.sum(0), rounded(x.sum(0), len(terms) * W * x.abs().sum(0), dtype), states[:rows])
    exact, allowed = rms(states[:rows].double(), weight)  # the norm reads what is rounded
    return float(torch.tensor([of_sum, share(exact, rounded(exact, allowed, dtype), out[:rows])]).max())


def check_turn(
    launch: Launch,
    variant: Variant,
    *,
    rows: int,
    heads: tuple[int, int],
    smaller: int = 0,
    normed: bool = True,
    indexed: bool = False,
    programs: int | None = None,
    seed: int = 0,
) -> float:
    """heads: of queries and of keys. smaller: by how much the head size is below the largest of the variant."""
    size, capacity, dtype = 2 * variant.constants["HALF_BLOCK"] - smaller, rows + 3, TYPES[variant.dtype or ""]
    random = Random(seed, dtype)
    sources, turned = capacity + 5 if indexed else capacity, sum(heads) * size
    stride = turned + heads[1] * size + 8
    qkv = random.rows(rows, capacity, stride)
    before = qkv.clone()
    weights = [random(size, dtype=FP32) for _ in range(2)]
    places = 40
    cos, sin = (random(places, size // 2, dtype=FP32) for _ in range(2))
    positions = torch.randint(0, places + 5, (sources,), generator=random.generator).to(torch.int32)
    index = random.index(rows, sources, capacity) if indexed else unwritten(1, dtype=torch.int32)
    told = unwritten(capacity, dtype=torch.int32)
    unread = unwritten(1, dtype=FP32)
    launch(
        variant, programs or capacity, qkv=qkv, q_weight=weights[0] if normed else unread, k_weight=weights[1] if normed else unread,
        cos=cos, sin=sin, positions=positions, index=index, new_positions=told, live=int32(rows), source_rows=sources,
        num_rows=capacity, row_stride=stride, num_heads=heads[0], kv_heads=heads[1], head_size=size, num_places=places, eps=EPS,
        normed=int(normed), indexed=int(indexed),
    )  # fmt: skip
    at = positions[index[:rows].long()] if indexed else positions[:rows]
    same = torch.equal(qkv[:rows, turned:], before[:rows, turned:]) and bool(qkv[rows:].isnan().all())
    if not same or not torch.equal(told[:rows], at) or not is_unwritten(told[rows:]):
        return WRONG
    x = before[:rows, :turned].double().unflatten(1, (-1, size))
    error = torch.zeros_like(x)
    if normed:
        weight = torch.stack([w for w, count in zip(weights, heads) for _ in range(count)])
        x, error = rms(x, weight)
    by_cos, by_sin = (table.double()[at.long().clamp(max=places - 1)][:, None] for table in (cos, sin))
    (first, second), (off, other) = x.chunk(2, -1), error.chunk(2, -1)
    exact = torch.cat([first * by_cos - second * by_sin, second * by_cos + first * by_sin], -1)
    sizes = [(f * by_cos).abs() + (s * by_sin).abs() for f, s in ((first, second), (second, first))]
    moved = [f * by_cos.abs() + s * by_sin.abs() for f, s in ((off, other), (other, off))]
    allowed = torch.cat(moved, -1) + 3 * W * torch.cat(sizes, -1)
    return share(exact, rounded(exact, allowed, dtype), qkv[:rows, :turned].unflatten(1, (-1, size)))


def check_gated(
    launch: Launch,
    variant: Variant,
    *,
    rows: int,
    n: int,
    k: int,
    capacity: int | None = None,
    indexed: bool = False,
    programs: int | None = None,
    seed: int = 0,
) -> float:
    capacity, dtype, blocks = capacity or rows + 3, TYPES[variant.dtype or ""], variant.constants
    random = Random(seed, dtype)
    sources, a, index = random.chosen(rows, capacity, k, indexed)
    weight, bias, out = random(2 * n, k), random(2 * n), unwritten(capacity, n, dtype=dtype)
    most = -(-capacity // blocks["BLOCK_M"]) * -(-n // blocks["BLOCK_N"])
    launch(
        variant, programs or most, a=a, index=index, weight=weight, bias=bias, out=out, live=int32(rows), source_rows=sources,
        num_rows=capacity, n=n, k=k, indexed=int(indexed),
    )  # fmt: skip
    if not is_unwritten(out[rows:]):
        return WRONG
    both, error = linear(a[index[:rows].long()] if indexed else a[:rows], weight, bias)
    (gates, values), (off, other) = both.chunk(2, 1), error.chunk(2, 1)
    silu = torch.nn.functional.silu(gates)
    # SiLU's slope is at most 1.1; exp2 rounds its exponent, which the quotient feels as a relative error of that size.
    off = 1.1 * off + (gates.abs() + 8) * W * silu.abs()
    exact = silu * values
    allowed = off * (values.abs() + other) + silu.abs() * other + 2 * W * exact.abs()
    return share(exact, rounded(exact, allowed, dtype), out[:rows])


def check_anchor(
    launch: Launch,
    variant: Variant,
    *,
    lengths: Sequence[int],
    hidden: int,
    candidates: int = 5,
    min_tokens: int = 2,
    ties: bool = False,
    programs: int | None = None,
    seed: int = 0,
) -> float:
    """ties: all candidates score alike, so the first is chosen."""
    rows, num_texts, random = sum(lengths), len(lengths) + 2, Random(seed, TYPES[variant.dtype or ""])
    x, order = random.rows(rows, rows + 3, hidden), random(rows + 3, dtype=FP32)
    ratio, bias = random(max(candidates, 1), hidden, dtype=FP32), random(max(candidates, 1), dtype=FP32)
    if ties:
        ratio, bias = ratio[:1].repeat(candidates, 1), bias[:1].repeat(candidates)
    permille = torch.linspace(100, 1000, max(candidates, 1)).to(torch.int32)
    count, before = unwritten(num_texts, dtype=torch.int32), order.clone()
    launch(
        variant, programs or num_texts, x=x, order=order, cu_seqlens=bounds(lengths, num_texts), texts=int32(len(lengths)),
        ratio_weight=ratio, ratio_bias=bias, permille=permille, count=count, num_rows=rows + 3, num_texts=num_texts, hidden=hidden,
        candidates=candidates, min_tokens=min_tokens,
    )  # fmt: skip
    last = bounds(lengths)[1:].long() - 1
    if not torch.equal(order, before.index_fill(0, last, torch.inf)) or not is_unwritten(
        count[len(lengths) * (candidates > 0) :]
    ):
        return WRONG
    if not candidates:
        return 0.0
    of = torch.tensor(lengths)
    logits, error = linear(x[last], ratio, bias)
    possible = logits + error >= (logits - error).amax(1, keepdim=True)  # of these rounding decides, but for equal ones
    possible = torch.arange(candidates) == 0 if ties else possible
    wanted = kept_count(of[:, None], permille.long().expand(len(of), -1), min_tokens)
    return 0.0 if ((wanted == count[: len(of), None]) & possible).any(1).all() else WRONG


def cases_of(variant: Variant) -> list[tuple[Any, dict[str, Any]]]:
    """Cases as in `encoder_cases`: widths of one block and of more, rows by index, fewer programs than rows, dead rows."""
    kernel, blocks = variant.kernel, variant.constants
    usual = {"lengths": (3, 0, 5), "padded": 6}
    if kernel == GATED:
        m, n, k = (blocks[f"BLOCK_{axis}"] for axis in "MNK")
        given = [
            {"rows": m + 1, "n": n + 8, "k": k + 8, "indexed": True, "programs": 3},
            {"rows": m - 1, "n": n - 8, "k": (variant.num_stages + 3) * k + 8, "capacity": 2 * m + 1},
            {"rows": 3, "n": 8, "k": 3 * k},
        ]
        return [(check_gated, case | {"seed": seed}) for seed, case in enumerate(given)]
    made: dict[str, list[tuple[Any, dict[str, Any]]]] = {
        LOOK_UP: [
            (check_look_up, usual | {"hidden": 1096, "programs": 4}),
            (check_look_up, usual | {"hidden": 24, "foreign": True, "num_rows": 6, "seed": 1}),
        ],
        ADD_RMS: [
            (check_add_rms, {"rows": 5, "hidden": 1096, "parts": 3, "indexed": True, "programs": 3}),
            (check_add_rms, {"rows": 3, "hidden": 24, "seed": 1}),
            (check_add_rms, {"rows": 2, "hidden": 1024, "parts": 0, "seed": 2}),
        ],
        ANCHOR: [
            (check_anchor, {"lengths": (1, 17, 50), "hidden": 136, "programs": 2}),
            (check_anchor, {"lengths": (4, 2, 9), "hidden": 24, "candidates": 3, "ties": True, "seed": 1}),
            (check_anchor, {"lengths": (9, 1), "hidden": 8, "candidates": 0, "seed": 2}),
        ],
        TURN: [
            (check_turn, {"rows": 5, "heads": (6, 3), "indexed": True, "programs": 3}),
            (check_turn, {"rows": 4, "heads": (4, 1), "smaller": 24, "seed": 1}),
            (check_turn, {"rows": 3, "heads": (2, 2), "normed": False, "seed": 2}),
        ],
    }
    return made[kernel]
