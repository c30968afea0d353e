"""Every variant of the encoder's kernels that is compiled: one table, read by the build, by whoever launches, and by the tests.

No GPU decided between tiles. Registers, shared memory and the number of programs did: a tile for few rows, so that a text of 32
tokens gives each processor work; one between; and one whose two operands are read as seldom as shared memory of 99 KB allows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..variants import ARCHITECTURES, DTYPES

PRODUCT, ADD_NORM = "product", "add_norm"
UNPAD, EMBED = "unpad", "embed"
SCORES, CHOICE, ABOVE = "scores", "choice", "above"
SHARE, NORMALIZE, SKIM = "share", "normalize", "skim"
PUT_BACK, SPREAD, POOL, VECTORS = "put_back", "spread", "pool", "vectors"
GROUPED, GROUPED_RECEIVED = "grouped_attention", "grouped_received"
LOOK_UP, ADD_RMS, TURN, GATED = "look_up", "add_rms", "turn", "gated"
ANCHOR = "anchor"

MODULES = {
    PRODUCT: "product", ADD_NORM: "norm", UNPAD: "ids", EMBED: "ids", SCORES: "cut", CHOICE: "cut", ABOVE: "cut",
    SHARE: "cut", NORMALIZE: "cut", SKIM: "cut", PUT_BACK: "head", SPREAD: "head", POOL: "head", VECTORS: "head",
    GROUPED: "grouped", GROUPED_RECEIVED: "grouped", **dict.fromkeys((LOOK_UP, ADD_RMS, TURN, GATED), "prenorm"),
    ANCHOR: "anchor",
}  # fmt: skip
"""The module of this package that each kernel is in, under its own name."""


def _arguments(words: str) -> dict[str, str]:
    """Read arguments in order: ``name:type`` is a pointer, ``name=type`` a number, and a name alone an int32."""
    result = {}
    for word in words.split():
        name, pointer, kind = word.partition(":")
        name, _, number = name.partition("=")
        result[name] = f"*{kind}" if pointer else number or "i32"
    return result


_OF_GROUPS = (
    "q_stride kv_stride num_queries num_keys num_texts num_heads kv_heads head_size scale=fp32 window_back window_ahead"
)

ARGUMENTS: dict[str, dict[str, str]] = {
    PRODUCT: _arguments(
        "a:T index:i32 weight:T bias:T out:T live:i32 source_rows num_rows n k a_stride out_stride parts indexed"
    ),
    ADD_NORM: _arguments(
        "residual:T index:i32 parts:fp32 bias:T weight:T norm_bias:T out:T live:i32 source_rows num_rows num_parts hidden eps=fp32 "
        "indexed"
    ),
    UNPAD: _arguments("attention_mask:i64 ends:i32 cu_seqlens:i32 texts:i32 batch padded num_rows num_texts"),
    EMBED: _arguments(
        "input_ids:i64 token_type_ids:i64 cu_seqlens:i32 words:T types:T places:T weight:T norm_bias:T out:T origin:i32 batch padded "
        "num_rows hidden num_words num_types num_places first_place typed eps=fp32"
    ),
    SCORES: _arguments(
        "x:T cu_seqlens:i32 texts:i32 first_weight:fp32 first_bias:fp32 last_weight:fp32 last_bias:fp32 ratio_weight:fp32 "
        "ratio_bias:fp32 permille:i32 order:fp32 count:i32 num_rows num_texts hidden width candidates min_tokens"
    ),
    CHOICE: _arguments(
        "order:fp32 cu_seqlens:i32 texts:i32 count:i32 lengths_from:i32 table:i32 keeps:i8 rows:i32 new_cu_seqlens:i32 num_rows "
        "num_texts table_size bins keep_first"
    ),
    ABOVE: _arguments(
        "order:fp32 cu_seqlens:i32 texts:i32 rows:i32 new_cu_seqlens:i32 before:i32 threshold=fp32 num_rows num_texts"
    ),
    SHARE: _arguments(
        "order:fp32 cu_seqlens:i32 texts:i32 reaches:fp32 num_rows num_texts wanted=fp32 slack=fp32 ties"
    ),
    NORMALIZE: _arguments("x:T weight:fp32 bias:fp32 out:fp32 live:i32 num_rows hidden eps=fp32"),
    SKIM: _arguments(
        "x:fp32 weight:fp32 bias:fp32 gains:fp32 gain_biases:fp32 order:fp32 live:i32 num_rows hidden eps=fp32"
    ),
    PUT_BACK: _arguments("states:T rows:i32 out:T live:i32 num_rows out_rows hidden"),
    SPREAD: _arguments("values:T cu_seqlens:i32 out:fp32 batch padded num_rows first columns stride"),
    POOL: _arguments("x:T cu_seqlens:i32 texts:i32 out:T num_rows num_texts hidden way"),
    VECTORS: _arguments("x:T texts:i32 out:fp32 num_texts width normalize"),
    GROUPED: _arguments("q:T k:T v:T cu_q:i32 cu_k:i32 positions_q:i32 positions_k:i32 out:T lse:fp32 " + _OF_GROUPS),
    GROUPED_RECEIVED: _arguments(
        "q:T k:T cu_q:i32 cu_k:i32 positions_q:i32 positions_k:i32 lse:fp32 received:fp32 " + _OF_GROUPS
    ),
    LOOK_UP: _arguments(
        "input_ids:i64 cu_seqlens:i32 words:T weight:T states:T out:T positions:i32 batch padded num_rows hidden num_words eps=fp32"
    ),
    ADD_RMS: _arguments(
        "residual:T index:i32 parts:fp32 bias:T weight:T states:T out:T live:i32 source_rows num_rows num_parts hidden eps=fp32 indexed"
    ),
    TURN: _arguments(
        "qkv:T q_weight:fp32 k_weight:fp32 cos:fp32 sin:fp32 positions:i32 index:i32 new_positions:i32 live:i32 source_rows num_rows "
        "row_stride num_heads kv_heads head_size num_places eps=fp32 normed indexed"
    ),
    ANCHOR: _arguments(
        "x:T order:fp32 cu_seqlens:i32 texts:i32 ratio_weight:fp32 ratio_bias:fp32 permille:i32 count:i32 num_rows num_texts hidden "
        "candidates min_tokens"
    ),
    GATED: _arguments("a:T index:i32 weight:T bias:T out:T live:i32 source_rows num_rows n k indexed"),
}
"""Each kernel's arguments in order, with their types; T is the variant's dtype. A variant leaves out those that it has as None."""

MULTIPLES: dict[str, dict[str, int]] = {
    PRODUCT: {**dict.fromkeys(("a", "weight", "bias", "out"), 16), **dict.fromkeys(("n", "k", "a_stride", "out_stride"), 8)},
    ADD_NORM: {**dict.fromkeys(("residual", "parts", "bias", "weight", "norm_bias", "out"), 16), "hidden": 8},
    UNPAD: {"attention_mask": 16, "ends": 16, "cu_seqlens": 16},
    EMBED: {**dict.fromkeys(("words", "types", "places", "weight", "norm_bias", "out"), 16), "hidden": 8},
    SCORES: {
        **dict.fromkeys(("x", "first_weight", "first_bias", "last_weight", "ratio_weight", "ratio_bias", "order"), 16),
        "hidden": 8,
    },
    CHOICE: {},
    ABOVE: dict.fromkeys(("order", "cu_seqlens", "new_cu_seqlens", "before"), 16),
    SHARE: {},
    NORMALIZE: {**dict.fromkeys(("x", "weight", "bias", "out"), 16), "hidden": 8},
    SKIM: {**dict.fromkeys(("x", "weight", "bias", "gains"), 16), "hidden": 8},
    PUT_BACK: {"states": 16, "out": 16, "hidden": 8},
    SPREAD: {},
    POOL: {"x": 16, "out": 16, "hidden": 8},
    VECTORS: {},
    GROUPED: {**dict.fromkeys(("q", "k", "v", "out"), 16), **dict.fromkeys(("q_stride", "kv_stride", "head_size"), 8)},
    GROUPED_RECEIVED: {**dict.fromkeys(("q", "k"), 16), **dict.fromkeys(("q_stride", "kv_stride", "head_size"), 8)},
    LOOK_UP: {**dict.fromkeys(("words", "weight", "states", "out"), 16), "hidden": 8},
    ADD_RMS: {**dict.fromkeys(("residual", "parts", "bias", "weight", "states", "out"), 16), "hidden": 8},
    TURN: {**dict.fromkeys(("qkv", "q_weight", "k_weight", "cos", "sin"), 16), **dict.fromkeys(("row_stride", "head_size"), 8)},
    ANCHOR: {"x": 16, "ratio_weight": 16, "hidden": 8},
    GATED: {**dict.fromkeys(("a", "weight", "bias", "out"), 16), **dict.fromkeys(("n", "k"), 8)},
}  # fmt: skip
"""What launches promise: addresses are multiples of so many bytes, and numbers of so many. It makes loads 16 bytes wide."""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One shape of a kernel.

    name: of all variants, unique. dtype: what T stands for; None where no argument has it. constants: what the compiler is told,
    None for arguments that are not there. types: arguments whose type is not the usual one. loose: numbers of `MULTIPLES` that are
    not promised.
    """

    name: str
    kernel: str
    dtype: str | None
    constants: Mapping[str, Any]
    num_warps: int
    num_stages: int
    types: Mapping[str, str] = field(default_factory=dict)
    loose: tuple[str, ...] = ()
    architectures: tuple[str, ...] = ARCHITECTURES

    @property
    def module(self) -> str:
        return f".encoder.{MODULES[self.kernel]}"

    @property
    def symbol(self) -> str:
        return self.kernel

    @property
    def arguments(self) -> dict[str, str]:
        """Names and types of what a launch passes, in order; T is resolved."""
        kinds = ARGUMENTS[self.kernel] | dict(self.types)
        return {name: kind.replace("T", self.dtype or "") for name, kind in kinds.items() if name not in self.constants}

    @property
    def multiples(self) -> dict[str, int]:
        """What a launch of it promises, by argument."""
        return {
            name: value
            for name, value in MULTIPLES[self.kernel].items()
            if name not in self.loose and name not in self.constants
        }


