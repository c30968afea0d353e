"""Every variant of the kernels of attention that is compiled: one table, read by the build, the hosts and the tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

ATTENTION, LSE, RECEIVED = "ragged_attention", "log_sum_exp", "received_attention"
"""What is launched: attention; before it, where it is wanted, each row's log-sum-exp, then what each token received."""

SYMBOLS = {ATTENTION: "ragged_attention", LSE: "ragged_attention", RECEIVED: "received_attention"}
"""The function of `kernel` that each is compiled from; compiled code has it under that name."""

_ALL = {**dict.fromkeys(("row_stride", "num_tokens", "num_sequences", "num_heads"), "i32"), "scale": "fp32"}
ARGUMENTS = {
    ATTENTION: {"q": "*T", "k": "*T", "v": "*T", "cu_seqlens": "*i32", "out": "*T", **_ALL},
    LSE: {"q": "*T", "k": "*T", "cu_seqlens": "*i32", "lse": "*fp32", **_ALL},
    RECEIVED: {"q": "*T", "k": "*T", "cu_seqlens": "*i32", "lse": "*fp32", "received": "*fp32", **_ALL},
}
"""Each kernel's arguments in order, with their types; T is the variant's dtype."""

GRIDS = {
    **dict.fromkeys((ATTENTION, LSE), "(T // block_m + B) * num_heads"),
    RECEIVED: "T // block_m + B",
}

MULTIPLES_OF_16 = ("q", "k", "v", "out", "row_stride")
"""What hosts promise: addresses in bytes, the stride in elements. It makes loads 16 bytes wide."""

ARCHITECTURES = ("sm_80", "sm_86", "sm_87", "sm_89", "sm_90", "sm_120")
"""GPUs that get machine code of their own. sm_87 is Jetson Orin."""

PTX_ARCHITECTURE = ARCHITECTURES[0]
"""Compiled to PTX as well, from which the driver makes code for every other GPU from this one on."""

DTYPES = ("fp16", "bf16", "fp32")
HEAD_SIZES = (32, 64, 128)


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One shape of a kernel.

    block_m: tokens of a tile. block_n: tokens it takes at a time. mean_length_up_to: mean tokens of a sequence, T / B, up to
    which this is the variant to take; None for any. T and B are known at launch, the longest length is not.
    """

    kernel: str
    dtype: str
    head_size: int
    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    mean_length_up_to: int | None

    module: ClassVar = ".kernel"
    architectures: ClassVar = ARCHITECTURES

    @property
    def name(self) -> str:
        prefix = {ATTENTION: "", LSE: "lse-", RECEIVED: "received-"}[self.kernel]
        return f"{prefix}{self.dtype}-d{self.head_size}-{self.block_m}x{self.block_n}"

    @property
    def symbol(self) -> str:
        return SYMBOLS[self.kernel]

    @property
    def arguments(self) -> dict[str, str]:
        """Names and types of what a launch passes, in order; T is resolved."""
        return {name: kind.replace("T", self.dtype) for name, kind in ARGUMENTS[self.kernel].items()}

    @property
    def multiples(self) -> dict[str, int]:
        """What hosts promise, also of arguments that are not there: the compiler takes it into account."""
        return {name: 16 for name in (*self.arguments, *self.constants) if name in MULTIPLES_OF_16}

    @property
    def constants(self) -> dict[str, int | None]:
        """Arguments that the compiler is told: sizes, and what there is not."""
        further: dict[str, dict[str, int | None]] = {
            ATTENTION: {"lse": None},
            LSE: {"v": None, "out": None},
            RECEIVED: {"HEADS": self.num_warps},
        }
        return {
            "HEAD_SIZE": self.head_size,
            "BLOCK_M": self.block_m,
            "BLOCK_N": self.block_n,
            **further[self.kernel],
        }


_Tile = tuple[int, int, int, int, int | None]
"""block_m, block_n, warps, stages, mean length."""


def _tiles(dtype: str, head_size: int) -> tuple[_Tile, ...]:
    """Tiles of attention, short sequences first.

    Short tiles have one warp where its registers suffice: no barrier, and as many programs at a time as fit. The larger
    ones give each warp 16 or 32 rows of its own, so that no softmax crosses warps. fp32 pays for three tensor-core
    products and twice the registers: at head size 128 larger tiles would spill, or were slower at any length.
    `benchmarks/gpu/attention_kernel.py` times all on all workloads; its record of an H100 decided between them.
    """
    if dtype == "fp32":
        return {
            32: ((16, 16, 2, 1, 32), (64, 32, 4, 1, None)),
            64: ((16, 16, 2, 1, 32), (64, 32, 4, 1, None)),
            128: ((16, 16, 2, 1, None),),
        }[head_size]
    return {
        32: ((16, 16, 1, 1, 32), (64, 32, 4, 2, 160), (128, 64, 4, 3, None)),
        64: ((16, 32, 1, 1, 32), (64, 32, 4, 2, 128), (64, 64, 4, 3, None)),
        128: ((16, 32, 2, 1, 32), (64, 32, 4, 3, None)),
    }[head_size]


def _tiles_of_lse(dtype: str, head_size: int) -> tuple[_Tile, ...]:
    """Tiles of log-sum-exps: one for all lengths, because every variant is there for seven GPUs; those of attention."""
    if dtype == "fp32":
        return {32: ((64, 32, 4, 1, None),), 64: ((64, 32, 4, 1, None),), 128: ((16, 16, 2, 1, None),)}[head_size]
    return ((64, 32, 4, 3 if head_size == 128 else 2, None),)


def _tiles_of_received(dtype: str, head_size: int) -> tuple[_Tile, ...]:
    """Tiles of what was received: each warp has a head of its own. No record decided; registers and shared memory did.

    Two programs fit on a processor of any GPU, but in fp32 at head size 128.
    """
    if dtype == "fp32":
        return {32: ((32, 16, 4, 2, None),), 64: ((16, 32, 4, 1, None),), 128: ((16, 16, 4, 1, None),)}[head_size]
    return {32: ((64, 32, 4, 2, None),), 64: ((64, 16, 4, 2, None),), 128: ((32, 32, 4, 1, None),)}[head_size]


def _variants(kernel: str, tiles: Callable[[str, int], tuple[_Tile, ...]]) -> tuple[Variant, ...]:
    fields = ("block_m", "block_n", "num_warps", "num_stages", "mean_length_up_to")
    return tuple(
        Variant(kernel=kernel, dtype=dtype, head_size=size, **dict(zip(fields, tile)))  # type: ignore[arg-type]
        for dtype in DTYPES
        for size in HEAD_SIZES
        for tile in tiles(dtype, size)
    )


VARIANTS = _variants(ATTENTION, _tiles)
VARIANTS_OF_LSE = _variants(LSE, _tiles_of_lse)
VARIANTS_OF_RECEIVED = _variants(RECEIVED, _tiles_of_received)
ALL = (*VARIANTS, *VARIANTS_OF_LSE, *VARIANTS_OF_RECEIVED)
