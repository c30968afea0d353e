"""What the encoder's kernels have to compute: a check for each, which any launch can be put to; `encoder_choices` has the others.

A check returns the largest error as a share of what rounding allows, NaN where something was not written; or 0, or infinity
where integers differ. It also fails where a kernel changes what is not its own. Dead rows of all inputs are NaN.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from encoder_launch import Launch, is_unwritten, unwritten

from adtp_export.model.selection import kept_count
from adtp_export.model.sequences import pack
from adtp_export.plugins.encoder.variants import Variant

TYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
W = torch.finfo(torch.float32).eps / 2
"""What fp32 rounds by."""

WRONG = math.inf


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def bounds(lengths: Sequence[int], size: int | None = None) -> torch.Tensor:
    """cu_seqlens of lengths, its end repeated up to `size` texts."""
    ends = [0, *itertools.accumulate(lengths)]
    return int32(*ends, *[ends[-1]] * ((size or len(lengths)) - len(lengths)))


class Random:
    """Tensors of one seed."""

    def __init__(self, seed: int, dtype: torch.dtype):
        self.generator, self.dtype = torch.Generator().manual_seed(seed), dtype

    def __call__(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator).to(dtype or self.dtype)

    def rows(self, live: int, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Of which those from `live` on are NaN."""
        t = self(*shape, dtype=dtype)
        t[live:] = float("nan")
        return t

    def index(self, live: int, sources: int, size: int) -> torch.Tensor:
        """Ascending rows, as a cut leaves them; what is beyond `live` is far away."""
        chosen = torch.randperm(sources, generator=self.generator)[:live].sort().values
        return torch.cat([chosen, torch.full((size - live,), 2**30)]).to(torch.int32)

    def chosen(self, live: int, size: int, columns: int, indexed: bool) -> tuple[int, torch.Tensor, torch.Tensor]:
        """How many rows there are, these, and an index of those that are read, or none."""
        sources = size + 5 if indexed else size
        x = self.rows(sources if indexed else live, sources, columns)
        return sources, x, self.index(live, sources, size) if indexed else unwritten(1, dtype=torch.int32)


def share(exact: torch.Tensor, allowed: torch.Tensor, written: torch.Tensor) -> float:
    """The largest error, divided by what is allowed there."""
    return float(((written.double() - exact).abs() / allowed).max()) if exact.numel() else 0.0