_TILES: dict[str, tuple[tuple[int, int, int, int, int], ...]] = {
    "fp32": ((32, 64, 32, 4, 2), (64, 64, 32, 4, 2)),
    **dict.fromkeys(("fp16", "bf16"), ((32, 64, 64, 4, 4), (64, 64, 64, 4, 3), (128, 128, 64, 8, 3))),
}
"""Of products, those for few rows first: BLOCK_M, BLOCK_N, BLOCK_K, warps, stages."""


def _products(dtype: str) -> Iterator[Variant]:
    for place, (m, n, k, warps, stages) in enumerate(_TILES[dtype]):
        blocks = {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k}
        kinds: dict[str, dict[str, Any]] = {
            "none": {"constants": {"ACTIVATION": "none"}},
            "gelu": {"constants": {"ACTIVATION": "gelu"}},
            "parts": {"constants": {"ACTIVATION": "none", "bias": None}, "types": {"out": "*fp32"}},
        }
        if place == 0:  # of first rows, which are few
            kinds |= {
                "tanh": {"constants": {"ACTIVATION": "tanh"}},
                "relu": {"constants": {"ACTIVATION": "relu"}},
                "any": {"constants": {"ACTIVATION": "none"}, "types": {"out": "*fp32"}, "loose": ("n", "out_stride")},
            }
        for kind, further in kinds.items():
            yield Variant(
                name=f"product-{dtype}-{m}x{n}-{kind}", kernel=PRODUCT, dtype=dtype, num_warps=warps, num_stages=stages,
                **further | {"constants": blocks | further["constants"]},
            )  # fmt: skip


