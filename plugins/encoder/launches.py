"""One bucket's launches, written one after the other: products, norms and attention, with their tiles, grids and places in memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from ..choice import choose
from ..plan import NULL, TEXTS, WEIGHT, Argument, Launch, Number, Pointer
from ..shipped import kernel
from ..variants import VARIANTS, VARIANTS_OF_LSE, VARIANTS_OF_RECEIVED, Variant
from . import grids
from .arena import Arena
from .description import NONE, Dense, Layer, Norm
from .variants import WIDTHS

NUMPY = {"fp16": np.dtype(np.float16), "bf16": np.dtype(ml_dtypes.bfloat16), "fp32": np.dtype(np.float32)}
SMALLEST = 32
"""Tokens of the first bucket."""

NOTHING = Pointer(NULL)
INT32, FP32 = np.dtype(np.int32), np.dtype(np.float32)


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """max_tokens: of a call, padding included; the largest bucket is the next power of two. max_texts: of a call. processors: of the GPU
    that grids are chosen for (SMs). mean_length: usual tokens of a text, by which attention's variant is chosen."""

    max_tokens: int = 16_384
    max_texts: int = 1024
    processors: int = 128
    mean_length: int = 128

    @property
    def buckets(self) -> tuple[int, ...]:
        found = [SMALLEST]
        while found[-1] < self.max_tokens:
            found.append(2 * found[-1])
        return tuple(found)


class Weights:
    """Arrays of a plan, each once, in the type that their kernel takes."""

    def __init__(self, dtype: str) -> None:
        self.dtype = NUMPY[dtype]
        self.arrays: list[np.ndarray] = []
        self._known: dict[tuple[int, np.dtype], tuple[int, np.ndarray]] = {}

    def __call__(self, array: np.ndarray, dtype: np.dtype | None = None) -> Pointer:
        """Return the place of an array; its type is by default that of the model's weights."""
        wanted = dtype or self.dtype
        if (id(array), wanted) not in self._known:
            self._known[id(array), wanted] = (len(self.arrays), array)  # which keeps its id its own
            self.arrays.append(np.ascontiguousarray(array.astype(wanted)))
        return Pointer(WEIGHT, 0, self._known[id(array), wanted][0])


@dataclass(frozen=True)
class Rows:
    """Rows that are worked on: at most `most`, as many as `live` says on the device, usually `usual`."""

    most: int
    live: Pointer
    usual: int


@dataclass(frozen=True, kw_only=True)
class States:
    """Rows of an array of `size` rows: those that `index` names, or the first ones where it is None. dtype: where it is not the usual
    one."""

    at: Pointer
    size: int
    rows: Rows
    index: Pointer | None = None
    dtype: str | None = None


