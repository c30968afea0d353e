"""`adtp::ragged_attention` and its relatives: attention over packed sequences, as torch custom ops.

The kernels registered here are the one reference of the project: every other implementation (the ONNX
functions' bodies, plugins, lowerings) is compared with them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor


@torch.library.custom_op("adtp::ragged_attention", mutates_args=())
def ragged_attention(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, num_heads: int, scale: float) -> Tensor:
    """Bidirectional multi-head attention in which every packed sequence attends to itself only.

    Args:
        q, k, v: ``(T, H)``, one floating dtype; head ``i`` owns columns ``i*D`` to ``(i+1)*D``, ``D = H / num_heads``.
        cu_seqlens: ``(B+1,) int32``, first element 0, last element T, non-decreasing. Sequences without tokens are for the operators
            alone: the ONNX function's body needs a token in each.
        num_heads: N, a divisor of H.
        scale: factor on ``q @ k.T`` before the softmax, usually ``D ** -0.5``.

    Returns:
        ``(T, H)`` in the dtype of ``q``.

    Raises:
        ValueError: shapes, dtypes or ``cu_seqlens`` break the contract above.

    Source: scaled dot-product attention, Vaswani et al. 2017, section 3.2; packing with ``cu_seqlens`` as in
    FlashAttention's variable-length interface.
    """
    out = torch.empty_like(q)
    for rows, _, context in sequences(q, k, v, cu_seqlens, num_heads, scale):
        out[rows] = context
    return out


@torch.library.custom_op("adtp::ragged_attention_received", mutates_args=())
def ragged_attention_received(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, num_heads: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Attend as `ragged_attention` does, and say how much attention every token received.

    Args: as of `ragged_attention`.

    Returns:
        output: ``(T, H)``, that of `ragged_attention`.
        received: ``(T,)``, the sum of the softmax's probabilities over heads and over the queries of the token's own
            sequence, so that a sequence of n tokens sums to ``n * num_heads``. It is fp64 for fp64 inputs, else fp32,
            and is summed in that type from probabilities in that type.

    Raises:
        ValueError: as `ragged_attention`.

    Source: the score of LTP, Kim et al., KDD 2022, section 3.2, before its division by heads and length.
    """
    return with_received(q, sequences(q, k, v, cu_seqlens, num_heads, scale))