WIDTHS = {512: 4, 1024: 8}
"""Columns that variants of norms and of embedding take at most, and their warps."""


def _norms(dtype: str) -> Iterator[Variant]:
    for width, warps in WIDTHS.items():
        usual: dict[str, Any] = {"kernel": ADD_NORM, "dtype": dtype, "num_warps": warps, "num_stages": 1}
        yield Variant(name=f"add_norm-{dtype}-{width}-parts", constants={"BLOCK_H": width}, **usual)
        if dtype != "fp32":  # in which whole products are parts, too
            whole: dict[str, Any] = {"types": {"parts": f"*{dtype}"}, "constants": {"BLOCK_H": width, "bias": None}}
            yield Variant(name=f"add_norm-{dtype}-{width}-whole", **whole, **usual)
        yield Variant(name=f"embed-{dtype}-{width}", constants={"BLOCK_H": width}, **usual | {"kernel": EMBED})


def _heads(dtype: str) -> Iterator[Variant]:
    usual: dict[str, Any] = {"dtype": dtype, "num_warps": 4, "num_stages": 1}
    yield Variant(name=f"put_back-{dtype}", kernel=PUT_BACK, constants={"BLOCK_H": 512}, **usual)
    yield Variant(name=f"spread-{dtype}", kernel=SPREAD, constants={"BLOCK": 1024}, **usual)
    blocks = {"BLOCK_R": 16, "BLOCK_H": 128}
    yield Variant(name=f"pool-{dtype}", kernel=POOL, constants=blocks, **usual)
    if dtype != "fp32":
        yield Variant(name=f"pool-{dtype}-fp32", kernel=POOL, constants=blocks, types={"out": "*fp32"}, **usual)
    yield Variant(name=f"vectors-{dtype}", kernel=VECTORS, constants={"BLOCK": 512}, **usual)


