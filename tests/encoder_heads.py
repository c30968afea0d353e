"""What kernels around heads and predictors have to compute. Checks as in `encoder_checks`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import encoder_checks as checks
import torch
from encoder_checks import TYPES, WRONG, Random, W, bounds, int32, normalized, rounded, share
from encoder_launch import Launch, is_unwritten, unwritten

from adtp_export.plugins.encoder.variants import Variant

FP32 = torch.float32


def check_put_back(
    launch: Launch, variant: Variant, *, rows: int, hidden: int, programs: int | None = None, seed: int = 0
) -> float:
    random, capacity, all_rows = Random(seed, TYPES[variant.dtype or ""]), rows + 3, 2 * rows + 3
    states, before = random.rows(rows, capacity, hidden), random(all_rows, hidden)
    index, out = random.index(rows, all_rows, capacity), before.clone()
    launch(
        variant, programs or capacity, states=states, rows=index, out=out, live=int32(rows), num_rows=capacity, out_rows=all_rows,
        hidden=hidden,
    )  # fmt: skip
    wanted = before.index_copy(0, index[:rows].long(), states[:rows])
    return 0.0 if torch.equal(out, wanted) else WRONG


def check_spread(
    launch: Launch,
    variant: Variant,
    *,
    lengths: Sequence[int],
    padded: int,
    columns: int,
    stride: int,
    first: int = 0,
    programs: int | None = None,
    seed: int = 0,
) -> float:
    random, batch, capacity = Random(seed, TYPES[variant.dtype or ""]), len(lengths), sum(lengths) + 2
    values = random.rows(sum(lengths), capacity, stride)
    values[:, :first] = values[:, first + columns :] = float("nan")
    out = unwritten(batch, padded, columns, dtype=FP32)
    most = -(-batch * padded * columns // variant.constants["BLOCK"])
    launch(
        variant, programs or most, values=values, cu_seqlens=bounds(lengths, batch + 2), out=out, batch=batch, padded=padded,
        num_rows=capacity, first=first, columns=columns, stride=stride,
    )  # fmt: skip
    wanted = torch.zeros(batch, padded, columns)
    for text, (begin, length) in enumerate(zip(bounds(lengths).tolist(), lengths)):
        wanted[text, :length] = values[begin : begin + length, first : first + columns].float()
    return 0.0 if torch.equal(out, wanted) else WRONG


def check_pool(
    launch: Launch,
    variant: Variant,
    *,
    lengths: Sequence[int],
    hidden: int,
    way: int,
    programs: int | None = None,
    seed: int = 0,
) -> float:
    random, num_texts = Random(seed, TYPES[variant.dtype or ""]), len(lengths) + 2
    x = random.rows(sum(lengths), sum(lengths) + 3, hidden)
    out = unwritten(num_texts, hidden, dtype=TYPES[variant.arguments["out"].removeprefix("*")])
    most = num_texts * -(-hidden // variant.constants["BLOCK_H"])
    launch(
        variant, programs or most, x=x, cu_seqlens=bounds(lengths, num_texts), texts=int32(len(lengths)), out=out, num_rows=len(x),
        num_texts=num_texts, hidden=hidden, way=way,
    )  # fmt: skip
    if not is_unwritten(out[len(lengths) :]):
        return WRONG
    texts = x[: sum(lengths)].double().split([*lengths])
    pooled = [lambda t: t[0], lambda t: t.mean(0), lambda t: t.amax(0), lambda t: t[-1]][way]
    exact = torch.stack([pooled(t) for t in texts])
    sizes = torch.stack([t.abs().mean(0) for t in texts])
    error = (max(lengths) / 8 + 8) * W * sizes if way == 1 else torch.zeros_like(exact)
    return share(exact, rounded(exact, error, out.dtype), out[: len(lengths)])


def check_vectors(
    launch: Launch,
    variant: Variant,
    *,
    texts: int,
    width: int,
    normalize: bool,
    zero: bool = False,
    programs: int | None = None,
    seed: int = 0,
) -> float:
    """zero: the first vector has no direction."""
    random, capacity = Random(seed, TYPES[variant.dtype or ""]), texts + 2
    x = random.rows(texts, capacity, width)
    if zero:
        x[0] = 0
    out = unwritten(capacity, width, dtype=FP32)
    launch(
        variant, programs or capacity, x=x, texts=int32(texts), out=out, num_texts=capacity, width=width, normalize=int(normalize)
    )  # fmt: skip
    if not is_unwritten(out[texts:]):
        return WRONG
    exact = x[:texts].double()
    exact = torch.nn.functional.normalize(exact, dim=1) if normalize else exact
    return share(exact, rounded(exact, 20 * W * exact.abs() * normalize, FP32), out[:texts])


def check_normalize(
    launch: Launch, variant: Variant, *, rows: int, hidden: int, programs: int | None = None, seed: int = 0
) -> float:
    random, capacity, eps = Random(seed, TYPES[variant.dtype or ""]), rows + 3, 1e-5
    x = random.rows(rows, capacity, hidden)
    weight, bias = (random(hidden, dtype=FP32) for _ in range(2))
    out = unwritten(capacity, hidden, dtype=FP32)
    launch(
        variant, programs or capacity, x=x, weight=weight, bias=bias, out=out, live=int32(rows), num_rows=capacity, hidden=hidden, eps=eps
    )  # fmt: skip
    if not is_unwritten(out[rows:]):
        return WRONG
    exact, error = normalized(x[:rows].double(), torch.zeros(rows, hidden).double(), weight, bias, eps)
    return share(exact, rounded(exact, error, FP32), out[:rows])


def check_skim(
    launch: Launch, variant: Variant, *, rows: int, hidden: int, programs: int | None = None, seed: int = 0
) -> float:
    random, capacity, eps = Random(seed, FP32), rows + 3, 1e-5
    x = random.rows(rows, capacity, hidden)
    weight, bias, gain_biases, gains = random(hidden), random(hidden), random(2), random(2, hidden)
    order = unwritten(capacity, dtype=FP32)
    given: dict[str, Any] = {"x": x, "weight": weight, "bias": bias, "gains": gains, "gain_biases": gain_biases}
    launch(
        variant, programs or capacity, order=order, live=int32(rows), num_rows=capacity, hidden=hidden, eps=eps, **given
    )
    if not is_unwritten(order[rows:]):
        return WRONG
    inner, error = normalized(x[:rows].double(), torch.zeros(rows, hidden).double(), weight, bias, eps)
    inner, error = checks.activation(inner, error, "gelu")
    exact = inner @ gains.double().T + gain_biases.double()
    reach = inner.abs() @ gains.double().abs().T + gain_biases.double().abs()
    off = error @ gains.double().abs().T + 26 * W * reach
    difference = exact[:, 1] - exact[:, 0]
    return share(difference, rounded(difference, off.sum(1), FP32), order[:rows])
