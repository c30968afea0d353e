"""Launches of layers with norms before their sublayers: eight of each layer, and one for embedding.

A layer is a product, turned heads, attention, a product and the sum that the next norm reads; then a gated product, a product and a sum.
What goes on is two arrays: the states that layers add to, and what the next norm made of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..plan import INPUT, LENGTH, TEXTS, Pointer
from . import grids
from .description import Dense, GatedLayer, RmsNorm
from .launches import FP32, INT32, NOTHING, Launches, Rows, States
from .variants import BY_NAME, HALVES, HEAD_BLOCKS

ATTENTION, LSE, RECEIVED = "grouped", "grouped_lse", "grouped_received"
PARTS, SILU = "parts", "silu"


@dataclass(frozen=True)
class Stream:
    """states: what layers add to. normed: what the next norm made of each row, where `states` have it.

    positions: of tokens in their texts, for rows that a cut may have chosen among since; then these have an index.
    """

    states: States
    normed: Pointer
    positions: States

    @property
    def normed_states(self) -> States:
        return replace(self.states, at=self.normed)

    def chosen(self, states: States) -> Stream:
        """Return what goes on after a cut."""
        assert self.positions.index is None
        positions = replace(self.positions, index=states.index, rows=states.rows)
        return Stream(states, self.normed, positions)


def head_size(layer: GatedLayer) -> int:
    """Return D."""
    return layer.output.weight.shape[1] // layer.heads


def embed(launches: Launches, words: np.ndarray, norm: RmsNorm, cu_seqlens: Pointer) -> Stream:
    """Look tokens up, and normalize them for the first layer."""
    tokens, hidden = launches.tokens, words.shape[1]
    states, normed = (launches.take(tokens, hidden) for _ in range(2))
    positions = launches.take(tokens, dtype=INT32)
    launches.launch(
        f"look_up-{launches.dtype}", grids.of_rows(tokens, launches.processors), "embed", input_ids=Pointer(INPUT), cu_seqlens=cu_seqlens,
        words=launches.weights(words), weight=launches.weights(norm.weight), states=states, out=normed, positions=positions,
        batch=TEXTS, padded=LENGTH, num_rows=tokens, hidden=hidden, num_words=len(words), eps=norm.eps,
    )  # fmt: skip
    rows = Rows(tokens, launches.live(cu_seqlens), tokens)
    return Stream(States(at=states, size=tokens, rows=rows), normed, States(at=positions, size=tokens, rows=rows))


def project(launches: Launches, layer: GatedLayer, stream: Stream, note: str) -> tuple[Pointer, Stream]:
    """Project to queries, keys and values, and turn the first two; return them, and the stream without its normalized rows."""
    qkv = launches.product(stream.normed_states, layer.qkv, "none", f"{note} qkv")
    launches.arena.give(stream.normed)
    size, at, norms = head_size(layer), stream.positions, layer.head_norms
    positions = at.at if at.index is None else launches.take(launches.tokens, dtype=INT32)
    half = next(half for half in HALVES[launches.dtype] if size <= 2 * half)
    gains = [launches.weights(norm.weight, FP32) for norm in norms] if norms else [NOTHING] * 2
    launches.launch(
        f"turn-{launches.dtype}-d{2 * half}", grids.of_rows(at.rows.most, launches.processors), f"{note} turn", qkv=qkv, q_weight=gains[0],
        k_weight=gains[1], cos=launches.weights(layer.turns.cos, FP32), sin=launches.weights(layer.turns.sin, FP32),
        positions=at.at, index=at.index or NOTHING, new_positions=positions, live=at.rows.live, source_rows=at.size,
        num_rows=at.rows.most, row_stride=len(layer.qkv.weight), num_heads=layer.heads, kv_heads=layer.kv_heads, head_size=size,
        num_places=len(layer.turns.cos), eps=norms[0].eps if norms else 0.0, normed=int(norms is not None),
        indexed=int(at.index is not None),
    )  # fmt: skip
    if at.index is not None:
        launches.arena.give(at.at)
    now = States(at=positions, size=launches.tokens, rows=at.rows)
    return qkv, replace(stream, positions=now)


def attention(
    launches: Launches, qkv: Pointer, layer: GatedLayer, stream: Stream, bounds: Pointer, note: str
) -> States:
    """Attend; return the context, ``(tokens, N * D)``."""
    out = launches.take(launches.tokens, layer.output.weight.shape[1])
    _attend(launches, ATTENTION, qkv, layer, (stream.positions.at, bounds), note, out=out)
    return States(at=out, size=launches.tokens, rows=stream.states.rows)


def received(
    launches: Launches, qkv: Pointer, layer: GatedLayer, stream: Stream, bounds: Pointer, note: str
) -> Pointer:
    """Sum what each token receives in a layer's attention; return where that is, ``(tokens,)`` in fp32."""
    sums, lse = launches.take(launches.tokens, dtype=FP32), launches.take(layer.heads, launches.tokens, dtype=FP32)
    places = (stream.positions.at, bounds)
    _attend(launches, LSE, qkv, layer, places, f"{note} log-sum-exp", lse=lse)
    _attend(launches, RECEIVED, qkv, layer, places, f"{note} received", lse=lse, received=sums)
    launches.arena.give(lse)
    return sums