class Launches:
    """A bucket's launches.

    Args:
        tokens: rows of the bucket. longest: tokens of the longest text.
    """

    def __init__(self, dtype: str, weights: Weights, tokens: int, longest: int, sizes: Sizes) -> None:
        self.kept: set[Pointer] = set()
        """Places of states that are read again at the end."""
        self.dtype, self.weights, self.tokens, self.longest = dtype, weights, tokens, longest
        self.texts, self.usual_texts = min(tokens, sizes.max_texts), -(-tokens // sizes.mean_length)
        self.processors = sizes.processors
        self.arena = Arena()
        self.done: list[Launch] = []

    def take(self, *shape: int, dtype: np.dtype | None = None) -> Pointer:
        """Return room for an array, by default of the type of states."""
        return self.arena.take(int(np.prod(shape)) * (dtype or self.weights.dtype).itemsize)

    def bounds(self) -> Pointer:
        """Return room for cu_seqlens."""
        return self.take(self.texts + 1, dtype=INT32)

    def live(self, cu_seqlens: Pointer) -> Pointer:
        """Return where it says how many rows there are: behind the last text."""
        return Pointer(cu_seqlens.place, cu_seqlens.offset + INT32.itemsize * self.texts)

    def launch(self, variant: str, programs: int, note: str, per_text: int = 0, **given: Pointer | float | str) -> None:
        """Add a launch; arguments are given by their names."""
        types = kernel(variant).types
        assert set(given) == set(types), (variant, set(given) ^ set(types))
        numbers = {"i32": "i32", "fp32": "f32"}
        arguments: list[Argument] = []
        for name, kind in types.items():
            value = given[name]
            assert isinstance(value, Pointer) == kind.startswith("*"), (variant, name)
            arguments.append(value if isinstance(value, Pointer) else Number(numbers[kind], value))
        self.done.append(
            Launch(
                variant=variant, programs=programs, programs_per_text=per_text, arguments=tuple(arguments), note=note
            )
        )

    def give(self, states: States) -> None:
        """Say that no later launch reads states, unless they are kept."""
        if states.at not in self.kept:
            self.arena.give(states.at)

    def product(self, states: States, dense: Dense, kind: str, note: str, out: Pointer | None = None) -> Pointer:
        """Multiply rows, add the bias, activate; return where the result is, by default in new room. It is of the type of the rows."""
        (n, k), rows = dense.weight.shape, states.rows
        dtype = states.dtype or self.dtype
        grid = grids.of_product(dtype, kind, (rows.usual, n, k), rows.most, self.processors)
        out = out or self.take(rows.most, n, dtype=NUMPY[dtype])
        self.product_on(grid, states, dense, out, note)
        return out

    def product_on(self, grid: grids.Grid, states: States, dense: Dense, out: Pointer, note: str) -> None:
        """Multiply rows as a grid says, into `out`."""
        (n, k), rows, dtype = dense.weight.shape, states.rows, NUMPY[grid.variant.dtype or ""]
        further: dict[str, Any] = {"bias": self.weights(dense.bias, dtype)} if "bias" in grid.variant.arguments else {}
        self.launch(
            grid.variant.name, grid.programs, note, a=states.at, index=states.index or NOTHING, weight=self.weights(dense.weight, dtype),
            out=out, live=rows.live, source_rows=states.size, num_rows=rows.most, n=n, k=k, a_stride=k, out_stride=n, parts=grid.parts,
            indexed=int(states.index is not None), **further,
        )  # fmt: skip

    def end(self, inner: States, dense: Dense, norm: Norm, before: States, note: str) -> States:
        """End a sublayer: ``LayerNorm(before + inner @ weight.T + bias)``. The room of both is used again, but for what is kept."""
        (hidden, k), rows = dense.weight.shape, inner.rows
        shape = (rows.usual, hidden, k)
        grid = grids.of_product(self.dtype, "parts", shape, rows.most, self.processors)
        is_whole = grid.parts == 1 and self.dtype != "fp32"  # of fp32, a part is the whole
        if is_whole:
            grid = grids.of_product(self.dtype, NONE, shape, rows.most, self.processors)
        parts = self.take(grid.parts, rows.most, hidden, dtype=None if is_whole else FP32)
        self.product_on(grid, inner, dense, parts, f"{note} output")
        self.arena.give(inner.at)
        further: dict[str, Any] = {} if is_whole else {"bias": self.weights(dense.bias)}  # a whole product has added it
        in_place = before.index is None and before.at not in self.kept
        out = before.at if in_place else self.take(rows.most, hidden)
        self.launch(
            f"add_norm-{self.dtype}-{width(hidden)}-{'whole' if is_whole else 'parts'}", grids.of_rows(rows.most, self.processors),
            f"{note} norm", residual=before.at, index=before.index or NOTHING, parts=parts, weight=self.weights(norm.weight),
            norm_bias=self.weights(norm.bias), out=out, live=rows.live, source_rows=before.size, num_rows=rows.most,
            num_parts=grid.parts, hidden=hidden, eps=norm.eps, indexed=int(before.index is not None),
            **further,
        )  # fmt: skip
        self.arena.give(parts)
        if not in_place:
            self.give(before)
        return States(at=out, size=rows.most, rows=rows)

    def attention(self, qkv: Pointer, layer: Layer, cu_seqlens: Pointer, note: str) -> Pointer:
        """Attend; return where the context is, ``(tokens, A)``."""
        out = self.take(self.tokens, layer.output.weight.shape[1])
        self._attend(VARIANTS, qkv, layer, cu_seqlens, note, out=out)
        return out

    def received(self, qkv: Pointer, layer: Layer, cu_seqlens: Pointer, note: str) -> Pointer:
        """Sum what each token receives in a layer's attention; return where that is, ``(tokens,)`` in fp32."""
        sums = self.take(self.tokens, dtype=FP32)
        lse = self.take(layer.heads, self.tokens, dtype=FP32)
        self._attend(VARIANTS_OF_LSE, qkv, layer, cu_seqlens, f"{note} log-sum-exp", lse=lse)
        self._attend(VARIANTS_OF_RECEIVED, qkv, layer, cu_seqlens, f"{note} received", lse=lse, received=sums)
        self.arena.give(lse)
        return sums

    def _attend(
        self, table: tuple[Variant, ...], qkv: Pointer, layer: Layer, cu_seqlens: Pointer, note: str, **further: Pointer
    ) -> None:
        wide = layer.output.weight.shape[1]
        variants = [v for v in table if (v.dtype, v.head_size) == (self.dtype, wide // layer.heads)]
        chosen = variants[choose(variants, self.tokens, self.usual_texts, layer.heads, self.processors)]
        columns = (Pointer(qkv.place, qkv.offset + i * wide * self.weights.dtype.itemsize) for i in range(3))
        per_tile = 1 if "received" in further else layer.heads
        given = {**dict(zip("qkv", columns)), "cu_seqlens": cu_seqlens, **further}
        self.launch(
            chosen.name, self.tokens // chosen.block_m * per_tile, note, per_tile, row_stride=3 * wide, num_tokens=self.tokens,
            num_sequences=TEXTS, num_heads=layer.heads, scale=layer.scale,
            **{name: value for name, value in given.items() if name in kernel(chosen.name).types},
        )  # fmt: skip


def width(hidden: int) -> int:
    """Return the columns of the variant of a norm, or of embedding, that takes so many."""
    return next(width for width in WIDTHS if hidden <= width)
