"""Every variant of the kernel that is compiled: one table, read by the build, the hosts and the tests."""

from __future__ import annotations

from dataclasses import dataclass

ARCHITECTURES = ("sm_80", "sm_86", "sm_87", "sm_89", "sm_90", "sm_120")
"""GPUs that get machine code of their own. sm_87 is Jetson Orin."""

PTX_ARCHITECTURE = "sm_80"
"""Compiled to PTX as well, from which the driver makes code for every other GPU from this one on."""

DTYPES = ("fp16", "bf16", "fp32")
HEAD_SIZES = (32, 64, 128)


@dataclass(frozen=True)
class Variant:
    """One shape of the kernel.

    block_m: tokens of a tile. block_n: keys it takes at a time. mean_length_up_to: mean tokens of a sequence, T / B,
    up to which this is the variant to take; None for any. T and B are known at launch, the longest length is not.
    """

    dtype: str
    head_size: int
    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    mean_length_up_to: int | None

    @property
    def name(self) -> str:
        return f"{self.dtype}-d{self.head_size}-{self.block_m}x{self.block_n}"


def _tiles(dtype: str, head_size: int) -> tuple[tuple[int, int, int, int, int | None], ...]:
    """Tiles as (block_m, block_n, warps, stages, mean length), short sequences first.

    Short tiles have one warp where its registers suffice: no barrier, and as many programs at a time as fit. The larger
    ones give each warp 16 or 32 rows of its own, so that no softmax crosses warps. fp32 pays for three tensor-core
    products and twice the registers: at head size 128 larger tiles would spill, or were slower at any length.
    `benchmarks/ragged_attention.py` times all on all workloads; its record of an H100 decided between them.
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


VARIANTS = tuple(Variant(dtype, size, *tile) for dtype in DTYPES for size in HEAD_SIZES for tile in _tiles(dtype, size))