def _skimming(dtype: str) -> Iterator[Variant]:
    for width, warps in WIDTHS.items():
        usual: dict[str, Any] = {"constants": {"BLOCK_H": width}, "num_warps": warps, "num_stages": 1}
        yield Variant(name=f"normalize-{dtype}-{width}", kernel=NORMALIZE, dtype=dtype, **usual)
        if dtype == "fp32":
            yield Variant(name=f"skim-{width}", kernel=SKIM, dtype=None, **usual)


def _scores(dtype: str) -> Iterator[Variant]:
    for rows, warps, stages in ((16, 4, 3), (64, 8, 2)):
        blocks = {"BLOCK_M": rows, "BLOCK_N": 128, "BLOCK_K": 32, "BLOCK_C": 16}
        yield Variant(
            name=f"scores-{dtype}-{rows}",
            kernel=SCORES,
            dtype=dtype,
            constants=blocks,
            num_warps=warps,
            num_stages=stages,
        )


def _choices() -> Iterator[Variant]:
    """The highest scores, as many as `count` says or as a table says of lengths; or ranks that a table says stay."""
    given: dict[str, Any] = {"lengths_from": None, "table": None, "keeps": None, "table_size": None, "bins": None}
    rules = {"given": given, "table": {"count": None, "keeps": None, "bins": None}, "ranks": {"count": None}}
    for block, warps in ((512, 8), (8192, 16)):
        for rule, gone in rules.items():
            yield Variant(
                name=f"choice-{rule}-{block}", kernel=CHOICE, dtype=None, constants={"BLOCK": block, **gone}, num_warps=warps,
                num_stages=1,
            )  # fmt: skip


_Tile = tuple[int, int, int, int]
_OF_HALVES: dict[int, tuple[_Tile, _Tile]] = {
    64: ((64, 64, 4, 3), (32, 32, 4, 2)),
    128: ((64, 32, 4, 3), (64, 32, 8, 1)),
    256: ((64, 32, 8, 2), (32, 32, 8, 2)),
}
_GROUPED_TILES: dict[str, dict[int, tuple[_Tile, _Tile]]] = {
    "fp32": {64: ((32, 16, 4, 1), (16, 32, 4, 1)), 128: ((16, 32, 4, 1), (16, 32, 4, 1))},
    "fp16": _OF_HALVES,
    "bf16": _OF_HALVES,
}
"""Of grouped attention and its log-sum-exps, then of what was received: BLOCK_M, BLOCK_N, warps, stages, by the largest head size.

fp32 of head size 256 would spill registers in any tile.
"""