@torch.library.custom_op("adtp::ragged_attention_from_others", mutates_args=())
def ragged_attention_from_others(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, num_heads: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Attend as `ragged_attention_received` does, and leave out of `received` what every token gives itself.

    Args: as of `ragged_attention`.

    Returns:
        output: ``(T, H)``, that of `ragged_attention`.
        received: ``(T,)``, that of `ragged_attention_received` less the diagonal of the softmax's probabilities, summed over heads.

    Raises:
        ValueError: as `ragged_attention`.

    Source: the code of PoWER-BERT, github.com/IBM/PoWER-BERT; its paper, Goyal et al., ICML 2020, section 3.2, has the sum over all.
    """
    return with_received(q, sequences(q, k, v, cu_seqlens, num_heads, scale), itself=False)


@torch.library.custom_op("adtp::ragged_attention_relative", mutates_args=())
def ragged_attention_relative(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    positions: Tensor,
    table: Tensor,
    num_heads: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Attend as `ragged_attention_received` does, with a bias that depends on how far apart two tokens are.

    Args: those of `ragged_attention`, and
        positions: ``(T,) int32``, rising in each sequence, from 0 to P - 1; gaps are where tokens were dropped.
        table: ``(2P-1, N)`` in the dtype of `q`; a query at position i adds ``table[j - i + P - 1]`` to its scores of a key at
            position j.

    Returns:
        Output ``(T, H)`` and received ``(T,)``, as of `ragged_attention_received`.

    Raises:
        ValueError: as `ragged_attention`, or `positions` or `table` break the contract above.

    Source: Raffel et al., T5 (JMLR 2020), section 2.1; MPNet (Song et al., NeurIPS 2020) has the same.
    """
    _check_table(q, table, num_heads)
    zero = table.shape[0] // 2

    def bias(rows: slice) -> Tensor:
        place = positions[rows].long()
        return table[place - place[:, None] + zero].permute(2, 0, 1)

    check(q, k, v, cu_seqlens, num_heads)
    check_positions(q, positions)
    check_rising(positions, bounds_of(cu_seqlens, q.shape[0]))
    if bool((positions > zero).any()):
        raise ValueError(f"positions must lie from 0 to {zero}, the reach of the table")
    return with_received(q, sequences(q, k, v, cu_seqlens, num_heads, scale, bias))


@torch.library.custom_op("adtp::ragged_attention_window", mutates_args=())
def ragged_attention_window(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    positions: Tensor,
    num_heads: int,
    scale: float,
    window: int,
) -> tuple[Tensor, Tensor]:
    """Attend as `ragged_attention_received` does, each token to those of its sequence that are near.

    Args: those of `ragged_attention`, and
        positions: ``(T,) int32``, not negative, rising in each sequence, and none twice, because the ONNX function's body looks tokens up
            by position; the CPU operator does not check that. Gaps are where tokens were dropped.
        window: at least 1; tokens see each other whose positions are at most this far apart.

    Returns:
        Output ``(T, H)`` and received ``(T,)``, as of `ragged_attention_received`.

    Raises:
        ValueError: as `ragged_attention`, or `positions` or `window` break the contract above.

    Source: Beltagy et al., Longformer (arXiv 2004.05150), section 3.1; the local layers of ModernBERT (Warner et al., arXiv
    2412.13663).
    """
    if window < 1:
        raise ValueError(f"window must be at least 1, got {window}")

    def bias(rows: slice) -> Tensor:
        place = positions[rows]
        far = (place - place[:, None]).abs() > window
        return torch.zeros_like(far, dtype=q.dtype).masked_fill(far, -torch.inf)

    check(q, k, v, cu_seqlens, num_heads)
    check_positions(q, positions)
    check_rising(positions, bounds_of(cu_seqlens, q.shape[0]), at_least=1)
    return with_received(q, sequences(q, k, v, cu_seqlens, num_heads, scale, bias))


_Parts = Iterator[tuple[slice, Tensor, Tensor]]


def with_received(q: Tensor, parts: _Parts, itself: bool = True) -> tuple[Tensor, Tensor]:
    """Put the results of `sequences` together, and sum what each token received; itself: also what it gave itself."""
    out, received = torch.empty_like(q), empty_received(q)
    for rows, scores, context in parts:
        out[rows] = context
        probabilities = torch.softmax(scores, dim=-1, dtype=received.dtype)
        received[rows] = probabilities.sum((0, 1))
        if not itself:
            received[rows] -= probabilities.diagonal(dim1=1, dim2=2).sum(0)
    return out, received


def sequences(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    num_heads: int,
    scale: float,
    bias: Callable[[slice], Tensor] | None = None,
) -> _Parts:
    """Attend in one sequence after another: its rows, its ``(N, n, n)`` scores, `bias` of its rows added, its ``(n, H)`` result."""
    check(q, k, v, cu_seqlens, num_heads)
    bounds = bounds_of(cu_seqlens, q.shape[0])
    for begin, end in zip(bounds, bounds[1:]):
        rows = slice(begin, end)
        heads = [t[rows].unflatten(1, (num_heads, -1)).transpose(0, 1) for t in (q, k, v)]
        scores = heads[0] @ heads[1].transpose(1, 2) * scale
        scores = scores if bias is None else scores + bias(rows)
        yield rows, scores, (torch.softmax(scores, dim=-1) @ heads[2]).transpose(0, 1).flatten(1)


def empty_received(q: Tensor) -> Tensor:
    """Return room for what tokens received, ``(T,)`` for rows ``(T, H)``: fp64 for fp64, else fp32."""
    return q.new_empty(q.shape[:1], dtype=torch.promote_types(q.dtype, torch.float32))


def rises(bounds: Sequence[int], tokens: int) -> bool:
    """Whether the values of a `cu_seqlens` begin at 0, end at T and never fall."""
    return (
        len(bounds) > 0 and bounds[0] == 0 and bounds[-1] == tokens and all(a <= b for a, b in zip(bounds, bounds[1:]))
    )


def bounds_of(cu_seqlens: Tensor, tokens: int, name: str = "cu_seqlens") -> list[int]:
    """Return the values of a `cu_seqlens`; raises ValueError unless they rise from 0 to T."""
    bounds: list[int] = cu_seqlens.tolist()
    if not rises(bounds, tokens):
        raise ValueError(f"{name} must rise from 0 to T = {tokens}, got {bounds}")
    return bounds


def check_rising(positions: Tensor, bounds: Sequence[int], at_least: int = 0) -> None:
    """Raises ValueError unless positions ``(T,)`` rise by `at_least` in each sequence, from 0 or more; bounds: as of `bounds_of`."""
    falls = positions.diff() < at_least
    begins = [begin - 1 for begin in bounds if 0 < begin < len(positions)]
    falls[begins] = False
    if bool(falls.any()) or bool((positions < 0).any()):
        raise ValueError(
            f"positions must rise from 0 or more in each sequence{', and none may be there twice' * at_least}"
        )


def rounding_bound(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, num_heads: int, scale: float
) -> tuple[Tensor, Tensor]:
    """What another implementation may differ by, element by element, on exactly these inputs, if it sums in fp32.

    The terms are those of `received_bound`; the product with the values adds a rounding for each of a query's n keys. The
    weights and the result may each be rounded once to the dtype of `q`, too, half a unit in the last place each.

    Returns:
        The answer and the bound, both ``(T, H)`` fp64.
    """
    u, w = (torch.finfo(dtype).eps / 2 for dtype in (q.dtype, torch.float32))
    q, k, v = q.double(), k.double(), v.double()
    exact = ragged_attention(q, k, v, cu_seqlens, num_heads, scale)
    bound = torch.empty_like(exact)
    for rows, p, change in _changes(q, k, cu_seqlens, num_heads, scale):
        values = v[rows].abs().unflatten(1, (num_heads, -1)).transpose(0, 1)
        bound[rows] = (p * (change + p.shape[-1] * w + u) @ values).transpose(0, 1).flatten(1)
    return exact, bound + u * exact.abs()


def received_bound(q: Tensor, k: Tensor, cu_seqlens: Tensor, num_heads: int, scale: float) -> tuple[Tensor, Tensor]:
    """What tokens receive, and by how much an implementation that computes in fp32 may differ, token by token.

    With w the rounding of fp32, a score of D terms is off by at most ``d = (D + 6) w scale |q| @ |k|``: its sum, its scaling and
    the exponent. The sum that a query's weights are divided by is off as much, at most as its largest score, and by a
    rounding for each of its n terms. What a token receives is a sum over n queries in N heads, with a rounding for each. Each
    of these terms may be too small for fp32.

    Returns:
        The answer and the bound, both ``(T,)`` fp64.
    """
    w, least = torch.finfo(torch.float32).eps / 2, torch.finfo(torch.float32).tiny
    q, k = q.double(), k.double()
    _, exact = ragged_attention_received(q, k, k, cu_seqlens, num_heads, scale)
    bound = torch.empty_like(exact)
    for rows, p, change in _changes(q, k, cu_seqlens, num_heads, scale):
        bound[rows] = (p * change).sum((0, 1)) + num_heads * p.shape[-1] * (w * exact[rows] + least)
    return exact, bound


def _changes(q: Tensor, k: Tensor, cu_seqlens: Tensor, num_heads: int, scale: float) -> _Parts:
    """Of each sequence with tokens: its rows, its weights, and by what share of each fp32 may change it, as `received_bound` says."""
    w = torch.finfo(torch.float32).eps / 2
    signed = sequences(q, k, k, cu_seqlens, num_heads, scale)
    absolute = sequences(q.abs(), k.abs(), k, cu_seqlens, num_heads, scale)
    for (rows, scores, _), (_, reach, _) in zip(signed, absolute):
        if n := scores.shape[-1]:
            d = (q.shape[1] // num_heads + 6) * w * reach
            yield rows, torch.softmax(scores, -1), torch.expm1(d + d.amax(-1, keepdim=True)) + (n + 4) * w


@ragged_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, num_heads: int, scale: float) -> Tensor:
    check(q, k, v, cu_seqlens, num_heads)
    return torch.empty_like(q)


def _shapes_with_received(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    """Check shapes and dtypes of an operator that has positions and a table, or positions alone, or neither before its numbers."""
    tensors = [each for each in others if isinstance(each, Tensor)]
    num_heads = others[len(tensors)]
    check(q, k, v, cu_seqlens, num_heads)
    if tensors:
        check_positions(q, tensors[0])
    if tensors[1:]:
        _check_table(q, tensors[1], num_heads)
    return torch.empty_like(q), empty_received(q)


for _operator in (
    ragged_attention_received,
    ragged_attention_from_others,
    ragged_attention_relative,
    ragged_attention_window,
):
    _operator.register_fake(_shapes_with_received)


def check_positions(q: Tensor, positions: Tensor) -> None:
    """Raises ValueError unless positions are those of rows ``(T, H)``."""
    if positions.dtype != torch.int32 or positions.shape != q.shape[:1]:
        raise ValueError(f"positions must be (T,) int32, got {tuple(positions.shape)} {positions.dtype}")


def _check_table(q: Tensor, table: Tensor, num_heads: int) -> None:
    if table.dim() != 2 or table.shape[0] % 2 == 0 or table.shape[1] != num_heads or table.dtype != q.dtype:
        raise ValueError(f"table must be (2P-1, {num_heads}) in the dtype of q, got {tuple(table.shape)} {table.dtype}")


def check(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, num_heads: int) -> None:
    """Raises ValueError where shapes or dtypes break the contract of `ragged_attention`."""
    if q.dim() != 2 or q.shape != k.shape or q.shape != v.shape:
        raise ValueError(f"q, k, v must share one shape (T, H), got {[tuple(t.shape) for t in (q, k, v)]}")
    if not q.dtype == k.dtype == v.dtype or not q.is_floating_point():
        raise ValueError(f"q, k, v must share one floating dtype, got {[t.dtype for t in (q, k, v)]}")
    if cu_seqlens.dtype != torch.int32 or cu_seqlens.dim() != 1:
        raise ValueError(f"cu_seqlens must be (B+1,) int32, got {tuple(cu_seqlens.shape)} {cu_seqlens.dtype}")
    if num_heads < 1 or q.shape[1] % num_heads:
        raise ValueError(f"num_heads must divide H = {q.shape[1]}, got {num_heads}")