def _attend(
    launches: Launches, kind: str, qkv: Pointer, layer: GatedLayer, places: tuple[Pointer, Pointer], note: str, **further: Pointer
) -> None:  # fmt: skip
    """places: positions and cu_seqlens."""
    size, positions, bounds = head_size(layer), *places
    block = next(block for block in HEAD_BLOCKS[launches.dtype] if size <= block)
    variant = BY_NAME[f"{kind}-{launches.dtype}-d{block}"]
    columns = (0, layer.heads * size, (layer.heads + layer.kv_heads) * size)
    given: dict[str, Any] = {
        name: Pointer(qkv.place, qkv.offset + column * launches.weights.dtype.itemsize) for name, column in zip("qkv", columns)
    }  # fmt: skip
    given |= (
        dict.fromkeys(("cu_q", "cu_k"), bounds) | dict.fromkeys(("positions_q", "positions_k"), positions) | further
    )
    stride, per_tile = len(layer.qkv.weight), 1 if kind == RECEIVED else layer.heads
    launches.launch(
        variant.name, launches.tokens // variant.constants["BLOCK_M"] * per_tile, note, per_tile, q_stride=stride, kv_stride=stride,
        num_queries=launches.tokens, num_keys=launches.tokens, num_texts=TEXTS, num_heads=layer.heads, kv_heads=layer.kv_heads,
        head_size=size, scale=layer.scale, window_back=layer.reach[0], window_ahead=layer.reach[1],
        **{name: place for name, place in given.items() if name in variant.arguments},
    )  # fmt: skip


def gated(launches: Launches, layer: GatedLayer, stream: Stream, note: str) -> States:
    """Multiply by gates and by values; return their products, ``(rows, I)``."""
    states, rows, dtype = stream.normed_states, stream.states.rows, launches.dtype
    n, k = layer.ffn_output.weight.shape[1], layer.inner.weight.shape[1]
    grid = grids.of_product(dtype, SILU, (rows.usual, n, k), rows.most, launches.processors, kernel="gated")
    out = launches.take(rows.most, n)
    launches.launch(
        grid.variant.name, grid.programs, f"{note} inner", a=states.at, index=states.index or NOTHING,
        weight=launches.weights(layer.inner.weight), bias=launches.weights(layer.inner.bias), out=out, live=rows.live,
        source_rows=states.size, num_rows=rows.most, n=n, k=k, indexed=int(states.index is not None),
    )  # fmt: skip
    launches.arena.give(stream.normed)
    return States(at=out, size=rows.most, rows=rows)


def end(launches: Launches, inner: States, dense: Dense, norm: RmsNorm, before: Stream, note: str) -> Stream:
    """End a sublayer: add ``inner @ weight.T + bias`` to the states, and normalize these for the next one."""
    (hidden, k), rows = dense.weight.shape, inner.rows
    grid = grids.of_product(launches.dtype, PARTS, (rows.usual, hidden, k), rows.most, launches.processors)
    parts = launches.take(grid.parts, rows.most, hidden, dtype=FP32)
    launches.product_on(grid, inner, dense, parts, f"{note} output")
    launches.arena.give(inner.at)
    states = add(launches, before.states, norm, (parts, grid.parts, launches.weights(dense.bias)), f"{note} norm")
    launches.arena.give(parts)
    return replace(before, states=states[0], normed=states[1])


def add(
    launches: Launches, before: States, norm: RmsNorm, added: tuple[Pointer, int, Pointer], note: str
) -> tuple[States, Pointer]:
    """Add parts and a bias to states, and normalize them; return both.

    Args:
        added: parts, how many, and the bias; of none they may be anywhere.
    """
    rows, hidden = before.rows, len(norm.weight)
    in_place = before.index is None and before.at not in launches.kept
    states, normed = before.at if in_place else launches.take(rows.most, hidden), launches.take(rows.most, hidden)
    launches.launch(
        f"add_rms-{launches.dtype}", grids.of_rows(rows.most, launches.processors), note, residual=before.at,
        index=before.index or NOTHING, parts=added[0], bias=added[2], weight=launches.weights(norm.weight), states=states, out=normed,
        live=rows.live, source_rows=before.size, num_rows=rows.most, num_parts=added[1], hidden=hidden, eps=norm.eps,
        indexed=int(before.index is not None),
    )  # fmt: skip
    if not in_place:
        launches.give(before)
    return States(at=states, size=rows.most, rows=rows), normed