HEAD_BLOCKS = {dtype: tuple(tiles) for dtype, tiles in _GROUPED_TILES.items()}
"""Head sizes up to which there is a variant of grouped attention."""


def _grouped(dtype: str) -> Iterator[Variant]:
    for block, tiles in _GROUPED_TILES[dtype].items():
        kinds: tuple[tuple[str, str, dict[str, Any]], ...] = (
            ("grouped", GROUPED, {"lse": None}),
            ("grouped_lse", GROUPED, {"v": None, "out": None}),
            ("grouped_received", GROUPED_RECEIVED, {}),
        )
        for name, kernel, gone in kinds:
            m, n, warps, stages = tiles[kernel == GROUPED_RECEIVED]
            yield Variant(
                name=f"{name}-{dtype}-d{block}", kernel=kernel, dtype=dtype, num_warps=warps, num_stages=stages,
                constants={"HEAD_BLOCK": block, "BLOCK_M": m, "BLOCK_N": n, **gone},
            )  # fmt: skip


_GATED_TILES: dict[str, tuple[tuple[int, int, int, int, int], ...]] = {
    "fp32": ((32, 32, 32, 4, 2),),
    **dict.fromkeys(("fp16", "bf16"), ((32, 64, 64, 4, 3), (64, 64, 64, 8, 3))),
}
"""Of products with gates, as `_TILES`; each has two operands of weights."""

HALVES = {"fp32": (64,), "fp16": (64, 128), "bf16": (64, 128)}
"""Halves of heads up to which there is a variant that turns them; those of `HEAD_BLOCKS`."""


def _prenorms(dtype: str) -> Iterator[Variant]:
    """Layers with norms before their sublayers. Rows may be of any width: they are walked in blocks."""
    usual: dict[str, Any] = {"dtype": dtype, "num_warps": 4, "num_stages": 1}
    yield Variant(name=f"look_up-{dtype}", kernel=LOOK_UP, constants={"BLOCK_H": 1024}, **usual)
    yield Variant(name=f"anchor-{dtype}", kernel=ANCHOR, constants={"BLOCK_C": 16, "BLOCK_H": 128}, **usual)
    yield Variant(name=f"add_rms-{dtype}", kernel=ADD_RMS, constants={"BLOCK_H": 1024}, **usual)
    for half in HALVES[dtype]:
        yield Variant(
            name=f"turn-{dtype}-d{2 * half}", kernel=TURN, constants={"BLOCK_N": 8, "HALF_BLOCK": half}, **usual
        )
    for m, n, k, warps, stages in _GATED_TILES[dtype]:
        yield Variant(
            name=f"gated-{dtype}-{m}x{n}-silu", kernel=GATED, dtype=dtype, num_warps=warps, num_stages=stages,
            constants={"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k},
        )  # fmt: skip


_ALONE: dict[str, Any] = {"dtype": None, "num_warps": 8, "num_stages": 1}

ALL = (
    Variant(name="unpad", kernel=UNPAD, constants={"BLOCK": 2048}, **_ALONE),
    *(variant for dtype in DTYPES for variant in (*_products(dtype), *_norms(dtype), *_scores(dtype))),
    *_choices(),
    *(variant for dtype in DTYPES for variant in (*_heads(dtype), *_skimming(dtype))),
    Variant(name="share", kernel=SHARE, constants={"BLOCK": 512}, **_ALONE | {"num_warps": 4}),
    Variant(name="above", kernel=ABOVE, constants={"BLOCK": 2048}, **_ALONE),
    *(variant for dtype in DTYPES for variant in _grouped(dtype)),
    *(variant for dtype in DTYPES for variant in _prenorms(dtype)),
)

BY_NAME = {variant.name: variant for variant in ALL}