def rounded(exact: torch.Tensor, error: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What an error may become when a result is rounded to a dtype: by half a unit, or to its least number."""
    info = torch.finfo(dtype)
    return error + info.eps / 2 * (exact.abs() + error) + info.smallest_normal * info.eps


def activation(exact: torch.Tensor, error: torch.Tensor, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Apply an activation in fp64, and say what an error becomes.

    GELU's slope is at most 1.13; erf is off by a few units at most, which x multiplies. tanh's is at most 1, and it is computed of a
    quotient of sums with exp, all near 1.
    """
    if name == "gelu":
        return torch.nn.functional.gelu(exact), 1.13 * error + 12 * W * (exact.abs() + error)
    if name == "tanh":
        return exact.tanh(), error + 16 * W
    if name == "relu":
        return exact.relu(), error
    return exact, error


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``x @ weight.T + bias`` in fp64, and by how much sums in fp32 may be off.

    Tensor cores may cut each of K additions, which is up to 2 w of what is added up. tf32x3 leaves 2**-22 of each factor
    out, and the product of what is left, together 12 w.
    """
    x, weight, bias = x.double(), weight.double(), bias.double()
    reach = x.abs() @ weight.abs().T + bias.abs()
    return x @ weight.T + bias, (2 * x.shape[1] + 16) * W * reach


def check_product(
    launch: Launch,
    variant: Variant,
    *,
    rows: int,
    capacity: int | None = None,
    n: int = 72,
    k: int = 72,
    parts: int = 1,
    indexed: bool = False,
    programs: int | None = None,
    strides: tuple[int, int] = (0, 0),
    seed: int = 0,
) -> float:
    """rows: how many are alive, of `capacity`. strides: what rows of a and out are longer by than k and n."""
    capacity = capacity or rows + 3
    dtype = TYPES[variant.dtype or ""]
    random = Random(seed, dtype)
    sources, a, index = random.chosen(rows, capacity, k + strides[0], indexed)
    a[:, k:] = float("nan")
    weight, bias = random(n, k), random(n)
    is_parts = variant.constants.get("bias", 0) is None
    shape = (parts, capacity, n + strides[1]) if is_parts else (capacity, n + strides[1])
    of_out = TYPES[variant.arguments["out"].removeprefix("*")]
    out = unwritten(*shape, dtype=of_out)
    blocks = variant.constants
    most = -(-capacity // blocks["BLOCK_M"]) * -(-n // blocks["BLOCK_N"]) * parts
    given: dict[str, Any] = {} if is_parts else {"bias": bias}
    launch(
        variant, programs or most, a=a, index=index, weight=weight, out=out, live=int32(rows), source_rows=sources,
        num_rows=capacity, n=n, k=k, a_stride=k + strides[0], out_stride=n + strides[1], parts=parts, indexed=int(indexed), **given,
    )  # fmt: skip
    if not is_unwritten(out[..., rows:, :]) or not is_unwritten(out[..., n:]):
        return WRONG
    x = (a[index[:rows].long()] if indexed else a[:rows])[:, :k]
    if not is_parts:
        exact, error = activation(*linear(x, weight, bias), variant.constants["ACTIVATION"])
        return share(exact, rounded(exact, error, of_out), out[:rows, :n])
    step, worst = math.ceil(math.ceil(k / blocks["BLOCK_K"]) / parts) * blocks["BLOCK_K"], 0.0
    for part in range(parts):
        some = slice(part * step, (part + 1) * step)
        exact, error = linear(x[:, some], weight[:, some], torch.zeros(n))
        worst = max_or_nan(worst, share(exact, error + torch.finfo(torch.float32).tiny, out[part, :rows, :n]))
    return worst


def max_or_nan(*values: float) -> float:
    return float(torch.tensor(values).max())


def normalized(
    x: torch.Tensor, error: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """LayerNorm in fp64 of what is off by `error`, and what the result may be off by.

    Sums over a row are trees of up to 24 additions. An error of a row moves each number by itself and by its mean, and the deviation by
    its root mean square.
    """
    mean = x.mean(1, keepdim=True)
    off = error + error.mean(1, keepdim=True) + 26 * W * x.abs().mean(1, keepdim=True) + W * (x - mean).abs()
    deviation = ((x - mean).square().mean(1, keepdim=True) + eps).sqrt()
    relative = off.square().mean(1, keepdim=True).sqrt() / deviation + 32 * W
    exact = (x - mean) / deviation * weight.double() + bias.double()
    size = ((x - mean).abs() + off) / deviation
    return exact, weight.double().abs() * (off / deviation + size * (relative + 3 * W)) + W * exact.abs()


def check_add_norm(
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
    capacity, eps = rows + 3, 1e-5
    dtype = TYPES[variant.dtype or ""]
    random = Random(seed, dtype)
    sources, residual, index = random.chosen(rows, capacity, hidden, indexed)
    is_whole = variant.constants.get("bias", 0) is None
    summed = random(parts, capacity, hidden, dtype=dtype if is_whole else torch.float32)
    summed[:, rows:] = float("nan")
    bias, weight, norm_bias = random(hidden), random(hidden), random(hidden)
    out = unwritten(capacity, hidden, dtype=dtype)
    given: dict[str, Any] = {} if is_whole else {"bias": bias}
    launch(
        variant, programs or capacity, residual=residual, index=index, parts=summed, weight=weight, norm_bias=norm_bias, out=out,
        live=int32(rows), source_rows=sources, num_rows=capacity, num_parts=parts, hidden=hidden, eps=eps, indexed=int(indexed),
        **given,
    )  # fmt: skip
    if not is_unwritten(out[rows:]):
        return WRONG
    terms = [*summed[:, :rows], residual[index[:rows].long()] if indexed else residual[:rows]]
    terms += [] if is_whole else [bias.expand(rows, -1)]
    x = torch.stack([t.double() for t in terms])
    error = len(terms) * W * x.abs().sum(0)
    exact, allowed = normalized(x.sum(0), error, weight, norm_bias, eps)
    return share(exact, rounded(exact, allowed, dtype), out[:rows])


def check_unpad(
    launch: Launch, variant: Variant, *, lengths: Sequence[int], padded: int, num_rows: int = 0, num_texts: int = 0
) -> float:
    """num_rows: fewer than the tokens where the bucket is too small, which must do no harm."""
    batch = len(lengths)
    mask = (torch.arange(padded) < torch.tensor(lengths)[:, None]).to(torch.int64)
    num_rows, num_texts = num_rows or batch * padded, num_texts or batch
    ends, cu_seqlens = unwritten(num_texts, dtype=torch.int32), unwritten(num_texts + 1, dtype=torch.int32)
    texts = unwritten(1, dtype=torch.int32)
    launch(
        variant, 1, attention_mask=mask, ends=ends, cu_seqlens=cu_seqlens, texts=texts, batch=batch, padded=padded,
        num_rows=num_rows, num_texts=num_texts,
    )  # fmt: skip
    exact, _ = pack(mask.sum(1).clamp(min=1), padded)
    wanted = torch.cat([exact, exact[-1:].expand(num_texts - batch)]).clamp(max=num_rows)
    return 0.0 if torch.equal(cu_seqlens.long(), wanted) and int(texts) == batch else WRONG


def check_embed(
    launch: Launch,
    variant: Variant,
    *,
    lengths: Sequence[int],
    padded: int,
    hidden: int,
    typed: bool = True,
    first_place: int = 0,
    num_rows: int | None = None,
    programs: int | None = None,
    foreign: bool = False,
    seed: int = 0,
) -> float:
    """foreign: ids and types outside their tables, of which the nearest rows are taken."""
    batch, eps, dtype = len(lengths), 1e-12, TYPES[variant.dtype or ""]
    random = Random(seed, dtype)
    live = [max(1, min(n, padded)) for n in lengths]
    num_rows = sum(live) + 2 if num_rows is None else num_rows
    size = (11, 2, padded + first_place - (3 if foreign and padded > 3 else 0))
    low, high = (-(2**40), 2**40) if foreign else (0, size[0])
    ids = torch.randint(low, high, (batch, padded), generator=random.generator)
    types = torch.randint(*((-5, 9) if foreign else (0, 2)), (batch, padded), generator=random.generator)
    words, kinds, places = (random(n, hidden) for n in size)
    weight, norm_bias = random(hidden), random(hidden)
    out, origin = unwritten(num_rows, hidden, dtype=dtype), unwritten(num_rows, dtype=torch.int32)
    cu_seqlens = bounds(live).clamp(max=num_rows)
    launch(
        variant, programs or num_rows, input_ids=ids, token_type_ids=types if typed else unwritten(1, dtype=torch.int64),
        cu_seqlens=cu_seqlens, words=words, types=kinds, places=places, weight=weight, norm_bias=norm_bias, out=out, origin=origin,
        batch=batch, padded=padded, num_rows=num_rows, hidden=hidden, num_words=size[0], num_types=size[1], num_places=size[2],
        first_place=first_place, typed=int(typed), eps=eps,
    )  # fmt: skip
    _, rows = pack(torch.tensor(live), padded)
    there = rows[:num_rows]
    if not torch.equal(origin[: len(there)].long(), there) or not is_unwritten(origin[len(there) :]):
        return WRONG
    if not is_unwritten(out[len(there) :]):
        return WRONG
    chosen = (ids.flatten()[there], types.flatten()[there] * int(typed), there % padded + first_place)
    tables = zip((words, kinds, places), chosen, size)
    x = torch.stack([table.double()[at.clamp(0, n - 1)] for table, at, n in tables])
    exact, allowed = normalized(x.sum(0), 2 * W * x.abs().sum(0), weight, norm_bias, eps)
    return share(exact, rounded(exact, allowed, dtype), out[: len(there)])


def check_scores(
    launch: Launch,
    variant: Variant,
    *,
    lengths: Sequence[int],
    hidden: int,
    width: int = 96,
    candidates: int = 5,
    min_tokens: int = 1,
    num_texts: int = 0,
    ties: bool = False,
    without_ratio: bool = False,
    seed: int = 0,
) -> float:
    """ties: all candidates score alike, so the first is chosen."""
    rows, dtype = sum(lengths), TYPES[variant.dtype or ""]
    capacity, num_texts = rows + 3, num_texts or len(lengths) + 2
    random = Random(seed, dtype)
    fp32 = torch.float32
    x = random.rows(rows, capacity, hidden)
    first, first_bias = random(width, hidden, dtype=fp32), random(width, dtype=fp32)
    last, last_bias = random(width, dtype=fp32), random(1, dtype=fp32)
    ratio, ratio_bias = random(candidates, hidden, dtype=fp32), random(candidates, dtype=fp32)
    if ties:
        ratio, ratio_bias = ratio[:1].repeat(candidates, 1), ratio_bias[:1].repeat(candidates)
    permille = torch.linspace(100, 1000, candidates).to(torch.int32)
    order, count = unwritten(capacity, dtype=fp32), unwritten(num_texts, dtype=torch.int32)
    tiles = -(-capacity // variant.constants["BLOCK_M"])
    launch(
        variant, tiles + (0 if without_ratio else num_texts), x=x, cu_seqlens=bounds(lengths, num_texts), texts=int32(len(lengths)),
        first_weight=first, first_bias=first_bias, last_weight=last, last_bias=last_bias, ratio_weight=ratio, ratio_bias=ratio_bias,
        permille=permille, order=order, count=count, num_rows=capacity, num_texts=num_texts, hidden=hidden, width=width,
        candidates=candidates, min_tokens=min_tokens,
    )  # fmt: skip
    if not is_unwritten(order[rows:]) or not is_unwritten(count[0 if without_ratio else len(lengths) :]):
        return WRONG
    inner, error = linear(x[:rows], first, first_bias)
    gains = last.double()
    exact = inner.relu() @ gains + last_bias.double()
    reach = (inner.relu() + error) @ gains.abs() + last_bias.double().abs()
    allowed = error @ gains.abs() + (40 + width // 64) * W * reach
    worst = share(exact, rounded(exact, allowed, fp32), order[:rows])
    if without_ratio:
        return worst
    begins = bounds(lengths)[:-1].long()
    logits, error = linear(x[begins], ratio, ratio_bias)
    of = torch.tensor(lengths)
    possible = logits + error >= (logits - error).amax(1, keepdim=True)  # of these rounding decides, but for equal ones
    wanted = kept_count(of[:, None], permille.long().expand(len(of), -1), min_tokens)
    possible = torch.arange(candidates) == 0 if ties else possible
    right = ((wanted == count[: len(of), None]) & possible).any(1).all()
    return worst if right else WRONG
